"""What is recorded of a round, and how uploads are combined."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support.fixtures import classifier
from torch import Tensor

from parsifl.algorithms.fedamp import FedAMP
from parsifl.algorithms.fedavg import FedAvg
from parsifl.core import tree
from parsifl.core.algorithm import ClientInfo, ClientUpload
from parsifl.core.keys import Key
from parsifl.engine.costs import Cost
from parsifl.engine.pool import ClientFailure, ClientResult
from parsifl.engine.record import RoundRecord
from parsifl.engine.settings import NetworkModel
from parsifl.engine.tally import RoundTally
from parsifl.wire import MessageStats

CLIENTS = [ClientInfo(client, 3 + client) for client in range(4)]


def drawn() -> list[dict[str, Tensor]]:
    draw = Key(0, purpose="test/gather").torch_generator()
    start = classifier().init(Key(0))
    return [
        tree.map(lambda leaf: torch.randn(leaf.shape, generator=draw, dtype=leaf.dtype), start)
        for _ in CLIENTS
    ]


def total(algorithm: Any, uploads: list[dict[str, Tensor]]) -> Any:
    accumulator = algorithm.accumulator(classifier())
    for client, upload in zip(CLIENTS, uploads, strict=True):
        accumulator.add(ClientUpload(client, algorithm.weight(client), upload))
    return accumulator.total()


def across(leaf: Tensor) -> Tensor:
    return leaf.mT.contiguous().mT if leaf.ndim == 2 else leaf


@pytest.mark.bits
@pytest.mark.parametrize("algorithm", [FedAvg(), FedAMP()], ids=["sum", "gather"])
def test_the_layout_of_uploads_in_memory_changes_no_bit(algorithm: Any) -> None:
    problem = classifier()
    server = algorithm.init_server(problem, CLIENTS, Key(0))
    uploads = drawn()
    turned = [tree.map(across, upload) for upload in uploads]
    assert any(not leaf.is_contiguous() for leaf in tree.leaves(turned[0]))
    states = [
        algorithm.aggregate(problem, server, total(algorithm, given), Key(0))
        for given in (uploads, turned)
    ]
    assert tree.same(*states)


def test_totals_of_parts_merge_to_the_total_up_to_rounding() -> None:
    uploads, algorithm = drawn(), FedAvg()
    merged = algorithm.accumulator(classifier())
    for part in (slice(0, 2), slice(2, 4)):
        accumulator = algorithm.accumulator(classifier())
        for client, upload in list(zip(CLIENTS, uploads, strict=True))[part]:
            accumulator.add(ClientUpload(client, algorithm.weight(client), upload))
        merged.merge(accumulator.total())
    ours, whole = merged.total().value(), total(algorithm, uploads).value()
    for name, value in whole.items():
        assert torch.allclose(ours[name], value, rtol=1e-14)


def test_uploads_that_are_gathered_are_ordered_by_client() -> None:
    accumulator = FedAMP().accumulator(classifier())
    for client in (CLIENTS[2], CLIENTS[0], CLIENTS[1]):
        accumulator.add(ClientUpload(client, 1.0, {"w": torch.ones(1)}))
    assert [upload.client.id for upload in accumulator.total()] == [0, 1, 2]
    assert not accumulator.mergeable


def result(client: ClientInfo, **more: Any) -> ClientResult:
    metrics = {"loss": torch.tensor(1.0 + client.id)}
    down, up = MessageStats(10, 20, 5.5, 4), MessageStats(100, 200, 50.2, 40)
    return ClientResult(client, None, None, metrics, down, up, Cost(5, 7, 9), **more)


def test_a_tally_adds_up_what_clients_sent_and_spent() -> None:
    tally = RoundTally(3, 4, NetworkModel(up=100.0))
    for client in CLIENTS[:3]:
        tally.add(result(client), client.samples, uploads=client.id < 2)
    tally.add(ClientFailure(CLIENTS[3], "slow", MessageStats(10)), 1.0, uploads=True)
    record = tally.record({"local": 1.0}, "loop")
    assert (record.round, record.cohort, record.trained) == (3, 4, 3)
    assert (record.bytes_up, record.bytes_down) == (200, 40)
    assert (record.dense_up, record.entropy_up, record.parameters_up) == (400, 102, 80)
    assert (record.dense_down, record.entropy_down, record.parameters_down) == (60, 18, 12)
    assert record.metrics["loss"] == pytest.approx((3 * 1.0 + 4 * 2.0) / 7)
    assert record.flops == 3 * int(Cost(5, 7, 9))
    assert [device["clients"] for device in record.devices] == [2, 1]
    assert record.dropped == {3: "slow"}
    assert record.simulated_seconds == 1.0


def test_a_client_that_cannot_be_counted_leaves_the_sum_open() -> None:
    tally = RoundTally(1, 2, NetworkModel())
    tally.add(result(CLIENTS[0]), 1.0, uploads=True)
    uncounted = ClientResult(CLIENTS[1], None, None, {}, MessageStats(), MessageStats())
    tally.add(uncounted, 1.0, uploads=True)
    assert tally.record({}, "loop").flops is None


def test_the_largest_upload_is_traced_to_its_client() -> None:
    tally = RoundTally(1, 3, NetworkModel())
    for client, largest in zip(CLIENTS, (0.0, 1e12, 1e10, 0.0), strict=True):
        tally.add(result(client, largest=largest), 1.0, uploads=True)
    assert tally.largest == (1e12, 1)


def test_a_record_survives_json_and_ignores_what_it_does_not_know() -> None:
    scores = {"global": {"test": {"loss": {"mean": 1.0, "std": 0.1, "worst_decile": 2.0}}}}
    record = RoundRecord(
        2, 5, bytes_up=7, dropped={1: "slow"}, metrics={"a": 1.0}, scores=scores,
        notes=("n",), unevaluated={3: "away"}, stopped="done",
    )  # fmt: skip
    line = record.to_json()
    assert line["global"] == scores["global"]
    assert RoundRecord.from_json({**line, "new field": 1}) == record
    assert RoundRecord.from_json({"round": 1, "cohort": 2}) == RoundRecord(1, 2)
