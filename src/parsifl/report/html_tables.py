"""The tables of the page: headline, paired gains, ledger, configuration differences."""

from __future__ import annotations

from collections.abc import Sequence

from parsifl.engine.run_dir import RunData
from parsifl.report import formatting
from parsifl.report.groups import Section, differences
from parsifl.report.paired_gains import Gain, baselines, gains
from parsifl.report.summary import ModelScore, Number, Row, rows, total
from parsifl.report.table import Cell, Column, Grid, mark_best, scored

_EMPTY = Cell(formatting.MISSING)
_PHASES = {"local": "local work", "aggregate": "aggregation", "evaluate": "evaluation"}


def headline_sheet(section: Section, name: str) -> Grid:
    """Return the first table of a section."""
    table_rows = rows(section)
    protocols, marks = _protocols(table_rows, scores=_evaluated(section))
    labels = [Cell(f"{row.label}{mark}") for row, mark in zip(table_rows, marks, strict=True)]
    columns = [
        (Column("algorithm", numeric=False), labels),
        *(_score_columns(section, table_rows) if _evaluated(section) else ()),
        (Column("bytes up", "bytes up"), [_size(row.bytes_up) for row in table_rows]),
        (Column("bytes down", "bytes down"), [_size(row.bytes_down) for row in table_rows]),
        (Column("time", "seconds"), [_seconds(row.seconds) for row in table_rows]),
        (
            Column("rounds"),
            [_rounds(row, g.runs) for row, g in zip(table_rows, section.groups, strict=True)],
        ),
        (Column("seeds"), [Cell(str(len(row.seeds)), len(row.seeds)) for row in table_rows]),
    ]
    headings = tuple(heading for heading, _ in columns)
    return Grid(name, "Results", headings, _transposed([cells for _, cells in columns]), protocols)


def _evaluated(section: Section) -> bool:
    return any(run.evaluates for run in section.runs)


def _score_columns(section: Section, table_rows: Sequence[Row]) -> list[tuple[Column, list[Cell]]]:
    score, better = section.score, section.maximize
    title = f"{score}, %" if score in formatting.PERCENT else score
    shared = [row.global_model for row in table_rows]
    personal = [row.personal_model for row in table_rows]
    parts = (
        (shared, "mean", better, Column(f"global {title}", f"global {score}")),
        (personal, "mean", better, Column(f"personal {title}", f"personal {score}")),
        (
            personal,
            "std",
            False,
            Column("std over clients", f"personal {score}, std over clients"),
        ),
        (
            personal,
            "worst_decile",
            better,
            Column("worst decile", f"personal {score}, worst decile of clients"),
        ),
    )
    return [
        (column, _best([_part(each, part, score) for each in scores], larger))
        for scores, part, larger, column in parts
    ]


def _protocols(table_rows: Sequence[Row], *, scores: bool) -> tuple[tuple[str, ...], list[str]]:
    """Return the protocol sentences, and a mark for each row if they differ."""
    row_protocols = [
        tuple(
            table_rows.protocol
            for table_rows in (row.global_model, row.personal_model)
            if table_rows
        )
        for row in table_rows
    ]
    # an algorithm without a global model does not follow another protocol
    kinds: dict[str, set[str]] = {"Global": set(), "Personal": set()}
    for texts in row_protocols:
        for text in texts:
            kinds[text.partition(":")[0]].add(text)
    closing = ["Bytes and time are totals of a run; time is wall time, including evaluation."]
    if scores:
        closing[0] = (
            "Spread and worst decile are those of the personal models; the worst decile is the "
            f"mean over the worst tenth of clients. {closing[0]}"
        )
    if any(len(row.seeds) > 1 for row in table_rows):
        closing.append("± is the standard deviation over seeds; costs are means over seeds.")
    if all(len(texts) <= 1 for texts in kinds.values()):
        return (*(text for texts in kinds.values() for text in texts), *closing), [""] * len(
            row_protocols
        )
    distinct = list(dict.fromkeys(texts for texts in row_protocols if texts))
    marks = [f" ({distinct.index(texts) + 1})" if texts else "" for texts in row_protocols]
    sentences = [f"({at}) {' '.join(texts)}" for at, texts in enumerate(distinct, start=1)]
    return (*sentences, *closing), marks


