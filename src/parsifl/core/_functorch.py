"""Every private function of torch that Parsifl calls, each with its public fallback.

The private functions save time where models are small (docs/adr/0007). `PRIVATE` and `PUBLIC` hold
the two implementations of each operation. If this version of torch lacks a private function, the
public implementation of that operation is used and one warning is issued at import.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from operator import attrgetter
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

# TorchDispatchMode has no fallback: the public torch.utils.flop_counter, which counts operations,
# is built on it and comes with it.

Params = dict[str, Tensor]
Leaf = tuple[Tensor, int | None]
"""A tensor of a whole block, and the axis of the clients in it; None if they share it."""
Work = Callable[[int, list[Leaf]], Sequence[Tensor]]
Batched = Callable[..., tuple[Tensor, ...]]
A = TypeVar("A")


def _find(name: str, library: Any = torch) -> Any:
    """Return a private function of torch by its path; None if this version lacks it."""
    try:
        return attrgetter(name)(library)
    except AttributeError:
        return None


_C: Any = _find("_C._functorch")
_load_rules: Any = _find("_functorch.vmap.lazy_load_decompositions")
_interpreter: Any = _find("_functorch.pyfunctorch.retrieve_current_functorch_interpreter")
_BLOCK: ContextVar[bool] = ContextVar("parsifl_block", default=False)
"""Whether `vmap_columns` is the innermost transformation; only the fallbacks set and read it."""


# ------------------------------------------------------------------ which transformation is active
def _is_transformed() -> bool:
    return _C.peek_interpreter_stack() is not None


def _inside_vmap() -> bool:
    interpreter = _C.peek_interpreter_stack()
    kind = _C.TransformType.Vmap
    return interpreter is not None and interpreter.level() == 1 and interpreter.key() == kind


def _in_own_block() -> bool:
    # torch has no public way to ask: only transformations that were started here are recognised
    return _BLOCK.get()


@contextmanager
def _block(active: bool) -> Iterator[None]:
    token = _BLOCK.set(active)
    try:
        yield
    finally:
        _BLOCK.reset(token)


# ------------------------------------------------------------------ vmap over clients
def _vmap_columns(function: Batched, columns: Sequence[tuple[Tensor, bool]], count: int) -> Any:
    _load_rules()
    level = _C._vmap_increment_nesting(count, "error")
    try:
        inputs = [
            _C._add_batch_dim(leaf, 0, level) if batched else leaf for leaf, batched in columns
        ]
        outputs = function(*inputs)
        return [_C._remove_batch_dim(output, level, count, 0) for output in outputs]
    finally:
        _C._vmap_decrement_nesting()


def _public_vmap_columns(
    function: Batched,
    columns: Sequence[tuple[Tensor, bool]],
    count: int,  # noqa: ARG001
) -> list[Tensor]:
    def marked(*leaves: Tensor) -> tuple[Tensor, ...]:
        with _block(True):
            return tuple(function(*leaves))

    axes = tuple(0 if batched else None for _, batched in columns)
    return list(torch.func.vmap(marked, axes)(*(leaf for leaf, _ in columns)))


def _leave_vmap(work: Work, tensors: Sequence[Tensor]) -> list[Tensor]:
    interpreter = _interpreter()
    level = interpreter.level()
    leaves = [_C._unwrap_batched(tensor, level) for tensor in tensors]
    with interpreter.lower():
        outputs = work(interpreter.batch_size(), leaves)
    return [_C._add_batch_dim(output, 0, level) for output in outputs]


def _public_leave_vmap(work: Work, tensors: Sequence[Tensor]) -> list[Tensor]:
    return list(_Outside.apply(work, *tensors))  # type: ignore[no-untyped-call]  # torch


class _Outside(torch.autograd.Function):
    """Passes the tensors of a block to a function, through torch's public vmap rule."""

    @staticmethod
    def forward(work: Work, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(output[0] for output in work(1, [(tensor[None], 0) for tensor in tensors]))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:  # noqa: ARG004
        ctx.mark_non_differentiable(*output)

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], work: Work, *tensors: Tensor
    ) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        with _block(False):
            outputs = work(info.batch_size, list(zip(tensors, in_dims[1:], strict=True)))
        return tuple(outputs), (0,) * len(outputs)


