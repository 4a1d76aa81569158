"""The run directory: write it safely, and read it as a recorded run.

`target.json` holds the total number of rounds, and whether there has been a checkpoint.

Reading is lenient and notes everything that was skipped: a run may be in progress or its files
damaged, and a report should still show the rest.
"""

from __future__ import annotations

import json
import math
import os
import platform
import tomllib
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import tomli_w

from parsifl import startup
from parsifl.core.errors import CheckpointError
from parsifl.engine.allocator import allocator
from parsifl.engine.record import MODELS, RoundRecord, headline, select_round
from parsifl.engine.safe_files import (
    is_temporary,
    locked,
    make_directory,
    reject_foreign,
    reject_links,
    remove_temporary,
    replace_file,
    sync_directory,
)

_CONFIG = "config.toml"
_ENVIRONMENT = "environment.json"
_TARGET = "target.json"
_METRICS = "metrics.jsonl"
_CLIENTS = "clients.json"
_CHECKPOINT = "checkpoint"
_REPRODUCIBLE = "run.reproducible"
_PACKAGES = ("parsifl", "torch", "numpy", "scipy", "scikit-learn", "flwr")
_DEEPEST = 4  # levels of directories that are searched for run directories
DAMAGED = (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError)
"""Exceptions that reading a damaged file may raise."""


