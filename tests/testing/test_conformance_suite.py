"""What the suite offers to authors: lists, exemptions, examples, own problems."""

# ruff: noqa: ARG002 - the contract names every argument

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, final

import pytest
import torch
from tests.support.fixtures import TinyFedAvg

from parsifl.algorithms.fedavg import FedAvg
from parsifl.core.algorithm import ClientUpdate, Conformance
from parsifl.core.batching import ClientRoundData
from parsifl.core.errors import CapabilityError, ConfigError
from parsifl.core.problem import Layered, Params, Problem
from parsifl.data.clients import ClientData
from parsifl.nn.neural import NeuralProblem
from parsifl.solvers.sgd import SgdConfig, sgd
from parsifl.testing import conformance
from parsifl.testing.conformance import ConformanceError, check_algorithm, harness_for, run_check
from parsifl.testing.conformance.examples import Example, neural


@final
@dataclass(frozen=True)
class Healthy(TinyFedAvg):
    """Do nothing wrong."""


@final
@dataclass(frozen=True)
class SinglePrecision(TinyFedAvg):
    """Upload float32 whatever comes in."""

    def client_update(
        self, problem: Problem, received: Params, state: None, data: ClientRoundData
    ) -> ClientUpdate[None, Params]:
        """Train and round."""
        trained = sgd(problem, received, data["train"], SgdConfig(self.lr))
        return ClientUpdate(None, {name: value.float() for name, value in trained.items()})


def test_a_healthy_method_passes_everything() -> None:
    check_algorithm(Healthy(lr=0.1))


def test_every_failed_check_is_listed() -> None:
    with pytest.raises(ConformanceError, match=r"SinglePrecision fails \d+ of 19 checks") as found:
        check_algorithm(SinglePrecision())
    assert "dtype and device kept: " in str(found.value)


@final
@dataclass(frozen=True)
class Excused(TinyFedAvg):
    """Shrink without a step, and say so."""

    conformance: ClassVar[Conformance] = Conformance(
        {"lr": 0.5}, {"zero local steps change nothing": "it shrinks"}
    )


def test_an_exemption_is_shown_with_its_reason() -> None:
    result = run_check("zero local steps change nothing", harness_for(Excused()))
    assert (result.status, result.reason) == ("exempt", "it shrinks")


def test_settings_for_the_trial_are_taken_from_the_class() -> None:
    algorithm: Any = conformance.small(Excused)
    assert (algorithm.lr, algorithm.local_steps, algorithm.batch_size) == (0.5, 3, 4)


@final
@dataclass(frozen=True)
class Headed(TinyFedAvg):
    """Require a head."""

    requires: ClassVar[tuple[type[Any], ...]] = (Layered,)


def test_a_required_capability_that_is_missing_is_named() -> None:
    assert run_check("a missing capability is named", harness_for(Headed())).status == "passed"
    assert run_check("nothing more is used", harness_for(Headed())).status == "passed"


class Impossible(Problem):
    """A capability that nobody has."""

    def fly(self) -> None:
        """Fly."""


@final
@dataclass(frozen=True)
class Ambitious(TinyFedAvg):
    """Require what nobody has."""

    requires: ClassVar[tuple[type[Any], ...]] = (Impossible,)


def test_a_method_without_an_example_asks_for_a_problem() -> None:
    with pytest.raises(CapabilityError, match="Impossible, which Ambitious requires; pass problem"):
        harness_for(Ambitious())


def test_an_example_may_be_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    makers: list[Any] = []
    monkeypatch.setattr("parsifl.testing.conformance.examples._MAKERS", makers)
    makers.append(lambda _: None)
    conformance.register(neural)
    assert isinstance(harness_for(Healthy()).problem, NeuralProblem)


def test_own_problem_and_data_are_used_and_come_together() -> None:
    example: Example = neural(torch.float64)
    data: ClientData = example.data
    harness = harness_for(Healthy(), example.problem, data)
    assert harness.problem is example.problem
    assert not harness.own_example
    with pytest.raises(ConformanceError, match="both"):
        harness_for(Healthy(), example.problem)


def test_an_unknown_check_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown check"):
        run_check("no such check", harness_for(FedAvg()))
