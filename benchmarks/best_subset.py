"""Lossless selection across sites, compared with pooled abess.

Usage: `python benchmarks/best_subset.py`.

Prints a table in Markdown. The loss is the sum over the training rows (half the sum of squares,
or the negative log-likelihood up to a constant); that of abess is taken after a refit of its
support at the tolerance of our own fits. PARSIFL_DATA names the directory of the real data; without
it only the simulated regimes run.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import abess
import numpy as np

from parsifl import data
from parsifl.sites import (
    FederatedSparseClassifier,
    FederatedSparseCox,
    FederatedSparsePoisson,
    FederatedSparseRegressor,
)

sys.path.insert(0, str(Path(__file__).parents[1]))  # the regimes are those of the tests
from tests.support.regimes import REGIMES

OURS: dict[str, Any] = {
    "gaussian": FederatedSparseRegressor,
    "binomial": FederatedSparseClassifier,
    "poisson": FederatedSparsePoisson,
    "cox": FederatedSparseCox,
}
ABESS: dict[str, Any] = {
    "gaussian": abess.LinearRegression,
    "binomial": abess.LogisticRegression,
    "poisson": abess.PoissonRegression,
    "cox": abess.CoxPHSurvivalAnalysis,
}
REAL = [
    ("heart-disease", "binomial", (2, 4, 6)),
    ("communities-crime", "gaussian", (5, 10, 20)),
    ("golub-leukemia", "gaussian", (2, 3)),
    ("golub-leukemia", "binomial", (1, 2)),
    ("parkinsons-telemonitoring", "gaussian", (2, 4, 8)),
    ("fed-tcga-brca", "cox", (3, 5, 10)),
]


def compare(family: str, x: Any, y: Any, groups: Any, count: int) -> tuple[Any, ...]:
    """Return both losses, the rounds, bytes up per site, and seconds."""
    begun = time.perf_counter()
    model = OURS[family](count, solver="exact").fit(x, y, groups=groups)
    seconds = time.perf_counter() - begun
    scaled = (x - x.mean(0)) / np.where(x.std(0) > 0, x.std(0), 1.0)
    pooled = ABESS[family](support_size=count)
    pooled.fit(scaled, y)
    support = np.flatnonzero(pooled.coef_)
    # a Cox fit has a stratum for each site; abess does not support strata and only selects columns
    refit = OURS[family](0, keep=support.tolist(), solver="exact").fit(x, y, groups=groups)
    sites = len(np.unique(groups))
    losses = [float(each._exact.losses.sum()) for each in (refit, model)]
    return *losses, model.n_iter_, model.bytes_up_ / sites, seconds, len(x)


def cases(seeds: int) -> Any:
    """Yield every dataset with its name."""
    for name, regime in REGIMES.items():
        for seed in range(seeds):
            sites = regime.draw(seed)
            label = name if seeds == 1 else f"{name} ({seed})"
            yield label, regime.family, sites.x, sites.y, sites.groups, regime.nonzero
    if "PARSIFL_DATA" not in os.environ:
        return
    for name, family, counts in REAL:
        loaded = data.load(name)
        groups = loaded.groups if loaded.groups is not None else np.arange(len(loaded.y)) % 4
        for count in counts:
            yield f"{name}, k = {count}", family, loaded.x, loaded.y, groups, count


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=1, help="how often each regime is drawn")
    seeds = parser.parse_args().seeds
    warnings.simplefilter("ignore")
    _write("| data | family | k | abess | lossless | difference | rounds | kB up a site | s |")
    _write("|-|-|-|-|-|-|-|-|-|")
    for name, family, x, y, groups, count in cases(seeds):
        theirs, ours, rounds, size, seconds, rows = compare(family, x, y, groups, count)
        # for separated classes both losses are rounding errors: compare with the loss of a row
        apart = (ours - theirs) / max(abs(theirs), 1e-3 * rows)
        _write(
            f"| {name} | {family} | {count} | {theirs:.3f} | {ours:.3f} | {apart:+.3%} | {rounds} "
            f"| {size / 1e3:.0f} | {seconds:.2f} |"
        )


def _write(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
