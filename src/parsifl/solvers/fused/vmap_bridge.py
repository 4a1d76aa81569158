"""Leave vmap for the fused solver, which trains a whole block of clients, and re-enter it.

Algorithms are written for one client and run under vmap. Differentiating through fused steps
raises an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor

from parsifl.core._functorch import Leaf, aligned, inside_vmap, leave_vmap
from parsifl.core.batching import Batch, Batches
from parsifl.core.problem import Params, Problem, layer_chain
from parsifl.solvers.fused.maml import PARTS, MamlBlock, MamlSteps
from parsifl.solvers.fused.network import Network
from parsifl.solvers.fused.schedule import Schedule, Step, row_scale
from parsifl.solvers.fused.steps import Block, GradientCollector, Steps

_ENABLED: ContextVar[bool] = ContextVar("parsifl_fused", default=False)


@contextmanager
def fused_steps() -> Iterator[None]:
    """Enable the fused path where it is supported; use it only around vmap over clients."""
    token = _ENABLED.set(True)
    try:
        yield
    finally:
        _ENABLED.reset(token)


def network_for(problem: Problem, batch: Batch | Batches) -> Network | None:
    """Return the layer chain if fused steps are enabled and the problem declares one."""
    if not _ENABLED.get() or not inside_vmap():
        return None
    chain = layer_chain(problem)
    if chain is None or batch.x.device.type == "meta":
        return None
    if isinstance(batch, Batches) and batch.augment:
        return None
    if chain.loss == "cross-entropy" and (batch.y.is_floating_point() or batch.y.ndim > 1):
        return None
    return Network(chain.layers, chain.loss)


def run(
    steps: Steps, params: Params, aux: tuple[Params, ...], frozen: Params, batches: Batches
) -> tuple[Params, tuple[Params, ...]]:
    """Take all steps; returns the parameters and the auxiliary trees."""
    tensors = [params[name] for name in steps.trained]
    tensors += [frozen[name] for name in steps.frozen]
    tensors += [part[name] for part in aux for name in steps.trained]

    def walk(count: int, leaves: list[Leaf]) -> Sequence[Tensor]:
        schedule = Schedule(_data(count, leaves), keyed=steps.network.keyed)
        return Block(steps, schedule, leaves[_DATA:]).walk()

    outputs = _for_block(walk, [*_schedule(batches), *tensors])
    size = len(steps.trained)
    groups = [
        dict(zip(steps.trained, outputs[at : at + size], strict=True))
        for at in range(0, len(outputs), size)
    ]
    return groups[0], tuple(groups[1:]) if steps.rule.moves_aux else aux


def run_maml(steps: MamlSteps, params: Params, batches: Batches) -> Params:
    """Take all MAML steps."""

    def walk(count: int, leaves: list[Leaf]) -> Sequence[Tensor]:
        schedule = Schedule(_data(count, leaves), keyed=steps.network.keyed, parts=PARTS)
        return MamlBlock(steps, schedule, leaves[_DATA:]).walk()

    tensors = [params[name] for name in steps.trained]
    outputs = _for_block(walk, [*_schedule(batches), *tensors])
    return dict(zip(steps.trained, outputs, strict=True))


def gradient(network: Network, params: Params, frozen: Params, batch: Batch) -> Params:
    """Return the gradient of the loss in `params`."""

    def find(count: int, leaves: list[Leaf]) -> Sequence[Tensor]:
        x, y, weight, key, *weights = (aligned(leaf, count) for leaf in leaves)
        values = dict(zip([*params, *frozen], weights, strict=True))
        step = Step(count, x, y, row_scale(weight), key)
        gradients = GradientCollector(values, frozenset(params)).at(network, step)
        return [gradients[name] for name in params]

    data = (batch.x, batch.y, batch.weight, batch.key)
    outputs = _for_block(find, [*data, *params.values(), *frozen.values()])
    return dict(zip(params, outputs, strict=True))


def _for_block(
    work: Callable[[int, list[Leaf]], Sequence[Tensor]], tensors: Sequence[Tensor]
) -> list[Tensor]:
    """Call `work` outside vmap with the tensors of all clients and their number."""
    if any(tensor.requires_grad for tensor in tensors):
        raise RuntimeError("fused steps cannot be differentiated: remove fused_steps()")
    return leave_vmap(work, tensors)


def _schedule(batches: Batches) -> tuple[Tensor, ...]:
    return (batches.x, batches.y, batches.index, batches.weight, batches.active, batches.key)


_DATA = 6  # tensors of a schedule


def _data(count: int, leaves: list[Leaf]) -> tuple[Tensor, ...]:
    """Return the pooled data, and the schedules of all clients."""
    (x, x_axis), (y, y_axis), *scheduled = leaves[:_DATA]
    if x_axis is not None or y_axis is not None:
        raise RuntimeError("pooled data must be shared by the clients of a block")
    return (x, y, *(aligned(leaf, count) for leaf in scheduled))
