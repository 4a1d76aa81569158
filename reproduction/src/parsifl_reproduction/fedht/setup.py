"""What Fed-HT's recipes share: the paper's grid, objectives by round, and how methods race.

The paper tunes every method over one grid. A second reading gives all methods one step: local
Hessians may be far steeper than their mean, and then Distributed-IHT alone can take long steps.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise
from typing import Any

import numpy as np
import torch

from parsifl.algorithms.distributediht import DistributedIHT
from parsifl.algorithms.fedht import FedHT
from parsifl.algorithms.fediterht import FedIterHT
from parsifl.core.algorithm import AnyAlgorithm
from parsifl.core.errors import ClientError, DivergenceWarning
from parsifl.data.clients import ClientData
from parsifl.engine.settings import Evaluation
from parsifl.engine.simulate import simulate
from parsifl.engine.training import RoundEnd, StopTraining
from parsifl.linear.glm import GLM
from parsifl_reproduction.comparison import agreed, at_grid_end, compare
from parsifl_reproduction.recipe import TUNING, Claim, Context, Result, Values, choosing, comparing

PAPER = "Tong et al., Federated Nonconvex Sparse Learning (Fed-HT and FedIter-HT)"
FED_HT, FED_ITER_HT, BASELINE = METHODS = ("Fed-HT", "FedIter-HT", "Distributed-IHT")
STEPS = (3, 5, 8, 10)
RATES = (10.0, 1.0, 0.6, 0.3, 0.1, 0.06, 0.03, 0.01, 0.001)
LARGER = (30.0, 3.0, 100.0, 300.0, 1000.0, 3000.0)
SMALLER = (3e-4, 3e-3, 1e-4, 3e-5)
"""Further steps, tried two at a time where the best one is at an end of the paper's grid; its last
gaps are a factor of ten wide, so one of them lies inside."""
EVERY = 2
GROWTH = 1.1
"""The theory's 1 / omega: how fast batches grow from round to round, if they do."""
DIVERGED = 10.0
"""A run whose objective exceeds this many times that of the zero model is stopped."""
DELAY, LOCAL_STEP = 0.15, 20e-6
"""Seconds of a round trip and of a local step, as the paper assumes them."""
CHOOSING = (
    f"The first {TUNING} seeds choose the settings; further seeds compare them. Where the best "
    "step of a method is at an end of the paper's grid, all methods try steps on both sides of it."
)
"""A deviation of every recipe that tunes over the paper's grid."""


@dataclass(frozen=True)
class Setting:
    """One point of the paper's grid; a steady one has the theory's step and growing batches."""

    method: str
    steps: int
    lr: float
    steady: bool = False

    @property
    def label(self) -> str:
        """The name of its jobs."""
        rate = "1/(6l)" if self.steady else f"{self.lr:g}"
        return f"{self.method} K={self.steps} lr={rate}"

    def build(self, tau: int, batch: int) -> AnyAlgorithm:
        """Return the algorithm."""
        common: dict[str, Any] = {
            "tau": tau,
            "lr": self.lr,
            "batch_size": batch,
            "last_batch": "redraw",  # every step draws its mini-batch independently
            "scope": "row",
            "batch_growth": GROWTH if self.steady else 1.0,
            "weighting": "uniform",  # the objective is the mean over clients of their mean losses
        }
        if self.method == BASELINE:
            return DistributedIHT(**common)
        kind = FedHT if self.method == FED_HT else FedIterHT
        return kind(local_steps=self.steps, **common)


def grid(context: Context, beyond: Sequence[float] = ()) -> list[Setting]:
    """Return the settings of all methods; Distributed-IHT has one local step."""
    steps, rates = ((3,), (0.01,)) if context.smoke else (STEPS, (*RATES, *beyond))
    pairs = [(k, rate) for k in steps for rate in rates]
    local = [Setting(method, k, rate) for method in METHODS[:2] for k, rate in pairs]
    return local + [Setting(BASELINE, 1, rate) for rate in rates]


def widened(context: Context, results: Sequence[Result]) -> list[Setting]:
    """Return the paper's grid, and further steps around each end at which a method is best."""
    larger, smaller, beyond = list(LARGER), list(SMALLER), list[float]()
    while results and not context.smoke:
        race = Race("", results, grid(context, beyond))
        best = {race.best(method).lr for method in METHODS}
        further: list[float] = []
        if max(*RATES, *beyond) in best:
            further, larger = further + larger[:2], larger[2:]
        if min(*RATES, *beyond) in best:
            further, smaller = further + smaller[:2], smaller[2:]
        if not further:
            break
        beyond += further
    return grid(context, beyond)


