"""Mini-batch SGD with a rule, for one client; under vmap for many at once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from parsifl.core._functorch import grad_once, inside_vmap, is_transformed
from parsifl.core.batching import Batch, Batches
from parsifl.core.problem import HasBuffers, Params, Problem, buffer_names, split_buffers
from parsifl.solvers import fused
from parsifl.solvers.update_rules import LinearTerm, Rule, SgdConfig

__all__ = ["SgdConfig", "gradient", "owned", "sgd", "sgd_pair"]

PLAIN = Rule()


def sgd(
    problem: Problem,
    params: Params,
    batches: Batches,
    config: SgdConfig,
    *,
    rule: Rule = PLAIN,
    aux: tuple[Params, ...] = (),
    frozen: Params | None = None,
) -> Params:
    """Return the parameters after one SGD step for each batch.

    Gradients update the trainable leaves. The forward pass updates the buffers, if there are any.

    Parameters
    ----------
    params
        The parameters that are trained; they are not changed.
    rule, aux
        The term that the algorithm adds to each step, with auxiliary trees (keyed like `params`).
    frozen
        Parameters that the loss reads but that are not trained: they get no weight gradient.
    """
    return sgd_pair(problem, params, batches, config, rule=rule, aux=aux, frozen=frozen)[0]


def sgd_pair(
    problem: Problem,
    params: Params,
    batches: Batches,
    config: SgdConfig,
    *,
    rule: Rule = PLAIN,
    aux: tuple[Params, ...] = (),
    frozen: Params | None = None,
) -> tuple[Params, tuple[Params, ...]]:
    """Run `sgd` and also return the auxiliary trees, which a rule may change."""
    if len(batches) == 0:
        return dict(params), aux
    network, fixed = fused.network_for(problem, batches), frozen or {}
    if network is not None:
        steps = fused.Steps(network, config, rule, tuple(params), tuple(fixed))
        return fused.run(steps, params, aux, fixed, batches)
    own_aux = tuple(owned(part, batches) for part in aux) if rule.moves_aux else aux
    trained, buffers = split_buffers(problem, owned(params, batches))
    walk = _Walk(rule, config, trained, own_aux)
    for batch in batches:
        if not buffers:
            walk.step(gradient(problem, walk.params, batch, fixed), batch, ragged=batches.ragged)
            continue
        gradients, moved = gradient_and_buffers(problem, walk.params, batch, {**fixed, **buffers})
        walk.step(gradients, batch, ragged=batches.ragged)
        for name, old in buffers.items():
            buffers[name] = torch.where(batch.active, moved[name], old)
    return {name: (walk.params | buffers)[name] for name in params}, walk.aux


def gradient(
    problem: Problem, params: Params, batch: Batch, frozen: Params | None = None
) -> Params:
    """Return the gradient of the loss, under vmap (fused if possible) or outside.

    The gradient of a buffer is zero.
    """
    fixed = frozen or {}
    network = fused.network_for(problem, batch)
    if network is not None:
        return fused.gradient(network, params, fixed, batch)
    trained, buffers = split_buffers(problem, params)
    gradients, _ = gradient_and_buffers(problem, trained, batch, {**fixed, **buffers})
    if not buffers:
        return gradients
    return {n: gradients[n] if n in gradients else torch.zeros_like(v) for n, v in params.items()}


def gradient_and_buffers(
    problem: Problem, params: Params, batch: Batch, fixed: Params
) -> tuple[Params, Params]:
    """Return the gradient in `params`, and the buffers of the problem after the forward pass."""

    def loss(trained: Params) -> tuple[Tensor, Params]:
        if not buffer_names(problem):
            return problem.loss({**fixed, **trained}, batch), {}
        return cast(HasBuffers, problem).loss_and_buffers({**fixed, **trained}, batch)

    if inside_vmap():
        return grad_once(loss, params)
    if is_transformed():
        return torch.func.grad(loss, has_aux=True)(params)  # type: ignore[no-any-return]  # torch
    # outside vmap, plain autograd saves a third of the time of small models, and channels last
    # saves a sixth of the time of convolutions
    if isinstance(batch.x, Tensor) and batch.x.ndim == 4 and _may_put_channels_last(params, fixed):
        batch = replace(batch, x=batch.x.contiguous(memory_format=torch.channels_last))
    leaves = {name: value.detach().requires_grad_() for name, value in params.items()}
    with torch.enable_grad():
        value, buffers = loss(leaves)
        gradients = torch.autograd.grad(value, list(leaves.values()), allow_unused=True)
    pairs = zip(leaves.items(), gradients, strict=True)
    return {n: torch.zeros_like(v) if s is None else s for (n, v), s in pairs}, buffers


def _may_put_channels_last(*trees: Params) -> bool:
    # oneDNN (up to 3.12 at least) writes past its memory in the gradient of a 1 x 1 convolution
    # with a stride, channels last and fewer than 16 of them (uxlfoundation/oneDNN#6035). The
    # stride is unknown here, so convolutions without one lose the layout as well.
    weights = (value for params in trees for value in params.values() if value.ndim == 4)
    return not any(weight.shape[1] < 16 and weight.shape[2:].numel() == 1 for weight in weights)


def owned(params: Params, batches: Batches) -> Params:
    """Return a copy that may be changed in place; needs at least one batch."""
    # Adding a zero that depends on the batch gives each client its own copy under vmap, where a
    # leaf shared by all clients could not be updated in place.
    zero = batches.weight[0, 0] * 0
    return {name: value + zero.to(value.dtype) for name, value in params.items()}


class _Walk:
    """The state of one SGD run: parameters, auxiliary trees and momentum."""

    def __init__(
        self, rule: Rule, config: SgdConfig, params: Params, aux: tuple[Params, ...]
    ) -> None:
        self.rule, self.config, self.params, self.aux = rule, config, params, aux
        self.velocity = (
            {name: torch.zeros_like(value) for name, value in params.items()}
            if config.momentum
            else {}
        )
        self._rules = {name: rule.of(name) for name in params}
        self._adds = rule.line() != LinearTerm()
        self._follows = type(rule).after_ is not Rule.after_

    def step(self, gradient: Params, batch: Batch, *, ragged: bool) -> None:
        """Take one step in place; a client without remaining steps keeps its values."""
        before = self._snapshot() if ragged else None
        for name, w in self.params.items():
            aux = tuple(part[name][None] for part in self.aux)
            self._move(name, w, gradient[name], aux)
        if before is not None:
            self._keep_inactive(before, batch.active)

    def _move(self, name: str, w: Tensor, gradient: Tensor, aux: tuple[Tensor, ...]) -> None:
        lr, momentum, decay = self.config.lr, self.config.momentum, self.config.weight_decay
        rule = self._rules[name]
        if decay:
            gradient = gradient + decay * w
        if momentum:
            # The rule's term belongs in the velocity: obtain it from a trial application.
            trial = w.clone()
            rule.before_(trial[None], aux, lr)
            velocity = self.velocity[name]
            velocity.mul_(momentum).add_(gradient).add_((w - trial) / lr)
            if rule.takes_step:
                w.zero_()
            w.sub_(velocity, alpha=lr)
        else:
            if rule.takes_step:
                w.zero_()
            if self._adds:
                rule.before_(w[None], aux, lr)
            w.sub_(gradient, alpha=lr)
        if self._follows:
            rule.after_(w[None], aux, lr)

    def _trees(self) -> list[Params]:
        moving = self.aux if self.rule.moves_aux else ()
        return [self.params, *moving, self.velocity]

    def _snapshot(self) -> list[Params]:
        return [{name: leaf.clone() for name, leaf in part.items()} for part in self._trees()]

    def _keep_inactive(self, before: list[Params], active: Any) -> None:
        for part, old in zip(self._trees(), before, strict=True):
            for name, leaf in part.items():
                leaf.copy_(torch.where(active, leaf, old[name]))
