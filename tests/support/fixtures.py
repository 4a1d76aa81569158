"""Building blocks for tests: an algorithm with replaceable methods, a model, clients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn

from parsifl.algorithms._bases.averaging import Averaging
from parsifl.algorithms._bases.local_sgd import LocalSgd
from parsifl.core.algorithm import ClientInfo, ClientUpdate
from parsifl.core.batching import ClientRoundData, DataRequest
from parsifl.core.config import Count, Size
from parsifl.core.keys import Key
from parsifl.core.problem import Params, Problem
from parsifl.data.clients import ClientData
from parsifl.nn.neural import NeuralProblem
from parsifl.solvers.sgd import SgdConfig, sgd

FEATURES, CLASSES = 4, 3


@dataclass(frozen=True)
class TinyFedAvg(LocalSgd, Averaging[Problem, None]):
    """Abstract FedAvg, for tests that replace one method."""

    cites: ClassVar[str] = "A toy"
    batch_size: Count = 4
    local_steps: Size = 2

    def batches(self, client: ClientInfo, round: int) -> DataRequest:  # noqa: ARG002 - the contract names it
        """Read the mini-batches of local SGD."""
        return DataRequest({"train": self.batch_spec(client)})

    def client_update(
        self,
        problem: Problem,
        received: Params,
        state: None,  # noqa: ARG002 - the contract names it
        data: ClientRoundData,
    ) -> ClientUpdate[None, Params]:
        """Run plain SGD from the received model."""
        return ClientUpdate(None, sgd(problem, received, data["train"], SgdConfig(self.lr)))


def classifier(dtype: torch.dtype = torch.float64, hidden: int = 5) -> NeuralProblem:
    """Return a network with one hidden layer."""

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(FEATURES, hidden), nn.ReLU(), nn.Linear(hidden, CLASSES))

    return NeuralProblem(build, dtype=dtype)


def clients(
    sizes: Sequence[int] = (6, 9, 8, 11),
    *,
    test: int = 3,
    validation: int = 0,
    profiles: Sequence[Mapping[str, Any]] | None = None,
    dtype: torch.dtype = torch.float64,
) -> ClientData:
    """Return clients with this many training rows each; labels follow the largest feature."""
    generator = Key(0, purpose="testing/toys").numpy_generator()
    count = sum(sizes) + len(sizes) * (test + validation)
    x = generator.normal(size=(count, FEATURES))
    splits: dict[str, list[Any]] = {"train": [], "validation": [], "test": []}
    at = 0
    for size in sizes:
        for name, rows in (("train", size), ("validation", validation), ("test", test)):
            splits[name].append(np.arange(at, at + rows))
            at += rows
    return ClientData(
        x=torch.from_numpy(x).to(dtype),
        y=torch.from_numpy(x[:, :CLASSES].argmax(axis=1)),
        train=splits["train"],
        validation=splits["validation"],
        test=splits["test"],
        profiles=[{}] * len(sizes) if profiles is None else profiles,
        classes=CLASSES,
    )
