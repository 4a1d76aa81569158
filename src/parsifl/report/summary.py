"""The headline: one row for each configuration, every number with its protocol."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from parsifl.core.text import visible
from parsifl.engine.record import RoundRecord
from parsifl.engine.run_dir import RunData
from parsifl.report import formatting
from parsifl.report.groups import RunGroup, Section, sections


@dataclass(frozen=True)
class Number:
    """A mean over seeds, with their standard deviation (None for a single seed)."""

    mean: float
    spread: float | None = None

    @staticmethod
    def of(values: Sequence[float]) -> Number:
        """Summarise one value per seed."""
        return Number(fmean(values), stdev(values) if len(values) > 1 else None)


@dataclass(frozen=True)
class ModelScore:
    """The score of one kind of model: mean, spread and worst tenth over clients.

    Attributes
    ----------
    protocol
        Which model, clients, split, round and weighting, in words.
    """

    mean: Number
    std: Number
    worst_decile: Number
    protocol: str


@dataclass(frozen=True)
class Row:
    """The headline numbers of one configuration; costs are totals of a run, averaged over seeds."""

    label: str
    algorithm: str
    data: str
    score: str
    maximize: bool
    seeds: tuple[int, ...]
    rounds: tuple[int, ...]
    global_model: ModelScore | None
    personal_model: ModelScore | None
    bytes_up: Number
    bytes_down: Number
    dense_up: Number
    dense_down: Number
    seconds: Number
    simulated_seconds: Number


def headline(runs: Sequence[RunData]) -> list[Row]:
    """Return a row for every configuration; the seeds of one configuration share a row."""
    return [row for section in sections(runs) for row in rows(section)]


def rows(section: Section) -> list[Row]:
    """Return the rows of one section."""
    return [_row(group) for group in section.groups]


def total(group: RunGroup, cost: Callable[[RoundRecord], float | None]) -> float | None:
    """Return a cost of a whole run, averaged over seeds; None if a round does not record it."""
    costs = [[cost(round) for round in run.records] for run in group.runs]
    known = [[value for value in run if value is not None] for run in costs]
    return fmean(map(sum, known)) if known == costs else None


def _row(group: RunGroup) -> Row:
    def summed(cost: Callable[[RoundRecord], float]) -> Number:
        return Number.of([sum(map(cost, run.records)) for run in group.runs])

    first = group.runs[0]
    return Row(
        label=group.label,
        algorithm=group.algorithm,
        data=first.data,
        score=first.score,
        maximize=first.maximize,
        seeds=tuple(run.seed for run in group.runs),
        rounds=tuple(len(run.records) for run in group.runs),
        global_model=_model_score(group, "global"),
        personal_model=_model_score(group, "personal"),
        bytes_up=summed(lambda r: r.bytes_up),
        bytes_down=summed(lambda r: r.bytes_down),
        dense_up=summed(lambda r: r.dense_up),
        dense_down=summed(lambda r: r.dense_down),
        seconds=summed(lambda r: sum(r.seconds.values())),
        simulated_seconds=summed(lambda r: r.simulated_seconds),
    )


def _model_score(group: RunGroup, model: str) -> ModelScore | None:
    chosen = [
        (run, selected) for run in group.runs if (selected := run.selected(model)) is not None
    ]
    if not chosen:
        return None
    summaries = [selected.scores[model]["test"][run.score] for run, selected in chosen]
    return ModelScore(
        mean=Number.of([summary["mean"] for summary in summaries]),
        std=Number.of([summary["std"] for summary in summaries]),
        worst_decile=Number.of([summary["worst_decile"] for summary in summaries]),
        protocol=_protocol(chosen[0][0], model, [selected.round for _, selected in chosen]),
    )


def _protocol(run: RunData, model: str, chosen: Iterable[int]) -> str:
    steps = int(run.evaluation.get("fine_tune_steps", 0))
    epochs = float(run.evaluation.get("fine_tune_epochs", 0.0))
    tuned = f" after {steps} fine-tuning step{'s' if steps > 1 else ''}" if steps else ""
    if epochs:
        tuned = f" after {epochs:g} epoch{'s' if epochs != 1 else ''} of fine-tuning"
    what = (
        f"Personal: each client's own model{tuned}, on its own test rows"
        if model == "personal"
        else "Global: the server's model, on the test rows of each client"
    )
    weighting = run.evaluation.get("weighting", "samples")
    training = run.config.get("algorithm", {}).get("weighting", weighting)
    other = "" if training == weighting else f" (in training {_weighted(training, 'training')})"
    return (
        f"{what}; {evaluated_clients(run, model)}; {_rule(run, model, chosen)}; "
        f"mean over clients {_weighted(weighting, 'test')}{other}."
    )


def _weighted(weighting: str, rows: str) -> str:
    return f"weighted by {rows} rows" if weighting == "samples" else "unweighted"


def evaluated_clients(run: RunData, model: str) -> str:
    """Return which clients a model was evaluated on, in words."""
    scores = run.clients.get((model, "test"))
    total = run.config.get("data", {}).get("clients")
    count = total if scores is None else len(scores.clients)
    who = str(run.evaluation.get("clients", "all"))
    if who == "sampled":
        return f"the {count} clients that have trained"
    if who == "unseen":
        return f"{count} clients that never train"
    return "all clients" if count is None else f"all {count} clients"


def _rule(run: RunData, model: str, chosen: Iterable[int]) -> str:
    rounds = sorted(set(chosen))
    where = f"{rounds[0]}" if len(rounds) == 1 else f"{rounds[0]} to {rounds[-1]}"
    split = run.selecting_split(model)
    if split is None:
        asked = str(run.evaluation.get("select", "last"))
        lacking = "" if asked == "last" else f" ({asked} was requested, but there are no such rows)"
        return f"last evaluated round ({where}){lacking}"
    return f"round that is best on {split} rows ({where})"


def render(rows: Sequence[Row]) -> Table:
    """Return the rows as a table for the terminal."""
    scores = list(dict.fromkeys(row.score for row in rows)) or ["score"]
    title = _plain(scores[0]) if len(scores) == 1 else None
    several = any(len(row.seeds) > 1 for row in rows)
    caption = _caption(rows, several)
    table = Table(title=title, caption=caption, caption_justify="left", box=SIMPLE_HEAD)
    table.collapse_padding, table.pad_edge = True, False
    table.add_column("algorithm", overflow="fold")  # the longest column, which narrows first
    columns = ["global", "personal", "std", "worst 10th", "up", "down", "seconds"]
    for column in [*(["seeds"] if several else []), *(["score"] * (len(scores) > 1)), *columns]:
        # a narrow terminal wraps numbers and cuts none off
        table.add_column(column, justify="right", overflow="fold")
    for row in rows:
        seeds = [str(len(row.seeds))] if several else []
        which = [_plain(row.score)] * (len(scores) > 1)
        table.add_row(_plain(row.label), *seeds, *which, *_cells(row))
    return table


def show(runs: Sequence[RunData]) -> None:
    """Print the headline of some runs."""
    Console().print(render(headline(runs)))


def _cells(row: Row) -> list[str]:
    def shown(score: ModelScore | None, part: str) -> str:
        return formatting.MISSING if score is None else number(getattr(score, part), row.score)

    personal = row.personal_model
    return [
        shown(row.global_model, "mean"),
        shown(personal, "mean"),
        shown(personal, "std"),
        shown(personal, "worst_decile"),
        formatting.size(row.bytes_up.mean),
        formatting.size(row.bytes_down.mean),
        formatting.significant(row.seconds.mean),
    ]


def number(value: Number, score: str) -> str:
    """Return a score, with the spread over seeds if there are several.

    >>> number(Number(0.971, 0.0123), "accuracy")
    '97.1 ± 1.2 %'
    """
    if value.spread is None:
        return formatting.score(value.mean, score)
    spread = formatting.score(value.spread, score)
    return f"{formatting.score(value.mean, score, unit=False)} ± {spread}"


def _caption(rows: Sequence[Row], several: bool) -> str:
    lines = [
        *_protocols([(row.label, row.global_model) for row in rows]),
        *_protocols([(row.label, row.personal_model) for row in rows]),
    ]
    if any(row.personal_model for row in rows):
        lines.append("std and worst tenth are over clients, of the personal models.")
    if several:
        lines.append("± is the standard deviation over seeds; costs are means over seeds.")
    return _plain("\n".join(lines))


def _protocols(scores: Iterable[tuple[str, ModelScore | None]]) -> list[str]:
    """Return how the scores of one model were obtained, with the rows where they differ."""
    rows: dict[str, list[str]] = {}
    for label, score in scores:
        if score is not None:
            rows.setdefault(score.protocol, []).append(label)
    if len(rows) < 2:
        return list(rows)
    parts = [(protocol.partition(":"), labels) for protocol, labels in rows.items()]
    return [f"{model} ({', '.join(labels)}):{rest}" for (model, _, rest), labels in parts]


def _plain(text: str) -> str:
    """Escape rich markup and control characters in names."""
    return visible(text).replace("[", r"\[")