def ledger_sheet(section: Section, name: str) -> Grid:
    """Return the bytes of the runs, compared with dense messages and the entropy bound."""
    body = []
    for row, group in zip(rows(section), section.groups, strict=True):
        visits = sum(r.trained for run in group.runs for r in run.records)
        sent = sum(r.bytes_up for run in group.runs for r in run.records)
        bounds = (total(group, lambda r: r.entropy_up), total(group, lambda r: r.entropy_down))
        body.append(
            (
                Cell(row.label),
                *_against(row.bytes_up, row.dense_up, bounds[0]),
                *_against(row.bytes_down, row.dense_down, bounds[1]),
                Cell(formatting.size(sent / visits), sent / visits) if visits else _EMPTY,
            )
        )
    parts = ("", ", dense", ", share", ", bound", ", over bound")
    titles = (*(f"{way}{part}" for way in ("up", "down") for part in parts), "up per visit")
    headings = (Column("algorithm", numeric=False), *(Column(title) for title in titles))
    notes = (
        "Bytes of a whole run, averaged over seeds. Dense: the same messages with all entries "
        "sent; a share slightly above 100 % is due to message headers. Bound: log2 "
        "C(d, k) bits for the positions of the k non-zeros of a tensor of d entries, plus the "
        "values (for a low-rank matrix its factors, r (d1 + d2) numbers); no lossless code for "
        "such supports is shorter on average. A visit is one client in one round.",
    )
    return Grid(name, "Bytes sent", headings, tuple(body), notes)


def _against(sent: Number, dense: Number, bound: float | None) -> tuple[Cell, ...]:
    """Return bytes, dense bytes, the share, the bound, and the excess over the bound."""
    known = bound is not None and bound > 0
    over = sent.mean / bound - 1 if bound is not None and known else None
    return (
        _size(sent),
        _size(dense),
        _share(sent, dense),
        Cell(formatting.size(bound), bound) if bound is not None else _EMPTY,
        Cell(f"{100 * over:+.1f} %", over) if over is not None else _EMPTY,
    )


def cost_sheet(section: Section, name: str) -> Grid:
    """Return operations, time by phase, and failures of the runs."""
    phases = list(
        dict.fromkeys(name for run in section.runs for r in run.records for name in r.seconds)
    )
    body = []
    for row, group in zip(rows(section), section.groups, strict=True):
        flops = _flops(group.runs)
        body.append(
            (
                Cell(row.label),
                _EMPTY if flops is None else Cell(formatting.operations(flops), flops),
                *_times(group.runs, phases),
                _seconds(row.simulated_seconds),
                *_mishaps(group.runs),
            )
        )
    titles = (
        *("FLOPs", *(_PHASES.get(phase, phase) for phase in phases), "simulated time"),
        *("dropped", "fallbacks"),
    )
    headings = (Column("algorithm", numeric=False), *(Column(title) for title in titles))
    notes = (
        "Totals of a whole run, averaged over seeds; dropped and fallbacks are summed. Simulated "
        "time: rounds on the configured network and devices, the slowest client of each round. "
        "Dropped: visits without a usable result.",
    )
    return Grid(name, "Time and work", headings, tuple(body), notes)


def gain_sheets(section: Section, name: str) -> list[Grid]:
    """Return a table of paired gains for each baseline among the runs."""
    return [
        _gain_sheet(section, f"{name}-{baseline.algorithm}", gains(section, baseline))
        for baseline in baselines(section)
        if gains(section, baseline)
    ]


