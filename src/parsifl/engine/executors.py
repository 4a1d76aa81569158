"""Runs one function for many clients: in a loop, in processes, or batched under vmap in threads.

Clients share a batch if their arguments have the same structure, shapes and dtypes (the numbers
of steps and of rows may differ: they are padded). Groups are derived, never declared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from parsifl import tree
from parsifl.engine.forked import run_forked, workers
from parsifl.engine.tasks import Outcome, Task, reason, run_alone
from parsifl.engine.threads import run_jobs
from parsifl.solvers.fused import fused_steps
from parsifl.work import Batches, Rows

Executor = Literal["loop", "forked", "vmap", "fused"]
_PADDED = (Batches, Rows)


def run(
    function: Callable[..., Any], tasks: Sequence[Task], executor: Executor, block: int
) -> Outcome:
    """Apply `function(*task.arguments)` to every task; a client that raises is named, not fatal.

    Batches hold at most `block` clients and run in several threads. What is in a batch does not
    depend on the number of threads; nor does any bit of the results, if there are two batches.
    """
    if executor == "forked" and len(tasks) > 1:
        return run_forked(function, tasks, workers())
    outcome = Outcome()
    if executor in ("loop", "forked"):
        for task in tasks:
            outcome.blocks.append([task.client])
            run_alone(function, task, outcome)
        return outcome
    scope = nullcontext if executor == "vmap" else fused_steps
    jobs = [partial(_run_block, function, members, scope) for members in _blocks(tasks, block)]
    for part in run_jobs(jobs):
        outcome.add(part)
    return outcome


def _run_block(
    function: Callable[..., Any],
    members: Sequence[_Flat],
    scope: Callable[[], AbstractContextManager[None]],
) -> Outcome:
    clients = [flat.task.client for flat in members]
    outcome = Outcome(blocks=[clients])
    if len(members) == 1:
        run_alone(function, members[0].task, outcome)
        return outcome
    try:
        with scope():
            results, finite = _run_batched(function, members)
    except Exception as error:  # isolate: whoever raises alone is the culprit
        for flat in members:
            run_alone(function, flat.task, outcome)
        if not outcome.failures:
            outcome.fallbacks.append(reason(error))
    else:
        outcome.results.update(zip(clients, results, strict=True))
        outcome.finite.update(clients if finite else ())
    return outcome


@dataclass(frozen=True)
class _Flat:
    """A task taken apart once: its leaves, and what must agree for clients to share a batch."""

    task: Task
    leaves: list[Any]
    structure: tree.Structure
    mark: Any
    steps: int


def _flat(task: Task) -> _Flat:
    leaves, structure = tree.flatten(task.arguments, units=_PADDED)
    steps = max((len(leaf) for leaf in leaves if isinstance(leaf, Batches)), default=0)
    parts = [_mark(leaf) for leaf in leaves]
    mark = None if None in parts else (structure, *parts)
    return _Flat(task, leaves, structure, mark, steps)


def _mark(leaf: Any) -> Any:
    """Return what must agree in one leaf; None if it cannot be batched."""
    if isinstance(leaf, Batches) and isinstance(leaf.x, Tensor):
        width = leaf.index.shape[1] if leaf.fixed else None
        return "batches", id(leaf.x), leaf.weight.dtype, leaf.augment, width
    if isinstance(leaf, Rows) and isinstance(leaf.x, Tensor):
        return "rows", leaf.x.shape[1:], leaf.x.dtype, leaf.y.shape[1:], leaf.y.dtype
    if isinstance(leaf, Tensor) and leaf.layout == torch.strided:
        return leaf.shape, leaf.dtype
    return None


def _blocks(tasks: Sequence[Task], size: int) -> list[list[_Flat]]:
    """Group tasks that may share a batch, longest first, and cut the groups into blocks."""
    groups: dict[Any, list[_Flat]] = {}
    blocks: list[list[_Flat]] = []
    for task in tasks:
        flat = _flat(task)
        if flat.mark is None:
            blocks.append([flat])
        else:
            groups.setdefault(flat.mark, []).append(flat)
    for members in groups.values():
        # descending steps: the clients that still have steps left are then a leading slice
        members.sort(key=lambda flat: (-flat.steps, flat.task.client))
        blocks += _cut(members, size)
    return blocks


def _cut(members: list[_Flat], largest: int) -> Iterator[list[_Flat]]:
    """Cut a group into nearly equal blocks; what is in them does not depend on the machine."""
    count = math.ceil(len(members) / largest)
    ends = [len(members) * (at + 1) // count for at in range(count)]
    return (members[start:end] for start, end in pairwise([0, *ends]))


def _run_batched(function: Callable[..., Any], members: Sequence[_Flat]) -> tuple[list[Any], bool]:
    """Return the results in the order of the members, and whether all are known to be finite."""
    columns, structure = _stacked_arguments(members)
    dims = tuple(0 if batched else None for _, batched in columns)
    if not any(batched for _, batched in columns):
        return [function(*flat.task.arguments) for flat in members], False
    result_structure: list[tree.Structure] = []

    def on_leaves(*leaves: Tensor) -> tuple[Tensor, ...]:
        result = function(*tree.unflatten(leaves, structure))
        flat, form = tree.flatten(result)
        result_structure[:] = [form]
        return tuple(flat)

    outputs = torch.func.vmap(on_leaves, in_dims=dims)(*(leaf for leaf, _ in columns))
    unbound = [output.unbind(0) for output in outputs]
    results = [
        tree.unflatten([column[i] for column in unbound], result_structure[0])
        for i in range(len(members))
    ]
    return results, all(_is_finite(output) for output in outputs)


def _is_finite(values: Tensor) -> bool:
    """Tell whether the sum is finite: that proves it of the terms, in one pass for all clients."""
    return not values.is_floating_point() or math.isfinite(values.sum())


def _stacked_arguments(
    members: Sequence[_Flat],
) -> tuple[list[tuple[Tensor, bool]], tree.Structure]:
    """Stack the leaves of all members; a leaf that is the same object for all is not copied."""
    padded = [_pad_column(column) for column in zip(*(m.leaves for m in members), strict=True)]
    columns: list[tuple[Tensor, bool]] = []
    for column in padded:
        for leaves in zip(*(tree.leaves(item) for item in column), strict=True):
            shared = all(leaf is leaves[0] for leaf in leaves)
            columns.append((leaves[0], False) if shared else (torch.stack(leaves), True))
    whole = tree.unflatten([column[0] for column in padded], members[0].structure)
    return columns, tree.structure(whole)


def _pad_column(column: tuple[Any, ...]) -> Sequence[Any]:
    if isinstance(column[0], Batches):
        steps = max(batches.index.shape[0] for batches in column)
        width = max(batches.index.shape[1] for batches in column)
        ragged = any(len(batches) < steps for batches in column)
        return [_pad_batches(batches, steps, width, ragged) for batches in column]
    if isinstance(column[0], Rows):
        length = max(len(rows.y) for rows in column)
        return [_pad_rows(rows, length) for rows in column]
    return column


def _pad_batches(batches: Batches, steps: int, width: int, ragged: bool) -> Batches:
    more_steps, more_rows = steps - batches.index.shape[0], width - batches.index.shape[1]
    if not more_steps and not more_rows:
        return replace(batches, ragged=ragged)
    row = int(batches.index[0, 0]) if batches.index.numel() else 0
    return replace(
        batches,
        index=functional.pad(batches.index, (0, more_rows, 0, more_steps), value=row),
        weight=functional.pad(batches.weight, (0, more_rows, 0, more_steps)),
        active=functional.pad(batches.active, (0, more_steps)),
        ragged=ragged,
    )


def _pad_rows(rows: Rows, length: int) -> Rows:
    missing = length - len(rows.y)
    if not missing:
        return rows
    return Rows(_pad_first(rows.x, missing), _pad_first(rows.y, missing),
                _pad_first(rows.weight, missing))  # fmt: skip


def _pad_first(values: Tensor, missing: int) -> Tensor:
    return torch.cat([values, values.new_zeros(missing, *values.shape[1:])])
