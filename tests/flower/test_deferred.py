"""The evaluation of a round travels inside the next request to train: the same records, sooner."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.flower.inprocess import Answer, InProcess, changed, fields, simulated
from tests.flower.test_server import experiment, server_state

from parsifl.core import tree
from parsifl.flower.message import Envelope, Kind
from parsifl.flower.pool import FlowerPool

HALF = {"participation": 0.5, "rounds": 4, "validation": 0.1}


def timeless(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: record[name] for name in record if name != "seconds"} for record in records]


@pytest.fixture(scope="module")
def at_once(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return the records of a federation whose rounds are evaluated in exchanges of their own."""
    folder = tmp_path_factory.mktemp("at-once")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FlowerPool, "deferred_evaluation", False)
        link = InProcess(experiment("ditto", **HALF), folder / "state")
        records = link.run(folder / "run")
    assert len(link.exchanges) == 1 + 2 * 4
    return timeless(records)


@pytest.fixture(scope="module")
def in_one_process() -> Any:
    """Return the server state of the same run in the engine."""
    return simulated(experiment("ditto", **HALF)).server


def test_a_round_is_one_exchange_and_the_records_are_the_same(
    at_once: list[dict[str, Any]], tmp_path: Path
) -> None:
    link = InProcess(experiment("ditto", **HALF), tmp_path / "state")
    assert timeless(link.run(tmp_path / "run")) == at_once
    kinds = [sorted(set(exchange.values())) for exchange in link.exchanges]
    # those who must be evaluated and do not train get a message in the same exchange
    assert kinds == [["hello"], ["train"], *[["evaluate", "train"]] * 3, ["evaluate"]]
    assert all(len(exchange) == 4 for exchange in link.exchanges[2:])


@pytest.mark.parametrize("message", range(4, 22, 2))
def test_a_server_that_is_killed_at_any_message_ends_with_the_same_records(
    message: int, at_once: list[dict[str, Any]], in_one_process: Any, tmp_path: Path
) -> None:
    seen = 0

    def kill(_: Kind, __: int, ___: Envelope, answer: Callable[[], Envelope]) -> Answer:
        nonlocal seen
        reply = answer()  # the client has worked and stored its state
        seen += 1
        if seen == message:
            raise KeyboardInterrupt
        return reply

    chosen = experiment("ditto", **HALF)
    link = InProcess(chosen, tmp_path / "state", kill)
    with pytest.raises(KeyboardInterrupt):
        link.run(tmp_path / "run")
    resumed = link.run(tmp_path / "run", resume=True)
    assert timeless(resumed) == at_once
    assert tree.same(server_state(tmp_path / "run", chosen), in_one_process)


def test_a_lost_reply_is_asked_for_again_with_its_evaluation(
    at_once: list[dict[str, Any]], tmp_path: Path
) -> None:
    lost: set[tuple[int, int]] = set()

    def lose(kind: Kind, client: int, request: Envelope, answer: Callable[[], Envelope]) -> Answer:
        reply, place = answer(), (client, fields(request).get("round", 0))
        if kind == "train" and place not in lost:
            lost.add(place)
            return None
        return reply

    link = InProcess(experiment("ditto", **HALF), tmp_path / "state", lose)
    assert timeless(link.run(tmp_path / "run", quorum=1.0)) == at_once
    assert len(lost) == 8


def test_scores_and_uploads_are_dropped_one_by_one(tmp_path: Path) -> None:
    """A client whose training fails is evaluated, and one with bad scores has trained."""

    def fault(kind: Kind, client: int, request: Envelope, answer: Callable[[], Envelope]) -> Answer:
        reply = answer()
        if kind != "train" or fields(request)["round"] != 1:
            return reply
        assert reply.carried is not None
        if client == 0:
            return Envelope('{"error": "DataError"}', {}, reply.carried)
        if client == 1:
            return Envelope(reply.text, reply.parts, changed(reply.carried, scores="high"))
        if client == 2:
            return Envelope(reply.text, reply.parts)
        return Envelope(reply.text, reply.parts, changed(reply.carried, round=1))

    link = InProcess(experiment("fedavg", rounds=2), tmp_path / "state", fault)
    first, second = link.run(tmp_path / "run")
    assert list(second["dropped"]) == [0]
    assert sorted(first["unevaluated"]) == [1, 2, 3]
    assert "round: a reply for 1, not 0" in first["unevaluated"][3]


def test_a_client_that_could_not_start_is_named_in_both_records(tmp_path: Path) -> None:
    def fault(kind: Kind, client: int, request: Envelope, answer: Callable[[], Envelope]) -> Answer:
        if kind == "train" and fields(request)["round"] == 1 and client == 2:
            return Envelope(json.dumps({"error": "MemoryError"}))
        return answer()

    link = InProcess(experiment("fedavg", rounds=2), tmp_path / "state", fault)
    first, second = link.run(tmp_path / "run")
    assert first["unevaluated"][2].startswith("MemoryError")
    assert second["dropped"][2].startswith("MemoryError")
