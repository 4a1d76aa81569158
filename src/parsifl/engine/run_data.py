"""A recorded run, read from its directory or taken from memory.

Reading is lenient, with a note for everything that was left out: a run may be in progress or its
files damaged, and a report should still show the rest.
"""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from parsifl.core.errors import CheckpointError
from parsifl.engine.record import MODELS, RoundRecord
from parsifl.engine.summary import headline, select_round

_DEEPEST = 4  # levels of directories that are searched for run directories
DAMAGED = (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError)
"""What a damaged file may raise where it is read."""


@dataclass(frozen=True)
class ScoreTable:
    """The metrics of every evaluated client, for one model and split."""

    clients: tuple[int, ...]
    samples: tuple[int, ...]
    values: Mapping[str, tuple[float, ...]]


@dataclass(frozen=True)
class RunData:
    """A run as its directory describes it.

    Attributes
    ----------
    clients
        The scores of each client, by (model, split), in the round `clients_round`.
    notes
        What a reader should know: damaged lines, missing files.
    target
        How many rounds the run is to have; None if unknown.
    """

    path: Path
    config: Mapping[str, Any]
    records: Sequence[RoundRecord] = ()
    clients: Mapping[tuple[str, str], ScoreTable] = field(default_factory=dict)
    clients_round: int | None = None
    environment: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    target: int | None = None

    @property
    def algorithm(self) -> str:
        """The name of the algorithm."""
        return str(self.config["algorithm"]["name"])

    @property
    def score(self) -> str:
        """The metric that is reported first."""
        return str(self.config["problem"]["score"])

    @property
    def maximize(self) -> bool:
        """Whether a larger score is better."""
        return bool(self.config["problem"].get("maximize", True))

    @property
    def seed(self) -> int:
        """The seed."""
        return int(self.config["run"]["seed"])

    @property
    def data(self) -> str:
        """The name of the dataset."""
        return str(_table(self.config, "data").get("name", ""))

    @property
    def data_checksum(self) -> str:
        """Equal if two runs saw the same rows on the same clients."""
        return str(_table(self.config, "data").get("checksum", ""))

    @property
    def evaluation(self) -> Mapping[str, Any]:
        """How models were evaluated."""
        return _table(_table(self.config, "run"), "evaluation")

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The records as JSON values, as in metrics.jsonl."""
        return [record.to_json() for record in self.records]

    def evaluated(self, model: str, split: str = "test") -> list[RoundRecord]:
        """Return the rounds in which a model has a finite score on a split."""
        found = ((r, r.scores.get(model, {}).get(split, {}).get(self.score)) for r in self.records)
        return [r for r, scores in found if scores is not None and math.isfinite(scores["mean"])]

    def selecting_split(self, model: str) -> str | None:
        """Return the split that decides which round is the headline; None: the last round is."""
        split = {"best-test": "test", "best-validation": "validation"}.get(
            str(self.evaluation.get("select", "last"))
        )
        return split if split is not None and self.evaluated(model, split) else None

    def selected(self, model: str) -> RoundRecord | None:
        """Return the round that the protocol selects for a model; None: it was never evaluated."""
        split = self.selecting_split(model)
        select = "last" if split is None else f"best-{split}"
        return select_round(self.evaluated(model), model, self.score, self.maximize, select)

    def summary(self) -> dict[str, Any]:
        """Return the headline numbers, from the round that the evaluation selects."""
        select = str(self.evaluation.get("select", "last"))
        return headline(self.records, self.score, self.maximize, select)

    def __repr__(self) -> str:
        return f"RunData({self.algorithm} on {self.data or 'own data'}, {len(self.records)} rounds)"


def find_runs(paths: Iterable[Path]) -> list[Path]:
    """Return run directories: each path itself, or all below it, damaged ones included."""
    found: list[Path] = []
    for path in paths:
        if (path / "config.toml").exists() or not path.is_dir():
            found.append(path)
        else:
            found.extend(list(_below(path, _DEEPEST)) or [path])
    return list(dict.fromkeys(found))


def _below(path: Path, levels: int) -> Iterator[Path]:
    for child in sorted(child for child in path.iterdir() if child.is_dir()):
        if any((child / name).is_file() for name in ("config.toml", "metrics.jsonl")):
            yield child
        elif levels > 1:
            yield from _below(child, levels - 1)


def read_runs(paths: Sequence[Path], left_out: list[str] | None = None) -> list[RunData]:
    """Read every run directory that the paths name or contain.

    Parameters
    ----------
    paths
        Run directories, or folders that contain run directories.
    left_out
        Receives the reason for every directory below a path that cannot be read. None: such a
        directory raises, as one that was named itself always does.
    """
    if not paths:
        raise CheckpointError("no run directory was named; give at least one")
    found: list[RunData] = []
    for path in find_runs(paths):
        try:
            found.append(open_run(path))
        except CheckpointError as error:
            if left_out is None or path in paths:
                raise
            left_out.append(f"left out: {error}")
    if not found:
        raise CheckpointError(f"no run directory can be read:\n  {'; '.join(left_out or ())}")
    return found


def open_run(path: str | Path) -> RunData:
    """Read a run directory; raise CheckpointError if it is none."""
    path = Path(path)
    config = _config(path)
    notes: list[str] = []
    records = _records(path / "metrics.jsonl", notes)
    clients_round, clients = _clients(path / "clients.json", notes)
    environment = _json(path / "environment.json", notes)
    if records and not any(record.scores for record in records):
        notes.append("no round has been evaluated yet")
    target = _target(path / "target.json", notes)
    if records and target is not None and len(records) < target and not records[-1].stopped:
        notes.append(f"{len(records)} of {target} rounds are finished")
    return RunData(path, config, records, clients, clients_round, environment, tuple(notes), target)


def _target(file: Path, notes: list[str]) -> int | None:
    rounds = _json(file, notes).get("rounds")
    return rounds if isinstance(rounds, int) else None


def _config(path: Path) -> dict[str, Any]:
    if not path.is_dir():
        raise CheckpointError(f"run directory not found: {path}")
    try:
        config = tomllib.loads((path / "config.toml").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} is not a run directory: neither it nor a directory inside it has a "
            "config.toml; name one that `parsifl run --out` or simulate(run_dir=...) made"
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError, RecursionError) as error:
        raise CheckpointError(f"{path / 'config.toml'} cannot be read: {error}") from None
    for table, name, kind in (
        ("algorithm", "name", str),
        ("problem", "score", str),
        ("run", "seed", int),
    ):
        if not isinstance(_table(config, table).get(name), kind):
            raise CheckpointError(
                f"{path} is not a run directory: its config.toml has no {table}.{name}"
            )
    return config


def _table(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = config.get(name, {})
    return found if isinstance(found, Mapping) else {}


def _records(file: Path, notes: list[str]) -> tuple[RoundRecord, ...]:
    try:
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    found: dict[int, RoundRecord] = {}
    damaged: list[int] = []
    for number, line in enumerate(lines, start=1):
        try:
            record = RoundRecord.from_json(json.loads(line))
        except DAMAGED:
            damaged.append(number)
            continue
        found[record.round] = record
    if damaged:
        where = ", ".join(map(str, damaged[:5])) + (" ..." if len(damaged) > 5 else "")
        plural = "s" if len(damaged) > 1 else ""
        notes.append(f"metrics.jsonl: damaged line{plural} {where} left out")
    if not found:
        notes.append("no round has been finished yet")
    return tuple(found[number] for number in sorted(found))


def _clients(file: Path, notes: list[str]) -> tuple[int | None, dict[tuple[str, str], ScoreTable]]:
    found = _json(file, notes)
    try:
        scores = {
            (model, split): _client_scores(values)
            for model in MODELS
            for split, values in found.get(model, {}).items()
        }
        return (int(found["round"]) if scores else None), scores
    except DAMAGED:
        notes.append(f"{file.name} is damaged and left out")
        return None, {}


def _client_scores(values: Mapping[str, Any]) -> ScoreTable:
    clients = tuple(int(client) for client in values["clients"])
    samples = tuple(int(count) for count in values["samples"])
    columns = {
        str(name): tuple(float(value) for value in column)
        for name, column in values.items()
        if name not in ("clients", "samples")
    }
    if any(len(column) != len(clients) for column in (samples, *columns.values())):
        raise ValueError("columns of unequal length")
    return ScoreTable(clients, samples, columns)


def _json(file: Path, notes: list[str]) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, *DAMAGED):
        found = None
    if not isinstance(found, dict):
        notes.append(f"{file.name} is damaged and left out")
        return {}
    return found
