"""What FedGradMP and its inexact version share: the loop of matching pursuit on a client."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from parsifl.algorithm import ClientInfo, Local
from parsifl.algorithms.mean import Mean, WeightedMean
from parsifl.atoms import dictionary
from parsifl.atoms.coordinates import positions
from parsifl.atoms.sparsity import Scope, Sparsity
from parsifl.config import Count, Size
from parsifl.keys import Key
from parsifl.problem import Params, Restricted, Selection, SupportSolvable
from parsifl.work import Batches, Draw, Shard, Work


@dataclass(frozen=True)
class Pursuit(Sparsity, WeightedMean[SupportSolvable]):
    """Abstract base of gradient matching pursuit: select, merge, minimise, prune.

    Parameters
    ----------
    steps
        Local iterations K.
    batch
        Rows of the mini-batch whose gradient selects the support; None: all.
    scope
        "row" gives every class its own `tau` coefficients, "all" lets classes compete.
    """

    requires: ClassVar[tuple[type, ...]] = (SupportSolvable,)

    steps: Size = 3
    batch: Count | None = 40
    scope: Scope = "row"

    @abstractmethod
    def solve(self, part: Restricted, key: Tensor, step: int) -> Tensor:
        """Minimise the full local loss over a support, exactly or not."""

    def bound(self, coefficients: Tensor) -> Tensor:
        """Project onto a ball, if the method has one."""
        return coefficients

    def work(self, info: ClientInfo, round: int) -> Work:
        """Read mini-batches to select by, and all rows (not gathered) to minimise over."""
        every = Draw(None, steps=1)
        return Work({"select": Draw(self.batch, steps=self.steps), "all": every})

    def local(
        self, problem: SupportSolvable, down: Params, client: None, shard: Shard
    ) -> Local[None, Params]:
        """Run K iterations from the received model; its support starts the merged one."""
        batches, params = shard["select"], dict(down)
        for step in range(len(batches)):
            moved = self._iterate(problem, params, batches, step, shard)
            active = batches.active[step]
            params = {
                name: torch.where(active, moved[name], value) if batches.ragged else moved[name]
                for name, value in params.items()
            }
        return Local(None, params)

    def _iterate(
        self,
        problem: SupportSolvable,
        params: Params,
        batches: Batches,
        step: int,
        shard: Shard,
    ) -> Params:
        name, current = problem.name, params[problem.name]
        slope = problem.gradient(params, Selection.of(batches, step))
        selected = self.masks(problem, slope, 2)[name]
        merged = selected | (current != 0)
        places = self.places(problem, name, tuple(current.shape), 3)
        index, valid = positions(merged, places)
        rows = Selection.of(shard["all"], 0)
        part = problem.restrict(params, rows, index, valid)
        found = self.solve(part, shard.key, step)
        full = torch.zeros_like(current).scatter(-1, index, found * valid)
        return {name: self.bound(self.pruned(problem, full))}

    def pruned(self, problem: SupportSolvable, coefficients: Tensor) -> Tensor:
        """Return P_Lambda(b) for the tau best atoms Lambda."""
        name, gram = problem.name, problem.gram
        if gram is None:
            return self.project(problem, {name: coefficients})[name]
        scored = {name: coefficients * dictionary.lengths(gram)}
        chosen = self.masks(problem, scored)[name]
        return dictionary.project(gram, coefficients, chosen)

    def aggregate(self, problem: SupportSolvable, server: Params, total: Mean, key: Key) -> Params:
        """Prune the mean to tau atoms."""
        mean = total.value()[problem.name]
        return {problem.name: self.bound(self.pruned(problem, mean))}