def _gain_sheet(section: Section, name: str, group_gains: Sequence[Gain]) -> Grid:
    percent = section.score in formatting.PERCENT
    unit = "points" if percent else section.score
    body = [
        (
            Cell(gain.group.label),
            Cell(str(len(gain.by_seed)), len(gain.by_seed)),
            _signed(gain.mean, section.score),
            _EMPTY if gain.margin is None else Cell(_interval(gain, section.score), gain.margin),
            _signed(gain.median_client, section.score),
            _fraction(gain.share(1)),
            _fraction(gain.share(-1)),
        )
        for gain in group_gains
    ]
    headings = (
        Column("algorithm", numeric=False),
        Column("seeds"),
        Column(f"gain, {unit}", "mean gain over seeds"),
        Column("95 % interval", "half width of the 95 % interval"),
        Column("median client", "median gain over clients"),
        Column("clients better", "share of clients better"),
        Column("clients worse", "share of clients worse"),
    )
    over = group_gains[0].baseline.label
    rounds = sorted({run.clients_round for run in section.runs if run.clients_round is not None})
    notes = (
        f"Personal {section.score} on test rows; positive is better than {over}. Paired by seed: "
        "the mean of the differences, with a t-interval where there are several seeds. Clients "
        "are paired one by one, in the last evaluated round"
        + (f" ({', '.join(map(str, rounds))})." if rounds else "."),
    )
    return Grid(name, f"Gain over {over}", headings, tuple(body), notes)


def difference_sheet(section: Section, name: str) -> Grid | None:
    """Return the fields on which the configurations differ; None if there are none."""
    fields = differences([group.config for group in section.groups])
    if not fields:
        return None
    labels = [group.label for group in section.groups]
    body = tuple(
        (Cell(field), *(Cell(_shown(value)) for value in values))
        for field, values in fields.items()
    )
    headings = tuple(Column(title, numeric=False) for title in ("field", *labels))
    return Grid(name, "What differs", headings, body)


def _shown(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _transposed(columns: Sequence[Sequence[Cell]]) -> tuple[tuple[Cell, ...], ...]:
    return tuple(zip(*columns, strict=True))


def _best(cells: Sequence[Cell], maximize: bool) -> list[Cell]:
    return list(mark_best(cells, maximize))


def _part(scored_model: ModelScore | None, part: str, score: str) -> Cell:
    if scored_model is None:
        return _EMPTY
    number: Number = getattr(scored_model, part)
    cell = scored(number.mean, number.spread, score)
    return Cell(cell.text, cell.value, cell.spread, hint=scored_model.protocol)


def _size(number: Number) -> Cell:
    return Cell(formatting.size(number.mean), number.mean, number.spread)


def _seconds(number: Number) -> Cell:
    return Cell(formatting.seconds(number.mean), number.mean, number.spread)


def _share(part: Number, total: Number) -> Cell:
    if not total.mean:
        return _EMPTY
    return Cell(formatting.share(part.mean, total.mean), part.mean / total.mean)


def _fraction(value: float | None) -> Cell:
    return _EMPTY if value is None else Cell(f"{100 * value:.0f} %", value)


def _signed(value: float | None, score: str) -> Cell:
    if value is None:
        return _EMPTY
    text = formatting.score(abs(value), score, unit=False)
    zero = not float(text)
    sign = "" if zero else "+" if value > 0 else "\N{MINUS SIGN}"
    return Cell(sign + text, value)


def _interval(gain: Gain, score: str) -> str:
    return f"± {formatting.score(gain.margin, score, unit=False)}"


def _rounds(row: Row, runs: Sequence[RunData]) -> Cell:
    """Return the number of finished rounds, and the total if some are missing."""
    wanted = max((run.target or 0 for run in runs), default=0)
    more = f" of {wanted}" if wanted > min(row.rounds) else ""
    return Cell(_range(row.rounds) + more, max(row.rounds))


def _range(values: Sequence[int]) -> str:
    low, high = min(values), max(values)
    return str(low) if low == high else f"{low} to {high}"


def _flops(runs: Sequence[RunData]) -> float | None:
    counts = [r.flops for run in runs for r in run.records]
    known = [count for count in counts if count is not None]
    return sum(known) / len(runs) if known and len(known) == len(counts) else None


def _times(runs: Sequence[RunData], phases: Sequence[str]) -> list[Cell]:
    return [
        _seconds(Number.of([sum(r.seconds.get(phase, 0.0) for r in run.records) for run in runs]))
        for phase in phases
    ]


def _mishaps(runs: Sequence[RunData]) -> list[Cell]:
    dropped = sum(len(r.dropped) for run in runs for r in run.records)
    fallbacks = sum(len(r.notes) for run in runs for r in run.records)
    return [Cell(str(dropped), dropped), Cell(str(fallbacks), fallbacks)]