# ------------------------------------------------------------------ gradients under vmap
def _grad_once(loss: Callable[[Params], tuple[Tensor, Params]], params: Params) -> Any:
    level = _C._grad_increment_nesting()
    try:
        with torch.enable_grad():
            leaves = {name: _leaf(value, level) for name, value in params.items()}
            value, extra = loss(leaves)
            if value.requires_grad:
                gradients = torch.autograd.grad(
                    value, list(leaves.values()), materialize_grads=True
                )
            else:  # the loss reads none of them
                gradients = tuple(map(torch.zeros_like, leaves.values()))
        named = zip(leaves, gradients, strict=True)
        return (
            {name: _C._unwrap_for_grad(gradient, level) for name, gradient in named},
            {name: _C._unwrap_for_grad(leaf, level) for name, leaf in extra.items()},
        )
    finally:
        _C._grad_decrement_nesting()


def _leaf(value: Tensor, level: int) -> Tensor:
    before = _C.get_inplace_requires_grad_allowed()
    _C.set_inplace_requires_grad_allowed(True)
    try:
        leaf: Tensor = _C._wrap_for_grad(value, level).requires_grad_()
    finally:
        _C.set_inplace_requires_grad_allowed(before)
    return leaf


def _public_grad_once(
    loss: Callable[[Params], tuple[Tensor, Params]], params: Params
) -> tuple[Params, Params]:
    if not params:
        return {}, loss(params)[1]
    gradients, extra = torch.func.grad(loss, has_aux=True)(params)
    return gradients, extra


# ------------------------------------------------------------------ backward passes
def _inside_backward() -> bool:
    return bool(torch._C._current_graph_task_id() != -1)


def _public_inside_backward() -> bool:
    # Exact where the forward pass runs with gradients enabled and the backward pass is not
    # differentiated again; work under torch.no_grad() counts as backward.
    return not torch.is_grad_enabled()


