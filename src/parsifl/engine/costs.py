"""Costs of a round: operations, counted once per kind of client work, and simulated seconds."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from dataclasses import replace
from typing import Any, final

from torch import Tensor

from parsifl.core import tree
from parsifl.core.algorithm import AnyAlgorithm
from parsifl.core.batching import Batches, ClientRoundData
from parsifl.core.problem import Problem
from parsifl.nn.flops import OperationCounter, noting_trained


@final
class Cost(int):
    """The operations of one client's round, split into forward and backward passes.

    Attributes
    ----------
    backward
        Operations inside backward passes; the rest is `forward`.
    trainable
        Number of parameters that the loss was differentiated by; None if unknown.
    """

    backward: int
    trainable: int | None

    def __new__(cls, forward: int, backward: int, trainable: int | None) -> Cost:
        """Create a count from the sum of both passes."""
        cost = super().__new__(cls, forward + backward)
        cost.backward, cost.trainable = backward, trainable
        return cost

    @property
    def forward(self) -> int:
        """Operations outside of backward passes."""
        return int(self) - self.backward


class FlopCounter:
    """Counts the operations of `client_update` once for each structure.

    A client's count is linear in its steps, so it follows from one run without steps and one run
    with a single step of each sequence. None if the work cannot run without data (CSR designs).
    """

    def __init__(self, method: AnyAlgorithm, problem: Problem) -> None:
        self._method, self._problem = method, problem
        self._known: dict[Any, _Measured | None] = {}
        self._last: tuple[Any, Any] = (None, _form(None))  # what was sent, which many share

    @property
    def structures(self) -> int:
        """How many structures were counted so far."""
        return len(self._known)

    def count(self, down: Any, client: Any, shard: ClientRoundData) -> Cost | None:
        """Return the operations of one round of local work."""
        mark = self._mark(down, client, shard)
        if mark not in self._known:
            self._known[mark] = self._measure(down, client, shard)
        measured = self._known[mark]
        return None if measured is None else measured.cost(shard)

    def _mark(self, down: Any, client: Any, shard: ClientRoundData) -> Any:
        if down is not self._last[0]:
            self._last = (down, _form(down))
        draws = [(name, b.index.shape[1], len(b) > 0) for name, b in sorted(shard.batches.items())]
        rows = None if shard.rows is None else len(shard.rows.y)
        return self._last[1], _form(client), tuple(draws), rows

    def _measure(self, down: Any, client: Any, shard: ClientRoundData) -> _Measured | None:
        if not _has_tensors_only((down, client, shard)):
            return None
        # A step on real tensors is cheap, and operations on `meta` tensors import torch's compiler,
        # which takes seconds. Work on all rows would take as long as the round itself.
        if shard.rows is None:
            with suppress(Exception):  # work that does nothing without batches
                return self._counted((down, client, shard))
        with suppress(Exception):  # work that needs values cannot be counted; the record says None
            return self._counted(tree.to_meta((down, client, shard)))
        return None

    def _counted(self, arguments: tuple[Any, Any, ClientRoundData]) -> _Measured:
        down, client, shard = arguments
        idle = {name: _cut(batches, 0) for name, batches in shard.batches.items()}

        def run(batches: dict[str, Batches]) -> OperationCounter:
            with OperationCounter() as counter:
                self._method.client_update(
                    self._problem, down, client, replace(shard, batches=batches)
                )
            return counter

        with noting_trained() as noted:
            base = run(idle)
            steps = {
                name: run({**idle, name: _cut(b, 1)}) for name, b in shard.batches.items() if len(b)
            }
        return _Measured(base, steps, sum(noted.values()))


@final
class _Measured:
    """Operations of a client without any step, and those that each step of a sequence adds."""

    def __init__(
        self, base: OperationCounter, steps: dict[str, OperationCounter], trained: int
    ) -> None:
        self._base = Counter(forward=base.forward, backward=base.backward)
        self._steps = {
            name: Counter(forward=one.forward - base.forward, backward=one.backward - base.backward)
            for name, one in steps.items()
        }
        self._trained = trained
        self._costs: dict[tuple[int, ...], Cost] = {}

    def cost(self, shard: ClientRoundData) -> Cost:
        """Return the operations for a shard with its numbers of steps."""
        steps = tuple([len(shard.batches[name]) for name in self._steps])
        if steps not in self._costs:
            self._costs[steps] = self._cost(steps)
        return self._costs[steps]

    def _cost(self, steps: tuple[int, ...]) -> Cost:
        total = dict(self._base)
        for count, each in zip(steps, self._steps.values(), strict=True):
            for part, operations in each.items():
                total[part] += count * operations
        idle = not sum(total.values())
        trainable = self._trained if self._trained or idle else None
        return Cost(total["forward"], total["backward"], trainable)


def _form(value: Any) -> Any:
    leaves, structure = tree.flatten(value)
    return structure, tuple([leaf.shape for leaf in leaves])


def _cut(batches: Batches, steps: int) -> Batches:
    return replace(
        batches,
        index=batches.index[:steps],
        weight=batches.weight[:steps],
        active=batches.active[:steps],
    )


def _has_tensors_only(arguments: Any) -> bool:
    return all(isinstance(leaf, Tensor) for leaf in tree.leaves(arguments))
