"""FedBestSubset: lossless best-subset selection, from sums over clients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Literal, final

import numpy as np
import torch
from torch import Tensor

from parsifl.core.algorithm import AdditiveAlgorithm, ClientInfo, ClientUpdate, Conformance
from parsifl.core.batching import ClientRoundData, DataRequest
from parsifl.core.config import Count, Fraction, Size
from parsifl.core.errors import CapabilityError, ConfigError
from parsifl.core.keys import Key
from parsifl.core.problem import CurvatureSums, Model, Params, Problem, Summable
from parsifl.sites.search import best_subset, secant_search, subset_state
from parsifl.sites.search.subset_state import ALWAYS, NEVER, Phase, Rules, Search, Sums


@dataclass(frozen=True)
class BestSubsetState:
    """The server's state: the fields of `parsifl.sites.search.subset_state.Search` as tensors."""

    coefficients: Tensor
    support: Tensor
    loss: Tensor
    rows: Tensor
    gradient: Tensor
    diagonal: Tensor
    known: Tensor
    curvature: Tensor
    asked: Tensor
    asked_support: Tensor
    candidates: Tensor
    phase: Tensor
    pivot: Tensor
    direction: Tensor
    pivot_loss: Tensor
    decrement: Tensor
    step: Tensor
    tries: Tensor
    failures: Tensor
    refused: Tensor
    scale: Tensor


@dataclass(frozen=True)
class BestSubsetQuestion:
    """Message to a client: the accepted model, the coefficients to evaluate, the candidates."""

    model: Params
    at: Params
    candidates: Tensor


