"""Figures 2 to 5 and Table 9 of FedSLR's paper."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import fmean, median

import torch

from parsifl.core.errors import DataError
from parsifl.engine.batch_sampler import BatchSampler
from parsifl.engine.run import Run
from parsifl_reproduction.comparison import compare
from parsifl_reproduction.fedslr import setup
from parsifl_reproduction.fedslr.sweeps import RANKS
from parsifl_reproduction.fedslr.tables import SPLITS
from parsifl_reproduction.recipe import (
    SKIPPED,
    Claim,
    Context,
    Job,
    Recipe,
    Result,
    Values,
    by_label,
)

LATENCY_BATCH = 20  # rows, as in Table 9
EXPORT_PENALTIES = (2e-3, 7.5e-3)  # small scale: eight rounds have to do what the paper's 1000 do
FIGURE_3 = ("fedavg", "feddyn", "ditto", "fedrep", "fedspa", "local", "fedslr")
FIGURE_5 = ("fedavg", "scaffold", "fedslr")


def _plan(context: Context, methods: Sequence[str], splits: Sequence[str]) -> list[Job]:
    row = setup.swept(context)
    cells = [setup.Cell(row, split, name) for split in splits for name in methods]
    return setup.plan(cells, context)


def _plan_figure2(context: Context) -> list[Job]:
    return _plan(context, tuple(setup.METHODS), SPLITS)


def _conclude_figure2(context: Context, results: Sequence[Result]) -> list[Claim]:
    """Compare the curves where a quarter of the rounds is done."""
    row = setup.swept(context)
    grouped = by_label(results)
    early: dict[str, list[float]] = {
        label: [_at(found["personal_curve"], 0.25) for found in runs]
        for label, runs in grouped.items()
    }
    return [
        compare(
            f"{split}: a quarter into training, the mixed model is ahead of {other}",
            "competitive except in the first rounds of IID",
            early.get(f"{row} {split} fedslr", []),
            early.get(f"{row} {split} {other}", []),
        )
        for split in SPLITS
        for other in ("ditto", "fedrep", "apfl")
    ]


def _at(curve: Sequence[Sequence[float]], part: float) -> float:
    last = curve[-1][0]
    return next(score for round, score in curve if round >= part * last)


def _plan_figure3(context: Context) -> list[Job]:
    return _plan(context, FIGURE_3, ("Non-IID",))


def _conclude_figure3(context: Context, results: Sequence[Result]) -> list[Claim]:
    """Compare each client with FedAvg: the median of the relative accuracies."""
    grouped = by_label(results)
    place = f"{setup.swept(context)} Non-IID"
    base = [found["clients"] for found in grouped.get(f"{place} fedavg", ())]
    medians: dict[str, list[float]] = {}
    for name in FIGURE_3[1:]:
        runs = [found["clients"] for found in grouped.get(f"{place} {name}", ())]
        medians[name] = [
            median(a - b for a, b in zip(ours, theirs, strict=True))
            for ours, theirs in zip(runs, base, strict=False)
        ]
    return [
        compare(
            f"the median client gains more with the mixed model than with {name}",
            "shown as violins, without numbers",
            medians["fedslr"],
            medians[name],
        )
        for name in FIGURE_3[1:-1]
    ]


def _plan_figure4(context: Context) -> list[Job]:
    return _plan(context, ("fedslr",), ("Non-IID",))


def _conclude_figure4(context: Context, results: Sequence[Result]) -> list[Claim]:
    runs = by_label(results).get(f"{setup.swept(context)} Non-IID fedslr", ())
    return [
        compare(
            "the personal extractor separates a client's classes better than the global one",
            "shown as a t-SNE plot, without numbers (ours: silhouette of the hidden layer)",
            [found["figure4"]["personal_separation"] for found in runs],
            [found["figure4"]["global_separation"] for found in runs],
        )
    ]


# ---------------------------------------------------------------------------------- Figure 5
def _plan_figure5(context: Context) -> list[Job]:
    return _plan(context, FIGURE_5, ("Non-IID",))


def _conclude_figure5(context: Context, results: Sequence[Result]) -> list[Claim]:
    """Compare bytes a round: on a given network, time is in proportion to them."""
    grouped, row = by_label(results), setup.swept(context)

    def down(name: str, end: slice) -> list[float]:
        return [fmean(v["down_by_round"][end]) for v in grouped.get(f"{row} Non-IID {name}", ())]

    tenth = max(setup.federations(context)[row].rounds // 10, 1)
    first, last = slice(0, tenth), slice(-tenth, None)
    return [
        compare("FedSLR's downlink falls as training goes on (bytes a round)",
                    "shown as a curve, without numbers", down("fedslr", first),
                    down("fedslr", last)),
        compare("in the end FedSLR sends less down than FedAvg (bytes a round)",
                    "shown as a curve, without numbers", down("fedavg", last),
                    down("fedslr", last)),
        compare("SCAFFOLD sends more down than 1.9 times what FedAvg does (bytes a round)",
                    "twice", down("scaffold", last), [1.9 * v for v in down("fedavg", last)]),
    ]  # fmt: skip


# ----------------------------------------------------------------------------------- Table 9
def _plan_table9(context: Context) -> list[Job]:
    penalties = RANKS.full if context.scale == "full" else EXPORT_PENALTIES
    return [
        Job(_exported(lam), seed, partial(_export, lam, seed, context))
        for seed in range(context.seeds)
        for lam in penalties
    ]


def _export(lam: float, seed: int, context: Context, folder: Path | None) -> Values:
    full = context.scale == "full"
    row = setup.swept(context) if full else setup.EXPORTED
    changes: Values = {} if full else setup.ON_RESNET
    cell = setup.cell(row, "Non-IID", "fedslr", context, lam=lam, **changes)
    try:
        run, data = setup.train(cell, seed, context, folder)
    except DataError as error:
        return {SKIPPED: str(error).splitlines()[0]}
    rows = BatchSampler(data, run.problem).rows(data.test[0][:LATENCY_BATCH])
    return {
        **_shipped(run, None, rows.x, folder),
        **{f"client_{key}": v for key, v in _shipped(run, 0, rows.x, folder).items()},
    }


def _exported(lam: float) -> str:
    return f"export lam={lam:g}"


def _shipped(run: Run, client: int | None, x: torch.Tensor, folder: Path | None) -> Values:
    name = "global" if client is None else f"client{client}"
    path = None if folder is None else folder / f"{name}.safetensors"
    return run.compact(client).report(x, path)


def _conclude_table9(context: Context, results: Sequence[Result]) -> list[Claim]:
    grouped = by_label(results)
    steps = EXPORT_PENALTIES if context.scale != "full" else RANKS.full
    labels = [_exported(lam) for lam in steps]
    strongest = labels[-1]

    def last(key: str, factor: float = 1.0) -> list[float]:
        return [factor * value for value in setup.column(grouped, strongest, key)]

    return [
        setup.falling("the exported global model shrinks as lambda grows",
                      "7.33, 6.56, 5.54, 3.09, 1.27 M",
                      {label: setup.column(grouped, label, "parameters") for label in labels}),
        compare("at the largest lambda the dense model takes twice as long, or longer (ms)",
                    "6.53 ms against 10.98 ms a batch of 20",
                    last("dense_milliseconds"), last("milliseconds", 2.0)),
        compare("a client's model takes no longer than a dense one (ms, 5 % for noise)",
                    "not shown", last("client_dense_milliseconds", 1.05),
                    last("client_milliseconds")),
        compare("a client's file is within 5 % of its factors and its sparse part (bytes)",
                    "not shown", last("client_ideal_bytes", 1.05), last("client_file_bytes")),
    ]  # fmt: skip


RECIPES = (
    Recipe("fedslr-figure2", "Accuracy by round", setup.PAPER, _plan_figure2, _conclude_figure2),
    Recipe("fedslr-figure3", "Gain of every client", setup.PAPER, _plan_figure3, _conclude_figure3),
    Recipe("fedslr-figure4", "Representations", setup.PAPER, _plan_figure4, _conclude_figure4),
    Recipe(
        "fedslr-figure5", "Time of communication", setup.PAPER, _plan_figure5, _conclude_figure5
    ),
    Recipe(
        "fedslr-table9",
        "Latency of the exported model",
        setup.PAPER,
        _plan_table9,
        _conclude_table9,
    ),
)
