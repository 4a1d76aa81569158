"""The client behind a ClientApp, and its state on disk."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.flower.inprocess import InProcess
from torch import Tensor, nn

from parsifl.algorithms.fedavg import FedAvg
from parsifl.core import tree
from parsifl.core.errors import CheckpointError, ConfigError, DataError, WireError
from parsifl.data.clients import ClientData
from parsifl.engine.batch_sampler import BatchSampler
from parsifl.engine.executors import placed
from parsifl.engine.experiment import Experiment
from parsifl.engine.simulate import simulate
from parsifl.flower.client import (
    ClientStates,
    RemoteClient,
    alone,
    as_client_number,
    client_number,
    state_root,
)
from parsifl.flower.hello import DataSchema
from parsifl.flower.message import Envelope, answered
from parsifl.flower.network_schema import FailureReply, TrainRequest, failure_in
from parsifl.nn.neural import NeuralProblem

RNG = np.random.default_rng(0)
PAIRS = [(RNG.standard_normal((n, 2)), RNG.integers(0, 2, n)) for n in (8, 12, 16)]


def test_a_client_gets_its_rows_and_nobody_elses() -> None:
    pooled = ClientData.of(PAIRS, validation=0.25)
    own = alone(pooled, 1)
    assert len(own.x) == 12
    for split in ("train", "validation", "test"):
        rows, theirs = getattr(own, split)[0], getattr(pooled, split)[1]
        assert np.array_equal(own.x[rows], pooled.x[theirs])
        assert np.array_equal(own.y[rows], pooled.y[theirs])
    with pytest.raises(ConfigError, match="clients 0 to 2, not 3"):
        alone(pooled, 3)


def test_a_pair_becomes_the_client_of_its_number() -> None:
    data = as_client_number(PAIRS[0], 2, Experiment("fedavg"))
    assert (len(data), data.first) == (1, 2)
    assert len(data.rows_by_client("train")[2]) == 6
    assert len(data.rows_by_client("test")[2]) == 2
    for other in (1, 3):
        with pytest.raises(IndexError):
            data.rows_by_client("train")[other]
    with pytest.raises(DataError, match="a node is one client"):
        as_client_number(ClientData.of(PAIRS), 0, Experiment("fedavg"))
    with pytest.raises(ConfigError, match="needs a named dataset"):
        as_client_number(PAIRS[0], 0, Experiment("fedavg", test="all"))


def test_a_client_that_is_alone_is_named_by_its_number() -> None:
    x, _ = PAIRS[0]
    data = as_client_number((x, np.full(len(x), 3)), 2, Experiment("fedavg"))
    with pytest.raises(DataError, match="client 2 has"):
        BatchSampler(data, NeuralProblem(nn.Linear(2, 2)))
    with pytest.raises(ConfigError, match="numbers from 0, got first=2"):
        simulate(FedAvg(), NeuralProblem(nn.Linear(2, 4)), data, 1)


@pytest.mark.parametrize("node", [{}, {"partition-id": "0"}, {"partition-id": -1}])
def test_a_node_without_a_number_is_told_what_to_do(node: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="--node-config"):
        client_number(node)


def test_the_state_folder_comes_from_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARSIFL_STATE", "there")
    assert state_root({"state-dir": "here"}) == Path("here")
    assert state_root({}) == Path("there")
    monkeypatch.delenv("PARSIFL_STATE")
    assert state_root({}) == Path.home() / ".parsifl" / "state"


def test_a_request_for_another_client_is_refused(tmp_path: Path) -> None:
    site = RemoteClient(Experiment("fedavg", model="glm"), 0, PAIRS[0], tmp_path)
    own = json.loads(site.hello().text)
    request = TrainRequest(
        client=1,
        round=0,
        experiment="0" * 32,
        accepted=0,
        oldest=0,
        data_schema=DataSchema.read(own["data_schema"]),
        uploads=True,
    )
    with pytest.raises(WireError, match="client: this is 0, not 1"):
        site.answer("train", request.envelope())
    reply = failure_in(answered(lambda: site.answer("train", request.envelope())))
    assert reply == FailureReply(error="WireError")


def test_a_failure_of_the_users_code_does_not_tell_its_text() -> None:
    def load() -> Envelope:
        raise ValueError("patient 17 has no age")

    reply = answered(load)
    assert "ValueError" in reply.text
    assert "17" not in reply.text


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


def test_the_device_of_a_run_is_where_a_client_computes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="the device 'cuda:99' cannot be used"):
        RemoteClient(Experiment("fedavg", device="cuda:99"), 0, PAIRS[0], tmp_path)
    devices: list[torch.device] = []

    def spy(function: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
        devices.append(device)
        return placed(function, device)

    monkeypatch.setattr("parsifl.flower.client.placed", spy)
    chosen = Experiment("fedavg", model="glm", clients=2, rounds=1, device="cpu:0")
    InProcess(chosen, tmp_path / "state").run(tmp_path / "run")
    assert devices == [torch.device("cpu:0")] * 2
