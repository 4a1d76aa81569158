"""Reads run folders for display: leniently, with a note for everything that was left out."""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from parsifl.core.errors import CheckpointError

MODELS = ("global", "personal")
SPLITS = ("test", "validation")
_DEEPEST = 4  # levels of folders in which run folders are looked for


@dataclass(frozen=True)
class Summary:
    """One metric over clients: mean, standard deviation, mean of the worst tenth."""

    mean: float
    std: float
    worst_decile: float


Scores = Mapping[str, Mapping[str, Mapping[str, Summary]]]  # model -> split -> metric


@dataclass(frozen=True)
class Round:
    """What one round cost, and its scores if it was evaluated."""

    round: int
    cohort: int
    trained: int
    bytes_up: int
    bytes_down: int
    dense_up: int
    dense_down: int
    entropy_up: int | None
    entropy_down: int | None
    flops: int | None
    simulated_seconds: float
    seconds: Mapping[str, float]
    dropped: int
    fallbacks: int
    info: Mapping[str, float]
    scores: Scores


@dataclass(frozen=True)
class ClientScores:
    """The metrics of every judged client, for one model and split."""

    clients: tuple[int, ...]
    samples: tuple[int, ...]
    values: Mapping[str, tuple[float, ...]]


@dataclass(frozen=True)
class RunData:
    """A run as its folder describes it.

    Attributes
    ----------
    clients
        The scores of each client, by (model, split), in the round `clients_round`.
    notes
        What a reader should know: damaged lines, missing files.
    target
        How many rounds the run is to have; None if its folder does not tell.
    """

    path: Path
    config: Mapping[str, Any]
    rounds: tuple[Round, ...] = ()
    clients: Mapping[tuple[str, str], ClientScores] = field(default_factory=dict)
    clients_round: int | None = None
    environment: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    target: int | None = None

    @property
    def algorithm(self) -> str:
        """The name of the method."""
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
        """The name of the data set."""
        return str(_table(self.config, "data").get("name", ""))

    @property
    def data_checksum(self) -> str:
        """Tells whether two runs saw the same rows on the same clients."""
        return str(_table(self.config, "data").get("checksum", ""))

    @property
    def evaluation(self) -> Mapping[str, Any]:
        """How models were judged."""
        return _table(_table(self.config, "run"), "evaluation")

    def judged(self, model: str, split: str = "test") -> list[Round]:
        """Return the rounds in which a model has a finite score on a split."""
        found = ((r, r.scores.get(model, {}).get(split, {}).get(self.score)) for r in self.rounds)
        return [r for r, summary in found if summary is not None and math.isfinite(summary.mean)]


def find(paths: Iterable[Path]) -> list[Path]:
    """Return run folders: each path itself, or all run folders below it, damaged ones included."""
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


def read_all(paths: Sequence[Path], left_out: list[str] | None = None) -> list[RunData]:
    """Read every run folder that the paths name or contain.

    Parameters
    ----------
    paths
        Run folders, or folders that contain run folders.
    left_out
        Gets the reason for every folder below a path that cannot be read; None: that raises, as
        it always does for a folder that was named itself.
    """
    if not paths:
        raise CheckpointError("no run folder was named; give at least one")
    found: list[RunData] = []
    for path in find(paths):
        try:
            found.append(read(path))
        except CheckpointError as error:
            if left_out is None or path in paths:
                raise
            left_out.append(f"left out: {error}")
    if not found:
        raise CheckpointError(f"no run folder can be read:\n  {'; '.join(left_out or ())}")
    return found


def read(path: Path) -> RunData:
    """Read one run folder; CheckpointError if it is none."""
    config = _config(path)
    notes: list[str] = []
    rounds = _rounds(path / "metrics.jsonl", notes)
    clients_round, clients = _clients(path / "clients.json", notes)
    environment = _json(path / "environment.json", notes)
    if rounds and not any(round.scores for round in rounds):
        notes.append("no round has been evaluated yet")
    target = _target(path / "target.json", notes)
    if rounds and target is not None and len(rounds) < target:
        notes.append(f"{len(rounds)} of {target} rounds are finished")
    return RunData(path, config, rounds, clients, clients_round, environment, tuple(notes), target)


