"""Runs that are killed, damaged and misled, and what must come of them.

After any number of kills a run ends with the bits of one that was left alone. After damage to a
file it does so too, or it stops with an error of ours, or its record notes what was lost.
"""

from __future__ import annotations

import random
import tempfile
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from tests.flower.inprocess import InProcess
from tests.support.faults import Disk, DiskFault, FaultyLink, Killed, damage_file
from tests.support.fixtures import classifier, clients

from parsifl.algorithms.ditto import Ditto
from parsifl.core import tree
from parsifl.core.errors import ParsiflError
from parsifl.engine import checkpoint
from parsifl.engine.experiment import Experiment
from parsifl.engine.run_dir import read_records
from parsifl.engine.simulate import simulate

ROUNDS = 4
_MOST_ATTEMPTS = 60


class Scenario(ABC):
    """A small run with client states that can be started and resumed in a folder."""

    name: str
    _golden: tuple[Any, list[Any]]

    @abstractmethod
    def run(self, folder: Path) -> None:
        """Start the run, or resume it if there is one."""

    @abstractmethod
    def types(self) -> Any:
        """Return the types of the algorithm's trees."""

    @cached_property
    def operations(self) -> int:
        """How often an undisturbed run changes the disk; fills in the expected result."""
        with tempfile.TemporaryDirectory() as place:
            with Disk(place) as disk:
                self.run(Path(place))
            self._golden = self.result(Path(place))
        return disk.operations

    def result(self, folder: Path) -> tuple[Any, list[Any]]:
        found = checkpoint.load(folder / "run" / "checkpoint", self.types())
        records = [replace(record, seconds={}) for record in read_records(folder / "run")]
        return None if found is None else found.server, records

    def same(self, folder: Path) -> bool:
        server, records = self.result(folder)
        return records == self._golden[1] and tree.same(server, self._golden[0])

    # ------------------------------------------------------------------ faults
    def interrupt(self, folder: Path, seed: int, fault: DiskFault = "kill") -> str:
        """Run until a fault of the disk; return where it was."""
        at = random.Random(f"place/{seed}").randrange(self.operations)
        disk = Disk(folder, at, fault, seed)
        try:
            with disk, _without_warnings():
                self.run(folder)
        except Killed:
            pass
        except (OSError, ParsiflError):
            if fault != "full":
                raise
        return f"{fault} at operation {at} of {disk.operations}: {(disk.log or ['-'])[-1]}"

    def kill(self, seed: int) -> str:
        """Kill a run up to three times and resume it; return what is wrong, or nothing."""
        draw = random.Random(f"kill/{seed}")
        with tempfile.TemporaryDirectory() as place:
            folder, told = Path(place), []
            for again in range(draw.choice([1, 1, 2, 3])):
                fault: DiskFault = draw.choice(["kill", "kill", "kill", "full"])
                told.append(self.interrupt(folder, 10 * seed + again, fault))
            try:
                with _without_warnings():
                    self.run(folder)
            except Exception as error:
                return f"{told}: {type(error).__name__}: {error}"
            return "" if self.same(folder) else f"{told}: other numbers"

    def corrupt(self, seed: int) -> tuple[str, str]:
        """Damage a file of an interrupted or a finished run and resume it.

        Returns the outcome and what was done: "same", "error" or "noted" are right.
        """
        draw = random.Random(f"corrupt/{seed}")
        with tempfile.TemporaryDirectory() as place:
            folder, kind = Path(place), draw.random()
            if kind < 0.3:  # the disk itself lies, and then the process is killed
                done = self.interrupt(folder, seed, draw.choice(["short", "flip"]))
                self._forget_some(folder, draw)
            else:
                done = self.interrupt(folder, seed)
                files = [path for path in folder.rglob("*") if path.is_file()]
                done += f"; {damage_file(folder, seed) if files else 'nothing to damage'}"
            return self.resumed(folder), done

    def resumed(self, folder: Path) -> str:
        """Resume a damaged run; return "same", "error", "noted", or what is wrong."""
        try:
            with _without_warnings():
                self.run(folder)
        except ParsiflError:
            return "error"
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        if self.same(folder):
            return "same"
        noted = any(record.notes or record.dropped for record in self.result(folder)[1])
        return "noted" if noted else "silent"

    def _forget_some(self, folder: Path, draw: random.Random) -> None:
        """Return to an earlier checkpoint, as a run that is killed and resumed does."""
        latest = folder / "run" / "checkpoint" / "LATEST"
        if draw.random() < 0.5 and latest.exists():
            lines = latest.read_bytes().splitlines(keepends=True)
            latest.write_bytes(b"".join(lines[1:]) or lines[0])


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Ignore warnings: rounds are repeated, or a checkpoint is read instead of a damaged one."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class Local(Scenario):
    """Clients in this process."""

    name = "local pool"

    def __init__(self) -> None:
        self._algorithm = Ditto(lr=0.1, local_steps=2, batch_size=4)

    def types(self) -> Any:
        return self._algorithm.tree_types()

    def run(self, folder: Path) -> None:
        simulate(
            self._algorithm, classifier(), clients((6, 9, 8, 7), validation=2), ROUNDS,
            seed=3, participation=0.7, executor="loop", run_dir=folder / "run", resume=True,
            checkpoint_seconds=0.0,
        )  # fmt: skip


class Messages(Scenario):
    """Clients behind messages, each with its state on its own disk."""

    name = "message pool"

    def __init__(self) -> None:
        self._experiment = Experiment.read(
            {
                "algorithm": "ditto", "data": "digits", "clients": 3, "rounds": ROUNDS,
                "model": "glm", "participation": 0.7,
                "settings": {"local_steps": 2},
            }
        )  # fmt: skip

    def types(self) -> Any:
        return self._experiment.build_algorithm().tree_types()

    def run(self, folder: Path, wrap: Callable[[Any], Any] = lambda link: link) -> None:
        link = InProcess(self._experiment, folder / "state")
        federation = link.federation(folder / "run", resume=True, quorum=1.0)
        federation._link = federation._pool._link = federation._pool.members._link = wrap(link)
        federation.run()

    def mislead(self, seed: int) -> tuple[str, list[Any]]:
        """Run over a network with faults, resuming until the end; return what is wrong."""
        assert self.operations  # the expected result is known
        found: list[FaultyLink] = []

        def wrap(link: Any) -> FaultyLink:
            found.append(FaultyLink(link, 1000 * seed + len(found)))
            return found[-1]

        with tempfile.TemporaryDirectory() as place:
            folder = Path(place)
            for _ in range(_MOST_ATTEMPTS):
                try:
                    self.run(folder, wrap)
                except ParsiflError as error:
                    if "uploads arrived" not in str(error):
                        return f"{error}", []
                    continue
                break
            planted = [fault for link in found for fault in link.planted]
            server, records = self.result(folder)
            if not tree.same(server, self._golden[0]):
                return "another model", planted
            for record, expected in zip(records, self._golden[1], strict=True):
                if record.scores != expected.scores and not record.unevaluated:
                    return f"round {record.round} has other scores", planted
            return "", planted