def all_training(data: ClientData) -> ClientData:
    """Give every row to training: the paper plots the objective itself."""
    none = [np.asarray(rows)[:0] for rows in data.train]
    return replace(data, test=none, validation=none)


def objectives(
    setting: Setting, problem: GLM, data: ClientData, tau: int, batch: int, rounds: int, seed: int
) -> Values:
    """Return the objective every two rounds, infinite from where a run diverged, and the bytes.

    The objective is what is minimized: (1/N) sum_i f_i with equal weights, l2 term included.
    """
    values: list[float] = []
    name = "objective" if problem.l2 else "loss" if problem.datafit.classes else "mse"
    start = math.log(problem.classes or 2) if problem.datafit.classes else _mean_square(data)

    def note(event: RoundEnd) -> None:
        record = event.record
        if "global" in record.scores:
            found = float(record.scores["global"]["train"][name]["mean"])
            values.append(found)
            if record.dropped or not found < DIVERGED * start:
                values[-1] = math.inf
                raise StopTraining("diverged")

    sent = 0
    try:
        # the grid has steps that diverge
        with np.errstate(over="ignore", invalid="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore", DivergenceWarning)
            run = simulate(
                setting.build(tau, batch),
                problem,
                data,
                rounds,
                seed=seed,
                evaluate_every=EVERY,
                evaluation=Evaluation(weighting="uniform", train=True),
                callbacks=[note],
            )
        sent = run.bytes_up // len(run.records)
    except ClientError:
        values.append(math.inf)
    missing = max(0, rounds // EVERY - len(values))
    found = [v if math.isfinite(v) else None for v in values + [math.inf] * missing]
    return {"objective": found, "bytes_up_per_round": sent}


def _mean_square(data: ClientData) -> float:
    y = data.y.double() if isinstance(data.y, torch.Tensor) else torch.as_tensor(data.y)
    parts = [float((y[torch.as_tensor(np.asarray(rows))] ** 2).mean()) for rows in data.train]
    return sum(parts) / len(parts)


def steepest(data: ClientData) -> float:
    """Return the largest |Z_i|^2 / n_i over clients: times the loss's own curvature, it is l."""
    return max(_spectral(data.x[np.asarray(part)]) ** 2 / len(part) for part in data.train)


def _spectral(rows: Any) -> float:
    """Return the largest singular value, by 30 power iterations (a lower bound, nearly tight)."""
    matrix = rows.numpy() if isinstance(rows, torch.Tensor) else rows
    vector = np.asarray(matrix.T @ (matrix @ np.ones(matrix.shape[1]))).ravel()
    size = 0.0
    for _ in range(30):
        length = float(np.linalg.norm(vector))
        if length == 0.0:
            return 0.0
        vector = np.asarray(matrix.T @ (matrix @ (vector / length))).ravel()
        size = math.sqrt(float(np.linalg.norm(vector)))
    return size


# ------------------------------------------------------------------------------------ the race
Curve = list[float]


def _curves(results: Sequence[Result], setting: Setting) -> list[Curve]:
    """Return the objectives of each seed, by evaluated round."""
    return [
        [math.inf if v is None else float(v) for v in result.values["objective"]]
        for result in results
        if result.label == setting.label
    ]


def _median_end(curves: Sequence[Curve]) -> float:
    return float(np.median([curve[-1] for curve in curves])) if curves else math.inf


def rounds_to(values: Curve, target: float) -> int | None:
    """Return the first evaluated round that is at least as good as the target.

    >>> rounds_to([3.0, 1.0], 1.0)
    4
    """
    below = [EVERY * at for at, value in enumerate(values, start=1) if value <= target]
    return below[0] if below else None


def rises(values: Curve) -> float:
    """Return how often the objective rises between evaluations in the second half of a run.

    >>> rises([9.0, 8.0, 3.0, 4.0, 2.0, 5.0])
    2.0
    """
    late = values[len(values) // 2 - 1 :]
    return float(sum(after > before for before, after in pairwise(late)))


@dataclass(frozen=True)
class Race:
    """The curves of a grid by setting and seed, and what follows from them.

    The first seeds choose settings; further seeds, if there are any, compare the chosen ones.
    `zero` is the objective of the zero model: a run that ends above it has learned nothing.
    """

    name: str
    results: Sequence[Result]
    settings: Sequence[Setting]
    zero: float = math.inf

    def curves(self, setting: Setting) -> list[Curve]:
        """Return the objectives of each seed that compares settings, by evaluated round."""
        return _curves(comparing(self.results), setting)

    def trials(self, setting: Setting) -> list[Curve]:
        """Return the objectives of each seed that chooses settings, by evaluated round."""
        return _curves(choosing(self.results), setting)

    def end(self, setting: Setting) -> float:
        """Return the median over seeds of the last objective; infinite if it was not run."""
        return _median_end(self.curves(setting))

    def best(self, method: str, lr: float | None = None) -> Setting:
        """Return the setting of a method that ends lowest, perhaps of those with one step."""
        mine = [s for s in self.settings if s.method == method and lr in (None, s.lr)]
        return min(mine, key=lambda setting: _median_end(self.trials(setting)))

    def compared(self, *steps: float | None) -> list[Setting]:
        """Return the settings that claims read: the tuned ones, and all with one of these steps."""
        chosen = [self.best(method) for method in METHODS]
        return list(dict.fromkeys([*chosen, *(s for s in self.settings if s.lr in steps)]))

    def common_step(self) -> float | None:
        """Return the largest step with which every method learns, on every seed, for some K."""

        def serves(lr: float) -> bool:
            return all(
                any(
                    curves and all(curve[-1] < self.zero for curve in curves)
                    for setting in self.settings
                    if setting.method == method and setting.lr == lr
                    for curves in [self.trials(setting)]
                )
                for method in METHODS
            )

        tried = {s.lr for s in self.settings}
        return next((lr for lr in RATES if lr in tried and serves(lr)), None)

    def tuned_to(self, method: str, lr: float) -> bool:
        """Return whether a method and the baseline are best with one step: no second reading."""
        return self.best(method).lr == self.best(BASELINE).lr == lr

    def further(self, context: Context, *steps: float) -> list[tuple[Setting, int]]:
        """Return what is left to run: a wider grid, and seeds that compare settings.

        These are the tuned settings, and all with the common step or one of `steps`.
        """
        first = min(context.seeds, TUNING)
        tried = [(setting, seed) for setting in self.settings for seed in range(first)]
        compared = self.compared(self.common_step(), *steps)
        return tried + [(s, seed) for s in compared for seed in range(first, context.seeds)]

    def fewer_rounds(self, method: str, paper: str, lr: float | None = None) -> Claim:
        """Compare the rounds to the baseline's last objective, tuned or with a common step."""
        how = "each method tuned" if lr is None else f"common step {lr:g}"
        statement = (
            f"{self.name}, {how}: {method} reaches the last objective of Distributed-IHT in fewer "
            "rounds"
        )
        ours, theirs = self.best(method, lr), self.best(BASELINE, lr)
        pairs = list(zip(self.curves(ours), self.curves(theirs), strict=False))
        if not pairs:
            return Claim(statement, paper, "", "not run")
        total = EVERY * len(pairs[0][1])
        reached = [rounds_to(mine, base[-1]) for mine, base in pairs]
        words = ", ".join("never" if each is None else str(each) for each in reached)
        found = (
            f"after {words} of {total} rounds (by seed): {ours.label} ends at "
            f"{self.end(ours):.4g}, {theirs.label} at {self.end(theirs):.4g}"
        )
        held = [each is not None and each < total for each in reached]
        claim = Claim(statement, paper, found, agreed(held))
        return claim if lr else at_grid_end(claim, self._end(ours), self._end(theirs))

    def faster(self, method: str, paper: str, lr: float) -> Claim:
        """Compare the seconds that the paper's delays give, at a common step."""
        statement = (
            f"{self.name}, common step {lr:g}: with 150 ms per round and 20 us per local step, "
            f"{method} reaches the last objective of Distributed-IHT at least 1.6 times as fast"
        )
        ours, theirs = self.best(method, lr), self.best(BASELINE, lr)
        factors = []
        for mine, base in zip(self.curves(ours), self.curves(theirs), strict=False):
            reached, total = rounds_to(mine, base[-1]), EVERY * len(base)
            spent = math.inf if reached is None else reached * (DELAY + ours.steps * LOCAL_STEP)
            factors.append(total * (DELAY + LOCAL_STEP) / spent)
        if not factors:
            return Claim(statement, paper, "", "not run")
        words = ", ".join(f"{factor:.1f}" for factor in factors)
        return Claim(
            statement, paper, f"{words} times (by seed)", agreed([f >= 1.6 for f in factors])
        )

    def more_iterations(self, method: str, lr: float | None = None) -> Claim | None:
        """Compare local iterations to the baseline's last objective; None if it is not reached."""
        how = "each method tuned" if lr is None else f"common step {lr:g}"
        ours, theirs = self.best(method, lr), self.best(BASELINE, lr)
        pairs = list(zip(self.curves(ours), self.curves(theirs), strict=False))
        reached = [rounds_to(mine, base[-1]) for mine, base in pairs]
        spent = [ours.steps * each for each in reached if each is not None]
        if not spent or len(spent) < len(reached):
            return None
        total = EVERY * len(pairs[0][1])
        return Claim(
            f"{self.name}, {how}: {method} takes more local iterations than Distributed-IHT to "
            "reach its last objective",
            "more internal iterations (Figure 4, b and d; Figure 5, bottom)",
            f"{', '.join(map(str, spent))} against {total} (by seed)",
            agreed([each > total for each in spent]),
        )

    def more_steps(self, method: str, lr: float) -> Claim:
        """Compare the largest K that ends with the smallest one, at a common step."""
        statement = f"{self.name}, common step {lr:g}: {method} ends lower with a larger K"
        mine = sorted(
            (s for s in self.settings if s.method == method and s.lr == lr), key=lambda s: s.steps
        )
        few, many = mine[0], mine[-1]
        claim = compare(
            statement,
            "converges faster with a larger K (Theorems 3.1 and 4.1; Figure 3)",
            *([curve[-1] for curve in self.curves(setting)] for setting in (many, few)),
            above=False,
            runs=(few.label, many.label) if self._tested() else None,
        )
        ends = "; ".join(f"{s.label} ends at {self.end(s):.4g}" for s in mine)
        return claim if claim.verdict == "not run" else replace(claim, ours=ends)

    def lowest(self, method: str, paper: str) -> Claim:
        """Compare the last objectives of the tuned methods."""
        statement = f"{self.name}: {method} ends lowest of the three, each tuned"
        chosen = {name: self.best(name) for name in METHODS}
        ends = {name: [c[-1] for c in self.curves(setting)] for name, setting in chosen.items()}
        if not all(ends.values()):
            return Claim(statement, paper, "", "not run")
        rows = list(zip(*ends.values(), strict=False))
        place = METHODS.index(method)
        rivals = [min(v for at, v in enumerate(row) if at != place) for row in rows]
        found = "; ".join(f"{s.label} ends at {self.end(s):.5g}" for s in chosen.values())
        others = [self._end(setting) for name, setting in chosen.items() if name != method]
        claim = compare(statement, paper, ends[method], rivals, above=False)
        claim = replace(claim, ours=found)
        return at_grid_end(claim, self._end(chosen[method]), ", ".join(filter(None, others)))

    def more_random(self, method: str) -> Claim:
        """Compare how often the objectives of the tuned methods rise near their end."""
        return compare(
            f"{self.name}: the objective of {method} rises more often than that of Distributed-IHT "
            "in the second half of the rounds, each tuned",
            "displays more randomness when approaching the solution (Figure 5, a and c)",
            *([rises(c) for c in self.curves(self.best(name))] for name in (method, BASELINE)),
        )

    def different_ends(self, least: float = 0.01) -> Claim:
        """Evaluate whether each two of the tuned methods end at different objectives."""
        statement = (
            f"{self.name}: the last objectives of the three, each tuned, differ by {least:.0%} or "
            "more"
        )
        paper = "the three reach the neighborhood of different solutions (Figure 5, c)"
        ends = [[c[-1] for c in self.curves(self.best(name))] for name in METHODS]
        seeds = list(zip(*ends, strict=False))
        closest = [min(abs(a - b) / max(a, b) for a, b in combinations(seed, 2)) for seed in seeds]
        shown = ", ".join(f"{each:.2%}" for each in closest)
        found = f"the nearest two differ by {shown} (by seed)" if closest else ""
        return Claim(statement, paper, found, agreed([each >= least for each in closest]))

    def sparse_uploads(self) -> Claim:
        """Compare the uploaded bytes of Fed-HT and FedIter-HT."""
        statement = f"{self.name}: FedIter-HT sends fewer bytes up per round than Fed-HT"
        paper = "reduces the communication load at each round (Conclusion)"
        pairs = [self._bytes(self.best(method)) for method in METHODS[:2]]
        if not all(pairs):
            return Claim(statement, paper, "", "not run")
        dense, sparse = pairs
        ratio = sum(dense) / max(1, sum(sparse))
        held = [b < a for a, b in zip(dense, sparse, strict=False)]
        return Claim(statement, paper, f"{ratio:.1f} times fewer", agreed(held))

    def _bytes(self, setting: Setting) -> list[int]:
        return [
            int(result.values["bytes_up_per_round"])
            for result in comparing(self.results)
            if result.label == setting.label
        ]

    def _tested(self) -> bool:
        """Return whether seeds compare settings that other seeds have chosen."""
        return any(result.seed >= TUNING for result in self.results)

    def _end(self, chosen: Setting) -> str:
        """Return the label of a setting whose step is the largest or smallest; else ""."""
        rates = {setting.lr for setting in self.settings}
        return chosen.label if len(rates) > 1 and chosen.lr in (max(rates), min(rates)) else ""
