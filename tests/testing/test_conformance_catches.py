"""Deliberately broken methods: each must fail the check that is there for it."""

# ruff: noqa: ARG002 - the contract names every argument

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, final

import numpy as np
import pytest
import torch
from torch import Tensor

from parsifl import tree
from parsifl.algorithm import AnyMethod, ClientInfo, Local
from parsifl.algorithms.mean import Mean, MeanServer
from parsifl.algorithms.settings import LocalSGD
from parsifl.keys import Key
from parsifl.problem import Model, Params, Problem
from parsifl.solvers.sgd import sgd
from parsifl.testing.conformance import run_check, trial_for
from parsifl.testing.toys import Toy
from parsifl.work import Shard, Work


@final
@dataclass(frozen=True)
class Impure(Toy):
    """Change the message that came in."""

    def local(
        self, problem: Problem, down: Params, client: None, shard: Shard
    ) -> Local[None, Params]:
        """Train in place."""
        trained = sgd(problem, down, shard["train"], self.lr)
        for name, value in down.items():
            value.copy_(trained[name])
        return Local(None, trained)


@final
@dataclass(frozen=True)
class ImpureServer(Toy):
    """Change the state that came in."""

    def aggregate(self, problem: Problem, server: Params, total: Mean, key: Key) -> Params:
        """Average in place."""
        for name, value in total.value().items():
            server[name].copy_(value)
        return server


@final
@dataclass(frozen=True)
class Remembering(Toy):
    """Keep something on self."""

    notes: list[int] = field(default_factory=list, init=False, compare=False)

    def broadcast(self, problem: Problem, server: Params, info: ClientInfo, key: Key) -> Params:
        """Send the model, and take a note."""
        self.notes.append(info.id)
        return server


@final
@dataclass(frozen=True)
class GlobalTorch(Toy):
    """Draw from torch's generator."""

    def init_server(self, problem: Problem, clients: Sequence[ClientInfo], key: Key) -> Params:
        """Start anywhere."""
        return {name: v + 0.1 * torch.randn_like(v) for name, v in problem.init(key).items()}


@final
@dataclass(frozen=True)
class GlobalNumpy(Toy):
    """Draw from NumPy's generator."""

    def weight(self, info: ClientInfo) -> float:
        """Weigh by chance."""
        return float(np.random.rand() + 1)  # noqa: NPY002 - the mistake that is to be found


@final
@dataclass(frozen=True)
class Branching(Toy):
    """Look at a value inside `local`."""

    def local(
        self, problem: Problem, down: Params, client: None, shard: Shard
    ) -> Local[None, Params]:
        """Branch on a tensor."""
        trained = sgd(problem, down, shard["train"], self.lr)
        first = next(iter(trained.values()))
        return Local(None, trained if float(first.sum()) > -1e9 else down)


@final
@dataclass(frozen=True)
class BranchingJudge(Toy):
    """Look at a value inside `personalize`."""

    def tuning(self, info: ClientInfo) -> Work:
        """Read one batch."""
        return self.work(info, 0)

    def personalize(self, problem: Problem, down: Params, client: None, shard: Shard) -> Model:
        """Branch on a tensor."""
        tuned = sgd(problem, down, shard["train"], self.lr)
        return Model(problem, tuned if float(next(iter(tuned.values())).sum()) > -1e9 else down)


@final
@dataclass(frozen=True)
class SinglePrecision(Toy):
    """Upload float32 whatever comes in."""

    def local(
        self, problem: Problem, down: Params, client: None, shard: Shard
    ) -> Local[None, Params]:
        """Train and round."""
        trained = sgd(problem, down, shard["train"], self.lr)
        return Local(None, {name: value.float() for name, value in trained.items()})


@final
@dataclass(frozen=True)
class Lazy(Toy):
    """Send back what came."""

    def local(
        self, problem: Problem, down: Params, client: None, shard: Shard
    ) -> Local[None, Params]:
        """Do nothing."""
        return Local(None, dict(down))


@final
@dataclass(frozen=True)
class Restless(Toy):
    """Shrink the model even without a step."""

    def local(
        self, problem: Problem, down: Params, client: None, shard: Shard
    ) -> Local[None, Params]:
        """Train and shrink."""
        trained = sgd(problem, down, shard["train"], self.lr)
        return Local(None, tree.scale(0.9, trained))


