from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from parsifl.cli.masks import app


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 0, result.output
    return result.output


def data(*arguments: str) -> Any:
    return json.loads(run(*arguments, "--json"))


def test_plan_of_the_issue_as_json() -> None:
    arguments = "--model mobilenet --devices 100 --strong 0.2 --budget 0.125 --draws 20"
    plan = data(*arguments.split())
    assert plan["J"] == pytest.approx(2_596_940.8)
    assert plan["proven"] is True
    assert plan["total"] == 3_206_976
    assert len(plan["masks"]) == 100
    assert [row["design"] for row in plan["comparison"]][:2] == ["optimal", "sequential"]


def test_plan_for_people_draws_the_plan_and_the_comparison() -> None:
    text = run("--model", "vgg", "--devices", "10", "--draws", "20", "--participation", "0.5")
    assert "proven optimal" in text
    assert "devices 0-7" in text
    assert "sequential" in text
    assert "expected bias of 5 devices per round" in text


def test_several_kinds_of_weak_devices_and_the_bias_objective() -> None:
    arguments = "--model vgg --devices 10 --budget 0.2 --budget 0.6 --objective bias --draws 20"
    plan = data(*arguments.split(), "--seconds", "3", "--participation", "0.5")
    assert len(set(plan["budgets"])) == 3
    assert plan["objective"] == "bias"
    assert plan["expected_bias"]["participation"] == 0.5


def test_models_take_options() -> None:
    rows = data("curve", "--model", "mlp:hidden=3+2,inputs=5", "--steps", "2")
    assert rows[0]["parameters"] == (5 + 1) * 3 + (3 + 1) * 2


def test_the_curve_of_a_large_model_has_a_line_for_each_rate_on_eighty_columns() -> None:
    lines = run("curve", "--steps", "3").splitlines()
    assert [line.split()[0] for line in lines if " G " in line] == ["0.00", "0.33", "0.67"]


def test_curve_as_json_and_as_a_table() -> None:
    rows = data("curve", "--model", "mlp", "--steps", "4", "--batch", "2")
    assert [row["rate"] for row in rows] == [0.0, 0.25, 0.5, 0.75]
    text = run("curve", "--model", "vgg", "--steps", "2", "--batch", "2", "--design", "last")
    assert "vgg, batches of 2" in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "mobilnet"], "did you mean 'mobilenet'"),
        (["--budget", "-0.5"], "not in the range 0.0<=x<=1.0"),
        (["--strong", "nan"], "not a finite number"),
        (["--participation", "nan"], "not a finite number"),
        (["--budget", "2"], "not in the range 0.0<=x<=1.0"),
        (["--objective", "j"], "unknown objective"),
        (["curve", "--design", "best", "--model", "mlp"], "unknown design"),
        (["--participation", "0", "--devices", "3", "--draws", "2"], "must be above 0"),
    ],
)
def test_mistakes_end_with_a_sentence(arguments: list[str], words: str) -> None:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert words in result.output
    assert "Traceback" not in result.output


def test_devices_that_can_train_nothing_are_told() -> None:
    text = run("--model", "vgg", "--devices", "4", "--budget", "0.0001", "--draws", "5")
    assert "cannot train any layer" in text
