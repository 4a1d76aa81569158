from __future__ import annotations

import gc
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from parsifl.core import tree
from parsifl.core.errors import CheckpointError
from parsifl.engine import state_store as module
from parsifl.engine.state_store import SegmentStore, StateStore


def test_states_are_copies_of_their_own_contiguous_memory() -> None:
    store = StateStore()
    whole = torch.arange(6.0).reshape(2, 3)
    store.save(3, {"t": whole.t(), "first": whole[0]})
    whole += 1
    state = store.load(3, lambda: None)
    assert state["t"].tolist() == [[0, 3], [1, 4], [2, 5]]
    assert state["t"].is_contiguous()
    assert state["first"].untyped_storage().nbytes() == 12
    assert len(store) == 1


def test_a_first_state_is_made_and_not_kept() -> None:
    store = StateStore()
    assert store.load(1, lambda: "made") == "made"
    assert len(store) == 0
    store.restore({7: None, 2: None})
    assert [client for client, _ in store] == [2, 7]


def state(client: int, value: int) -> Any:
    """Return a state of 40 to 56 bytes whose structure depends on the client."""
    tensors = {"w": torch.full((2, 5), float(value)), "b": torch.arange(client % 3) + value}
    return (tensors, client % 2) if client % 5 else tensors


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 11), st.sampled_from(["save", "load", "settle"]))),
    st.integers(0, 400),
    st.booleans(),
)
def test_a_store_with_a_limit_keeps_what_one_without_keeps(
    tmp_path_factory: pytest.TempPathFactory,
    steps: list[tuple[int, str]],
    limit: int,
    in_folder: bool,
) -> None:
    folder = tmp_path_factory.mktemp("store")
    store, expected = StateStore(limit, folder / "spilled" if in_folder else None), {}
    for value, (client, step) in enumerate(steps):
        if step == "save":
            expected[client] = state(client, value)
            store.save(client, expected[client])
        elif step == "load":
            found = store.load(client, lambda: None)
            assert tree.same(found, expected.get(client))
        else:
            store.flush_to(folder / "settled").delete_stale()
        assert store.held <= limit
    assert len(store) == len(expected)
    assert [client for client, _ in store] == sorted(expected)
    assert all(tree.same(found, expected[client]) for client, found in store)


def test_what_does_not_fit_in_memory_is_in_a_temporary_folder_that_goes_with_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    store = StateStore(limit=1000)
    for turn in range(30):
        for client in range(50):
            store.save(client, torch.full((25,), float(100 * turn + client)))
    folder = next(tmp_path.iterdir())
    size = sum(path.stat().st_size for path in folder.iterdir())
    assert size < 40_000  # 5,000 bytes of states, 150,000 were written
    assert all(float(found[0]) == 2900 + client for client, found in store)
    del store
    gc.collect()
    assert not folder.exists()


def test_a_state_of_nothing_is_written_once(tmp_path: Path) -> None:
    store = StateStore()
    for _ in range(3):
        for client in range(100):
            store.save(client, None)
        shelf = store.flush_to(tmp_path)
    assert [part.states for part in shelf.parts] == [100]


def test_files_have_a_bounded_number_of_tensors_and_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PART_LEAVES", 10)
    shelf = SegmentStore(tmp_path)
    shelf.write((client, {"a": torch.ones(1), "b": torch.ones(1)}) for client in range(12))
    assert [part.states for part in shelf.parts] == [5, 5, 2]
    monkeypatch.setattr(module, "PART_BYTES", 4000)
    shelf.write((client, torch.ones(500)) for client in range(20, 23))
    assert [part.states for part in shelf.parts] == [5, 5, 2, 2, 1]


def test_what_an_interrupted_run_left_is_not_overwritten_and_swept_later(tmp_path: Path) -> None:
    SegmentStore(tmp_path).write([(1, torch.zeros(2))])
    shelf = SegmentStore(tmp_path)
    shelf.write([(1, torch.ones(2))])
    assert sorted(path.name[5:13] for path in tmp_path.iterdir()) == ["00000001", "00000002"]
    shelf.delete_stale()
    assert [path.name for path in tmp_path.iterdir()] == [shelf.parts[0].name]
    assert shelf[1].tolist() == [1, 1]


def test_a_shelf_is_opened_again_by_its_parts(tmp_path: Path) -> None:
    shelf = SegmentStore(tmp_path)
    shelf.write([(5, {"w": torch.tensor([1.0, -0.0])}), (3, {"w": torch.tensor([2.0])})])
    shelf.write([(5, {"w": torch.tensor([float("nan")])})])
    again = SegmentStore.open(tmp_path, shelf.sync(), dict[str, Tensor])
    assert list(again) == [3, 5]
    assert again[3]["w"].tolist() == [2.0]
    assert again[5]["w"].isnan().all()
    with pytest.raises(KeyError):
        again[4]
    with pytest.raises(ValueError, match="does not fit"):
        SegmentStore.open(tmp_path, shelf.sync(), tuple[Tensor, Tensor])


def test_a_linked_part_is_rejected_and_never_deleted(tmp_path: Path) -> None:
    folder, target = tmp_path / "states", tmp_path / "elsewhere.safetensors"
    shelf = SegmentStore(folder)
    shelf.write([(1, torch.zeros(2))])
    parts = shelf.sync()
    (folder / shelf.parts[0].name).rename(target)
    (folder / shelf.parts[0].name).symlink_to(target)
    with pytest.raises(CheckpointError, match="symbolic link"):
        SegmentStore.open(folder, parts, Tensor)
    SegmentStore(folder).delete_stale()
    assert (folder / shelf.parts[0].name).is_symlink()
    assert target.exists()
