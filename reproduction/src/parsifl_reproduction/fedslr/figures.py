"""Figures 2 to 5 of FedSLR's paper, all from the runs of Table 1."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from statistics import fmean, median

from parsifl_reproduction.comparison import compare
from parsifl_reproduction.fedslr import setup
from parsifl_reproduction.fedslr.tables import PERSONAL, SPLITS, TITLES
from parsifl_reproduction.recipe import Claim, Context, Job, Recipe, Result, Values, by_label

QUARTER, BEHIND = 0.25, 1.0
FIGURE_3 = ("fedavg", "feddyn", "ditto", "fedrep", "fedspa", "local", "fedslr")
FIGURE_5 = ("fedavg", "scaffold", "fedslr")
_NO_NUMBERS = "shown as a curve, without numbers"


def _plan(methods: Sequence[str], splits: Sequence[str], context: Context) -> list[Job]:
    row = setup.swept(context)
    cells = [setup.Cell(row, split, name) for split in splits for name in methods]
    return setup.plan(cells, context)


# ---------------------------------------------------------------------------------- Figure 2
def _conclude_figure2(context: Context, results: Sequence[Result]) -> list[Claim]:
    """Compare the curves where a quarter of the rounds is done, with the best other one."""
    row, grouped = setup.swept(context), by_label(results)
    claims = []
    for split in SPLITS:
        ours = _early(grouped.get(f"{row} {split} fedslr", ()))
        others = {name: _early(grouped.get(f"{row} {split} {name}", ())) for name in PERSONAL}
        best = [max(scores) for scores in zip(*filter(None, others.values()), strict=False)]
        claims.append(
            compare(
                f"{split}: a quarter into training, the mixed model is at most {BEHIND:g} point "
                "behind the best personal algorithm",
                "competitive, except in the first rounds of some IID groups",
                ours,
                best,
                least=-BEHIND,
            )
        )
    return claims


def _early(runs: Sequence[Values]) -> list[float]:
    return [_at(run["personal_curve"], QUARTER) for run in runs]


def _at(curve: Sequence[Sequence[float]], part: float) -> float:
    last = curve[-1][0]
    return next(score for round, score in curve if round >= part * last)


# ---------------------------------------------------------------------------------- Figure 3
def _conclude_figure3(context: Context, results: Sequence[Result]) -> list[Claim]:
    """Compare each client's gain over FedAvg, by the median client and by the mean."""
    grouped, place = by_label(results), f"{setup.swept(context)} Non-IID"
    base = [found["clients"] for found in grouped.get(f"{place} fedavg", ())]
    gains: dict[str, list[list[float]]] = {}
    for name in FIGURE_3[1:]:
        runs = [found["clients"] for found in grouped.get(f"{place} {name}", ())]
        gains[name] = [
            [a - b for a, b in zip(ours, theirs, strict=True)]
            for ours, theirs in zip(runs, base, strict=False)
        ]
    titles = {**TITLES, "feddyn": "FedDyn"}
    medians = [
        compare(
            f"the median client gains more with the mixed model than with {titles[name]}",
            "shown as violins, without numbers",
            [median(gain) for gain in gains["fedslr"]],
            [median(gain) for gain in gains[name]],
        )
        for name in FIGURE_3[1:-1]
    ]
    means = [
        compare(
            f"the mean client gains more with the mixed model than with {titles[name]}",
            "shown as violins, without numbers",
            [fmean(gain) for gain in gains["fedslr"]],
            [fmean(gain) for gain in gains[name]],
        )
        for name in FIGURE_3[1:-1]
    ]
    personal = [replace(claim, counted="fedslr-table1") for claim in means[1:]]
    return [*medians, means[0], *personal]