class RunDir:
    """The files of one run; `metrics.jsonl` holds one line per finished round."""

    def __init__(self, path: Path, others: Collection[str] = ()) -> None:
        """`others` are names in the directory that belong to the caller."""
        self.path = path
        self._others = frozenset(others)
        self.checkpoints = path / _CHECKPOINT
        self._metrics = path / _METRICS
        self._mark = (0, 0)
        self._target: dict[str, Any] = {}

    def locked(self) -> AbstractContextManager[None]:
        """Lock the directory against other runs; see `safe_files.locked`."""
        return locked(self.path)

    def sync_metrics(self) -> tuple[int, int]:
        """Wait until metrics.jsonl is on the disk; return its length and checksum."""
        if self._metrics.exists():
            with self._metrics.open("rb") as file:
                os.fsync(file.fileno())
            sync_directory(self.path)
        return self._mark

    def open(self, identity: Mapping[str, Any], *, resume: bool) -> None:
        """Create the directory, or check that it belongs to the same configuration.

        A run that stopped before its first round was finished is replaced.
        """
        with self.locked():
            self._open(identity, resume=resume)

    def _open(self, identity: Mapping[str, Any], *, resume: bool) -> None:
        self.check()
        config = self.path / _CONFIG
        if self.replaceable():
            for name in (_CLIENTS, _METRICS, _TARGET):
                (self.path / name).unlink(missing_ok=True)
            self._target = {}
        elif config.exists():
            self._check_same(read_config(self.path), _plain(identity))
            if not resume:
                raise CheckpointError(
                    f"{self.path} already holds a run of this configuration; resume it "
                    "(resume=True, --resume), or choose another directory"
                )
            remove_temporary(self.path)
            return
        remove_temporary(self.path)
        # config.toml comes last: it marks the directory as complete
        described = {**environment(), "allocator": allocator()}
        replace_file(self.path / _ENVIRONMENT, json.dumps(described, indent=1).encode())
        replace_file(config, tomli_w.dumps(_plain(identity)).encode())

    def replaceable(self) -> bool:
        """Return whether the directory holds only files of a run without a finished round.

        Every file must be ours by name and content: others are never replaced.
        """
        if not (self.path / _CONFIG).exists():
            return False
        for path in self.path.iterdir():
            if path.name in self._others:
                continue
            if path.is_symlink() or not path.is_file():
                return False
            has_our_content = _FIRST_FILES.get(path.name)
            if not is_temporary(path) and not (has_our_content and has_our_content(path)):
                return False
        return True

    def check(self, *more: str) -> None:
        """Reject a directory in which a run would replace files that it did not write.

        These are files with names of run files (and `more`) without our configuration, and
        symbolic links. A run that has lost its checkpoints is rejected too.
        """
        names = [_CHECKPOINT, _METRICS, _CLIENTS, _TARGET, _ENVIRONMENT, *more]
        reject_links(*(self.path / name for name in (_CONFIG, *names)))
        if (self.path / _CONFIG).exists():
            self._check_checkpoints()
            return
        if _is_environment(self.path / _ENVIRONMENT):  # a run that was killed at the start
            names.remove(_ENVIRONMENT)
        reject_foreign(self.path, names, _CONFIG)

    def _check_checkpoints(self) -> None:
        """Raise CheckpointError if there was a checkpoint and it is missing.

        Without `target.json`, a finished round implies that there was one.
        """
        self._target = _read_object(self.path / _TARGET)
        had = self._target.get("checkpoint") or (not self._target and read_records(self.path))
        latest = self.checkpoints / "LATEST"
        if had and not latest.exists():
            raise CheckpointError(
                f"{latest} is missing, so the run cannot be resumed; restore it from a copy, or "
                "delete the run directory to start from the beginning"
            )

    def set_aside(self) -> Path:
        """Move a finished attempt to `attempt-NUMBER`, so that a new one can start here."""
        number = 1
        while (attempt := self.path / f"attempt-{number}").exists():
            number += 1
        make_directory(attempt)
        # config.toml comes last: as long as it is here, the run can be resumed
        for name in (_CHECKPOINT, _METRICS, _CLIENTS, _TARGET, _ENVIRONMENT, _CONFIG):
            if (self.path / name).exists():
                (self.path / name).rename(attempt / name)
        sync_directory(attempt)
        sync_directory(self.path)
        self._mark, self._target = (0, 0), {}
        return attempt

    def note_environment(self, round: int) -> str:
        """Append the versions of a resumed run to environment.json if they have changed.

        Return a note for the record, or "".
        """
        path, now = self.path / _ENVIRONMENT, environment()
        recorded = _read_object(path)
        resumed = recorded.get("resumed", [])
        resumed = resumed if isinstance(resumed, list) else []
        latest = resumed[-1] if resumed else recorded
        before = {name: latest.get(name) for name in now} if isinstance(latest, dict) else {}
        if before == now:
            return ""
        recorded = {**recorded, "resumed": [*resumed, {"after_round": round, **now}]}
        replace_file(path, json.dumps(recorded, indent=1).encode())
        if not any(before.values()):
            return f"{_ENVIRONMENT} is missing or damaged: earlier rounds may have other versions"
        changed = [f"{n} {before[n]} -> {now[n]}" for n in now if before[n] != now[n]]
        return f"resumed with other versions: {', '.join(changed)}; results may differ by rounding"

    def _check_same(self, stored: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
        if stored.get("format", 1) != wanted.get("format", 1):
            raise CheckpointError(
                f"{self.path} has run directory format {stored.get('format', 1)}, but Parsifl "
                f"{version('parsifl')} writes format {wanted.get('format', 1)}: resume with the "
                "version in environment.json, or choose a new directory"
            )
        before, now = _flat(stored), _flat(wanted)
        if before.get(_REPRODUCIBLE) and not now.get(_REPRODUCIBLE):
            raise CheckpointError(
                f"{self.path} was created by a reproducible run: resume it with --reproducible "
                f"or {startup.VARIABLE}=1"
            )
        changed = [
            f"{name}: {before.get(name, 'absent')!r} there, {now.get(name, 'absent')!r} requested"
            for name in sorted({*before, *now})
            if before.get(name) != now.get(name)
        ]
        if not changed:
            return
        listed = "\n  ".join(["", *changed])
        if all(line.startswith(("run.executor:", "run.block:")) for line in changed):
            raise CheckpointError(
                f"{self.path} was run with a different executor, so results would not be "
                "bit-identical. Resume with the same --executor and the version in "
                f"environment.json, or choose a new directory:{listed}"
            )
        raise CheckpointError(
            f"{self.path} holds a run of another configuration:{listed}\n"
            "Resume it with its own options, or choose another directory"
        )

    def set_target(self, rounds: int) -> None:
        """Record the total number of rounds; a later call may increase it."""
        self._write_target(rounds=rounds)

    def note_checkpoint(self) -> None:
        """Record that the run has a checkpoint, so that it never starts from the beginning."""
        if not self._target.get("checkpoint"):
            self._write_target(checkpoint=True)

    def _write_target(self, **changes: Any) -> None:
        self._target = {**self._target, **changes}
        replace_file(self.path / _TARGET, json.dumps(self._target).encode())

    def append(self, record: RoundRecord) -> None:
        """Append the line of a finished round."""
        line = _strict_json(record.to_json()) + b"\n"
        with self._metrics.open("ab") as file:
            file.write(line)
        length, crc = self._mark
        self._mark = (length + len(line), zlib.crc32(line, crc))

    def truncate(self, round: int, mark: tuple[int, int] | None = None) -> list[RoundRecord]:
        """Remove the lines after a round, which will be repeated, and return the remaining ones.

        Parameters
        ----------
        mark
            Length and checksum of these lines, from the checkpoint of that round.
        """
        content = self._metrics.read_bytes() if self._metrics.exists() else b""
        if mark is None:
            content = b"".join(content.splitlines(keepends=True)[:round])
        elif len(content) < mark[0]:
            raise self._damaged(f"it has {len(content)} bytes, but the checkpoint needs {mark[0]}")
        else:
            content = content[: mark[0]]
        read_mark = (len(content), zlib.crc32(content))
        if mark is not None and read_mark != mark:
            raise self._damaged("its checksum does not match the checkpoint")
        complete = _records(content)
        if [record.round for record in complete] != list(range(1, round + 1)):
            raise self._damaged(
                f"it has {len(complete)} complete lines, but the checkpoint is of round {round}"
                if len(complete) != round
                else "rounds are repeated, missing or out of order"
            )
        replace_file(self._metrics, content)
        self._mark = read_mark
        return complete

    def _damaged(self, reason: str) -> CheckpointError:
        return CheckpointError(
            f"{self._metrics} is damaged: {reason}; restore it from a copy, or delete the run "
            "directory to start from the beginning"
        )

    def write_clients(self, scores: Mapping[str, Any]) -> None:
        """Replace the per-client scores of the last evaluated round."""
        replace_file(self.path / _CLIENTS, _strict_json(scores))


def _strict_json(value: Any) -> bytes:
    """Return JSON in which numbers that are not finite are the texts NaN, Infinity, -Infinity."""
    return json.dumps(_finite(value), allow_nan=False).encode()


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _finite(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return json.dumps(value)  # float() reads this back
    return value


def read_config(path: Path) -> dict[str, Any]:
    """Read the configuration of a run directory."""
    try:
        return tomllib.loads((path / "config.toml").read_text())
    except FileNotFoundError:
        raise CheckpointError(f"{path} is not a run directory: it has no config.toml") from None
    except DAMAGED as error:
        raise CheckpointError(f"{path / 'config.toml'} is damaged: {error}") from None


def _read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; a missing or damaged file is empty."""
    try:
        values = json.loads(path.read_text())
    except (OSError, *DAMAGED):
        return {}
    return values if isinstance(values, dict) else {}


def read_records(path: Path) -> list[RoundRecord]:
    """Read the records of a run directory; an incomplete last line is skipped."""
    file = path / _METRICS
    return _records(file.read_bytes() if file.exists() else b"")


def _records(content: bytes) -> list[RoundRecord]:
    """Return the records in these lines up to the first invalid one."""
    records: list[RoundRecord] = []
    for line in content.splitlines():
        try:
            record = RoundRecord.from_json(json.loads(line))
        except DAMAGED:
            break
        if type(record.round) is not int or type(record.cohort) is not int:
            break
        records.append(record)
    return records


def environment() -> dict[str, str]:
    """Return the versions that a result may depend on."""
    machine = {
        "python": platform.python_version(),
        "machine": platform.machine(),
    }
    installed = {package: _version(package) for package in _PACKAGES}
    return {**machine, **{name: number for name, number in installed.items() if number is not None}}


@cache
def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _is_environment(path: Path) -> bool:
    return {"parsifl", "python", "machine"} <= _read_object(path).keys()


def _is_config(path: Path) -> bool:
    try:
        return {"format", "algorithm", "problem", "run"} <= read_config(path.parent).keys()
    except CheckpointError:
        return False


_FIRST_FILES: Mapping[str, Callable[[Path], bool]] = {
    _CONFIG: _is_config,
    _ENVIRONMENT: _is_environment,
    _TARGET: lambda path: _read_object(path).keys() == {"rounds"},
    _METRICS: lambda path: path.stat().st_size == 0,
    _CLIENTS: lambda path: "round" in _read_object(path),
}
"""Files before the end of the first round, each with a test of its content."""


def _plain(value: Any) -> Any:
    """Convert values to what TOML supports: no None, tuples as lists."""
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items() if v is not None}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def _flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, Mapping):
            flat.update(_flat(value, f"{prefix}{name}."))
        else:
            flat[prefix + name] = value
    return flat


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
        Remarks for the reader: damaged lines, missing files.
    target
        The total number of rounds; None if unknown.
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
        """Equal if two runs used the same rows on the same clients."""
        return str(_table(self.config, "data").get("checksum", ""))

    @property
    def evaluation(self) -> Mapping[str, Any]:
        """How models were evaluated."""
        return _table(_table(self.config, "run"), "evaluation")

    @property
    def evaluates(self) -> bool:
        """Whether the run evaluates models."""
        return bool(_table(self.config, "run").get("evaluate_every", 1))

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The records as JSON values, as in metrics.jsonl."""
        return [record.to_json() for record in self.records]

    def evaluated(self, model: str, split: str = "test") -> list[RoundRecord]:
        """Return the rounds in which a model has a finite score on a split."""
        pairs = ((r, r.scores.get(model, {}).get(split, {}).get(self.score)) for r in self.records)
        return [r for r, scores in pairs if scores is not None and math.isfinite(scores["mean"])]

    def selecting_split(self, model: str) -> str | None:
        """Return the split that selects the headline round; None selects the last round."""
        split = {"best-test": "test", "best-validation": "validation"}.get(
            str(self.evaluation.get("select", "last"))
        )
        return split if split is not None and self.evaluated(model, split) else None

    def selected(self, model: str) -> RoundRecord | None:
        """Return the round that the protocol selects for a model; None without evaluations."""
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
    run_dirs: list[Path] = []
    for path in paths:
        if (path / "config.toml").exists() or not path.is_dir():
            run_dirs.append(path)
        else:
            run_dirs.extend(list(_below(path, _DEEPEST)) or [path])
    return list(dict.fromkeys(run_dirs))


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
        Receives the reason for every directory below a path that cannot be read. If None, such a
        directory raises an error, as a directory named in `paths` always does.
    """
    if not paths:
        raise CheckpointError("no run directory was named; give at least one")
    runs: list[RunData] = []
    for path in find_runs(paths):
        try:
            runs.append(open_run(path))
        except CheckpointError as error:
            if left_out is None or path in paths:
                raise
            left_out.append(f"left out: {error}")
    if not runs:
        raise CheckpointError(f"no run directory can be read:\n  {'; '.join(left_out or ())}")
    return runs


def open_run(path: str | Path) -> RunData:
    """Read a run directory; raise CheckpointError if it is not one."""
    path = Path(path)
    config = _config(path)
    notes: list[str] = []
    records = _read_leniently(path / "metrics.jsonl", notes)
    clients_round, clients = _clients(path / "clients.json", notes)
    environment = _json(path / "environment.json", notes)
    target = _target(path / "target.json", notes)
    if records and target is not None and len(records) < target and not records[-1].stopped:
        notes.append(f"{len(records)} of {target} rounds are finished")
    run = RunData(path, config, records, clients, clients_round, environment, (), target)
    if records and run.evaluates and not any(record.scores for record in records):
        notes.append("no round has been evaluated yet")
    return replace(run, notes=tuple(notes))


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
    except (OSError, *DAMAGED) as error:
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
    table = config.get(name, {})
    return table if isinstance(table, Mapping) else {}


def _read_leniently(file: Path, notes: list[str]) -> tuple[RoundRecord, ...]:
    try:
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    by_round: dict[int, RoundRecord] = {}
    damaged: list[int] = []
    for number, line in enumerate(lines, start=1):
        try:
            record = RoundRecord.from_json(json.loads(line))
        except DAMAGED:
            damaged.append(number)
            continue
        by_round[record.round] = record
    if damaged:
        where = ", ".join(map(str, damaged[:5])) + (" ..." if len(damaged) > 5 else "")
        plural = "s" if len(damaged) > 1 else ""
        notes.append(f"metrics.jsonl: damaged line{plural} {where} left out")
    if not by_round:
        notes.append("no round has been finished yet")
    return tuple(by_round[number] for number in sorted(by_round))


def _clients(file: Path, notes: list[str]) -> tuple[int | None, dict[tuple[str, str], ScoreTable]]:
    content = _json(file, notes)
    try:
        scores = {
            (model, split): _client_scores(values)
            for model in MODELS
            for split, values in content.get(model, {}).items()
        }
        return (int(content["round"]) if scores else None), scores
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
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, *DAMAGED):
        content = None
    if not isinstance(content, dict):
        notes.append(f"{file.name} is damaged and left out")
        return {}
    return content
