"""Gradient matching pursuit for a block of clients: select, merge, minimize, prune."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, final

import torch
from torch import Tensor
from torch.nn import functional

from parsifl.core._functorch import eager
from parsifl.core.batching import Batches
from parsifl.core.problem import Restricted, Selection, SupportSolvable
from parsifl.linear.sparsity import dictionary
from parsifl.linear.sparsity.constraint import Sparsity
from parsifl.linear.sparsity.coordinates import largest_now, nonzero_now, places
from parsifl.solvers import restricted
from parsifl.solvers.least_squares import solve_symmetric
from parsifl.solvers.restricted import predictor

Prune = Literal["largest", "omp", "cost"]
_SINGULAR = 1e-8
_LOOSE = 1e4  # a pivot from which on a column almost depends on the others


@final
@dataclass(frozen=True)
class Pursuit:
    """The parts of an iteration.

    Parameters
    ----------
    sparsity, prune
        How many atoms are kept, and how they are chosen in a dictionary.
    solve
        Minimizes full local losses over supports for a block of clients; receives a key.
    bound
        Projects the model onto a ball; receives the number of leading client axes.
    """

    sparsity: Sparsity
    prune: Prune
    solve: Callable[[Restricted, Tensor], Tensor]
    bound: Callable[[SupportSolvable, Tensor, int], Tensor]

    def run(
        self,
        problem: SupportSolvable,
        current: Tensor,
        batches: Batches,
        full: Batches,
        key: Tensor,
    ) -> tuple[Tensor, Tensor | None]:
        """Run one iteration per batch, for one client or under vmap for many.

        Parameters
        ----------
        batches
            The mini-batches whose gradients select supports.
        full
            One batch with all rows of the client, over which losses are minimized.

        Returns
        -------
        tuple of Tensor
            The coefficients, and whether the client has fewer rows than unknowns (None on the
            meta device, where only operations are counted).
        """
        if current.is_meta:
            return self._template(current, batches, full), None

        def work(*tensors: Tensor) -> tuple[Tensor, ...]:
            return self._pursue(problem, batches.x, batches.y, *tensors)

        drawn = (batches.index, batches.weight, batches.active, full.index, full.weight, key)
        coefficients, short = eager(work, current, *drawn)
        return coefficients, short

    def _template(self, current: Tensor, batches: Batches, full: Batches) -> Tensor:
        """Run only the products whose operations are counted; return coefficients without data."""
        width, merged = current.shape[-1], 3 * self.sparsity.count(current.shape[-1])
        rows = full.index.shape[1]
        for _ in range(len(batches)):
            selected = current.new_empty(batches.index.shape[1], width)
            columns = current.new_empty(rows, min(merged, width))
            _ = selected.mT @ selected.new_empty(len(selected), current[..., 0].numel())
            _ = columns.mT @ columns
        return torch.empty_like(current)

    def _pursue(
        self, problem: SupportSolvable, x: Any, y: Tensor, current: Tensor, *work: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Iterate for a block of clients, from the support of the received coefficients.

        Also return which clients have fewer rows than 3 tau unknowns.
        """
        index, weight, active, rows, row_weight, key = work
        everything = Selection(x, y, rows[:, 0], row_weight[:, 0])
        needed = min(3 * self.sparsity.count(current.shape[-1]), current.shape[-1])
        short = (everything.count < needed).to(current.dtype)
        if not index.shape[1]:
            return current.clone(), short
        where = _places_of(index, everything.rows)
        u = problem.predictions(current, everything)
        for step, length in enumerate(_lengths(weight)):
            drawn, share, at = (part[:, step, :length] for part in (index, weight, where))
            batch = Selection(x, y, drawn, share)
            gradients = problem.gradients(current, batch, _picked(u, at))
            seed = key if step == 0 else key ^ step
            moved = self._iterate(problem, current, gradients, u, everything, seed)
            going = active[:, step]
            if bool(going.all()):
                current, u = moved
            else:
                current, u = _where(going, moved[0], current), _where(going, moved[1], u)
        return current, short

    def _iterate(
        self,
        problem: SupportSolvable,
        current: Tensor,
        gradients: Tensor,
        u: Tensor,
        everything: Selection,
        key: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Return the next iterate, and its predictions for all rows."""
        always = problem.unpenalized.get(problem.name, ())
        if problem.gram is not None:  # correlations: the norms of atoms must not matter
            gradients = gradients / dictionary.divisors(problem.gram)
        merged = self.sparsity.mask(gradients, always, lead=1, multiple=2, select=largest_now)
        # the same width for every client, so that no client depends on the others of its block
        width, by_row = current.shape[-1], self._by_row(current)
        room = min(self.sparsity.count(width, 3) + len(always), width) if by_row else 0
        index, valid = places(merged.logical_or_(nonzero_now(current)), room)
        part = problem.restrict(current, everything, index, valid, u)
        solution = _coefficients(part, self.solve(part, key)) * valid
        by_cost = self.prune == "cost"
        short = problem.gram is None and by_row and (by_cost or not always)
        if short:  # only merged coefficients can be kept: select among them
            count = self.sparsity.count(width)
            if by_cost:
                exempt = torch.isin(index, torch.tensor(always, device=index.device))
                solution = without_the_cheapest(part, solution, valid, exempt, count)
            else:
                solution = torch.where(largest_now(solution, count), solution, 0.0)
        # unused positions refer to coefficient 0, whose value must be kept: add, do not set
        full = torch.zeros_like(current).scatter_add_(-1, index, solution)
        moved = self.bound(problem, full if short else self.pruned(problem, full, lead=1), 1)
        if problem.gram is None:  # its support is within the merged one, whose columns are known
            return moved, predictor(part, moved.gather(-1, index) * valid)
        return moved, problem.predictions(moved, everything)

    def curvature(
        self, problem: SupportSolvable, current: Tensor, full: Batches
    ) -> dict[str, Tensor]:
        """Return gradient and Hessian of a client's loss on the support of the coefficients.

        Losses that are not quadratic also have a majorizer, the Hessian of a quadratic that is
        nowhere below them. The upper triangle of [k, k + 1] then holds the Hessian, the lower one
        the majorizer.
        """
        size = self._room(problem, current) * current[..., 0].numel()
        if current.is_meta:
            columns = current.new_empty(full.index.shape[1], size)
            inner = columns.mT @ columns
            more = inner if problem.quadratic else _packed(inner, inner)
            return {"gradient": current.new_empty(size), "hessian": more}

        def work(now: Tensor, rows: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
            data = Selection(full.x, full.y, rows[:, 0], weight[:, 0])
            part = problem.restrict(now, data, *self._support(problem, now))  # in unit atoms
            gradient = restricted.gradient(part, part.start).flatten(1)
            hessian = restricted.hessian(part, part.start)
            if not problem.quadratic:
                hessian = _packed(hessian, restricted.majorizer(part, part.start))
            return gradient, hessian

        gradient, hessian = eager(work, current, full.index, full.weight)
        return {"gradient": gradient, "hessian": hessian}

    def refitted(
        self, problem: SupportSolvable, current: Tensor, mean: Mapping[str, Tensor]
    ) -> Tensor:
        """Take a step of the mean loss on the support that cannot increase it.

        That is the Newton step p if the majorizer Q proves it safe, g'p + p'Qp / 2 <= 0, and
        otherwise the minimizer of the quadratic with Hessian Q.
        """
        index, valid = (part[0] for part in self._support(problem, current[None]))
        used = valid.flatten().to(current.dtype)
        gradient = mean["gradient"] * used

        def newton(matrix: Tensor) -> Tensor:
            system = matrix * used[:, None] * used + torch.diag(1 - used)
            return solve_symmetric(system[None], gradient[None])[0]

        if problem.quadratic:
            step = newton(mean["hessian"])
        else:
            hessian, bound = _unpacked(mean["hessian"])
            step = newton(hessian)
            if not bool(step @ bound @ step <= 2 * (gradient @ step)):  # NaN included
                step = newton(bound)
        change = step.reshape(index.shape) * valid
        if problem.gram is not None:
            change = change / dictionary.divisors(problem.gram)[index]
        return current.scatter_add(-1, index, -change)

    def _support(self, problem: SupportSolvable, current: Tensor) -> tuple[Tensor, Tensor]:
        marks = nonzero_now(current)
        marks[..., list(problem.unpenalized.get(problem.name, ()))] = True
        return places(marks, self._room(problem, current))

    def _room(self, problem: SupportSolvable, current: Tensor) -> int:
        width = current.shape[-1]
        always = problem.unpenalized.get(problem.name, ())
        return min(self.sparsity.count(width) + len(always), width)

    def _by_row(self, current: Tensor) -> bool:
        """Return whether every row (client, class) keeps its own `tau` single coefficients."""
        return self.sparsity.groups is None and (self.sparsity.scope == "row" or current.ndim == 2)

    def pruned(self, problem: SupportSolvable, coefficients: Tensor, lead: int = 0) -> Tensor:
        """Return P_Lambda(b) for the tau best atoms Lambda."""
        gram, always = problem.gram, problem.unpenalized.get(problem.name, ())
        if gram is None:
            return torch.where(
                self.sparsity.mask(coefficients, always, lead=lead), coefficients, 0.0
            )
        if self.prune == "omp":
            return dictionary.pursue(gram, coefficients, self.sparsity.count(len(gram)), always)
        chosen = self.sparsity.mask(coefficients * dictionary.lengths(gram), always, lead=lead)
        return dictionary.project(gram, coefficients, chosen)


def _packed(upper: Tensor, lower: Tensor) -> Tensor:
    """Return the halves of two symmetric matrices [.., k, k] as one matrix [.., k, k + 1]."""
    first = functional.pad(upper, (1, 0)).triu(1)
    return first + functional.pad(lower, (0, 1)).tril()


def _unpacked(both: Tensor) -> tuple[Tensor, Tensor]:
    upper, lower = both[:, 1:].triu(), both[:, :-1].tril()
    return upper + upper.triu(1).mT, lower + lower.tril(-1).mT


def _coefficients(part: Restricted, z: Tensor) -> Tensor:
    return z if part.lengths is None else z / part.lengths


def _tiny(like: Tensor) -> float:
    return torch.finfo(like.dtype).tiny


def without_the_cheapest(
    part: Restricted, coefficients: Tensor, valid: Tensor, exempt: Tensor, count: int
) -> Tensor:
    """Remove coefficients one by one until `count` per row are left besides the exempt ones.

    On the quadratic model with Hessian H, setting b_j to zero costs b_j^2 / [H^-1]_jj. The cheapest
    one is removed, and the others are re-optimized. Two columns that are nearly multiples of each
    other both have large coefficients; one of them can be removed at no cost, after which the
    other is expensive. H^-1 is updated, and computed again after a removal that was almost free:
    there the update would leave rounding errors that decide the next ones.
    """
    alive = valid.expand_as(coefficients).flatten(1)
    used = alive.to(coefficients.dtype)
    hessian = restricted.hessian(part, coefficients) * used[:, :, None] * used[:, None]
    level = hessian.diagonal(dim1=1, dim2=2).amax(1).clamp(min=_tiny(coefficients))
    system = hessian / level[:, None, None] + torch.diag_embed(1 - used + _SINGULAR)
    inverse = torch.linalg.inv(system)
    b, free = coefficients.flatten(1) * used, alive & ~exempt.expand_as(coefficients).flatten(1)
    clients, rows = torch.arange(len(b)), coefficients.shape[1] if coefficients.ndim == 3 else 1
    while True:
        left = free.reshape(len(b), rows, -1)
        spare = (left & (left.sum(2, keepdim=True) > count)).flatten(1)
        going = spare.any(1)
        if not bool(going.any()):
            return b.reshape(coefficients.shape)
        pivots = inverse.diagonal(dim1=1, dim2=2).clamp(min=_tiny(b))
        cheapest = torch.where(spare, b.square() / pivots, torch.inf).argmin(1)
        column = inverse[clients, :, cheapest] * going[:, None]
        pivot = pivots[clients, cheapest]
        share = column / pivot[:, None]
        b = b - share * b[clients, cheapest, None]
        inverse = inverse - share[:, :, None] * column[:, None]
        who, what = clients[going], cheapest[going]
        b[who, what], free[who, what] = 0.0, False
        for matrix in (inverse, system):
            matrix[who, what], matrix[who, :, what] = 0.0, 0.0
        system[who, what, what] = 1.0
        loose = going & (pivot > _LOOSE)
        if bool(loose.any()):
            inverse[loose] = torch.linalg.inv(system[loose])


def _places_of(index: Tensor, rows: Tensor) -> Tensor:
    """Return the index of each row number of [clients, steps, b] among those of its client."""
    ordered, order = rows.sort(1)
    return order.gather(1, torch.searchsorted(ordered, index.flatten(1))).reshape(index.shape)


def _lengths(weight: Tensor) -> list[int]:
    """Return how many entries of [clients, steps, b] precede the padding in each step."""
    numbers = torch.arange(1, weight.shape[2] + 1)
    lengths: list[int] = (numbers * (weight != 0).any(0)).amax(1).clamp(min=1).tolist()
    return lengths


def _picked(u: Tensor, where: Tensor) -> Tensor:
    """Return the predictions [clients, b(, classes)] of some rows."""
    return u.gather(1, where if u.ndim == 2 else where[..., None].expand(-1, -1, u.shape[-1]))


def _where(going: Tensor, moved: Tensor, stayed: Tensor) -> Tensor:
    return torch.where(going.reshape(-1, *(1,) * (moved.ndim - 1)), moved, stayed)
