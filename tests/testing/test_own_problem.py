"""The conformance suite on a user's own problem and data, in float32."""

from __future__ import annotations

import copy
import functools
import json
from typing import Any

import pytest
import torch
from torch import nn

from parsifl.core import registry
from parsifl.nn.neural import NeuralProblem
from parsifl.testing.conformance import CHECKS, run_checks, small
from parsifl.testing.conformance.__main__ import main
from parsifl.testing.conformance.examples import example_for


@functools.cache
def own(name: str) -> tuple[Any, Any]:
    example = example_for(small(registry.find(name)), torch.float32)
    return example.problem, example.data


def regression() -> tuple[Any, Any]:
    return own("fedgradmp")


@pytest.mark.slow
@pytest.mark.parametrize("name", list(registry.algorithms()))
def test_every_algorithm_passes_on_a_users_own_data_in_single_precision(name: str) -> None:
    for result in run_checks(small(registry.find(name)), *own(name)):
        assert result.status != "failed", f"{result.check}: {result.reason}"


def test_the_command_takes_a_problem(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fedht", "--problem", f"{__name__}:regression", "--json"]) == 0
    table = json.loads(capsys.readouterr().out)
    assert [row["check"] for row in table["FedHT"]] == list(CHECKS)


def normalized() -> tuple[Any, Any]:
    """Return a classifier with running statistics; batches must not be padded."""
    _, data = own("fedavg")
    module = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    return NeuralProblem(lambda: copy.deepcopy(module), buffers="average"), data


@pytest.mark.parametrize("name", ["fedavg", "ditto"])
def test_running_statistics_pass_from_the_command_line(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [name, "--problem", f"{__name__}:normalized", "--set", "last_batch=wrap", "--json"]
    code = main(words)
    (rows,) = json.loads(capsys.readouterr().out).values()
    failed = [f"{row['check']}: {row['reason']}" for row in rows if row["status"] == "failed"]
    assert not failed
    assert code == 0


def test_a_misspelt_setting_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fedavg", "--set", "last_bach=wrap"]) == 2
    assert "did you mean 'last_batch'" in capsys.readouterr().err


def test_a_problem_that_cannot_be_loaded_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fedht", "--problem", "no.such.module:thing"]) == 2
    assert "cannot be loaded" in capsys.readouterr().err
    assert main(["fedht", "--problem", "nothing"]) == 2
