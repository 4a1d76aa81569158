"""What FedGradMP and its inexact version share: the loop of matching pursuit on a client."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from parsifl.algorithms._bases.averaging import Averaging, Mean
from parsifl.core._functorch import eager
from parsifl.core.algorithm import ClientInfo, ClientUpdate
from parsifl.core.batching import Batches, BatchSpec, ClientRoundData, DataRequest
from parsifl.core.config import Count, Size
from parsifl.core.keys import Key
from parsifl.core.problem import Params, Restricted, Selection, SupportSolvable
from parsifl.linear.sparsity import dictionary
from parsifl.linear.sparsity.constraint import Scope, Sparsity
from parsifl.linear.sparsity.coordinates import largest_now, nonzero_now, places
from parsifl.solvers.support import predictor


@dataclass(frozen=True)
class Pursuit(Sparsity, Averaging[SupportSolvable, None]):
    """Abstract base of gradient matching pursuit: select, merge, minimise, prune.

    Parameters
    ----------
    steps
        Local iterations K.
    batch
        Rows of the mini-batch whose gradient selects the support; None: all.
    scope
        "row" gives every class its own `tau` coefficients, "all" lets classes compete.
    prune
        How approx_tau(b) is found in a dictionary: the "largest" coefficients, or orthogonal
        matching pursuit ("omp", row by row), which can be far better where atoms are alike.

    The record of a round tells as `underdetermined` which share of the clients (by weight) had
    fewer rows than 3 tau: their minimiser is not unique, and the nearest to the iterate is taken.
    """

    requires: ClassVar[tuple[type[Any], ...]] = (SupportSolvable,)

    local_steps: Size = 3
    batch_size: Count | None = 40
    scope: Scope = "row"
    prune: Literal["largest", "omp"] = "largest"

    def weight(self, client: ClientInfo) -> float:
        """Count the weights of a client's rows: its minimiser does not feel their scale."""
        return super().weight(client) * float(client.profile.get("importance", 1.0))

    @abstractmethod
    def solve(self, part: Restricted, key: Tensor) -> Tensor:
        """Minimise full local losses over supports, exactly or not, for a block of clients."""

    def bound(self, coefficients: Tensor, lead: int = 0) -> Tensor:
        """Project onto a ball, if the method has one."""
        return coefficients

    def batches(self, client: ClientInfo, round: int) -> DataRequest:
        """Read mini-batches to select by, and all rows to minimise over; none is gathered."""
        draw = BatchSpec(self.batch_size, steps=client.profile.get("local_steps", self.local_steps))
        return DataRequest({"select": draw, "all": BatchSpec(None, steps=1)})

    def client_update(
        self, problem: SupportSolvable, received: Params, state: None, data: ClientRoundData
    ) -> ClientUpdate[None, Params]:
        """Run K iterations from the received model."""
        current = received[problem.name]
        batches, full = data["select"], data["all"]
        if current.is_meta:
            return ClientUpdate(None, {problem.name: self._template(current, batches, full)})
        found, short = eager(
            partial(self._pursue, problem, batches.x, batches.y),
            current,
            batches.index,
            batches.weight,
            batches.active,
            full.index,
            full.weight,
            data.key,
        )
        return ClientUpdate(None, {problem.name: found}, {"underdetermined": short})

    def _template(self, current: Tensor, batches: Batches, full: Batches) -> Tensor:
        """Return an upload without data; the products are those whose operations are counted."""
        width, support = current.shape[-1], 3 * self.count(current.shape[-1])
        rows = full.index.shape[1]
        for _ in range(len(batches)):
            selected = current.new_empty(batches.index.shape[1], width)
            columns = current.new_empty(rows, min(support, width))
            _ = selected.mT @ selected.new_empty(len(selected), current[..., 0].numel())
            _ = columns.mT @ columns
        return torch.empty_like(current)

    def _pursue(
        self,
        problem: SupportSolvable,
        x: Any,
        y: Tensor,
        current: Tensor,
        *work: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Iterate for a block of clients; the support of what was received starts Lambda.

        Also tell who has fewer rows than 3 tau unknowns.
        """
        index, weight, active, rows, row_weight, key = work
        everything = Selection(x, y, rows[:, 0], row_weight[:, 0])
        needed = min(3 * self.count(current.shape[-1]), current.shape[-1])
        short = (everything.count < needed).to(current.dtype)
        if not index.shape[1]:
            return current.clone(), short
        where = _places_of(index, everything.rows)
        u = problem.predictions(current, everything)
        for step, length in enumerate(_lengths(weight)):
            drawn, share, at = (part[:, step, :length] for part in (index, weight, where))
            batch = Selection(x, y, drawn, share)
            slope = problem.gradients(current, batch, _picked(u, at))
            seed = key if step == 0 else key ^ step
            moved = self._iterate(problem, current, slope, u, everything, seed)
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
        slope: Tensor,
        u: Tensor,
        everything: Selection,
        key: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Return the next iterate, and its predictions for all rows."""
        always = problem.unpenalized.get(problem.name, ())
        merged = self.mask(slope, always, lead=1, multiple=2, select=largest_now)
        # as many places for everybody, so that no client depends on the others of its block
        width, by_row = current.shape[-1], self._by_row(current)
        room = min(self.count(width, 3) + len(always), width) if by_row else 0
        index, valid = places(merged.logical_or_(nonzero_now(current)), room)
        part = problem.restrict(current, everything, index, valid, u)
        found = self.solve(part, key) * valid
        short = problem.gram is None and not always and by_row
        if short:  # only merged coefficients can survive: choose among them
            found = torch.where(largest_now(found, self.count(width)), found, 0.0)
        # unused places point at coefficient 0, whose own value must survive: add, do not set
        full = torch.zeros_like(current).scatter_add_(-1, index, found)
        moved = self.bound(full if short else self.pruned(problem, full, lead=1), lead=1)
        if problem.gram is None:  # its support is within the merged one, whose columns are at hand
            return moved, predictor(part, moved.gather(-1, index) * valid)
        return moved, problem.predictions(moved, everything)

    def _by_row(self, current: Tensor) -> bool:
        """Tell whether every row (client, class) keeps its own `tau` single coefficients."""
        return self.groups is None and (self.scope == "row" or current.ndim == 2)

    def pruned(self, problem: SupportSolvable, coefficients: Tensor, lead: int = 0) -> Tensor:
        """Return P_Lambda(b) for the tau best atoms Lambda."""
        gram, always = problem.gram, problem.unpenalized.get(problem.name, ())
        if gram is None:
            return torch.where(self.mask(coefficients, always, lead=lead), coefficients, 0.0)
        if self.prune == "omp":
            return dictionary.pursue(gram, coefficients, self.count(len(gram)), always)
        chosen = self.mask(coefficients * dictionary.lengths(gram), always, lead=lead)
        return dictionary.project(gram, coefficients, chosen)

    def aggregate(self, problem: SupportSolvable, server: Params, total: Mean, key: Key) -> Params:
        """Prune the mean to tau atoms."""
        mean = total.value()[problem.name]
        return {problem.name: self.bound(self.pruned(problem, mean))}


def _places_of(index: Tensor, rows: Tensor) -> Tensor:
    """Return where each row number of [clients, steps, b] is among those of its client."""
    ordered, order = rows.sort(1)
    return order.gather(1, torch.searchsorted(ordered, index.flatten(1))).reshape(index.shape)


def _lengths(weight: Tensor) -> list[int]:
    """Return how many places of [clients, steps, b] come before the padding, step by step."""
    numbers = torch.arange(1, weight.shape[2] + 1)
    lengths: list[int] = (numbers * (weight != 0).any(0)).amax(1).clamp(min=1).tolist()
    return lengths


def _picked(u: Tensor, where: Tensor) -> Tensor:
    """Return the predictions [clients, b(, classes)] of some rows."""
    return u.gather(1, where if u.ndim == 2 else where[..., None].expand(-1, -1, u.shape[-1]))


def _where(going: Tensor, moved: Tensor, kept: Tensor) -> Tensor:
    return torch.where(going.reshape(-1, *(1,) * (moved.ndim - 1)), moved, kept)