@final
@dataclass(frozen=True)
class FedBestSubset(
    AdditiveAlgorithm[
        Summable, BestSubsetState, None, BestSubsetQuestion, CurvatureSums, CurvatureSums
    ]
):
    r"""Best-subset selection that equals the pooled fit, from sums over rows.

    .. math:: \min_b \sum_i f_i(b) \quad \text{subject to} \quad \|b\|_0 \le \tau

    A client answers, at coefficients b, with its loss, its gradient and the diagonal of its
    Hessian over all columns, and its Hessian on some candidates: the support and the `candidates`
    columns with the largest scores :math:`g_j^2 / h_j`. The server fills the support, exchanges
    columns on the quadratic model (without messages), takes damped Newton steps on the true loss,
    and accepts only steps that lower it. Sent: coefficients and candidates down, sums up. Kept:
    nothing on the client. For a squared loss whose whole Hessian fits into `max_bytes`, one round
    suffices. After convergence further rounds change nothing. Every client must take part in every
    round, because sums over different clients cannot be compared.

    Parameters
    ----------
    tau
        How many coefficients (units, with `units`) may differ from zero, on top of those that the
        problem always keeps; with 0 nothing is selected.
    candidates
        How many columns besides the support are candidates; None: 2 tau + 20, or all columns if
        one round then suffices.
    max_bytes
        The largest upload of a client in a round; the number of candidates is reduced to meet it.
    intercepts
        "shared", or "own": each client has its own intercept, which stays on the client.
    units
        The unit of each coefficient except the intercept, numbered from 0. The columns of a unit
        (the levels of a factor) are selected together. Empty: every column is a unit.
    gradients
        Whether the server learns the Hessian from differences of gradients: clients send the
        diagonal at the start, and the Hessian of the support with all columns when the steps have
        converged, otherwise loss and gradient. For sites with guards.
    noise
        The width of the noise that sites add to their sums, relative to the largest term.
    """

    cites: ClassVar[str] = (
        "Splicing: Zhu et al., A polynomial algorithm for best-subset selection problem, PNAS 2020 "
        "(abess); distributed best subsets: Lan, Lin and Wang, 2024, arXiv:2408.17276; lossless "
        "distributed generalised linear models: Wu et al., Grid Binary LOgistic REgression, 2012; "
        "Cox models: Lu et al., WebDISCO, 2015"
    )
    requires: ClassVar[tuple[type[Any], ...]] = (Summable,)
    conformance: ClassVar[Conformance] = Conformance(settings={"tau": 2})

    tau: Size = 10
    candidates: Count | None = None
    max_bytes: Count = 8_000_000
    intercepts: Literal["shared", "own"] = "shared"
    units: tuple[int, ...] = ()
    gradients: bool = False
    noise: Fraction = 0.0

    def check(self) -> None:
        """Reject units that are not numbered from 0."""
        if self.units and sorted(set(self.units)) != list(range(max(self.units) + 1)):
            raise ConfigError("units must number the units from 0, without gaps")

    # ------------------------------------------------------------------ server
    def init_server(
        self, problem: Summable, clients: Sequence[ClientInfo], key: Key
    ) -> BestSubsetState:
        """Request the sums of the model without selected units."""
        start = problem.init(key)[problem.name]
        if start.ndim != 1:
            raise CapabilityError(
                "FedBestSubset needs one vector of coefficients; softmax has one per class"
            )
        return self.started(problem, start)

    def started(self, problem: Summable, start: Tensor) -> BestSubsetState:
        """Return the state before the first round; an intercept starts at `start`."""
        first = subset_state.begin(self.rules(problem, start), start.to(torch.float64).numpy())
        if self.gradients:
            first = replace(first, candidates=np.zeros(0, np.int64))
        return _as_tensors(first, start.dtype)

    def rules(self, problem: Summable, like: Tensor) -> Rules:
        """Return the settings of the search, from this algorithm and the problem."""
        width, shared = len(like), self.intercepts == "shared"
        inner = width - problem.intercept
        if self.units and len(self.units) != inner:
            raise ConfigError(f"units has {len(self.units)} entries for {inner} columns")
        labels = np.arange(width) if not self.units else np.array([*self.units, -1][:width])
        always = [*problem.unpenalized.get(problem.name, ())]
        labels = labels.copy()
        if self.units:
            labels[np.isin(labels, labels[always][labels[always] >= 0])] = -1
        labels[always] = ALWAYS
        if problem.intercept and not shared:  # profiled by the clients: 0 here
            labels[-1] = NEVER
        free = labels >= 0
        labels[free] = np.unique(labels[free], return_inverse=True)[1]
        count = min(self.tau, max(int(labels.max()) + 1, 0))
        return Rules(
            width=width,
            count=count,
            labels=labels.astype(np.int64),
            ridge=problem.ridge.to(torch.float64).numpy(),
            candidates=self.beside(width, len(always) + count, quadratic=problem.quadratic),
            quadratic=problem.quadratic,
            precision=torch.finfo(like.dtype).eps,
            noise=self.noise,
        )

    def beside(self, width: int, support: int, *, quadratic: bool) -> int:
        """Return how many columns besides the support are candidates.

        >>> FedBestSubset(tau=5).beside(100, 5, quadratic=False)
        30
        """
        most = math.isqrt(max(2 * (self.max_bytes // 8 - 2 - 2 * width), 0)) - 1
        if quadratic and self.candidates is None and most >= width:
            return width
        if not self.tau:
            return 0
        asked = 2 * self.tau + 20 if self.candidates is None else self.candidates
        return max(min(asked, width, most - support), 1)

    def upload_bytes(self, width: int, support: int, *, quadratic: bool) -> int:
        """Return the size of a client's largest upload: 2 + 2 d + c (c + 1) / 2 numbers.

        >>> FedBestSubset(tau=5).upload_bytes(100, 5, quadratic=True)
        42016
        """
        beside = self.beside(width, support, quadratic=quadratic)
        c = min(beside + support, width)
        return 8 * (2 + 2 * width + c * (c + 1) // 2)

    def broadcast(
        self, problem: Summable, server: BestSubsetState, client: ClientInfo, key: Key
    ) -> BestSubsetQuestion:
        """Send the accepted model and the request."""
        name = problem.name
        model, at = {name: server.coefficients}, {name: server.asked}
        return BestSubsetQuestion(model, at, server.candidates)

    def contribute(self, problem: Summable, upload: CurvatureSums, weight: float) -> CurvatureSums:
        """Add the sums without a weight: they already count the client's rows."""
        return upload

    def aggregate(
        self, problem: Summable, server: BestSubsetState, total: CurvatureSums, key: Key
    ) -> BestSubsetState:
        """Take a step of the search."""
        rules = self.rules(problem, server.coefficients)
        advance = secant_search.advance if self.gradients else best_subset.advance
        search = advance(as_search(server), as_sums(total), rules)
        return _as_tensors(search, server.coefficients.dtype)

    def model(self, problem: Summable, server: BestSubsetState) -> Model:
        """Return the accepted model; own intercepts of clients are unknown here and count as 0."""
        return Model(problem, {problem.name: server.coefficients})

    # ------------------------------------------------------------------ client
    def batches(self, client: ClientInfo, round: int) -> DataRequest:
        """Read all rows."""
        return DataRequest(rows=True)

    def personalization_batches(self, client: ClientInfo) -> DataRequest:
        """Read all rows if the intercept is the client's own."""
        return DataRequest(rows=self.intercepts == "own")

    def client_update(
        self, problem: Summable, received: BestSubsetQuestion, state: None, data: ClientRoundData
    ) -> ClientUpdate[None, CurvatureSums]:
        """Answer with sums."""
        own_intercept = self.intercepts == "own"
        rows, columns, at = data.all_rows(), received.candidates, received.at[problem.name]
        if not self.gradients:
            sums = problem.curvature_sums(received.at, rows, columns, own_intercept=own_intercept)
            return ClientUpdate(None, sums)
        every = torch.arange(len(at), device=columns.device)
        asked = every if len(columns) else columns
        sums = problem.curvature_sums(received.at, rows, asked, own_intercept=own_intercept)
        if len(columns):
            sums = replace(sums, curvature=rows_of(sums.curvature, columns))
        elif at[: len(at) - problem.intercept].any():
            sums = replace(sums, diagonal=torch.zeros_like(sums.diagonal))
        return ClientUpdate(None, sums)

    def hessian(self, packed: Tensor, columns: Tensor) -> Tensor:
        """Return the Hessian on the candidates of an upload, from its `curvature`."""
        if self.gradients:
            return packed.reshape(len(columns), -1)[:, columns]
        return rows_of(packed, torch.arange(len(columns))).reshape(len(columns), -1)

    def personalize(
        self, problem: Summable, received: BestSubsetQuestion, state: None, data: ClientRoundData
    ) -> Model:
        """Return the accepted model, with the client's own intercept if it has one."""
        if self.intercepts == "shared":
            return Model(problem, received.model)
        return Model(problem, problem.with_own_intercept(received.model, data.all_rows()))

    def check_capabilities(self, problem: Problem) -> None:
        """Also reject own intercepts for a problem without an intercept."""
        super().check_capabilities(problem)
        if self.intercepts == "own" and not getattr(problem, "intercept", False):
            raise CapabilityError("intercepts='own' needs a problem with an intercept")


def rows_of(packed: Tensor, columns: Tensor) -> Tensor:
    """Return some rows of a symmetric matrix, one after the other, from its upper triangle.

    >>> rows_of(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1])).tolist()
    [2.0, 3.0]
    """
    size = (math.isqrt(8 * len(packed) + 1) - 1) // 2
    full = packed.new_zeros((size, size))
    upper = torch.triu_indices(size, size, device=packed.device).unbind()
    full[upper] = packed
    return (full + full.triu(1).mT)[columns].flatten()


def as_search(state: BestSubsetState) -> Search:
    """Return the search of a server state, in NumPy.

    >>> from parsifl.linear.glm import GLM
    >>> state = FedBestSubset(tau=1).init_server(GLM(2), [], Key(0))
    >>> as_search(state).phase.name
    'LOOK'
    """
    values: dict[str, Any] = {}
    for item in fields(Search):
        tensor = getattr(state, item.name)
        if tensor.is_floating_point():
            tensor = tensor.to(torch.float64)
        values[item.name] = tensor.numpy() if tensor.ndim else tensor.item()
    return Search(**{**values, "phase": Phase(values["phase"])})


def _as_tensors(search: Search, dtype: torch.dtype) -> BestSubsetState:
    tensors = {}
    for item in fields(Search):
        tensor = torch.from_numpy(np.array(getattr(search, item.name)))  # a copy
        tensors[item.name] = tensor.to(dtype) if tensor.is_floating_point() else tensor
    return BestSubsetState(**tensors)


def as_sums(total: CurvatureSums) -> Sums:
    """Return sums over clients as NumPy arrays for the search."""
    rows, loss, *arrays = (
        getattr(total, item.name).to(torch.float64).numpy() for item in fields(CurvatureSums)
    )
    return Sums(float(rows), float(loss), *arrays)
