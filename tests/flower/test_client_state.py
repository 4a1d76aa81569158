from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import Tensor

from parsifl.core import tree
from parsifl.core.errors import CheckpointError, WireError
from parsifl.flower.client_state import ClientStates

NAME = "0123456789abcdef" * 2
KIND = dict[str, Tensor]


def state(value: float) -> dict[str, Tensor]:
    return {"w": torch.full((3, 2), value), "n": torch.tensor(7)}


def test_a_version_comes_back_bit_for_bit(tmp_path: Path) -> None:
    kept = {"w": torch.tensor([-0.0, 1e-40, 3.5]), "n": torch.tensor([1, 2])}
    ClientStates(tmp_path, NAME, 3, KIND).save(1, kept)
    assert tree.same(ClientStates(tmp_path, NAME, 3, KIND).load(1), kept)


def test_versions_stay_until_they_are_forgotten(tmp_path: Path) -> None:
    durable = ClientStates(tmp_path, NAME, 0, KIND)
    for version in (1, 2, 3):
        durable.save(version, state(version))
    assert tree.same(durable.load(2), state(2))
    assert durable.versions() == [1, 2, 3]
    durable.forget(accepted=3, oldest=2, newest=4)
    assert durable.versions() == [2, 3]  # the server may return to the checkpoint before


def test_versions_that_were_never_accepted_do_not_push_out_accepted_ones(tmp_path: Path) -> None:
    durable = ClientStates(tmp_path, NAME, 0, KIND)
    # the reply of round 2 was lost
    for accepted, oldest, version in ((0, 0, 1), (1, 0, 2), (1, 1, 3), (3, 1, 4)):
        durable.save(version, state(version))
        durable.forget(accepted, oldest, version)
    assert durable.versions() == [1, 3, 4]


def test_a_version_can_be_written_again(tmp_path: Path) -> None:
    durable = ClientStates(tmp_path, NAME, 0, KIND)
    durable.save(1, state(1))
    durable.save(1, state(5))
    assert tree.same(durable.load(1), state(5))
    assert not list(tmp_path.rglob("*.tmp"))


def test_version_zero_is_no_state_and_a_missing_one_is_named(tmp_path: Path) -> None:
    durable = ClientStates(tmp_path, NAME, 4, KIND)
    assert durable.load(0) is None
    with pytest.raises(CheckpointError, match="client 4 has no state of round 2"):
        durable.load(2)


def test_experiments_and_clients_do_not_share_states(tmp_path: Path) -> None:
    ClientStates(tmp_path, NAME, 0, KIND).save(1, state(1))
    assert ClientStates(tmp_path, NAME, 1, KIND).versions() == []
    assert ClientStates(tmp_path, NAME[::-1], 0, KIND).versions() == []


def test_folders_are_private_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        ClientStates(tmp_path / "a" / "b", NAME, 0, KIND).save(1, state(1))
    finally:
        os.umask(before)
    for folder in ("a", "a/b", f"a/b/{NAME}", f"a/b/{NAME}/client-0"):
        assert (tmp_path / folder).stat().st_mode & 0o777 == 0o700
    (file,) = tmp_path.rglob("*.state")
    assert file.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("name", ["../../etc", "", "A" * 32, NAME + "/x", NAME[:-1]])
def test_only_a_drawn_name_becomes_a_folder(name: str, tmp_path: Path) -> None:
    with pytest.raises(WireError, match="32 hexadecimal digits"):
        ClientStates(tmp_path, name, 0, KIND)


def test_a_damaged_state_is_refused(tmp_path: Path) -> None:
    durable = ClientStates(tmp_path, NAME, 0, KIND)
    durable.save(1, state(1))
    (file,) = tmp_path.rglob("*.state")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(bytes(data))
    with pytest.raises(CheckpointError, match="cannot be read"):
        durable.load(1)


def test_a_method_without_state_writes_nothing(tmp_path: Path) -> None:
    durable = ClientStates(tmp_path, NAME, 0, type(None))
    durable.save(1, None)
    assert durable.load(1) is None
    assert not list(tmp_path.iterdir())
