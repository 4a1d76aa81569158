from __future__ import annotations

import json
import random
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support import strategies
from torch import Tensor

from parsifl.algorithms.scaffold import ScaffoldServer
from parsifl.core import tree
from parsifl.core.algorithm import TreeTypes
from parsifl.core.errors import CheckpointError
from parsifl.engine import checkpoint
from parsifl.engine.local_pool import LocalPool
from parsifl.engine.record import RoundRecord
from parsifl.engine.safe_files import replace_file
from parsifl.engine.state_store import StateStore

TYPES = TreeTypes(ScaffoldServer, dict[str, Tensor], None, None)
PART = "part-00000001.safetensors"
FILES = ("LATEST", "state.json", "server.safetensors", PART)


def server(value: float) -> ScaffoldServer:
    params = {"b": torch.full((3,), value), "a": torch.arange(6.0).reshape(2, 3).t() * value}
    return ScaffoldServer(params, {"c": torch.tensor(-0.0)}, 7)


def store(value: float) -> LocalStates:
    held = LocalStates()
    states = held.store
    shared = torch.full((4,), value, dtype=torch.float64)
    states.save(5, {"v": shared, "w": shared[:2]})  # memory that overlaps
    states.save(12, {"v": torch.zeros(0), "w": torch.tensor([float("inf")])})
    return held


def save(folder: Path, round: int, server: Any, states: LocalStates, pending: Any = None) -> None:
    checkpoint.save(folder, checkpoint.Checkpoint(round, server, pending), states.save)


class LocalStates:
    """The part of a local pool that keeps client states."""

    def __init__(self, store: StateStore | None = None, kind: Any = dict[str, Tensor]) -> None:
        program: Any = SimpleNamespace(algorithm=SimpleNamespace(tree_types=lambda: TYPES))
        self._pool: Any = object.__new__(LocalPool)
        self._pool.program, self._pool._saved = program, []
        self._pool.store = store or StateStore()
        self._kind = kind

    @property
    def store(self) -> StateStore:
        found: StateStore = self._pool.store
        return found

    def save(self, directory: Path) -> dict[str, Any]:
        return LocalPool.save(self._pool, directory)

    def restore(self, directory: Path, saved: dict[str, Any]) -> None:
        LocalPool.restore(self._pool, directory, saved)

    def items(self) -> dict[str, Any]:
        return {str(client): state for client, state in self.store}


def load(folder: Path) -> tuple[checkpoint.Checkpoint | None, LocalStates]:
    states = LocalStates()
    return checkpoint.load(folder, TYPES, states.restore), states


def place_of(folder: Path, name: str) -> Path:
    if name == PART:
        return folder / "clients" / name
    return folder / name if name == "LATEST" else next(folder.glob("round-*")) / name


def seal(folder: Path) -> None:
    """Give a checkpoint that was changed by hand the checksum that belongs to it."""
    place = next(folder.glob("round-*"))
    value = 0
    for name in FILES[1:3]:
        value = zlib.crc32((place / name).read_bytes(), value)
    (folder / "LATEST").write_text(f"{place.name} {value:08x}")


def test_what_is_saved_comes_back_bit_for_bit(tmp_path: Path) -> None:
    save(tmp_path, 3, server(0.1), store(0.2))
    found, states = load(tmp_path)
    assert found is not None
    assert (found.round, found.pending) == (3, None)
    assert tree.same(found.server, server(0.1))
    assert tree.same(states.items(), store(0.2).items())
    assert sorted(states.items()) == ["12", "5"]


def test_a_record_without_its_scores_comes_back(tmp_path: Path) -> None:
    record = RoundRecord(3, 2, bytes_up=7, dropped={1: "slow"})
    save(tmp_path, 3, server(0.1), store(0.2), record)
    found, _ = load(tmp_path)
    assert found is not None
    assert found.pending == record


@settings(max_examples=25, deadline=None)
@given(strategies.params(torch.float32))
def test_any_parameters_come_back(tmp_path_factory: Any, params: dict[str, Tensor]) -> None:
    folder = tmp_path_factory.mktemp("checkpoint")
    save(folder, 1, params, LocalStates())
    found = checkpoint.load(folder, TreeTypes(dict[str, Tensor], type(None), None, None))
    assert found is not None
    assert tree.same(found.server, params)


