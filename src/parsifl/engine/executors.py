"""Runs one function for many clients: in a loop, or batched under `torch.func.vmap`.

Clients share a batch if their arguments have the same structure, shapes and dtypes (the numbers
of steps and of rows may differ: they are padded). Groups are derived, never declared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from parsifl import tree
from parsifl.solvers.fused import fused_steps
from parsifl.work import Batches, Rows

Executor = Literal["loop", "vmap", "fused"]
_PADDED = (Batches, Rows)


@dataclass(frozen=True)
class Task:
    """A client and the trees that the function takes."""

    client: int
    arguments: tuple[Any, ...]


@dataclass
class Outcome:
    """What came of the tasks: results and failures by client, and what was noticed on the way."""

    results: dict[int, Any] = field(default_factory=dict)
    failures: dict[int, str] = field(default_factory=dict)
    fallbacks: list[str] = field(default_factory=list)
    blocks: list[list[int]] = field(default_factory=list)


def run(
    function: Callable[..., Any], tasks: Sequence[Task], executor: Executor, block: int
) -> Outcome:
    """Apply `function(*task.arguments)` to every task; a client that raises is named, not fatal."""
    outcome = Outcome()
    batched = nullcontext if executor == "vmap" else fused_steps
    for members in _blocks(tasks, 1 if executor == "loop" else block):
        outcome.blocks.append([task.client for task in members])
        if len(members) == 1:
            _run_alone(function, members[0], outcome)
            continue
        try:
            with batched():
                results = _run_batched(function, members)
        except Exception as error:  # isolate: whoever raises alone is the culprit
            before = len(outcome.failures)
            for task in members:
                _run_alone(function, task, outcome)
            if len(outcome.failures) == before:
                outcome.fallbacks.append(_reason(error))
        else:
            outcome.results.update(zip((t.client for t in members), results, strict=True))
    return outcome


def _run_alone(function: Callable[..., Any], task: Task, outcome: Outcome) -> None:
    try:
        outcome.results[task.client] = function(*task.arguments)
    except Exception as error:  # one client must not stop the round
        outcome.failures[task.client] = _reason(error)


def _reason(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def signature(arguments: tuple[Any, ...]) -> Any:
    """Return what must agree for clients to share a batch; None if a client cannot be batched."""
    leaves, structure = tree.flatten(arguments, units=_PADDED)
    parts: list[Any] = [structure]
    for leaf in leaves:
        if isinstance(leaf, Batches):
            if not isinstance(leaf.x, Tensor):
                return None
            parts.append(("batches", id(leaf.x), leaf.weight.dtype, leaf.augment))
        elif isinstance(leaf, Rows):
            if not isinstance(leaf.x, Tensor):
                return None
            parts.append(("rows", leaf.x.shape[1:], leaf.x.dtype, leaf.y.shape[1:], leaf.y.dtype))
        elif isinstance(leaf, Tensor) and leaf.layout == torch.strided:
            parts.append((leaf.shape, leaf.dtype))
        else:
            return None
    return tuple(parts)


def _blocks(tasks: Sequence[Task], size: int) -> list[list[Task]]:
    """Group tasks that may share a batch, longest first, and cut the groups into blocks."""
    if size == 1:
        return [[task] for task in tasks]
    groups: dict[Any, list[Task]] = {}
    blocks: list[list[Task]] = []
    for task in tasks:
        mark = signature(task.arguments)
        if mark is None:
            blocks.append([task])
        else:
            groups.setdefault(mark, []).append(task)
    for members in groups.values():
        # descending steps: the clients that still have steps left are then a leading slice
        members.sort(key=lambda task: (-_steps(task), task.client))
        blocks += [members[at : at + size] for at in range(0, len(members), size)]
    return blocks


def _steps(task: Task) -> int:
    leaves, _ = tree.flatten(task.arguments, units=_PADDED)
    return max((len(leaf) for leaf in leaves if isinstance(leaf, Batches)), default=0)


def _run_batched(function: Callable[..., Any], members: Sequence[Task]) -> list[Any]:
    columns, structure = _stacked_arguments(members)
    dims = tuple(0 if batched else None for _, batched in columns)
    if not any(batched for _, batched in columns):
        return [function(*task.arguments) for task in members]
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
    members: Sequence[Task],
) -> tuple[list[tuple[Tensor, bool]], tree.Structure]:
    """Stack the leaves of all members; a leaf that is the same object for all is not copied."""
    padded = _pad([tree.flatten(task.arguments, units=_PADDED) for task in members])
    flat = [tree.flatten(arguments) for arguments in padded]
    columns: list[tuple[Tensor, bool]] = []
    for leaves in zip(*(leaves for leaves, _ in flat), strict=True):
        shared = all(leaf is leaves[0] for leaf in leaves)
        columns.append((leaves[0], False) if shared else (torch.stack(leaves), True))
    return columns, flat[0][1]


def _pad(flat: list[tuple[list[Any], tree.Structure]]) -> list[Any]:
    """Give all `Batches` the same number of steps and rows, all `Rows` the same length."""
    columns = [_pad_column(column) for column in zip(*(leaves for leaves, _ in flat), strict=True)]
    structure = flat[0][1]
    return [tree.unflatten(leaves, structure) for leaves in zip(*columns, strict=True)]


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
