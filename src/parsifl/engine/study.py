"""Studies: jobs in several processes, and grids of experiments, each in its own directory.

The best combination is selected on validation rows if there are any: a test score that was used
for selection is optimistic.
"""

from __future__ import annotations

import itertools
import math
import multiprocessing
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

from parsifl.core.errors import ConfigError, ParsiflError
from parsifl.engine.experiment import Experiment
from parsifl.engine.record import MODELS
from parsifl.engine.run import Run
from parsifl.engine.safe_files import locked

_SEPARATORS = re.compile(r"[/\\%\0]")
Grid = Mapping[str, Sequence[Any]]
T = TypeVar("T")
Split = Literal["validation", "test"]


def run_jobs(jobs: Sequence[Callable[[], T]], processes: int = 1) -> Iterator[tuple[int, T]]:
    """Run jobs in this process, or in several; yield the index and the result of each.

    Results are yielded as they complete. Jobs that run in other processes must be picklable. The
    cores are divided among the processes. If the caller is interrupted or killed, or closes the
    iterator, running jobs are terminated; after an error in a job, waiting jobs are cancelled.
    """
    if processes < 1:
        raise ConfigError(f"jobs must be at least 1, got {processes}")
    if processes == 1 or len(jobs) < 2:
        for number, job in enumerate(jobs):
            yield number, job()
        return
    cores = max(1, (os.cpu_count() or 1) // processes)
    context = multiprocessing.get_context("spawn")  # forked processes of torch may hang
    others = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(
        min(processes, len(jobs)), mp_context=context, initializer=_start_worker, initargs=(cores,)
    )
    try:
        waiting = {pool.submit(job): number for number, job in enumerate(jobs)}
        for done in as_completed(waiting):
            yield waiting[done], done.result()
    except BrokenProcessPool:
        raise ParsiflError(
            "a worker process was killed, perhaps because the machine ran out of memory; finished "
            f"jobs are kept: repeat the command with fewer than {processes} processes (--jobs)"
        ) from None
    except (KeyboardInterrupt, GeneratorExit):
        # the pool has already handed out some of the waiting jobs, which would still start
        for process in set(multiprocessing.active_children()) - others:
            process.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _start_worker(cores: int) -> None:
    import torch

    torch.set_num_threads(cores)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    # otherwise workers would wait forever if the process of the pool is killed
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


@dataclass(frozen=True)
class Point:
    """One combination of settings, one directory per seed below it."""

    settings: dict[str, Any]

    @property
    def label(self) -> str:
        """The settings as the name of one directory; separators are written as %2F."""
        text = ",".join(f"{name}={value}" for name, value in self.settings.items()) or "default"
        return _SEPARATORS.sub(lambda sign: f"%{ord(sign[0]):02X}", text)


@dataclass(frozen=True)
class GridResult:
    """The results of one point: the headline of each seed's run, and its validation scores."""

    point: Point
    summaries: tuple[dict[str, Any], ...]
    validation: tuple[dict[str, float], ...] = ()

    def mean(self, model: str, split: Split = "test") -> float | None:
        """Return the mean score over seeds of the global or the personal model."""
        if split == "validation":
            known = [scores[model] for scores in self.validation if model in scores]
        else:
            known = [
                summary["mean"] for each in self.summaries if (summary := each[model]) is not None
            ]
        if not known or len(known) < len(self.summaries):
            return None
        return math.fsum(known) / len(known)


def points(grid: Grid) -> list[Point]:
    """Return every combination of a grid.

    >>> [point.label for point in points({"lr": [0.1, 0.2], "mu": [1]})]
    ['lr=0.1,mu=1', 'lr=0.2,mu=1']
    """
    for name, values in grid.items():
        if not values:
            raise ConfigError(f"the grid gives no value for '{name}'")
    return [
        Point(dict(zip(grid, values, strict=True))) for values in itertools.product(*grid.values())
    ]


def experiments(base: Experiment, grid: Grid, seeds: int) -> Iterator[tuple[Point, Experiment]]:
    """Yield every experiment; all are built, and thereby checked, before the first one runs."""
    if seeds < 1:
        raise ConfigError(f"seeds must be at least 1, got {seeds}")
    if "seed" in grid:
        raise ConfigError("a grid has no seeds: set the number of seeds per combination (--seeds)")
    planned = []
    for point in points(grid):
        for seed in range(base.seed, base.seed + seeds):
            experiment = replace(base.vary(point.settings), seed=seed)
            experiment.build_algorithm()
            planned.append((point, experiment))
    return iter(planned)


def sweep(
    base: Experiment,
    grid: Grid,
    seeds: int,
    run: Callable[[Experiment, Path], Run],
    folder: Path,
    processes: int = 1,
) -> list[GridResult]:
    """Run the whole grid; `run` resumes what an earlier sweep left unfinished.

    With several `processes`, `run` must be picklable. Another sweep in the same directory is an
    error.
    """
    planned = list(experiments(base, grid, seeds))  # errors are raised before anything is created
    jobs = [
        partial(_headline, run, experiment, folder / point.label / f"seed-{experiment.seed}")
        for point, experiment in planned
    ]
    with locked(folder):
        finished = dict(run_jobs(jobs, processes))
    outcomes: dict[str, GridResult] = {}
    for number, (point, _) in enumerate(planned):
        summary, validation = finished[number]
        before = outcomes.get(point.label, GridResult(point, ()))
        outcomes[point.label] = replace(
            before,
            summaries=(*before.summaries, summary),
            validation=(*before.validation, validation),
        )
    return list(outcomes.values())


def _headline(
    run: Callable[[Experiment, Path], Run], experiment: Experiment, folder: Path
) -> tuple[dict[str, Any], dict[str, float]]:
    finished = run(experiment, folder)
    return finished.summary(), _validation(finished)


def _validation(run: Run) -> dict[str, float]:
    """Return the validation score of each model, in the round of its headline numbers."""
    summary, records = run.summary(), {record.round: record for record in run.records}
    scores: dict[str, float] = {}
    for model in MODELS:
        record = records.get(summary[f"{model}_round"])
        if record is not None and "validation" in record.scores[model]:
            scores[model] = record.scores[model]["validation"][summary["score"]]["mean"]
    return scores


def chosen_by(outcomes: Sequence[GridResult], model: str) -> Split:
    """Return which rows select the best: test rows only if there are no validation rows."""
    is_complete = all(outcome.mean(model, "validation") is not None for outcome in outcomes)
    return "validation" if is_complete else "test"


def best(outcomes: Sequence[GridResult], model: str, maximize: bool) -> GridResult:
    """Return the outcome with the best mean score of a model, on the rows of `chosen_by`."""
    if model not in MODELS:
        raise ConfigError(f"model must be one of {', '.join(MODELS)}, got '{model}'")
    split = chosen_by(outcomes, model)
    scored = [(outcome.mean(model, split), outcome) for outcome in outcomes]
    known = [(score, outcome) for score, outcome in scored if score is not None]
    if not known:
        raise ConfigError(f"no run of this sweep has a {model} model; choose the other one")
    sign = 1.0 if maximize else -1.0
    return max(known, key=lambda pair: sign * pair[0])[1]
