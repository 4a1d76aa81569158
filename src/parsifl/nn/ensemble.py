"""Several networks of one architecture as one problem: trained separately, averaged outputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import final

import torch
from torch import Tensor

from parsifl.core.batching import Batch, Rows
from parsifl.core.errors import CapabilityError, ConfigError
from parsifl.core.keys import Key
from parsifl.core.layer_group import LayerGroup
from parsifl.core.problem import Layered, Params, Problem, Scalable
from parsifl.nn.flops import named


def prefix(member: int) -> str:
    """Return the prefix of the parameter names of one network."""
    return f"{member}/"


@final
class Ensemble:
    """Networks whose outputs are averaged; each is trained by its own loss (Split-Mix).

    The loss is the sum of the losses of the members. Their parameters are disjoint, so each member
    gets only the gradient of its own loss.

    Parameters
    ----------
    base
        The problem of one network.
    members
        Numbers of the networks; the parameter "w" of network 3 is called "3/w".
    """

    def __init__(self, base: Problem, members: Sequence[int]) -> None:
        if not members:
            raise ConfigError("an ensemble needs at least one network")
        self.base, self.members = base, tuple(members)

    @property
    def primary_metric(self) -> str:
        """The metric that is reported first."""
        return self.base.primary_metric

    @property
    def higher_is_better(self) -> bool:
        """Whether a larger score is better."""
        return self.base.higher_is_better

    @property
    def supports_vmap(self) -> bool:
        """Whether many clients may run at once."""
        return self.base.supports_vmap

    @property
    def uses_batch_statistics(self) -> bool:
        """Whether predictions depend on the rest of the batch."""
        return self.base.uses_batch_statistics

    def init(self, key: Key) -> Params:
        """Initialize every member by its own seed; member 0 by the seed of the run."""
        return join({i: self.base.init(member_key(key, i)) for i in self.members})

    def loss(self, params: Params, batch: Batch) -> Tensor:
        """Return the sum of the members' losses."""
        losses = []
        for member in self.members:
            with named(prefix(member)):
                losses.append(self.base.loss(part(params, member), batch))
        return torch.stack(losses).sum() if len(losses) > 1 else losses[0]

    def predict(self, params: Params, x: Tensor) -> Tensor:
        """Return the mean of the members' outputs."""
        outputs = [self.base.predict(part(params, member), x) for member in self.members]
        return torch.stack(outputs).mean(0)

    def metrics(self, params: Params, rows: Rows) -> dict[str, Tensor]:
        """Return the base's metrics of each row for the mean output."""
        score = getattr(self.base, "output_metrics", None)
        if score is None:
            raise CapabilityError(f"{type(self.base).__name__} does not declare `output_metrics`")
        metrics: dict[str, Tensor] = score(self.predict(params, rows.x), rows.y)
        return metrics

    @cached_property
    def head(self) -> tuple[str, ...]:
        """The names of the parameters of all last layers."""
        inner = _layered(self.base).head
        return tuple(prefix(member) + name for member in self.members for name in inner)

    @cached_property
    def layer_groups(self) -> tuple[LayerGroup, ...]:
        """The blocks below the heads, member by member."""
        return tuple(
            replace(
                block,
                name=prefix(member) + block.name,
                parameters=tuple(prefix(member) + name for name in block.parameters),
            )
            for member in self.members
            for block in _layered(self.base).layer_groups
        )

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every parameter."""
        if not isinstance(self.base, Scalable):
            raise CapabilityError(f"{type(self.base).__name__} does not declare its shapes")
        inner = self.base.shapes()
        return {prefix(i) + name: shape for i in self.members for name, shape in inner.items()}


def part(params: Params, member: int) -> Params:
    """Return the parameters of one member under its own names.

    >>> sorted(part({"0/w": torch.ones(1), "1/w": torch.ones(1)}, 1))
    ['w']
    """
    start = prefix(member)
    return {n.removeprefix(start): value for n, value in params.items() if n.startswith(start)}


def join(parts: dict[int, Params]) -> Params:
    """Return the parameters of all members in one dict: the inverse of `part`."""
    return {prefix(i) + n: value for i, params in parts.items() for n, value in params.items()}


def member_key(key: Key, member: int) -> Key:
    """Return the key that initializes a member; member 0 has that of the run."""
    if member == 0:
        return key
    return Key(Key(key.seed, purpose=f"member {member}").word() >> 1)


def _layered(problem: Problem) -> Layered:
    if not isinstance(problem, Layered):
        raise CapabilityError(f"{type(problem).__name__} does not declare its layers")
    return problem
