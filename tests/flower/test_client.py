from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from parsifl.core.errors import ConfigError, DataError, WireError
from parsifl.data.clients import ClientData
from parsifl.engine.experiment import Experiment
from parsifl.flower.client import RemoteClient, alone, client_number, placed, state_root
from parsifl.flower.data_schema import DataSchema
from parsifl.flower.message import Envelope, answered
from parsifl.flower.network_schema import FailureReply, TrainRequest, failure_in

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
    data = placed(PAIRS[0], 2, Experiment("fedavg"))
    assert len(data) == 3
    assert [len(part) for part in data.train] == [0, 0, 6]
    assert len(data.test[2]) == 2
    with pytest.raises(DataError, match="a node is one client"):
        placed(ClientData.of(PAIRS), 0, Experiment("fedavg"))
    with pytest.raises(ConfigError, match="needs a named dataset"):
        placed(PAIRS[0], 0, Experiment("fedavg", test="all"))


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
