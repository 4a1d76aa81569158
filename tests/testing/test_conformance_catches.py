"""Deliberately broken methods: each must fail the check that is there for it."""

# ruff: noqa: ARG002 - the contract names every argument

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, final

import numpy as np
import pytest
import torch
from tests.support.fixtures import TinyFedAvg
from torch import Tensor

from parsifl.algorithms._bases.averaging import Averaging, Mean
from parsifl.algorithms._bases.local_sgd import LocalSgd
from parsifl.core import tree
from parsifl.core.algorithm import AnyAlgorithm, ClientInfo, ClientUpdate
from parsifl.core.batching import ClientRoundData, DataRequest
from parsifl.core.keys import Key
from parsifl.core.problem import Model, Params, Problem
from parsifl.solvers.sgd import SgdConfig, sgd
from parsifl.testing.conformance import harness_for, run_check


@final
@dataclass(frozen=True)
class Impure(TinyFedAvg):
    """Change the message that came in."""

    def client_update(
        self, problem: Problem, received: Params, state: None, data: ClientRoundData
    ) -> ClientUpdate[None, Params]:
        """Train in place."""
        trained = sgd(problem, received, data["train"], SgdConfig(self.lr))
        for name, value in received.items():
            value.copy_(trained[name])
        return ClientUpdate(None, trained)


@final
@dataclass(frozen=True)
class ImpureServer(TinyFedAvg):
    """Change the state that came in."""

    def aggregate(self, problem: Problem, server: Params, total: Mean, key: Key) -> Params:
        """Average in place."""
        for name, value in total.value().items():
            server[name].copy_(value)
        return server


@final
@dataclass(frozen=True)
class Remembering(TinyFedAvg):
    """Keep something on self."""

    notes: list[int] = field(default_factory=list, init=False, compare=False)

    def broadcast(self, problem: Problem, server: Params, client: ClientInfo, key: Key) -> Params:
        """Send the model, and take a note."""
        self.notes.append(client.id)
        return server


@final
@dataclass(frozen=True)
class GlobalTorch(TinyFedAvg):
    """Draw from torch's generator."""

    def init_server(self, problem: Problem, clients: Sequence[ClientInfo], key: Key) -> Params:
        """Start anywhere."""
        return {name: v + 0.1 * torch.randn_like(v) for name, v in problem.init(key).items()}


@final
@dataclass(frozen=True)
class GlobalNumpy(TinyFedAvg):
    """Draw from NumPy's generator."""

    def weight(self, client: ClientInfo) -> float:
        """Weigh by chance."""
        return float(np.random.rand() + 1)  # noqa: NPY002 - the mistake that is to be found


@final
@dataclass(frozen=True)
class Branching(TinyFedAvg):
    """Look at a value inside `local`."""

    def client_update(
        self, problem: Problem, received: Params, state: None, data: ClientRoundData
    ) -> ClientUpdate[None, Params]:
        """Branch on a tensor."""
        trained = sgd(problem, received, data["train"], SgdConfig(self.lr))
        first = next(iter(trained.values()))
        return ClientUpdate(None, trained if float(first.sum()) > -1e9 else received)


@final
@dataclass(frozen=True)
class BranchingPersonalize(TinyFedAvg):
    """Look at a value inside `personalize`."""

    def personalization_batches(self, client: ClientInfo) -> DataRequest:
        """Read one batch."""
        return self.batches(client, 0)

    def personalize(
        self, problem: Problem, received: Params, state: None, data: ClientRoundData
    ) -> Model:
        """Branch on a tensor."""
        tuned = sgd(problem, received, data["train"], SgdConfig(self.lr))
        return Model(problem, tuned if float(next(iter(tuned.values())).sum()) > -1e9 else received)


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


@final
@dataclass(frozen=True)
class Lazy(TinyFedAvg):
    """Send back what came."""

    def client_update(
        self, problem: Problem, received: Params, state: None, data: ClientRoundData
    ) -> ClientUpdate[None, Params]:
        """Do nothing."""
        return ClientUpdate(None, dict(received))


@final
@dataclass(frozen=True)
class Restless(TinyFedAvg):
    """Shrink the model even without a step."""

    def client_update(
        self, problem: Problem, received: Params, state: None, data: ClientRoundData
    ) -> ClientUpdate[None, Params]:
        """Train and shrink."""
        trained = sgd(problem, received, data["train"], SgdConfig(self.lr))
        return ClientUpdate(None, tree.scale(0.9, trained))


