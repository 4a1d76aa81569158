"""Run one function for many clients: one by one or batched under vmap, optionally in threads.

Clients share a batch if their arguments have the same structure, shapes and dtypes (the numbers
of steps and of rows may differ: they are padded). Groups are derived from the arguments.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from parsifl.core import tree
from parsifl.core._functorch import vmap_columns
from parsifl.core.batching import Batches, Rows
from parsifl.core.errors import ConfigError, reason, unknown
from parsifl.core.problem import ExecutionHints, Problem, execution, layer_chain
from parsifl.engine.finite import is_ordinary
from parsifl.engine.threads import imap_ordered
from parsifl.solvers.fused import fused_steps

T = TypeVar("T")
CPU = torch.device("cpu")
Executor = Literal["loop", "threads", "vmap", "fused"]
_TENSORS: dict[type, tuple[str, ...]] = {
    Batches: ("x", "y", "index", "weight", "active", "key"),
    Rows: ("x", "y", "weight"),
}
"""The classes that are padded, and their tensors in the order of `tree.flatten`."""
_PADDED = tuple(_TENSORS)
_POOLED = ("x", "y")
BLOCK = ExecutionHints().block_size
EXECUTORS = ("auto", "loop", "threads", "vmap", "fused")


@dataclass(frozen=True)
class Task:
    """A client and the arguments of the function."""

    client: int
    arguments: tuple[Any, ...]


@dataclass
class Outcome:
    """The outcome of the tasks: results and failures by client, and notes for the record.

    `ordinary` names clients whose results are known to be finite and of ordinary size; the others
    have not been checked.
    """

    results: dict[int, Any] = field(default_factory=dict)
    failures: dict[int, str] = field(default_factory=dict)
    fallbacks: list[str] = field(default_factory=list)
    blocks: list[list[int]] = field(default_factory=list)
    ordinary: set[int] = field(default_factory=set)

    def add(self, other: Outcome) -> None:
        """Add the results of other tasks."""
        self.results.update(other.results)
        self.failures.update(other.failures)
        self.fallbacks += other.fallbacks
        self.blocks += other.blocks
        self.ordinary |= other.ordinary


def run(
    function: Callable[..., Any], tasks: Sequence[Task], executor: Executor, block: int
) -> Outcome:
    """Apply `function(*task.arguments)` to every task. Exceptions are recorded per client."""
    outcome = Outcome()
    for part in imap(jobs(function, tasks, executor, block), executor):
        outcome.add(part)
    return outcome


def jobs(
    function: Callable[..., Any], tasks: Sequence[Task], executor: Executor, block: int
) -> list[Callable[[], Outcome]]:
    """Return one job per client ("loop", "threads") or per batch of at most `block` clients.

    The contents of a batch do not depend on the number of threads.
    """
    if executor in ("loop", "threads"):
        return [partial(_run_client, function, task) for task in tasks]
    scope = nullcontext if executor == "vmap" else fused_steps
    return [partial(_run_block, function, part, scope) for part in _blocks(tasks, block)]


def imap(jobs: Iterable[Callable[[], T]], executor: Executor) -> Generator[T, None, None]:
    """Run jobs and yield their results in order; all executors except "loop" use threads."""
    if executor == "loop":
        return (job() for job in jobs)
    return imap_ordered(jobs)


def _run_client(function: Callable[..., Any], task: Task) -> Outcome:
    outcome = Outcome(blocks=[[task.client]])
    run_alone(function, task, outcome)
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
            results, ordinary = _run_batched(function, members)
    except Exception as error:  # isolate: a client that raises alone is the culprit
        for flat in members:
            run_alone(function, flat.task, outcome)
        if not outcome.failures:
            outcome.fallbacks.append(reason(error))
    else:
        outcome.results.update(zip(clients, results, strict=True))
        outcome.ordinary.update(clients if ordinary else ())
    return outcome


class _Flat(NamedTuple):
    """A flattened task: its leaves, and what must agree for clients to share a batch."""

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
    """Cut a group into nearly equal blocks, which do not depend on the machine."""
    count = math.ceil(len(members) / largest)
    if count > 1 and count % 2 and len(members) >= 2 * (count + 1):
        count += 1  # an even number, so that two cores have equal work
    ends = [len(members) * (at + 1) // count for at in range(count)]
    return (members[start:end] for start, end in pairwise([0, *ends]))


def _run_batched(function: Callable[..., Any], members: Sequence[_Flat]) -> tuple[list[Any], bool]:
    """Return the results in the order of the members, and whether all are of ordinary size."""
    columns, structure = _stacked_arguments(members)
    if not any(batched for _, batched in columns):
        return [function(*flat.task.arguments) for flat in members], False
    result_structure: list[tree.Structure] = []

    def on_leaves(*leaves: Tensor) -> tuple[Tensor, ...]:
        result = function(*tree.unflatten(leaves, structure))
        flat, form = tree.flatten(result)
        result_structure[:] = [form]
        return tuple(flat)

    outputs = vmap_columns(on_leaves, columns, len(members))
    unbound = [output.unbind(0) for output in outputs]
    results = [
        tree.unflatten([column[i] for column in unbound], result_structure[0])
        for i in range(len(members))
    ]
    return results, all(is_ordinary(output) for output in outputs)


def _stacked_arguments(
    members: Sequence[_Flat],
) -> tuple[list[tuple[Tensor, bool]], tree.Structure]:
    """Stack the leaves of all members; a leaf that is the same object for all is not copied."""
    columns: list[tuple[Tensor, bool]] = []
    first: list[Any] = []
    for column in zip(*(member.leaves for member in members), strict=True):
        padded = _pad_column(column)
        first.append(padded[0])
        names = _TENSORS.get(type(padded[0]))
        if names is None:
            columns.append(_stacked(padded))
            continue
        for name in names:  # weights that happen to be one object are still each client's own
            weights = [getattr(leaf, name) for leaf in padded]
            columns.append(_stacked(weights) if name in _POOLED else (torch.stack(weights), True))
    return columns, tree.structure(tree.unflatten(first, members[0].structure))


def _stacked(leaves: Sequence[Tensor]) -> tuple[Tensor, bool]:
    shared = all(leaf is leaves[0] for leaf in leaves)
    return (leaves[0], False) if shared else (torch.stack(tuple(leaves)), True)


def _pad_column(column: Sequence[Any]) -> Sequence[Any]:
    if isinstance(column[0], Batches):
        shapes = {batches.index.shape for batches in column}
        if len(shapes) == 1 and not any(batches.ragged for batches in column):
            return column
        steps, width = (max(sizes) for sizes in zip(*shapes, strict=True))
        ragged = any(shape[0] < steps for shape in shapes)
        return [_pad_batches(batches, steps, width, ragged) for batches in column]
    if isinstance(column[0], Rows):
        length = max(len(rows.y) for rows in column)
        return [_pad_rows(rows, length) for rows in column]
    return column


def _pad_batches(batches: Batches, steps: int, width: int, ragged: bool) -> Batches:
    more_steps, more_rows = steps - batches.index.shape[0], width - batches.index.shape[1]
    if not more_steps and not more_rows:
        return batches if batches.ragged == ragged else replace(batches, ragged=ragged)
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


def run_alone(function: Callable[..., Any], task: Task, outcome: Outcome) -> None:
    """Run one task; if it raises, record the error for its client and continue with the others."""
    try:
        outcome.results[task.client] = function(*task.arguments)
    except Exception as error:  # one client must not stop the round
        outcome.failures[task.client] = reason(error)


def choose_executor(
    executor: str, problem: Problem, *, sparse: bool = False, cpu: bool = True
) -> tuple[Executor, int]:
    """Return the executor and the number of clients per block; `sparse` rows are CSR."""
    if executor not in EXECUTORS:
        raise ConfigError(unknown("executor", executor, EXECUTORS))
    if not cpu:
        if executor in ("threads", "fused"):
            raise ConfigError(
                f"executor={executor!r} requires the CPU: use 'vmap' or 'loop' on other devices"
            )
        executor = "vmap" if executor == "auto" else executor
    # Sparse rows cannot be batched. Threads would take twice as long as a loop, because each of the
    # many short products releases and takes Python's lock (docs/adr/0004).
    if executor == "loop" or not problem.supports_vmap or sparse:
        return "loop", BLOCK
    hints = execution(problem)
    if executor == "threads" or (executor == "auto" and hints.per_client_threads):
        return "threads", BLOCK
    fused = executor != "vmap" and hints.fused and layer_chain(problem) is not None
    return "fused" if fused else "vmap", hints.block_size


def check_device(device: str | torch.device) -> torch.device:
    """Return the device; raise ConfigError if this machine or this build of torch lacks it."""
    try:
        torch_device = torch.device(device)
        torch.zeros(1, device=torch_device).cpu()
    except (RuntimeError, AssertionError, NotImplementedError, TypeError) as error:
        first = str(error).splitlines()[0]
        raise ConfigError(f"the device {str(device)!r} cannot be used: {first}") from error
    return torch_device


def placed(function: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """Return a function of trees that computes on a device.

    It also works under vmap, where a whole batch of clients is moved at once.
    """
    if device == CPU:
        return function

    def there(*arguments: Any) -> Any:
        moved = tree.map(lambda leaf: leaf.to(device), arguments)
        return tree.map(lambda leaf: leaf.to(CPU), function(*moved))

    return there
