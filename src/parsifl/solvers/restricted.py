"""Minimize losses over supports, exactly or by one of several inner solvers.

Solvers take a block of clients at once (leading axis) and start at the current coefficients. A
client stops once its z is within `delta` of its minimizer, estimated by the gradient over the
smallest curvature if the loss is quadratic, and by the length of the step otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from parsifl.core import keys
from parsifl.core.errors import CapabilityError
from parsifl.core.problem import Restricted
from parsifl.solvers.least_squares import least_squares, solve_symmetric

_NEWTON_STEPS = 25
_HALVINGS = 8
_ENTRIES = 1 << 17  # Hessians that are solved at once: more would exceed the cache

Move = Callable[[Tensor, int, Tensor], Tensor]
"""The change of z in a step; that of stopped clients is not used."""


def predictor(part: Restricted, z: Tensor) -> Tensor:
    """Return u: [clients, n], or [clients, n, classes]."""
    if part.places is None:
        return (part.columns @ z[..., None])[..., 0]
    shared = z.new_zeros(*z.shape[:2], part.columns.shape[-1] + 1)
    return (shared.scatter_(-1, part.places, z)[..., :-1] @ part.columns.mT).mT


def loss(part: Restricted, z: Tensor) -> Tensor:
    """Return each client's loss at z."""
    fit = (part.weight * part.loss(predictor(part, z), part.targets)).sum(-1)
    return fit + (part.ridge * z.square()).flatten(1).sum(-1) / 2


def gradient(part: Restricted, z: Tensor) -> Tensor:
    """Return the gradients at z."""
    derivative = part.slope(predictor(part, z), part.targets)
    if part.places is None:
        return (part.columns.mT @ (part.weight * derivative)[..., None])[..., 0] + part.ridge * z
    shared = (part.weight[..., None] * derivative).mT @ part.columns
    return functional.pad(shared, (0, 1)).gather(-1, part.places) + part.ridge * z


def hessian(part: Restricted, z: Tensor) -> Tensor:
    """Return the Hessians at z as matrices, with the coefficients of classes in sequence."""
    return _assembled(part, z, part.curvature(predictor(part, z)))


def majorizer(part: Restricted, z: Tensor) -> Tensor:
    """Return the Hessians of quadratics that touch the losses at z and are nowhere below them."""
    if part.majorizer is None:
        raise CapabilityError("no quadratic bounds this loss: its curvature is unbounded")
    return _assembled(part, z, part.majorizer(predictor(part, z)))


def _assembled(part: Restricted, z: Tensor, curvature: Tensor) -> Tensor:
    if z.ndim == 2:
        inner = part.columns.mT @ (part.columns * (part.weight * curvature)[..., None])
    else:
        weighted, columns = curvature * part.weight[..., None, None], class_columns(part)
        inner = torch.einsum("inab,iank,ibnl->iakbl", weighted, columns, columns)
        inner = inner.reshape(len(z), z[0].numel(), z[0].numel())
    return inner + torch.diag_embed(part.ridge.flatten(1))


def class_columns(part: Restricted) -> Tensor:
    """Return the columns of each class, [clients, classes, n, k], zero in unused positions."""
    positions, padded = part.places, functional.pad(part.columns, (0, 1))
    if positions is None:
        return part.columns[:, None]
    wide = padded[:, None].expand(-1, positions.shape[1], -1, -1)
    return wide.gather(-1, positions[:, :, None].expand(-1, -1, wide.shape[2], -1))


def minimize(part: Restricted) -> Tensor:
    """Return the exact minimizers: by least squares, or by Newton's method to convergence."""
    return least_squares(part) if part.scale is not None else newton(part)


