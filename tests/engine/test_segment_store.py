from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from parsifl.engine import state_store as module
from parsifl.engine.state_store import SegmentStore


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
