from __future__ import annotations

import functools
import json

import pytest

from parsifl.core import registry
from parsifl.testing.conformance import CHECKS, Harness, harness_for, run_check, small
from parsifl.testing.conformance.__main__ import main


@functools.cache
def harness(name: str) -> Harness:
    return harness_for(small(registry.find(name)))


@pytest.mark.parametrize("check", list(CHECKS))
@pytest.mark.parametrize("name", list(registry.algorithms()))
def test_every_algorithm_passes_its_checks(name: str, check: str) -> None:
    result = run_check(check, harness(name))
    assert result.status != "failed", result.reason


def test_the_command_prints_every_check(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fedavg"]) == 0
    shown = capsys.readouterr().out
    assert "FedAvg" in shown
    assert all(check in shown for check in CHECKS)
    assert "0 failed" not in shown


def test_the_command_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["Fed-Avg", "--json"]) == 0
    table = json.loads(capsys.readouterr().out)
    assert [row["check"] for row in table["FedAvg"]] == list(CHECKS)
    assert {row["status"] for row in table["FedAvg"]} <= {"passed", "not applicable"}


def test_the_command_refuses_an_unknown_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fedavgg"]) == 2
    assert "did you mean 'fedavg'" in capsys.readouterr().err