@final
@dataclass(frozen=True)
class DataDependent(Toy):
    """Upload a number of entries that the data decide."""

    def local(
        self, problem: Problem, down: Params, client: None, shard: Shard
    ) -> Local[None, Params]:
        """Send only what is positive."""
        trained = sgd(problem, down, shard["train"], self.lr)
        return Local(None, {n: v.flatten()[v.flatten() > 0] for n, v in trained.items()})

    def aggregate(self, problem: Problem, server: Params, total: Mean, key: Key) -> Params:
        """Forget the uploads."""
        return tree.scale(0.5, server)

    def contribute(self, problem: Problem, upload: Params, weight: float) -> Mean:
        """Add nothing."""
        return Mean({}, {})


@final
@dataclass(frozen=True)
class Unweighted(Toy):
    """Let the last client win, so that the order matters."""

    def contribute(self, problem: Problem, upload: Params, weight: float) -> Mean:
        """Count calls through the upload's own memory."""
        return Mean.of(upload, weight)

    def aggregate(self, problem: Problem, server: Params, total: Mean, key: Key) -> Params:
        """Amplify the rounding of the sum."""
        return {n: (v * 1e16).round() % 7 for n, v in total.value().items()}


@final
@dataclass(frozen=True)
class Undeclared(Toy):
    """Use the head without requiring Layered."""

    def model(self, problem: Any, server: Params) -> Model:
        """Look at the head."""
        assert problem.head
        return Model(problem, server)


@final
@dataclass(frozen=True)
class Mistyped(Toy):
    """Say that the downlink is a tensor."""

    def broadcast(  # type: ignore[override]  # the mistake that is to be found
        self, problem: Problem, server: Params, info: ClientInfo, key: Key
    ) -> Tensor:
        """Send a dict all the same."""
        result: Any = server
        return result  # type: ignore[no-any-return]  # on purpose


@final
@dataclass(frozen=True)
class Telltale(LocalSGD, MeanServer[Problem, Params]):
    """Upload the personal model."""

    cites: ClassVar[str] = "A toy"
    batch: int = 4
    steps: int = 2

    def init_client(self, problem: Problem, info: ClientInfo, down: Params, key: Key) -> Params:
        """Start from what came."""
        return down

    def work(self, info: ClientInfo, round: int) -> Work:
        """Read mini-batches."""
        return Work({"train": self.draw(info)})

    def local(
        self, problem: Problem, down: Params, client: Params, shard: Shard
    ) -> Local[Params, Params]:
        """Train the personal model and give it away."""
        own = sgd(problem, client, shard["train"], self.lr)
        return Local(own, own)

    def personalize(self, problem: Problem, down: Params, client: Params, shard: Shard) -> Model:
        """Judge the personal model."""
        return Model(problem, client)


@dataclass(frozen=True)
class NotFinal(Toy):
    """Leave out the decorator."""


@final
class NotADataclass(Toy):
    """Leave out the other decorator."""


@final
@dataclass(frozen=True)
class Silent(Toy):
    cites: ClassVar[str] = "A toy"


@final
@dataclass(frozen=True)
class Uncited(Toy):
    """Name no paper."""

    cites: ClassVar[str] = " "


@final
@dataclass(frozen=True)
class Forgetful(Toy):
    """Lose a setting on the way to JSON."""

    hidden: float = field(default=1.0, init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "hidden", Forgetful.counter)
        Forgetful.counter += 1.0

    counter: ClassVar[float] = 0.0


@pytest.mark.parametrize(
    ("method", "check"),
    [
        (Impure(), "inputs stay as they are"),
        (ImpureServer(), "inputs stay as they are"),
        (Remembering(), "inputs stay as they are"),
        (GlobalTorch(), "global generators untouched"),
        (GlobalTorch(), "same key, same bits"),
        (GlobalNumpy(), "global generators untouched"),
        (Branching(), "no fallback, nobody dropped"),
        (BranchingJudge(), "no fallback, nobody dropped"),
        (SinglePrecision(), "dtype and device kept"),
        (Lazy(), "training moves the models"),
        (Restless(), "zero local steps change nothing"),
        (DataDependent(), "upload foreseen without data"),
        (Unweighted(), "order of clients irrelevant"),
        (Undeclared(), "nothing more is used"),
        (Mistyped(), "types are told"),
        (Telltale(), "personal state stays at home"),
        (NotFinal(), "final and frozen"),
        (NotADataclass(), "final and frozen"),
        (Silent(), "documented"),
        (Uncited(), "documented"),
        (Forgetful(), "settings survive JSON"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Toy | Telltale) else "",
)
def test_a_broken_method_fails_the_check_for_it(method: AnyMethod, check: str) -> None:
    result = run_check(check, trial_for(method))
    assert result.status == "failed"
    assert result.reason
