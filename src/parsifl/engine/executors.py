"""Runs one function for many clients: in a loop, in worker processes, or batched under vmap.

Clients share a batch if their arguments have the same structure, shapes and dtypes (the numbers
of steps and of rows may differ: they are padded). Groups are derived, never declared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from parsifl import tree
from parsifl.engine.forked import run_forked, workers
from parsifl.engine.tasks import Outcome, Task, reason, run_alone
from parsifl.solvers.fused import fused_steps
from parsifl.work import Batches, Rows

Executor = Literal["loop", "forked", "vmap", "fused"]
_PADDED = (Batches, Rows)


def run(
    function: Callable[..., Any], tasks: Sequence[Task], executor: Executor, block: int
) -> Outcome:
    """Apply `function(*task.arguments)` to every task; a client that raises is named, not fatal."""
    if executor == "forked" and len(tasks) > 1:
        return run_forked(function, tasks, workers())
    outcome = Outcome()
    batched = nullcontext if executor == "vmap" else fused_steps
    if executor in ("loop", "forked"):
        for task in tasks:
            outcome.blocks.append([task.client])
            run_alone(function, task, outcome)
        return outcome
    for members in _blocks(tasks, block):
        outcome.blocks.append([flat.task.client for flat in members])
        if len(members) == 1:
            run_alone(function, members[0].task, outcome)
            continue
        try:
            with batched():
                results = _run_batched(function, members)
        except Exception as error:  # isolate: whoever raises alone is the culprit
            before = len(outcome.failures)
            for flat in members:
                run_alone(function, flat.task, outcome)
            if len(outcome.failures) == before:
                outcome.fallbacks.append(reason(error))
        else:
            clients = (flat.task.client for flat in members)
            outcome.results.update(zip(clients, results, strict=True))
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
        blocks += [members[at : at + size] for at in range(0, len(members), size)]
    return blocks


def _run_batched(function: Callable[..., Any], members: Sequence[_Flat]) -> list[Any]:
    columns, structure = _stacked_arguments(members)
    dims = tuple(0 if batched else None for _, batched in columns)
    if not any(batched for _, batched in columns):
        return [function(*flat.task.arguments) for flat in members]
    result_structure: list[tree.Structure] = []

    def on_leaves(*leaves: Tensor) -> tuple[Tensor, ...]:
        result = function(*tree.unflatten(leaves, structure))
        flat, form = tree.flatten(result)
        result_structure[:] = [form]
        return tuple(flat)

    outputs = torch.func.vmap(on_leaves, in_dims=dims)(*(leaf for leaf, _ in columns))
    unbound = [output.unbind(0) for output in outputs]
    return [
        tree.unflatten([column[i] for column in unbound], result_structure[0])
        for i in range(len(members))
    ]


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