def test_a_state_of_nothing_comes_back(tmp_path: Path) -> None:
    states = LocalStates()
    states.store.save(0, None)
    save(tmp_path, 1, None, states)
    found = checkpoint.load(tmp_path, TreeTypes(type(None), type(None), None, None))
    assert found is not None
    assert found.server is None


def test_the_latest_wins_and_all_but_the_last_two_are_removed(tmp_path: Path) -> None:
    states = store(1.0)
    for number in (1, 2, 3):
        save(tmp_path, number, server(float(number)), states)
    found = checkpoint.load(tmp_path, TYPES)
    assert found is not None
    assert found.round == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "LATEST",
        "clients",
        "round-00000002",
        "round-00000003",
    ]
    assert len(list((tmp_path / "clients").iterdir())) == 1


@pytest.mark.parametrize("name", FILES)
def test_the_checkpoint_before_is_whole_with_its_client_states(tmp_path: Path, name: str) -> None:
    states = LocalStates()
    for round in range(1, 8):
        for client in range(round % 3, 8, 3):
            states.store.save(client, {"w": torch.full((3,), float(100 * round + client))})
        if round == 6:
            expected = states.items()
        save(tmp_path, round, server(float(round)), states)
    latest = tmp_path / "round-00000007"
    newest = max((tmp_path / "clients").iterdir()).name
    path = tmp_path / {"LATEST": name, PART: f"clients/{newest}"}.get(name, f"{latest.name}/{name}")
    content = bytearray(path.read_bytes())
    content[len(content) // 4] ^= 1
    path.write_bytes(bytes(content))
    with pytest.warns(UserWarning, match="cannot be read.*round-00000006"):
        found, states = load(tmp_path)
    assert found is not None
    assert found.round == 6
    assert tree.same(found.server, server(6.0))
    assert tree.same(states.items(), expected)
    save(tmp_path, 7, server(7.0), states)
    again = checkpoint.load(tmp_path, TYPES)  # without a warning
    assert again is not None
    assert again.round == 7


def test_only_what_has_changed_is_written(tmp_path: Path) -> None:
    states = LocalStates()
    for client in range(6):
        states.store.save(client, {"w": torch.full((3,), float(client))})
    save(tmp_path, 1, server(1.0), states)
    first = (tmp_path / "clients" / PART).stat()
    states.store.save(4, {"w": torch.full((3,), 9.0)})
    save(tmp_path, 2, server(1.0), states)
    assert (tmp_path / "clients" / PART).stat().st_mtime_ns == first.st_mtime_ns
    assert sum(path.stat().st_size for path in (tmp_path / "clients").iterdir()) < 2 * first.st_size
    found, again = load(tmp_path)
    assert found is not None
    assert [float(state["w"][0]) for _, state in again.store] == [0, 1, 2, 3, 9, 5]


def test_files_out_of_date_are_removed(tmp_path: Path) -> None:
    states = LocalStates()
    for round in range(1, 41):
        for client in range(round % 3, 8, 3):
            states.store.save(client, {"w": torch.full((3,), float(100 * round + client))})
        save(tmp_path, round, server(1.0), states)
        assert len(list((tmp_path / "clients").iterdir())) <= 10
        found, again = load(tmp_path)
        assert found is not None
        assert tree.same(again.items(), states.items())


def test_an_empty_folder_has_no_checkpoint(tmp_path: Path) -> None:
    assert checkpoint.load(tmp_path, TYPES) is None


def test_checkpoints_without_their_list_are_not_started_over(tmp_path: Path) -> None:
    for number in (1, 2):
        save(tmp_path, number, server(float(number)), store(1.0))
    (tmp_path / "LATEST").unlink()
    with pytest.raises(CheckpointError, match="round-00000001, round-00000002 but no LATEST"):
        checkpoint.load(tmp_path, TYPES)
    assert (tmp_path / "round-00000002" / "state.json").exists()


def test_a_first_save_that_was_interrupted_starts_over(tmp_path: Path) -> None:
    save(tmp_path, 1, server(1.0), store(1.0))
    (tmp_path / "LATEST").unlink()
    assert checkpoint.load(tmp_path, TYPES) is None


def test_what_an_interrupted_save_leaves_behind_does_no_harm(tmp_path: Path) -> None:
    save(tmp_path, 1, server(1.0), store(1.0))
    half = tmp_path / ".round-00000002.tmp"
    half.mkdir()
    (half / "server.safetensors").write_bytes(b"half")
    whole_but_not_named = tmp_path / "round-00000002"
    whole_but_not_named.mkdir()
    found = checkpoint.load(tmp_path, TYPES)
    assert found is not None
    assert found.round == 1
    save(tmp_path, 2, server(2.0), store(1.0))
    again = checkpoint.load(tmp_path, TYPES)
    assert again is not None
    assert again.round == 2
    assert not half.exists()


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["missing", "empty", "cut", "not text"])
def test_a_damaged_file_is_refused(tmp_path: Path, name: str, damage: str) -> None:
    save(tmp_path, 2, server(1.0), store(1.0))
    path = place_of(tmp_path, name)
    content = path.read_bytes()
    path.unlink()
    if damage != "missing":
        half = content[: len(content) // 2]
        path.write_bytes({"empty": b"", "cut": half, "not text": b"\xff" + content}[damage])
    if (name, damage) == ("LATEST", "missing"):
        assert checkpoint.load(tmp_path, TYPES) is None
        return
    with pytest.raises(CheckpointError, match="delete the run directory"):
        load(tmp_path)


def test_a_flipped_bit_anywhere_is_noticed(tmp_path: Path) -> None:
    save(tmp_path, 2, server(1.0), store(1.0))
    generator = random.Random(0)
    for name in FILES:
        path = place_of(tmp_path, name)
        content = path.read_bytes()
        for _ in range(20):
            flipped = bytearray(content)
            flipped[generator.randrange(len(content))] ^= 1 << generator.randrange(8)
            path.write_bytes(bytes(flipped))
            with pytest.raises(CheckpointError):
                load(tmp_path)
        path.write_bytes(content)
    assert checkpoint.load(tmp_path, TYPES) is not None


@pytest.mark.parametrize(
    "change",
    [
        lambda state: state.pop("round"),
        lambda state: state.pop("pool"),
        lambda state: state["pool"]["segments"].append(["absent", "00000000", 1]),
        lambda state: state["pool"]["segments"][0].pop(),
        lambda state: state["pool"].update({"segments": 3}),
        lambda state: state["server"].update({"c": "Other"}),
    ],
)
def test_a_state_that_does_not_fit_is_refused(tmp_path: Path, change: Any) -> None:
    save(tmp_path, 2, server(1.0), store(1.0))
    path = place_of(tmp_path, "state.json")
    state = json.loads(path.read_text())
    change(state)
    path.write_text(json.dumps(state))
    seal(tmp_path)
    with pytest.raises(CheckpointError, match="cannot be read"):
        load(tmp_path)


def test_a_checkpoint_of_an_older_format_is_rejected_by_its_format(tmp_path: Path) -> None:
    save(tmp_path, 2, server(1.0), store(1.0))
    path = place_of(tmp_path, "state.json")
    state = json.loads(path.read_text())
    del state["format"]
    path.write_text(json.dumps(state))
    seal(tmp_path)
    with pytest.raises(CheckpointError, match="checkpoint format 1, but this version"):
        load(tmp_path)


def test_a_checkpoint_of_another_method_is_refused(tmp_path: Path) -> None:
    save(tmp_path, 2, server(1.0), store(1.0))
    with pytest.raises(CheckpointError, match="does not fit the type"):
        checkpoint.load(tmp_path, TreeTypes(dict[str, Tensor], dict[str, Tensor], None, None))


@settings(max_examples=20, deadline=None)
@given(st.binary(max_size=50), st.binary(max_size=50))
def test_a_replaced_file_has_the_new_content(
    tmp_path_factory: Any, before: bytes, after: bytes
) -> None:
    path = tmp_path_factory.mktemp("file") / "f"
    replace_file(path, before)
    replace_file(path, after)
    assert path.read_bytes() == after
    assert [found.name for found in path.parent.iterdir()] == ["f"]
