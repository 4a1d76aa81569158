"""Algorithms that run gradient matching pursuit on the clients and prune the mean."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from parsifl.algorithms._bases.averaging import Mean, Weighted
from parsifl.algorithms._bases.sparsity import SparsitySettings
from parsifl.core.algorithm import AdditiveAlgorithm, ClientInfo, ClientUpdate
from parsifl.core.batching import BatchSpec, ClientRoundData, DataRequest
from parsifl.core.config import Count, Size, is_number
from parsifl.core.errors import CapabilityError, ConfigError
from parsifl.core.keys import Key
from parsifl.core.problem import Model, Params, Restricted, SupportSolvable
from parsifl.linear.sparsity.constraint import Scope
from parsifl.solvers.matching_pursuit import Prune, Pursuit


@dataclass(frozen=True)
class MatchingPursuit(
    SparsitySettings,
    Weighted,
    AdditiveAlgorithm[SupportSolvable, Params, None, Params, Params, Mean],
):
    """Abstract base of gradient matching pursuit: select, merge, minimize, prune.

    Parameters
    ----------
    local_steps
        Local iterations K.
    batch_size
        Rows of the mini-batch whose gradient selects the support, drawn again in every iteration;
        None: all.
    scope
        "row" selects `tau` coefficients per class, "all" selects them over all classes.
    prune
        How approx_tau(b) is found in a dictionary: the "largest" coefficients, or orthogonal
        matching pursuit ("omp"), which can be far better for correlated atoms. It works row by row;
        softmax therefore needs scope="row". Without a dictionary, "cost" lets clients remove one by
        one the coefficients whose removal costs least, b_j^2 / [H^-1]_jj, which is better for
        correlated columns. Not in the paper.
    refit_from
        The round (from 0) from which the support is fixed and fitted to the rows of all clients:
        they send gradient and curvature on the support, and the server takes a Newton step. One
        such round gives pooled least squares, which is several times closer to the truth than the
        pruned mean. Other losses take several rounds: they also send the curvature of a quadratic
        bound of the loss. The server replaces a Newton step that could increase the loss by the
        minimizer of the bound, so that no refit increases the loss of the clients that take part
        (the projection onto a ball, which follows, may). "poisson" has no such bound and is
        rejected. Not in the paper. None: never.

    The record of a round contains `underdetermined`, the weighted share of clients with fewer than
    3 tau rows: their minimizer is not unique, and the one nearest to the iterate is used (with a
    dictionary in coefficients of unit atoms).
    """

    requires: ClassVar[tuple[type[Any], ...]] = (SupportSolvable,)

    local_steps: Size = 3
    batch_size: Count | None = 40
    scope: Scope = "row"
    prune: Prune = "largest"
    refit_from: Size | None = None

    def check(self) -> None:
        """Reject options that would have no effect."""
        super().check()
        if self.spare_vectors:
            raise ConfigError(
                "matching pursuit does not support spare_vectors: exempt coefficients with "
                "GLM(keep=...)"
            )
        if self.scope == "layer":
            raise ConfigError(
                "matching pursuit has one tensor of coefficients, so scope='layer' equals "
                "scope='all': use 'all' or 'row'"
            )
        if self.groups is not None and self.prune == "omp":
            raise ConfigError("groups need prune='largest': 'omp' selects single atoms")
        if self.groups is not None and self.refit_from is not None:
            raise ConfigError("refit_from does not support groups: remove one of them")

    @abstractmethod
    def solve(self, part: Restricted, key: Tensor) -> Tensor:
        """Minimize full local losses over supports, exactly or not, for a block of clients."""

    def bound(self, problem: SupportSolvable, coefficients: Tensor, lead: int = 0) -> Tensor:
        """Project the model onto a ball, if the algorithm has one."""
        return coefficients

    def pursuit(self) -> Pursuit:
        """Return the solver of the clients, whose pruning step the server uses too."""
        return Pursuit(self.sparsity, self.prune, self.solve, self.bound)

    def profile_fields(self) -> tuple[str, ...]:
        """Return the number of iterations of a device, and the total weight of its rows."""
        return ("local_steps", "importance")

    def weight(self, client: ClientInfo) -> float:
        """Include the weights of a client's rows: its minimizer does not depend on their scale."""
        importance = client.profile.get("importance", 1.0)
        if not is_number(importance) or not 0 <= importance < math.inf:
            raise ConfigError(
                f"the importance of client {client.id} is {importance!r}; it must be a finite "
                "number of at least 0"
            )
        return super().weight(client) * float(importance)

    def init_server(
        self, problem: SupportSolvable, clients: Sequence[ClientInfo], key: Key
    ) -> Params:
        """Return the problem's initial parameters, pruned to tau atoms and within the ball."""
        weights = [self.weight(client) for client in clients if client.takes_part]
        if weights and not any(weights):
            raise ConfigError("every client has weight 0: check the importance of the profiles")
        if self.refit_from is not None and not problem.has_majorizer:
            raise CapabilityError(
                "refit_from needs a loss of bounded curvature: remove it, or use FedBestSubset"
            )
        if self.prune == "cost" and (problem.gram is not None or self.groups is not None):
            raise ConfigError(
                "prune='cost' removes single coefficients of a problem without a dictionary: use "
                "prune='largest'"
            )
        start = problem.init(key)
        rows = start[problem.name].ndim > 1
        if self.prune == "cost" and self.scope == "all" and rows:
            raise ConfigError(
                "prune='cost' works row by row (softmax: per class): use scope='row' or "
                "prune='largest'"
            )
        if self._pursues_all(problem, start[problem.name]):
            raise ConfigError(
                "prune='omp' selects atoms row by row (softmax: per class), so scope='all' would "
                "have no effect: use scope='row' or prune='largest'"
            )
        if not bool(start[problem.name].any()):
            return start
        sparse = self.pursuit().pruned(problem, start[problem.name])
        return {**start, problem.name: self.bound(problem, sparse)}

    def _pursues_all(self, problem: SupportSolvable, coefficients: Tensor) -> bool:
        within = self.prune == "omp" and problem.gram is not None
        return within and self.scope == "all" and coefficients.ndim > 1

    def broadcast(
        self, problem: SupportSolvable, server: Params, client: ClientInfo, key: Key
    ) -> Params:
        """Send the sparse model."""
        return server

    def model(self, problem: SupportSolvable, server: Params) -> Model:
        """Return the sparse model."""
        return Model(problem, server)

    def batches(self, client: ClientInfo, round: int) -> DataRequest:
        """Request mini-batches for the selection, and all rows for the minimization."""
        everything = BatchSpec(None, steps=1)
        if self._refits(round):
            return DataRequest({"all": everything})
        steps = client.profile.get("local_steps", self.local_steps)
        select = BatchSpec(self.batch_size, steps=steps, last_batch="redraw")
        return DataRequest({"select": select, "all": everything})

    def _refits(self, round: int) -> bool:
        return self.refit_from is not None and round >= self.refit_from

    def client_update(
        self, problem: SupportSolvable, received: Params, state: None, data: ClientRoundData
    ) -> ClientUpdate[None, Params]:
        """Run K iterations from the received model, or compute the sums for a refit."""
        current = received[problem.name]
        if self._refits(data.round):
            return ClientUpdate(None, self.pursuit().curvature(problem, current, data["all"]))
        select = data["select"]
        coefficients, short = self.pursuit().run(problem, current, select, data["all"], data.key)
        metrics = {} if short is None else {"underdetermined": short}
        return ClientUpdate(None, {problem.name: coefficients}, metrics)

    def personalize(
        self, problem: SupportSolvable, received: Params, state: None, data: ClientRoundData
    ) -> Model:
        """Evaluate every client on the global model."""
        return Model(problem, received)

    def contribute(self, problem: SupportSolvable, upload: Params, weight: float) -> Mean:
        """Weight the uploaded coefficients."""
        return Mean.of(upload, weight)

    def aggregate(self, problem: SupportSolvable, server: Params, total: Mean, key: Key) -> Params:
        """Prune the mean to tau atoms, or refit on the support."""
        if not any(bool(weight) for weight in total.weight.values()):
            return server  # only clients of weight 0 took part
        if self._refits(key.round):
            coefficients = self.pursuit().refitted(problem, server[problem.name], total.value())
        else:
            coefficients = self.pursuit().pruned(problem, total.value()[problem.name])
        return {problem.name: self.bound(problem, coefficients)}
