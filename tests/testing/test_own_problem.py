"""The conformance suite on a user's own problem and data, in float32."""

from __future__ import annotations

import functools
import json
from typing import Any

import pytest
import torch

from parsifl.core import registry
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


def test_a_problem_that_cannot_be_loaded_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fedht", "--problem", "no.such.module:thing"]) == 2
    assert "cannot be loaded" in capsys.readouterr().err
    assert main(["fedht", "--problem", "nothing"]) == 2
