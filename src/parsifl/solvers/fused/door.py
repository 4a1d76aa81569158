"""The way from one client's code to the whole block: autograd functions with a vmap rule.

Methods are written for one client and run under `torch.func.vmap`; here the tensors of all
clients of the block come whole. Differentiating through this raises.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from parsifl.problem import Params, Problem
from parsifl.problems.neural import NeuralProblem
from parsifl.solvers.fused.ahead import PARTS, AheadBlock, Route
from parsifl.solvers.fused.gradients import Found
from parsifl.solvers.fused.network import Network
from parsifl.solvers.fused.schedule import Leaf, Schedule, Step, row_scale
from parsifl.solvers.fused.steps import Block, Recipe
from parsifl.work import Batch, Batches

_ENABLED: ContextVar[bool] = ContextVar("parsifl_fused", default=False)
_Dims = tuple[int | None, ...]
_Names = tuple[tuple[str, ...], tuple[str, ...]]


@contextmanager
def fused_steps() -> Iterator[None]:
    """Let solvers take the fused path where they can; only meant around `torch.func.vmap`."""
    token = _ENABLED.set(True)
    try:
        yield
    finally:
        _ENABLED.reset(token)


def inside_vmap() -> bool:
    """Tell whether the innermost transformation is the one `torch.func.vmap` over clients."""
    interpreter: Any = torch._C._functorch.peek_interpreter_stack()
    kind = torch._C._functorch.TransformType.Vmap
    return interpreter is not None and interpreter.level() == 1 and interpreter.key() == kind


def network_for(problem: Problem, batch: Batch | Batches) -> Network | None:
    """Return the layers to run by hand, if this is the place and the problem is of that kind."""
    if not _ENABLED.get() or not isinstance(problem, NeuralProblem) or not inside_vmap():
        return None
    if isinstance(batch, Batches) and batch.augment:
        return None
    if problem.chain is None or batch.x.device.type == "meta":
        return None
    if problem.kind == "cross-entropy" and (batch.y.is_floating_point() or batch.y.ndim > 1):
        return None
    return Network(problem.chain, problem.kind)


def run(
    recipe: Recipe, params: Params, aux: tuple[Params, ...], frozen: Params, batches: Batches
) -> tuple[Params, tuple[Params, ...]]:
    """Take all steps; returns the parameters and the auxiliary trees."""
    tensors = [params[name] for name in recipe.trained]
    tensors += [frozen[name] for name in recipe.frozen]
    tensors += [part[name] for part in aux for name in recipe.trained]
    outputs = _Steps.apply(recipe, *_schedule(batches), *tensors)  # type: ignore[no-untyped-call]  # torch's own
    size = len(recipe.trained)
    groups = [
        dict(zip(recipe.trained, outputs[at : at + size], strict=True))
        for at in range(0, len(outputs), size)
    ]
    return groups[0], tuple(groups[1:]) if recipe.rule.moves_aux else aux


def run_ahead(route: Route, params: Params, batches: Batches) -> Params:
    """Take all steps with a look ahead."""
    tensors = [params[name] for name in route.trained]
    outputs = _Ahead.apply(route, *_schedule(batches), *tensors)  # type: ignore[no-untyped-call]  # torch's own
    return dict(zip(route.trained, outputs, strict=True))


def gradient(network: Network, params: Params, frozen: Params, batch: Batch) -> Params:
    """Return the gradient of the loss in `params`."""
    names = (tuple(params), tuple(frozen))
    data = (batch.x, batch.y, batch.weight, batch.key)
    outputs = _Gradient.apply(network, names, *data, *params.values(), *frozen.values())  # type: ignore[no-untyped-call]  # torch's own
    return dict(zip(params, outputs, strict=True))


def _schedule(batches: Batches) -> tuple[Tensor, ...]:
    data = (batches.x, batches.y, batches.index, batches.weight, batches.active, batches.key)
    return data


class _Hand(torch.autograd.Function):
    """What the functions below share: they exist under vmap only, and keep nothing."""

    @staticmethod
    def forward(*_: Any) -> Any:  # pragma: no cover - torch requires it; `network_for` prevents it
        raise RuntimeError("fused work runs under torch.func.vmap only")

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Keep nothing: there is no backward pass."""


class _Steps(_Hand):
    @staticmethod
    def vmap(info: Any, in_dims: _Dims, recipe: Recipe, *tensors: Tensor) -> Any:
        """Run the block; leaves that all clients share come without a client axis."""
        schedule = Schedule(_data(info, in_dims, tensors), keyed=recipe.network.keyed)
        outputs = Block(recipe, schedule, _leaves(in_dims, tensors)).walk()
        return outputs, (0,) * len(outputs)


class _Ahead(_Hand):
    @staticmethod
    def vmap(info: Any, in_dims: _Dims, route: Route, *tensors: Tensor) -> Any:
        """Run the block."""
        schedule = Schedule(_data(info, in_dims, tensors), keyed=route.network.keyed, parts=PARTS)
        outputs = AheadBlock(route, schedule, _leaves(in_dims, tensors)).walk()
        return outputs, (0,) * len(outputs)


class _Gradient(_Hand):
    @staticmethod
    def vmap(info: Any, in_dims: _Dims, network: Network, names: _Names, *tensors: Tensor) -> Any:
        """Return the gradients of all clients."""
        count = info.batch_size
        x, y, weight, key, *leaves = (
            _batched(tensor, dim, count) for tensor, dim in zip(tensors, in_dims[2:], strict=True)
        )
        trained, frozen = names
        values = dict(zip(trained + frozen, leaves, strict=True))
        step = Step(count, x, y, row_scale(weight), key)
        outputs = Found(values, frozenset(trained)).at(network, step)
        return tuple(outputs[name] for name in trained), (0,) * len(trained)


def _data(info: Any, in_dims: _Dims, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return the pooled data, and the schedules of all clients."""
    if in_dims[1] is not None or in_dims[2] is not None:
        raise RuntimeError("pooled data must be shared by the clients of a block")
    scheduled = zip(tensors[2:6], in_dims[3:7], strict=True)
    return (*tensors[:2], *(_batched(tensor, dim, info.batch_size) for tensor, dim in scheduled))


def _leaves(in_dims: _Dims, tensors: tuple[Tensor, ...]) -> list[Leaf]:
    return list(zip(tensors[6:], in_dims[7:], strict=True))


def _batched(tensor: Tensor, dim: int | None, count: int) -> Tensor:
    return tensor.expand(count, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
