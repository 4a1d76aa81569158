"""Floating-point operations of local work, counted on tensors without data."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from parsifl import tree
from parsifl.algorithm import AnyMethod
from parsifl.problem import Problem
from parsifl.work import Batches, Shard


class FlopCounter:
    """Counts the operations of `local` for each structure once, on `meta` tensors.

    A client's count is linear in its steps: one run without steps and one with a single step of
    each sequence give the rest. None where the work cannot run without data (CSR designs).
    """

    def __init__(self, method: AnyMethod, problem: Problem) -> None:
        self._method, self._problem = method, problem
        self._known: dict[Any, tuple[int, dict[str, int]] | None] = {}

    def count(self, down: Any, client: Any, shard: Shard) -> int | None:
        """Return the operations of one round of local work."""
        mark = self._mark(down, client, shard)
        if mark not in self._known:
            self._known[mark] = self._measure(down, client, shard)
        measured = self._known[mark]
        if measured is None:
            return None
        base, steps = measured
        return base + sum(len(shard.draws[name]) * each for name, each in steps.items())

    def _mark(self, down: Any, client: Any, shard: Shard) -> Any:
        leaves, structure = tree.flatten((down, client))
        draws = tuple((n, b.index.shape[1], len(b) > 0) for n, b in sorted(shard.draws.items()))
        rows = None if shard.rows is None else len(shard.rows.y)
        return structure, tuple(leaf.shape for leaf in leaves), draws, rows

    def _measure(self, down: Any, client: Any, shard: Shard) -> tuple[int, dict[str, int]] | None:
        if not _has_tensors_only((down, client, shard)):
            return None
        idle = {name: _cut(batches, 0) for name, batches in shard.draws.items()}
        try:
            base = self._run(down, client, replace(shard, draws=idle))
            steps = {
                name: self._run(down, client, replace(shard, draws={**idle, name: _cut(b, 1)}))
                - base
                for name, b in shard.draws.items()
                if len(b)
            }
        except Exception:  # work that needs values cannot be counted; the record says None
            return None
        return base, steps

    def _run(self, down: Any, client: Any, shard: Shard) -> int:
        arguments = tree.to_meta((down, client, shard))
        with FlopCounterMode(display=False) as counter:
            self._method.local(self._problem, *arguments)
        return int(counter.get_total_flops())


def _cut(batches: Batches, steps: int) -> Batches:
    return replace(
        batches,
        index=batches.index[:steps],
        weight=batches.weight[:steps],
        active=batches.active[:steps],
    )


def _has_tensors_only(arguments: Any) -> bool:
    return all(isinstance(leaf, Tensor) for leaf in tree.leaves(arguments))