@final
@dataclass(frozen=True)
class DataDependent(TinyFedAvg):
    """Upload a number of entries that the data decide."""

    def client_update(
        self, problem: Problem, received: Params, state: None, data: ClientRoundData
    ) -> ClientUpdate[None, Params]:
        """Send only what is positive."""
        trained = sgd(problem, received, data["train"], SgdConfig(self.lr))
        return ClientUpdate(None, {n: v.flatten()[v.flatten() > 0] for n, v in trained.items()})

    def aggregate(self, problem: Problem, server: Params, total: Mean, key: Key) -> Params:
        """Forget the uploads."""
        return tree.scale(0.5, server)

    def contribute(self, problem: Problem, upload: Params, weight: float) -> Mean:
        """Add nothing."""
        return Mean({}, {})


@final
@dataclass(frozen=True)
class Unweighted(TinyFedAvg):
    """Let the last client win, so that the order matters."""

    def contribute(self, problem: Problem, upload: Params, weight: float) -> Mean:
        """Count calls through the upload's own memory."""
        return Mean.of(upload, weight)

    def aggregate(self, problem: Problem, server: Params, total: Mean, key: Key) -> Params:
        """Amplify the rounding of the sum."""
        return {n: (v * 1e16).round() % 7 for n, v in total.value().items()}


@final
@dataclass(frozen=True)
class Undeclared(TinyFedAvg):
    """Use the head without requiring Layered."""

    def model(self, problem: Any, server: Params) -> Model:
        """Look at the head."""
        assert problem.head
        return Model(problem, server)


@final
@dataclass(frozen=True)
class Mistyped(TinyFedAvg):
    """Say that the downlink is a tensor."""

    def broadcast(  # type: ignore[override]  # the mistake that is to be found
        self, problem: Problem, server: Params, client: ClientInfo, key: Key
    ) -> Tensor:
        """Send a dict all the same."""
        result: Any = server
        return result  # type: ignore[no-any-return]  # on purpose


@final
@dataclass(frozen=True)
class Telltale(LocalSgd, Averaging[Problem, Params]):
    """Upload the personal model."""

    cites: ClassVar[str] = "A toy"
    batch_size: int = 4
    local_steps: int = 2

    def init_client(
        self, problem: Problem, client: ClientInfo, received: Params, key: Key
    ) -> Params:
        """Start from what came."""
        return received

    def batches(self, client: ClientInfo, round: int) -> DataRequest:
        """Read mini-batches."""
        return DataRequest({"train": self.batch_spec(client)})

    def client_update(
        self, problem: Problem, received: Params, state: Params, data: ClientRoundData
    ) -> ClientUpdate[Params, Params]:
        """Train the personal model and give it away."""
        own = sgd(problem, state, data["train"], SgdConfig(self.lr))
        return ClientUpdate(own, own)

    def personalize(
        self, problem: Problem, received: Params, state: Params, data: ClientRoundData
    ) -> Model:
        """Judge the personal model."""
        return Model(problem, state)


@dataclass(frozen=True)
class NotFinal(TinyFedAvg):
    """Leave out the decorator."""


@final
class NotADataclass(TinyFedAvg):
    """Leave out the other decorator."""


@final
@dataclass(frozen=True)
class Silent(TinyFedAvg):
    cites: ClassVar[str] = "A toy"


@final
@dataclass(frozen=True)
class Uncited(TinyFedAvg):
    """Name no paper."""

    cites: ClassVar[str] = " "


@final
@dataclass(frozen=True)
class Forgetful(TinyFedAvg):
    """Lose a setting on the way to JSON."""

    hidden: float = field(default=1.0, init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "hidden", Forgetful.counter)
        Forgetful.counter += 1.0

    counter: ClassVar[float] = 0.0


@pytest.mark.parametrize(
    ("algorithm", "check"),
    [
        (Impure(), "inputs stay as they are"),
        (ImpureServer(), "inputs stay as they are"),
        (Remembering(), "inputs stay as they are"),
        (GlobalTorch(), "global generators untouched"),
        (GlobalTorch(), "same key, same bits"),
        (GlobalNumpy(), "global generators untouched"),
        (Branching(), "no fallback, no client dropped"),
        (BranchingPersonalize(), "no fallback, no client dropped"),
        (SinglePrecision(), "dtype and device kept"),
        (Lazy(), "training moves the models"),
        (Restless(), "zero local steps change nothing"),
        (DataDependent(), "upload foreseen without data"),
        (Unweighted(), "order of clients irrelevant"),
        (Undeclared(), "nothing more is used"),
        (Mistyped(), "types match the annotations"),
        (Telltale(), "personal state stays at home"),
        (NotFinal(), "final and frozen"),
        (NotADataclass(), "final and frozen"),
        (Silent(), "documented"),
        (Uncited(), "documented"),
        (Forgetful(), "settings survive JSON"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, TinyFedAvg | Telltale) else "",
)
def test_a_broken_algorithm_fails_the_check_for_it(algorithm: AnyAlgorithm, check: str) -> None:
    result = run_check(check, harness_for(algorithm))
    assert result.status == "failed"
    assert result.reason
