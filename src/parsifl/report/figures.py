"""The numbers behind the figures, as JSON values; assets/*.js draws them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from itertools import accumulate
from statistics import fmean, stdev
from typing import Any

from parsifl.engine.record import MODELS, RoundRecord
from parsifl.engine.run_dir import RunData
from parsifl.report import formatting
from parsifl.report.groups import RunGroup, Section
from parsifl.report.paired_gains import baselines
from parsifl.report.state_sparsity import read_anatomy
from parsifl.report.summary import total

MOST_POINTS = 400  # more would not be visible
_COSTS: Mapping[str, Callable[[RoundRecord], float]] = {
    "up": lambda r: r.bytes_up,
    "down": lambda r: r.bytes_down,
    "total": lambda r: r.bytes_up + r.bytes_down,
    "seconds": lambda r: sum(r.seconds.values()),
    "simulated": lambda r: r.simulated_seconds,
    "flops": lambda r: r.flops or 0,
}


def figures(section: Section) -> dict[str, Any]:
    """Return everything that the figures of a section need."""
    names = [baseline.label for baseline in baselines(section)]
    return {
        "score": section.score,
        "percent": section.score in formatting.PERCENT,
        "maximize": section.maximize,
        "baselines": names,
        "groups": [_group(group) for group in section.groups],
    }


def _group(group: RunGroup) -> dict[str, Any]:
    return {
        "label": group.label,
        "seeds": [run.seed for run in group.runs],
        "curves": _curves(group),
        "ledger": _ledger(group),
        "clients": {model: _clients(group, model) for model in MODELS},
        "totals": _totals(group),
        "anatomy": _anatomy(group),
    }


def _curves(group: RunGroup) -> dict[str, Any]:
    """Return scores against costs, at the rounds that every seed has evaluated."""
    shared = _thin(_shared_rounds(group, lambda r: bool(r.scores)))
    scores = {
        f"{model}|{split}|{metric}": _score(group, shared, model, split, metric)
        for model, split, metric in _names(group)
    }
    return {"round": shared, "x": _axes(group, shared), "y": scores}


def _axes(group: RunGroup, shared: Sequence[int]) -> dict[str, list[float | None]]:
    """Return the cumulative costs up to each round, averaged over seeds."""
    axes: dict[str, list[float | None]] = {}
    for name, cost in _COSTS.items():
        spent = [
            dict(
                zip((r.round for r in run.records), accumulate(map(cost, run.records)), strict=True)
            )
            for run in group.runs
        ]
        axes[name] = [_tidy(fmean(each[number] for each in spent)) for number in shared]
    return axes


def _names(group: RunGroup) -> list[tuple[str, str, str]]:
    return list(
        dict.fromkeys(
            (model, split, metric)
            for run in group.runs
            for round in run.records
            for model, splits in round.scores.items()
            for split, metrics in splits.items()
            for metric in metrics
        )
    )


def _score(
    group: RunGroup, shared: Sequence[int], model: str, split: str, metric: str
) -> dict[str, list[float | None]]:
    """Return mean and worst decile over clients (mean over seeds), and both kinds of spread."""
    seeds = [
        {r.round: r.scores.get(model, {}).get(split, {}).get(metric) for r in run.records}
        for run in group.runs
    ]
    columns: dict[str, list[float | None]] = {n: [] for n in ("mean", "worst", "seeds", "clients")}
    for number in shared:
        summaries = [s for seed in seeds if (s := seed.get(number)) is not None]
        is_complete = len(summaries) == len(seeds)
        means = [s["mean"] for s in summaries]
        columns["mean"].append(_tidy(fmean(means)) if is_complete else None)
        columns["worst"].append(
            _tidy(fmean(s["worst_decile"] for s in summaries)) if is_complete else None
        )
        columns["clients"].append(
            _tidy(fmean(s["std"] for s in summaries)) if is_complete else None
        )
        columns["seeds"].append(_tidy(stdev(means)) if is_complete and len(means) > 1 else None)
    return columns


def _ledger(group: RunGroup) -> dict[str, Any]:
    """Return costs and the algorithm's own metrics, round by round."""
    shared = _thin(_shared_rounds(group, lambda r: r.round > 0))
    drawn_rounds = set(shared)
    rounds = [{r.round: r for r in run.records if r.round in drawn_rounds} for run in group.runs]
    info = dict.fromkeys(name for seed in rounds for r in seed.values() for name in r.metrics)
    series: dict[str, Callable[[RoundRecord], float | None]] = {
        "up, share of dense": lambda r: r.bytes_up / r.dense_up if r.dense_up else None,
        "down, share of dense": lambda r: r.bytes_down / r.dense_down if r.dense_down else None,
        "up, over the entropy bound": lambda r: r.bytes_up / r.entropy_up if r.entropy_up else None,
        "down, over the entropy bound": lambda r: (
            r.bytes_down / r.entropy_down if r.entropy_down else None
        ),
        "bytes up per client": lambda r: r.bytes_up / r.trained if r.trained else None,
        "bytes down per client": lambda r: r.bytes_down / r.trained if r.trained else None,
    }
    for phase in dict.fromkeys(
        name for seed in rounds for r in seed.values() for name in r.seconds
    ):
        series[f"seconds: {phase}"] = partial(_phase, phase)
    for name in info:
        series[f"reported: {name}"] = partial(_reported, name)
    return {
        "round": shared,
        "y": {
            name: [_mean(value(seed[number]) for seed in rounds) for number in shared]
            for name, value in series.items()
        },
    }