def newton(part: Restricted, delta: float = 0.0, steps: int = _NEWTON_STEPS) -> Tensor:
    """Take Newton steps, each reduced to the best of a few halvings (or to zero).

    If the loss has no minimizer on the support (separable classes without l2), the steps end
    at a finite point of small loss.
    """
    most = max(1, _ENTRIES // max(1, part.start.shape[1:].numel()) ** 2)

    def move(z: Tensor, _: int, going: Tensor) -> Tensor:
        change = torch.zeros_like(z)
        for some in torch.split(going.nonzero()[:, 0], most):  # skip stopped clients
            change[some] = _newton_step(_members(part, some), z[some])
        return change

    return _walk(part.start, move, delta, steps)


def _newton_step(part: Restricted, z: Tensor) -> Tensor:
    fractions = torch.tensor([0.5**power for power in range(_HALVINGS)] + [0.0])
    step = solve_symmetric(hessian(part, z), gradient(part, z).flatten(1)).reshape(z.shape)
    losses = torch.stack([loss(part, z - float(f) * step) for f in fractions])
    return -_spread(_longest_good(fractions.to(z.dtype), losses), z) * step


def _members(part: Restricted, some: Tensor) -> Restricted:
    """Return the losses of some of the clients, by position."""
    if len(some) == len(part.start):
        return part
    return replace(
        part,
        columns=part.columns[some],
        targets=part.targets[some],
        weight=part.weight[some],
        rows=part.rows[some],
        ridge=part.ridge[some],
        start=part.start[some],
        u=None if part.u is None else part.u[some],
        places=None if part.places is None else part.places[some],
    )


def _longest_good(fractions: Tensor, losses: Tensor) -> Tensor:
    """Return for each client the longest step with the smallest loss, up to rounding."""
    finite = losses.nan_to_num(nan=torch.inf)
    least = finite.amin(0)
    good = finite <= least + 1e-13 * (1 + least.abs())
    return torch.where(good, fractions[:, None], 0.0).amax(0)


def gradient_descent(part: Restricted, delta: float = 0.0, steps: int = 50) -> Tensor:
    """Take gradient steps of length 1 / L, where L is the largest curvature on the support.

    If the loss is quadratic, all steps are taken at once.
    """
    if part.scale is not None:
        return _descend_at_once(part, delta, steps)
    rate = _spread(1 / curvatures(part)[0], part.start)
    return _walk(part.start, lambda z, *_: -rate * gradient(part, z), delta, steps)


def _descend_at_once(part: Restricted, delta: float, steps: int) -> Tensor:
    r"""Take k gradient steps on a quadratic loss: z - H^+ (1 - (1 - H / L)^k) g, by eigenvalues.

    The cost does not depend on k. Supports with more columns than rows and no ridge use the Gram
    matrix of the rows.
    """
    largest, least = curvatures(part)
    start_gradient = gradient(part, part.start)
    root = part.columns * (_bound(part) * part.weight).sqrt()[..., None]
    wide = root.shape[-1] > root.shape[-2] and not bool(part.ridge.any())
    gram = root @ root.mT if wide else root.mT @ root + torch.diag_embed(part.ridge)
    values, vectors = torch.linalg.eigh(gram)
    values = values.clamp(min=0)
    if wide:  # H = R'R and g = R'r: the coordinates of g are those of r times singular values
        singular = values.sqrt()
        known = singular > singular[..., -1:] * len(singular[0]) * torch.finfo(root.dtype).eps
        basis = root.mT @ vectors / torch.where(known, singular, torch.inf)[:, None]
    else:
        basis = vectors
    along = (basis.mT @ start_gradient[..., None])[..., 0]
    factor = (1 - values / largest[:, None]).clamp(min=0)
    taken = _steps_taken(factor, along, delta * least, steps)[:, None]
    # the geometric series 1 + factor + factor^2 + ...
    sums = torch.where(factor < 1, (1 - factor**taken) / (1 - factor), taken)
    change: Tensor = (basis @ (sums * along / largest[:, None])[..., None])[..., 0]
    return part.start - change


def _steps_taken(factor: Tensor, along: Tensor, shortest: Tensor, steps: int) -> Tensor:
    """Return how many steps have a gradient longer than `shortest`; gradients never grow."""
    low = torch.zeros(len(factor), dtype=factor.dtype)
    high = torch.full_like(low, steps)
    for _ in range(steps.bit_length()):
        middle = ((low + high) / 2).floor()
        longer = (factor ** middle[:, None] * along).norm(dim=-1) > shortest
        low = torch.where(longer, (middle + 1).minimum(high), low)
        high = torch.where(longer, high, middle)
    return low


def stochastic_gradient(
    part: Restricted, key: Tensor, batch: int, lr: float, steps: int = 50
) -> Tensor:
    """Take SGD steps on rows that are drawn by key, with replacement."""
    squares = _squares(part)

    def move(z: Tensor, step: int, _: Tensor) -> Tensor:
        return -lr * gradient(_sample(part, squares, key, batch, step), z)

    return _walk(part.start, move, 0.0, steps)


def svrg(
    part: Restricted, key: Tensor, batch: int, delta: float = 0.0, steps: int = 50, every: int = 10
) -> Tensor:
    """Take variance-reduced steps of length 1 / (4 L), with a new anchor every `every` steps."""
    pace, squares = 0.25 / row_smoothness(part), _squares(part)
    rate = _spread(pace, part.start)
    least = curvatures(part)[1] if part.scale is not None else 1 / pace
    z, going = part.start, torch.ones(len(part.start), dtype=torch.bool)
    for first in range(0, steps, every):
        full = gradient(part, z)
        going = going & (full.flatten(1).norm(dim=1) > delta * least)
        if not bool(going.any()):
            break
        move = _reduced(part, squares, key, batch, first, z, full, rate)
        moved = _walk(z, move, 0.0, min(every, steps - first))
        z = torch.where(_spread(going, z), moved, z)
    return z


def _reduced(
    part: Restricted,
    squares: Tensor,
    key: Tensor,
    batch: int,
    first: int,
    anchor: Tensor,
    full: Tensor,
    rate: Tensor,
) -> Move:
    def move(z: Tensor, step: int, _: Tensor) -> Tensor:
        some = _sample(part, squares, key, batch, first + step)
        return -rate * (gradient(some, z) - gradient(some, anchor) + full)

    return move


def curvatures(part: Restricted) -> tuple[Tensor, Tensor]:
    """Return each client's largest and least positive curvature (by the smaller Gram matrix).

    Directions without curvature are ignored. The largest value is a bound for any loss, the
    smallest one only for quadratic losses.
    """
    root = class_columns(part) * part.weight.sqrt()[:, None, :, None]
    gram = root.mT @ root if root.shape[-2] > root.shape[-1] else root @ root.mT
    values: Tensor = torch.linalg.eigvalsh(gram)
    values = values.reshape(len(values), -1)
    largest = values.amax(-1)
    rounding = values.shape[-1] * torch.finfo(values.dtype).eps * largest
    least = values.masked_fill(values <= rounding[:, None], torch.inf).amin(-1)
    ridge = part.ridge.flatten(1)
    damped = ridge.masked_fill(ridge <= 0, torch.inf).amin(-1)
    top = _bound(part) * largest + ridge.amax(-1) + _tiny(root)
    return top, torch.minimum(_bound(part) * least, damped).minimum(top)


def row_smoothness(part: Restricted) -> Tensor:
    """Return the largest curvature that a single drawn row of each client can have."""
    squares = _squares(part)
    largest = (squares * (part.weight * part.rows[:, None])).amax(-1)  # as `_sample` weighs a row
    largest = torch.where(_equally_weighted(part)[:, 0], largest, (squares * part.weight).sum(-1))
    return _bound(part) * largest + part.ridge.flatten(1).amax(-1) + _tiny(squares)


def _tiny(like: Tensor) -> float:
    return torch.finfo(like.dtype).tiny  # keeps an empty support from dividing by zero


def _bound(part: Restricted) -> float:
    # the curvature of the logistic and of the softmax loss is at most 1/4 and 1/2
    if part.scale is not None:
        return part.scale
    return 0.25 if part.places is None else 0.5


def _squares(part: Restricted) -> Tensor:
    """Return the largest squared length [clients, n] that each row has in a class."""
    return class_columns(part).square().sum(-1).amax(1)


def _sample(part: Restricted, squares: Tensor, key: Tensor, batch: int, step: int) -> Restricted:
    """Draw rows with replacement; their weighted sum is unbiased.

    Rows are drawn uniformly if all have one weight. Otherwise they are drawn in proportion to
    their weight and squared length, because a heavy row that is seldom drawn forces short steps.
    """
    total = part.rows[:, None]
    draws = torch.stack([keys.uniform(each, (batch,), salt=step) for each in key])
    rows = (draws * total).to(torch.long).minimum(total - 1)
    weight = part.weight.gather(1, rows) * (total / batch)
    equal = _equally_weighted(part)
    if not bool(equal.all()):
        level = squares.clamp(min=_tiny(squares) ** 0.5)  # rows without an entry on the support
        sums = (part.weight * level).cumsum(1)
        heavy = torch.searchsorted(sums, draws.to(sums.dtype) * sums[:, -1:], right=True)
        heavy = heavy.minimum(total - 1)
        rows = torch.where(equal, rows, heavy)
        weight = torch.where(equal, weight, sums[:, -1:] / level.gather(1, heavy) / batch)
    return replace(
        part,
        columns=part.columns[torch.arange(len(rows))[:, None], rows],  # faster than gather
        targets=part.targets.gather(1, rows),
        weight=weight,
        u=None,
    )


def _equally_weighted(part: Restricted) -> Tensor:
    """Return for each client [clients, 1] whether all its rows have one weight."""
    row_numbers = torch.arange(part.weight.shape[1], device=part.weight.device)
    used = row_numbers < part.rows[:, None]
    equal: Tensor = ((part.weight == part.weight[:, :1]) | ~used).all(1, keepdim=True)
    return equal


def _spread(values: Tensor, like: Tensor) -> Tensor:
    return values.reshape(-1, *(1,) * (like.ndim - 1))


def _walk(z: Tensor, move: Move, shortest: float | Tensor, steps: int) -> Tensor:
    """Take steps until no client's step is longer than `shortest`."""
    going = torch.ones(len(z), dtype=torch.bool)
    for step in range(steps):
        change = move(z, step, going)
        going = going & (change.flatten(1).norm(dim=1) > shortest)
        if not bool(going.any()):
            break
        z = z + _spread(going, z) * change
    return z
