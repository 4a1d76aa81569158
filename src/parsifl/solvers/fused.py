"""SGD for a block of clients with the step fused into the backward pass.

For a chain of layers the gradient of a weight need not exist: `baddbmm_` adds -lr * g^T h into
the weights of all clients at once. Rules apply before and after, as in the generic path, which is
the reference for this one. The door to it is an `autograd.Function` whose vmap rule receives the
tensors of the whole block; differentiating through it raises.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from parsifl.problem import Params, Problem
from parsifl.problems.chain import Activate, Chain, Linear
from parsifl.problems.neural import NeuralProblem
from parsifl.solvers.rules import Rule
from parsifl.work import Batches

_ENABLED: ContextVar[bool] = ContextVar("parsifl_fused", default=False)


@contextmanager
def fused_steps() -> Iterator[None]:
    """Let `sgd` take the fused path where it can; only meant around `torch.func.vmap`."""
    token = _ENABLED.set(True)
    try:
        yield
    finally:
        _ENABLED.reset(token)


@dataclass(frozen=True)
class Recipe:
    """Everything about the steps that is no tensor."""

    chain: Chain
    rule: Rule
    lr: float
    momentum: float
    decay: float
    trained: tuple[str, ...]
    frozen: tuple[str, ...]
    aux: int


def chain_for(problem: Problem, batches: Batches) -> Chain | None:
    """Return the layers to run by hand, if this is the place and the problem is of that kind."""
    if not _ENABLED.get() or not isinstance(problem, NeuralProblem):
        return None
    if problem.kind != "cross-entropy" or batches.augment or batches.x.device.type == "meta":
        return None
    return problem.chain


def run(
    recipe: Recipe, params: Params, aux: tuple[Params, ...], frozen: Params, batches: Batches
) -> tuple[Params, tuple[Params, ...]]:
    """Take all steps; returns the parameters and the auxiliary trees."""
    tensors = [params[name] for name in recipe.trained]
    tensors += [frozen[name] for name in recipe.frozen]
    tensors += [part[name] for part in aux for name in recipe.trained]
    data = (batches.x, batches.y, batches.index, batches.weight, batches.active)
    outputs = _Steps.apply(recipe, *data, *tensors)  # type: ignore[no-untyped-call]  # torch's own
    size = len(recipe.trained)
    groups = [
        dict(zip(recipe.trained, outputs[at : at + size], strict=True))
        for at in range(0, len(outputs), size)
    ]
    return groups[0], tuple(groups[1:]) if recipe.rule.moves_aux else aux


class _Steps(torch.autograd.Function):
    """Hands the tensors of a whole block to `_Block`; needs to be called under vmap."""

    @staticmethod
    def forward(*_: Any) -> Any:  # pragma: no cover - torch requires it; sgd never comes here
        raise RuntimeError("fused steps run under torch.func.vmap only")

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Keep nothing: there is no backward pass."""

    @staticmethod
    def vmap(info: Any, in_dims: Any, recipe: Recipe, *tensors: Tensor) -> Any:
        """Run the block; leaves that all clients share come without a client axis."""
        x, y, *scheduled = tensors[:5]
        if in_dims[1] is not None or in_dims[2] is not None:
            raise RuntimeError("pooled data must be shared by the clients of a block")
        count = info.batch_size
        index, weight, active = (
            _batched(tensor, dim, count)
            for tensor, dim in zip(scheduled, in_dims[3:6], strict=True)
        )
        rest = [(tensor, dim) for tensor, dim in zip(tensors[5:], in_dims[6:], strict=True)]
        block = _Block(recipe, rest, count, active)
        block.walk(x, y, index, weight)
        outputs = block.outputs()
        return outputs, (0,) * len(outputs)


def _batched(tensor: Tensor, dim: int | None, count: int) -> Tensor:
    return tensor.expand(count, *tensor.shape) if dim is None else tensor.movedim(dim, 0)


def _owned(tensor: Tensor, dim: int | None, count: int, order: Tensor | None) -> Tensor:
    batched = _batched(tensor, dim, count)
    if order is not None and dim is not None:
        return batched.index_select(0, order)
    return batched.clone(memory_format=torch.contiguous_format)


def _shared(tensor: Tensor, dim: int | None, order: Tensor | None) -> Tensor:
    if dim is None:
        return tensor[None]
    batched = tensor.movedim(dim, 0)
    return batched if order is None else batched.index_select(0, order)