def _phase(name: str, round: RoundRecord) -> float | None:
    return round.seconds.get(name, 0.0)


def _reported(name: str, round: RoundRecord) -> float | None:
    return round.metrics.get(name)


def _mean(values: Any) -> float | None:
    numbers = list(values)
    return None if any(value is None for value in numbers) else _tidy(fmean(numbers))


def _clients(group: RunGroup, model: str) -> list[dict[str, Any]]:
    """Return the score of every client, by run; runs with the same `pair` saw the same rows."""
    runs: list[dict[str, Any]] = []
    for run in group.runs:
        scores = run.clients.get((model, "test"))
        if scores is not None and run.score in scores.values:
            runs.append(
                {
                    "seed": run.seed,
                    "pair": f"{run.seed} {run.data_checksum}",
                    "round": run.clients_round,
                    "ids": list(scores.clients),
                    "rows": list(scores.samples),
                    "values": [_tidy(value) for value in scores.values[run.score]],
                }
            )
    return runs


def _anatomy(group: RunGroup) -> dict[str, Any] | None:
    """Return the sparsity of the first seed's last state, unless it is dense."""
    anatomy = read_anatomy(group.runs[0].path)
    return asdict(anatomy) if anatomy is not None and anatomy.parsimonious else None


def _totals(group: RunGroup) -> dict[str, float | None]:
    costs: dict[str, Callable[[RoundRecord], float | None]] = {
        "up": lambda r: r.bytes_up,
        "down": lambda r: r.bytes_down,
        "dense_up": lambda r: r.dense_up,
        "dense_down": lambda r: r.dense_down,
        "entropy_up": lambda r: r.entropy_up,
        "entropy_down": lambda r: r.entropy_down,
    }
    return {name: total(group, cost) for name, cost in costs.items()}


def _shared_rounds(group: RunGroup, wanted: Callable[[RoundRecord], bool]) -> list[int]:
    sets = [_numbers(run, wanted) for run in group.runs]
    return sorted(set.intersection(*sets))


def _numbers(run: RunData, wanted: Callable[[RoundRecord], bool]) -> set[int]:
    return {round.round for round in run.records if wanted(round)}


def _thin(numbers: Sequence[int]) -> list[int]:
    """Keep at most `MOST_POINTS` rounds, evenly spread, with the first and the last."""
    if len(numbers) <= MOST_POINTS:
        return list(numbers)
    step = (len(numbers) - 1) / (MOST_POINTS - 1)
    return [numbers[round(at * step)] for at in range(MOST_POINTS)]


def _tidy(value: float) -> float | None:
    """Return a number for JSON, with six digits; None if it is not finite."""
    return float(f"{value:.6g}") if math.isfinite(value) else None
