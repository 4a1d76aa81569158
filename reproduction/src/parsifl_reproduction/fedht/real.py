"""Fed-HT on MNIST and on text, by the partition of its Table II: Figure 5."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch

from parsifl.core.keys import Key
from parsifl.data.clients import ClientData
from parsifl.data.dataset import Dataset
from parsifl.data.partitions import kmeans
from parsifl.data.ragged import Ragged
from parsifl.data.registry import load
from parsifl.linear.glm import GLM
from parsifl_reproduction.fedht.setup import (
    EVERY,
    METHODS,
    PAPER,
    RATES,
    STEPS,
    Setting,
    all_training,
    best,
    curve,
    grid,
    objectives,
    rounds_to,
    steepest,
)
from parsifl_reproduction.recipe import Claim, Context, Job, Recipe, Result, Values

BATCH, L2, CLIENTS = 50, 1e-4, 100


@dataclass(frozen=True)
class Real:
    """One data set of Figure 5, or what stands in for it."""

    name: str
    dataset: str
    tau: int
    datafit: str
    rates: tuple[float, ...]
    rows: int | None
    """How many rows the small scale draws (of generated data), or keeps."""
    note: str

    def load(self, context: Context, seed: int) -> Dataset:
        """Read or generate the data set; the small scale has fewer rows."""
        if not self.dataset.startswith("text-like"):
            made = load(self.dataset, context.data_dir)
            if self.dataset == "rcv1-sample":
                return made.merged()
            kept = None if context.scale == "full" else self.rows
            return replace(made, x=made.x[:kept], y=made.y[:kept])
        few: dict[str, Any] = {} if context.scale == "full" else {"rows": self.rows}
        return load(self.dataset, seed=seed, **few)

    def parts(self, made: Dataset, context: Context, seed: int) -> Ragged:
        """Divide as in Table II: clusters in 20 parts, a part of two clusters for each client."""
        clients = CLIENTS if context.scale == "full" else 20
        by = "labels" if self.dataset == "mnist" else "features"
        return kmeans(made, clients, Key(seed, purpose="fedht-real"), by=by)

    def data(self, context: Context, seed: int) -> ClientData:
        """Return the clients, judged on their training rows."""
        made = self.load(context, seed)
        data = ClientData.from_dataset(
            made,
            self.parts(made, context, seed),
            test=0.0,
            key=Key(seed, purpose="fedht-real"),
            normalize="unit" if self.dataset == "mnist" else "none",
            dtype=torch.float64,
        )
        return all_training(data.flattened())

    def problem(self, features: int) -> GLM:
        """Return the paper's loss."""
        classes = 10 if self.datafit == "softmax" else None
        l2 = 0.0 if self.datafit == "squared" else L2
        return GLM(features, self.datafit, classes=classes, l2=l2)

    def settings(self, context: Context) -> list[Setting]:
        """Return the paper's grid, or a part of it."""
        if context.scale == "full":
            return grid(STEPS, RATES)
        return grid((3, 10), self.rates)


REALS = (
    Real("mnist", "mnist", 500, "softmax", (0.3, 0.1), 20_000, "MNIST itself"),
    Real(
        "rcv1",
        "rcv1-sample",
        200,
        "logistic",
        (10.0, 1.0),
        None,
        "stand-in: 1,500 documents of RCV1 instead of 20,242",
    ),
    Real(
        "rcv1-generated",
        "text-like",
        200,
        "logistic",
        (10.0, 1.0),
        2_000,
        "stand-in: generated text-like data with RCV1's 47,236 columns",
    ),
    Real(
        "e2006",
        "text-like-e2006",
        200,
        "squared",
        (0.6, 0.3),
        1_000,
        "stand-in: generated text-like data with E2006-tfidf's 150,360 columns",
    ),
)


def rounds(context: Context) -> int:
    """Return the number of rounds."""
    return 200 if context.scale == "full" else 20


@lru_cache(maxsize=3)
def _data(real: Real, context: Context, seed: int) -> ClientData:
    """Divide a data set once for all jobs that read it: K-means takes longer than some of them."""
    return real.data(context, seed)


def _run(real: Real, setting: Setting, context: Context, seed: int, _folder: Path | None) -> Values:
    data = _data(real, context, seed)
    problem = real.problem(int(data.x.shape[1]))
    if setting.steady:  # the theory's step size and its growing batches
        scale = problem.datafit.smoothness * steepest(data) + problem.l2
        setting = Setting(setting.method, setting.steps, 1 / (6 * scale), steady=True)
    return objectives(setting, problem, data, real.tau, BATCH, rounds(context), seed)


def _steady(steps: int) -> list[Setting]:
    return [Setting(method, steps, math.nan, steady=True) for method in METHODS[:2]]


def _plan(real: Real, context: Context) -> list[Job]:
    return [
        Job(setting.label, seed, partial(_run, real, setting, context, seed))
        for setting in (*real.settings(context), *_steady(10))
        for seed in range(context.seeds)
    ]


def _conclude(real: Real, context: Context, results: Sequence[Result]) -> list[Claim]:
    settings = real.settings(context)
    chosen = {method: best(results, settings, method) for method in METHODS}
    curves = {method: curve(results, setting.label) for method, setting in chosen.items()}
    target, total = curves["Distributed-IHT"][-1], len(curves["Distributed-IHT"]) * EVERY
    ends = ", ".join(f"{chosen[m].label} ends at {curves[m][-1]:.4g}" for m in METHODS)
    claims = []
    for method in METHODS[:2]:
        reached = rounds_to(curves[method], target)
        ours = "never" if reached is None else f"after {reached} rounds"
        claims.append(
            Claim(
                f"{real.name}: {method} reaches the objective of Distributed-IHT after {total} "
                "rounds in fewer of them",
                "significantly fewer rounds (Figure 5, top)",
                f"{ours}; {ends}",
                "held" if reached is not None and reached < total else "did not hold",
                real.note,
            )
        )
    lowest = min(METHODS, key=lambda method: curves[method][-1])
    theory = {s.method: curve(results, s.label)[-1] for s in _steady(10)}
    shown = ", ".join(f"{method} {value:.4g}" for method, value in theory.items())
    claims.append(
        Claim(
            f"{real.name}: FedIter-HT ends lowest of the three",
            "FedIter-HT performs consistently better (Figure 5)",
            f"{lowest} ends lowest; {ends}",
            "held" if lowest == "FedIter-HT" else "did not hold",
            f"{real.note}; with the theory's step 1/(6l) and growing batches, K = 10: {shown}",
        )
    )
    return claims


RECIPES = tuple(
    Recipe(
        f"fedht-figure5-{real.name}",
        f"Fed-HT on {real.note.removeprefix('stand-in: ')} (Figure 5)",
        PAPER,
        partial(_plan, real),
        partial(_conclude, real),
    )
    for real in REALS
)