class _Block:
    """The parameters of all clients of a block, ordered so that longer schedules come first."""

    def __init__(
        self,
        recipe: Recipe,
        tensors: Sequence[tuple[Tensor, int | None]],
        count: int,
        active: Tensor,
    ) -> None:
        self.recipe = recipe
        steps = active.sum(1)
        descending = bool((steps[1:] <= steps[:-1]).all())
        self.order = None if descending else steps.argsort(descending=True, stable=True)
        self.active = active if self.order is None else active[self.order]
        size, fixed = len(recipe.trained), len(recipe.frozen)
        own, rest = tensors[:size], tensors[size + fixed :]
        order = self.order
        self.params = {
            name: _owned(tensor, dim, count, order)
            for name, (tensor, dim) in zip(recipe.trained, own, strict=True)
        }
        frozen = tensors[size : size + fixed]
        self.frozen = {
            name: _shared(tensor, dim, order).expand(count, *_inner(tensor, dim))
            for name, (tensor, dim) in zip(recipe.frozen, frozen, strict=True)
        }
        moved = recipe.rule.moves_aux
        self.aux = [
            {
                name: _owned(t, d, count, order) if moved else _shared(t, d, order)
                for name, (t, d) in zip(recipe.trained, rest[at : at + size], strict=True)
            }
            for at in range(0, len(rest), size)
        ]
        self.velocity = (
            {name: torch.zeros_like(value) for name, value in self.params.items()}
            if recipe.momentum
            else {}
        )

    def outputs(self) -> tuple[Tensor, ...]:
        """Return the parameters (and moved aux) in the order of the clients."""
        trees = [self.params, *(self.aux if self.recipe.rule.moves_aux else [])]
        found = [part[name] for part in trees for name in self.recipe.trained]
        if self.order is None:
            return tuple(found)
        back = self.order.argsort()
        return tuple(value.index_select(0, back) for value in found)

    def walk(self, x: Tensor, y: Tensor, index: Tensor, weight: Tensor) -> None:
        """Take every step; the clients that have it are a leading slice."""
        if self.order is not None:
            index, weight = index[self.order], weight[self.order]
        scale = weight / weight.sum(-1, keepdim=True).clamp(min=1)
        alive = self.active.sum(0).tolist()
        # one buffer for the rows of every step: fresh memory would cost a page fault each 4 kB
        buffer = x.new_empty(index.shape[0] * index.shape[2], *x.shape[1:])
        for step, count in enumerate(alive):
            if count:
                rows = index[:count, step]
                gathered = buffer[: rows.numel()]
                torch.index_select(x, 0, rows.reshape(-1), out=gathered)
                inputs = gathered.view(*rows.shape, *x.shape[1:])
                self._step(inputs, y[rows], scale[:count, step], count)

    def _step(self, x: Tensor, y: Tensor, scale: Tensor, count: int) -> None:
        """Run one forward and one backward pass; weights move as their gradient is ready."""
        inputs, output = self._forward(x, count)
        gradient = torch.softmax(output, -1)
        gradient.scatter_add_(2, y[..., None], gradient.new_full((*y.shape, 1), -1.0))
        gradient.mul_(scale[..., None])
        first = self._first_trained()
        for at in range(len(self.recipe.chain) - 1, first - 1, -1):
            layer, value = self.recipe.chain[at], inputs[at]
            if isinstance(layer, Linear):
                weight = self._weight(layer.weight)[:count]
                below = torch.bmm(gradient, weight) if at > first else gradient
                self._land(layer, gradient, value, count)
                gradient = below
            elif isinstance(layer, Activate):
                gradient = _through(layer, gradient, inputs[at + 1])
            else:
                gradient = gradient.reshape(value.shape)

    def _forward(self, x: Tensor, count: int) -> tuple[list[Tensor], Tensor]:
        """Return the input of every layer (and the output at the end), and the output."""
        values = [x]
        for layer in self.recipe.chain:
            value = values[-1]
            if isinstance(layer, Linear):
                weight = self._weight(layer.weight)[:count].transpose(1, 2)
                if layer.bias is None:
                    values.append(torch.bmm(value, weight))
                else:
                    bias = self._weight(layer.bias)[:count, None]
                    values.append(torch.baddbmm(bias, value, weight))
            elif isinstance(layer, Activate):
                values.append(_activate(layer, value))
            else:
                values.append(value.flatten(2))
        return values, values[-1]

    def _weight(self, name: str) -> Tensor:
        return self.params[name] if name in self.params else self.frozen[name]

    def _first_trained(self) -> int:
        for at, layer in enumerate(self.recipe.chain):
            if isinstance(layer, Linear) and {layer.weight, layer.bias} & set(self.recipe.trained):
                return at
        return len(self.recipe.chain)

    def _land(self, layer: Linear, gradient: Tensor, value: Tensor, count: int) -> None:
        if layer.weight in self.params:
            self._move(layer.weight, count, gradient.transpose(1, 2), value)
        if layer.bias is not None and layer.bias in self.params:
            self._move(layer.bias, count, gradient.sum(1), None)

    def _move(self, name: str, count: int, left: Tensor, right: Tensor | None) -> None:
        """Apply w <- after(w - lr (g + e)) where g = left @ right (or left itself)."""
        recipe, w = self.recipe, self.params[name][:count]
        aux = tuple(part[name][:count] for part in self.aux)
        if recipe.momentum:
            velocity = self.velocity[name][:count].mul_(recipe.momentum)
            trial = w.clone()
            recipe.rule.before_(trial, aux, recipe.lr)
            velocity.add_(w - trial, alpha=1 / recipe.lr)
            if recipe.decay:
                velocity.add_(w, alpha=recipe.decay)
            _add_gradient(velocity, left, right, 1.0)
            w.sub_(velocity, alpha=recipe.lr)
        else:
            old = w.clone() if recipe.decay and type(recipe.rule) is not Rule else w
            recipe.rule.before_(w, aux, recipe.lr)
            if recipe.decay:
                w.sub_(old, alpha=recipe.lr * recipe.decay)
            _add_gradient(w, left, right, -recipe.lr)
        recipe.rule.after_(w, aux, recipe.lr)


def _add_gradient(target: Tensor, left: Tensor, right: Tensor | None, factor: float) -> None:
    if right is None:
        target.add_(left, alpha=factor)
    else:
        target.baddbmm_(left, right, alpha=factor)


def _inner(tensor: Tensor, dim: int | None) -> tuple[int, ...]:
    return tuple(tensor.shape if dim is None else tensor.movedim(dim, 0).shape[1:])


def _activate(layer: Activate, value: Tensor) -> Tensor:
    if layer.function == "relu":
        return value.relu()
    return value.tanh() if layer.function == "tanh" else value.sigmoid()


def _through(layer: Activate, gradient: Tensor, output: Tensor) -> Tensor:
    """Multiply by the derivative of the activation, written in terms of its output."""
    if layer.function == "relu":
        return gradient.mul_(output > 0)
    if layer.function == "tanh":
        return gradient.mul_(1 - output.square())
    return gradient.mul_(output * (1 - output))
