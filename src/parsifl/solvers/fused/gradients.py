"""The gradient of a mini-batch for a block of clients."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import final

import torch
from torch import Tensor

from parsifl.solvers.fused.layer import GradientSink
from parsifl.solvers.fused.network import Network
from parsifl.solvers.fused.schedule import Step


@final
class GradientCollector:
    """Collects gradients; the weights stay as they are."""

    def __init__(self, values: Mapping[str, Tensor], wanted: frozenset[str]) -> None:
        self._values, self._wanted = values, wanted
        self._gradients: dict[str, Tensor] = {}

    def at(self, network: Network, step: Step) -> dict[str, Tensor]:
        """Return the gradient of every wanted weight."""
        network.on(self).run(step)
        return self._gradients

    def read(self, name: str) -> Tensor:
        """Return a weight of all clients."""
        return self._values[name]

    def landing(self, name: str) -> GradientSink | None:
        """Keep the gradient of what is trained."""
        return partial(self._keep, name) if name in self._wanted else None

    def _keep(self, name: str, left: Tensor, right: Tensor | None) -> None:
        shape = self._values[name].shape
        self._gradients[name] = left if right is None else torch.bmm(left, right).view(shape)
