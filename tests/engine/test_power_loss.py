"""What a function has written is there after a power loss: contents, and names in directories."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from tests.fuzz.faulted import ROUNDS, Local
from tests.support.faults import Disk, DiskFault, Killed

from parsifl.core.algorithm import TreeTypes
from parsifl.engine import checkpoint
from parsifl.engine.checkpoint import Checkpoint
from parsifl.engine.record import RoundRecord
from parsifl.engine.run_dir import RunDir, read_config, read_records
from parsifl.engine.safe_files import replace_file, write_synced
from parsifl.engine.state_store import SegmentStore
from parsifl.flower.client import ClientStates

LOSSES: tuple[DiskFault, ...] = ("lost-data", "lost-entries")
LOCAL = Local()
TYPES = TreeTypes(torch.Tensor, type(None), None, None)
lossy = pytest.mark.parametrize("loss", LOSSES)


def lose_power_after(folder: Path, loss: DiskFault, write: Callable[[], object]) -> None:
    with suppress(Killed), Disk(folder, fault=loss) as disk:
        write()
        disk.power_off()


def test_a_power_loss_takes_what_was_not_synced(tmp_path: Path) -> None:
    def write() -> None:
        (tmp_path / "new" / "deep").mkdir(parents=True)
        (tmp_path / "new" / "deep" / "file").write_bytes(b"new")
        (tmp_path / "old").write_bytes(b"changed")
        (tmp_path / "moved").rename(tmp_path / "elsewhere")
        (tmp_path / "gone").unlink()
        (tmp_path / "source").replace(tmp_path / "target")

    def contents() -> dict[str, bytes]:
        files = (path for path in tmp_path.rglob("*") if path.is_file())
        return {path.relative_to(tmp_path).as_posix(): path.read_bytes() for path in files}

    names = ("old", "moved", "gone", "source", "target")
    before = {name: name.encode() for name in names}
    for name in names:
        (tmp_path / name).write_bytes(before[name])
    lose_power_after(tmp_path, "lost-entries", write)
    assert contents() == {**before, "old": b"changed"}
    (tmp_path / "old").write_bytes(before["old"])
    lose_power_after(tmp_path, "lost-data", write)
    assert contents() == {
        "new/deep/file": b"", "old": b"old", "elsewhere": b"moved", "target": b"source",
    }  # fmt: skip


@lossy
@pytest.mark.parametrize("write", [replace_file, write_synced])
def test_a_written_file_survives(
    tmp_path: Path, loss: DiskFault, write: Callable[[Path, bytes], None]
) -> None:
    (tmp_path / "file").write_bytes(b"old")
    lose_power_after(tmp_path, loss, lambda: write(tmp_path / "file", b"new"))
    assert (tmp_path / "file").read_bytes() == b"new"


@lossy
def test_a_run_directory_survives(tmp_path: Path, loss: DiskFault) -> None:
    def write() -> None:
        directory = RunDir(tmp_path / "study" / "run")
        with directory.locked():
            directory.open({"format": 2}, resume=False)
        directory.append(RoundRecord(1, 2))
        directory.sync_metrics()

    lose_power_after(tmp_path, loss, write)
    assert read_config(tmp_path / "study" / "run") == {"format": 2}
    assert read_records(tmp_path / "study" / "run") == [RoundRecord(1, 2)]


@lossy
def test_an_attempt_that_was_set_aside_survives(tmp_path: Path, loss: DiskFault) -> None:
    directory = RunDir(tmp_path)
    directory.open({"format": 2}, resume=False)
    lose_power_after(tmp_path, loss, directory.set_aside)
    assert [path.name for path in tmp_path.iterdir()] == ["attempt-1"]
    assert read_config(tmp_path / "attempt-1") == {"format": 2}


@lossy
def test_a_checkpoint_survives(tmp_path: Path, loss: DiskFault) -> None:
    folder = tmp_path / "run" / "checkpoint"

    def write() -> None:
        checkpoint.save(folder, Checkpoint(1, torch.ones(2)), lambda _: {})

    lose_power_after(tmp_path, loss, write)
    loaded = checkpoint.load(folder, TYPES)
    assert loaded is not None
    assert loaded.round == 1
    assert loaded.server.tolist() == [1, 1]


@lossy
def test_client_states_of_a_checkpoint_survive(tmp_path: Path, loss: DiskFault) -> None:
    parts = []

    def write() -> None:
        states = SegmentStore(tmp_path / "run" / "clients")
        states.write([(3, torch.ones(2))])
        parts.extend(states.sync())

    lose_power_after(tmp_path, loss, write)
    states = SegmentStore.open(tmp_path / "run" / "clients", parts, torch.Tensor)
    assert states[3].tolist() == [1, 1]


@lossy
def test_the_state_of_a_remote_client_survives(tmp_path: Path, loss: DiskFault) -> None:
    states = ClientStates(tmp_path / "state", "0" * 32, 2, torch.Tensor)
    lose_power_after(tmp_path, loss, lambda: states.save(1, torch.ones(2)))
    assert states.load(1).tolist() == [1, 1]


def test_files_of_an_interrupted_replacement_are_removed(tmp_path: Path) -> None:
    RunDir(tmp_path).open({"format": 2}, resume=False)
    for _ in range(3):
        with pytest.raises(Killed), Disk(tmp_path, 2, "lost-data"):
            replace_file(tmp_path / "target.json", b"{}")
    assert len(list(tmp_path.glob(".target.json.*.tmp"))) == 3
    (tmp_path / ".target.json.tmp").write_text("a file of the user")
    RunDir(tmp_path).open({"format": 2}, resume=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        ".target.json.tmp", "config.toml", "environment.json",
    ]  # fmt: skip


@pytest.mark.parametrize("at", range(1, 41))
@lossy
def test_a_power_loss_costs_at_most_the_current_round(
    tmp_path: Path, at: int, loss: DiskFault
) -> None:
    with pytest.raises(Killed), Disk(tmp_path, LOCAL.operations - at, loss) as disk:
        LOCAL.run(tmp_path)
    saved = checkpoint.load(tmp_path / "run" / "checkpoint", LOCAL.types())
    assert saved is not None
    assert saved.round >= ROUNDS - 2  # the 40 operations begin before the checkpoint of round 3
    LOCAL.run(tmp_path)
    assert LOCAL.same(tmp_path), disk.log[-5:]