def _target(file: Path, notes: list[str]) -> int | None:
    rounds = _json(file, notes).get("rounds")
    return rounds if isinstance(rounds, int) else None


def _config(path: Path) -> dict[str, Any]:
    if not path.is_dir():
        raise CheckpointError(f"{path} is not a run folder: there is no such folder")
    try:
        config = tomllib.loads((path / "config.toml").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} is not a run folder: it has no config.toml, nor do the folders inside it; "
            "name a folder that `parsifl run --out` or simulate(run_dir=...) made"
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise CheckpointError(f"{path / 'config.toml'} cannot be read: {error}") from None
    for table, name, kind in (
        ("algorithm", "name", str),
        ("problem", "score", str),
        ("run", "seed", int),
    ):
        if not isinstance(_table(config, table).get(name), kind):
            raise CheckpointError(
                f"{path} is not a run folder: its config.toml has no {table}.{name}"
            )
    return config


def _table(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = config.get(name, {})
    return found if isinstance(found, Mapping) else {}


def _rounds(file: Path, notes: list[str]) -> tuple[Round, ...]:
    try:
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    found: dict[int, Round] = {}
    damaged: list[int] = []
    for number, line in enumerate(lines, start=1):
        try:
            record = _round(json.loads(line))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
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


def _whole(value: Any) -> int | None:
    return None if value is None else int(value)


def _round(record: Mapping[str, Any]) -> Round:
    models = {name: _scores(record[name]) for name in MODELS if record.get(name)}
    return Round(
        round=int(record["round"]),
        cohort=int(record.get("cohort", 0)),
        trained=int(record.get("trained", 0)),
        bytes_up=int(record["bytes_up"]),
        bytes_down=int(record["bytes_down"]),
        dense_up=int(record.get("dense_up", 0)),
        dense_down=int(record.get("dense_down", 0)),
        entropy_up=_whole(record.get("entropy_up")),
        entropy_down=_whole(record.get("entropy_down")),
        flops=_whole(record.get("flops")),
        simulated_seconds=float(record.get("simulated_seconds", 0.0)),
        seconds={str(k): float(v) for k, v in record.get("seconds", {}).items()},
        dropped=len(record.get("dropped", ())),
        fallbacks=len(record.get("fallbacks", ())),
        info={str(k): float(v) for k, v in record.get("info", {}).items()},
        scores=models,
    )


def _scores(splits: Mapping[str, Any]) -> dict[str, dict[str, Summary]]:
    names = ("mean", "std", "worst_decile")
    return {
        str(split): {
            str(metric): Summary(*(float(values[name]) for name in names))
            for metric, values in metrics.items()
        }
        for split, metrics in splits.items()
    }


def _clients(
    file: Path, notes: list[str]
) -> tuple[int | None, dict[tuple[str, str], ClientScores]]:
    found = _json(file, notes)
    try:
        scores = {
            (model, split): _client_scores(values)
            for model in MODELS
            for split, values in found.get(model, {}).items()
        }
        return (int(found["round"]) if scores else None), scores
    except (KeyError, TypeError, ValueError, AttributeError):
        notes.append(f"{file.name} is damaged and left out")
        return None, {}


def _client_scores(values: Mapping[str, Any]) -> ClientScores:
    clients = tuple(int(client) for client in values["clients"])
    samples = tuple(int(count) for count in values["samples"])
    columns = {
        str(name): tuple(float(value) for value in column)
        for name, column in values.items()
        if name not in ("clients", "samples")
    }
    if any(len(column) != len(clients) for column in (samples, *columns.values())):
        raise ValueError("columns of unequal length")
    return ClientScores(clients, samples, columns)


def _json(file: Path, notes: list[str]) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (ValueError, OSError, RecursionError):
        found = None
    if not isinstance(found, dict):
        notes.append(f"{file.name} is damaged and left out")
        return {}
    return found