# ---------------------------------------------------------------------------------- Figure 4
def _conclude_figure4(context: Context, results: Sequence[Result]) -> list[Claim]:
    """Compare extractors and classifiers with and without the personal component."""
    runs = by_label(results).get(f"{setup.swept(context)} Non-IID fedslr", ())
    found = [run["figure4"] for run in runs]

    def accuracy(pair: str) -> list[float]:
        return [each["accuracy"][pair] for each in found]

    return [
        compare(
            "the personal extractor separates a client's classes better than the global one "
            "(100 x the silhouette of the last hidden layer, mean over clients)",
            "shown as a t-SNE plot, without numbers",
            [100 * each["separation"]["personal"] for each in found],
            [100 * each["separation"]["global"] for each in found],
        ),
        compare(
            "fusing both parts mislabels fewer points than fusing the extractor alone (accuracy)",
            "shown as a t-SNE plot, without numbers",
            accuracy("personal personal"),
            accuracy("personal global"),
        ),
        compare(
            "fusing both parts mislabels fewer points than fusing the classifier alone (accuracy)",
            "shown as a t-SNE plot, without numbers",
            accuracy("personal personal"),
            accuracy("global personal"),
        ),
    ]


# ---------------------------------------------------------------------------------- Figure 5
def _conclude_figure5(context: Context, results: Sequence[Result]) -> list[Claim]:
    """Compare bytes and seconds per round at both ends of training."""
    grouped, row = by_label(results), setup.swept(context)
    tenth = max(setup.federations(context)[row].rounds // 10, 1)
    first, last = slice(0, tenth), slice(-tenth, None)

    def per_round(name: str, key: str, end: slice, scale: float = 1.0) -> list[float]:
        runs = grouped.get(f"{row} Non-IID {name}", ())
        return [scale * fmean(run[key][end]) for run in runs]

    down = partial(per_round, key="down_by_round", scale=1e-6)
    seconds = partial(per_round, key="network_seconds")

    def steady(name: str) -> list[float]:
        ends = zip(seconds(name, end=last), seconds(name, end=first), strict=False)
        return [a / b for a, b in ends]

    ratio = [
        a / b
        for a, b in zip(seconds("scaffold", end=last), seconds("fedavg", end=last), strict=False)
    ]
    return [
        compare("FedSLR's downlink falls during training (MB per round)", _NO_NUMBERS,
                down("fedslr", end=first), down("fedslr", end=last)),
        compare("FedSLR's seconds of communication fall during training", _NO_NUMBERS,
                seconds("fedslr", end=first), seconds("fedslr", end=last)),
        compare("in the end FedSLR takes fewer seconds per round than FedAvg", _NO_NUMBERS,
                seconds("fedavg", end=last), seconds("fedslr", end=last)),
        *(
            compare(f"{title}'s seconds of communication do not change during training (ratio of "
                    "the last to the first rounds, at least 0.99)", "the same scale throughout",
                    steady(name), 0.99)
            for name, title in (("fedavg", "FedAvg"), ("scaffold", "SCAFFOLD"))
        ),
        compare("SCAFFOLD takes at least 1.9 times the seconds of FedAvg", "twice",
                ratio, 1.9),
    ]  # fmt: skip


_SILHOUETTE = "the silhouette over all clients instead of a t-SNE plot of one"
_LINK = "simulated seconds of a link of 40 Mbit/s and 5 ms each way instead of a measured WLAN"
_BOTH = (*setup.METHODS,), SPLITS
RECIPES = (
    Recipe(
        "fedslr-figure2",
        "Accuracy by round",
        setup.PAPER,
        partial(_plan, *_BOTH),
        _conclude_figure2,
        setup.deviations,
    ),
    Recipe(
        "fedslr-figure3",
        "Gain of every client",
        setup.PAPER,
        partial(_plan, FIGURE_3, ("Non-IID",)),
        _conclude_figure3,
        setup.deviations,
    ),
    Recipe(
        "fedslr-figure4",
        "Representations",
        setup.PAPER,
        partial(_plan, ("fedslr",), ("Non-IID",)),
        _conclude_figure4,
        partial(setup.deviations, more=(_SILHOUETTE,)),
    ),
    Recipe(
        "fedslr-figure5",
        "Time of communication",
        setup.PAPER,
        partial(_plan, FIGURE_5, ("Non-IID",)),
        _conclude_figure5,
        partial(setup.deviations, more=(_LINK,)),
    ),
)