# ------------------------------------------------------------------ calling a module
class _Slots:
    """A module and the tables that hold its parameters and buffers."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._places = {
            f"{prefix}.{name}" if prefix else name: (table, name, value)
            for prefix, layer in module.named_modules()
            for table in (layer._parameters, layer._buffers)
            for name, value in table.items()
        }

    def __call__(self, values: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """Return the output for these values; afterwards the module holds none of them."""
        slots = [(self._places[name], value) for name, value in values.items()]
        try:
            for (table, name, _), value in slots:
                table[name] = value
            output: Tensor = self._module(x)
            return output
        finally:
            for (table, name, empty), _ in slots:
                table[name] = empty


class _PublicSlots:
    """The same through `torch.func.functional_call`, which looks up the tables in every call."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._known = {
            *dict(module.named_parameters(remove_duplicate=False)),
            *dict(module.named_buffers(remove_duplicate=False)),
        }

    def __call__(self, values: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """Return the output for these values."""
        for name in values:
            if name not in self._known:
                raise KeyError(name)
        output: Tensor = torch.func.functional_call(self._module, dict(values), (x,))
        return output


# ------------------------------------------------------------------ the start-up check
PRIVATE: dict[str, Any] = {
    "is_transformed": _is_transformed,
    "inside_vmap": _inside_vmap,
    "vmap_columns": _vmap_columns,
    "leave_vmap": _leave_vmap,
    "grad_once": _grad_once,
    "inside_backward": _inside_backward,
    "ModuleSlots": _Slots,
}
PUBLIC: dict[str, Any] = {
    "is_transformed": _in_own_block,
    "inside_vmap": _in_own_block,
    "vmap_columns": _public_vmap_columns,
    "leave_vmap": _public_leave_vmap,
    "grad_once": _public_grad_once,
    "inside_backward": _public_inside_backward,
    "ModuleSlots": _PublicSlots,
}
_TRANSFORMS = (
    "_C._functorch.peek_interpreter_stack",
    "_C._functorch.TransformType.Vmap",
    "_C._functorch._vmap_increment_nesting",
    "_C._functorch._vmap_decrement_nesting",
    "_C._functorch._add_batch_dim",
    "_C._functorch._remove_batch_dim",
    "_C._functorch._unwrap_batched",
    "_C._functorch._grad_increment_nesting",
    "_C._functorch._grad_decrement_nesting",
    "_C._functorch._wrap_for_grad",
    "_C._functorch._unwrap_for_grad",
    "_C._functorch.get_inplace_requires_grad_allowed",
    "_C._functorch.set_inplace_requires_grad_allowed",
    "_functorch.vmap.lazy_load_decompositions",
    "_functorch.pyfunctorch.retrieve_current_functorch_interpreter",
)
# Transformations are replaced together: the public ones mark the block that they are in.
_NEEDS: dict[tuple[str, ...], tuple[str, ...]] = {
    ("is_transformed", "inside_vmap", "vmap_columns", "leave_vmap", "grad_once"): _TRANSFORMS,
    ("inside_backward",): ("_C._current_graph_task_id",),
    ("ModuleSlots",): ("_parameters", "_buffers"),
}


def choose(library: Any = torch) -> dict[str, Any]:
    """Return the operations for this version of torch: the private ones where they exist."""
    chosen, missing = dict(PRIVATE), []
    for operations, needs in _NEEDS.items():
        absent = [need for need in needs if not _has(library, need)]
        if absent:
            missing += absent
            chosen |= {name: PUBLIC[name] for name in operations}
    if missing:
        warnings.warn(
            f"torch {library.__version__} lacks {', '.join(missing)}: Parsifl uses slower public "
            "functions instead. Install the version of torch in constraints.txt for full speed.",
            RuntimeWarning,
            stacklevel=2,
        )
    return chosen


def _has(library: Any, name: str) -> bool:
    root = library.nn.Module() if name in ("_parameters", "_buffers") else library
    return _find(name, root) is not None


_chosen = choose()

is_transformed: Callable[[], bool] = _chosen["is_transformed"]
"""Return whether a `torch.func` transformation (vmap or grad) is active."""

inside_vmap: Callable[[], bool] = _chosen["inside_vmap"]
"""Return whether the innermost transformation is the vmap over clients."""

vmap_columns: Callable[[Batched, Sequence[tuple[Tensor, bool]], int], list[Tensor]] = _chosen[
    "vmap_columns"
]
"""Do what `torch.func.vmap` does, given flat tensors and whether each has a client axis."""

leave_vmap: Callable[[Work, Sequence[Tensor]], list[Tensor]] = _chosen["leave_vmap"]
"""Call `work(clients, leaves)` outside of vmap with the tensors of all clients, and re-enter.

The outputs have the clients along their first axis. Only valid if `inside_vmap()`.
"""

grad_once: Callable[[Callable[[Params], tuple[Tensor, Params]], Params], tuple[Params, Params]] = (
    _chosen["grad_once"]
)
"""Return the gradient of a loss under vmap, and the other tensors that the loss returns.

The gradient cannot be differentiated again. `torch.func.grad` records the backward pass for that
purpose, which takes a tenth of the time of a small model.
"""

inside_backward: Callable[[], bool] = _chosen["inside_backward"]
"""Return whether a backward pass is running in this thread."""

ModuleSlots: Callable[[nn.Module], Callable[[Mapping[str, Tensor], Tensor], Tensor]] = _chosen[
    "ModuleSlots"
]
"""Call a module with values for its parameters and buffers, as `torch.func.functional_call` does.

Locations of the values are looked up once, which saves a tenth of a step for small models. Not
thread-safe.
"""


def eager(function: Batched, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Apply a function of tensors [clients, ...] to one client's tensors.

    Under vmap, values cannot be inspected. This function can: it receives the real tensors of all
    clients of the block at once, or of a block of one outside vmap.

    >>> eager(lambda v: (v * v.count_nonzero(),), torch.tensor([0.0, 2.0]))
    (tensor([0., 2.]),)
    """

    def work(count: int, leaves: list[Leaf]) -> Sequence[Tensor]:
        return function(*(aligned(leaf, count) for leaf in leaves))

    leave = leave_vmap if inside_vmap() else _public_leave_vmap
    return tuple(leave(work, tensors))


def aligned(leaf: Leaf, count: int) -> Tensor:
    """Return a tensor with the clients along its first axis."""
    tensor, axis = leaf
    return tensor.expand(count, *tensor.shape) if axis is None else tensor.movedim(axis, 0)
