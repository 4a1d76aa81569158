"""One hostile client among four: its reply is dropped and named, and the run is completed."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.flower.inprocess import Answer, InProcess, changed, fields
from tests.flower.test_server import experiment

from parsifl import wire
from parsifl.core.errors import DataError, ParsiflError
from parsifl.flower.message import Envelope, Kind, printable
from parsifl.wire import frame

HUGE = 10**400
Forge = Callable[[Envelope], Envelope | str]


def hostile(forged: Kind, forge: Forge, client: int = 1) -> Any:
    def fault(kind: Kind, who: int, _: Envelope, answer: Callable[[], Envelope]) -> Answer:
        reply = answer()
        return forge(reply) if kind == forged and who == client else reply

    return fault


def is_safe(reason: str) -> bool:
    return reason.isprintable() and 0 < len(reason) <= 500


def enormous(reply: Envelope) -> Envelope:
    """Return an upload of a few hundred bytes whose shape has 2^1024 entries."""
    data = wire.encode({"w": torch.eye(2)})
    description = b'["d",["w"],[]]'
    reader = frame.Reader(memoryview(data))
    flags = frame.read_prefix(reader)
    text = json.loads(frame._text(reader, bool(flags & frame.DEFLATED)))
    text[1][0] = [text[1][0][0], *[2**60] * 17, 16]
    description = json.dumps(text, separators=(",", ":")).encode()
    body = frame.varint(len(description)) + description + frame.varint(2) + frame.varint(200)
    body += bytes(204)
    crc = frame.checksum(0, [body])
    prefix = frame.PREFIX.pack(frame.MAGIC, frame.VERSION, 0, crc)
    return Envelope(reply.text, {"upload": prefix + body})


UPLOADS: dict[str, Forge] = {
    "2^1024 entries": enormous,
    "too many metrics": lambda r: changed(r, metrics={f"m{i}": 0.5 for i in range(101)}),
    "a long name": lambda r: changed(r, metrics={"x" * 100_000: 0.5}),
    "an escape": lambda r: changed(r, metrics={"\x1b[2J": 0.5}),
    "infinite metrics": lambda r: changed(r, metrics={"loss": math.inf}),
    "a huge metric": lambda r: changed(r, metrics={"loss": HUGE}),
    "a metric whose mean overflows": lambda r: changed(r, metrics={"loss": -1.7e308}),
    "huge round": lambda r: changed(r, round=HUGE),
    "a surrogate": lambda r: changed(r, experiment="\ud800"),
    "a field more": lambda r: changed(r, weight=1e9),
    "a part more": lambda r: Envelope(r.text, {**r.parts, "state": b""}),
    "not JSON": lambda r: Envelope("{", r.parts),
    "deep": lambda r: Envelope("[" * 100_000, r.parts),
    "long": lambda r: Envelope(json.dumps({"client": "x" * 10**7}), r.parts),
    "an error with a surrogate": lambda _: Envelope('{"error": "A", "detail": "\\ud800"}'),
    "an error with escapes": lambda _: Envelope(
        json.dumps({"error": "A", "detail": "\x1b[2J\x1b]0;owned\x07\nround 2 of 2 is done"})
    ),
    "an error that is a list": lambda _: Envelope('{"error": ["A"]}'),
    "a long error": lambda _: Envelope(json.dumps({"error": "A", "detail": "x" * 20_000})),
    "a raw text": lambda _: "gone\ud800\x1b[31m\n" * 1000,
}


@pytest.mark.parametrize("name", list(UPLOADS))
def test_a_hostile_upload_is_dropped_and_named(name: str, tmp_path: Path) -> None:
    chosen = experiment("fedavg", rounds=1, evaluate_every=0)
    link = InProcess(chosen, tmp_path / "state", hostile("train", UPLOADS[name]))
    (record,) = link.run(tmp_path / "run")
    assert list(record["dropped"]) == [1]
    assert is_safe(record["dropped"][1]), record["dropped"]
    assert record["trained"] == 3


def scores(**changes: Any) -> Forge:
    return lambda reply: changed(reply, **changes)


GOOD = {"test": {"loss": 0.5, "accuracy": 0.5}}
SCORES: dict[str, Forge] = {
    "a list": scores(scores={"global": []}),
    "a text": scores(scores={"global": "x"}),
    "null": scores(scores=None),
    "null inside": scores(scores={"global": {"test": None}}),
    "huge samples": scores(samples={"test": HUGE}),
    "2^63 samples": scores(samples={"test": 2**63}),
    "NaN": scores(scores={"personal": {"test": {"loss": math.nan, "accuracy": 0.5}}}),
    "infinity": scores(scores={"personal": {"test": {"loss": math.inf, "accuracy": 0.5}}}),
    "a loss whose mean overflows": scores(
        scores={"personal": {"test": {"loss": 1.7e308, "accuracy": 0.5}}}
    ),
    "a negative accuracy": scores(scores={"personal": {"test": {"loss": 0.5, "accuracy": -5.0}}}),
    "an accuracy of 1e300": scores(scores={"personal": {"test": {"loss": 0.5, "accuracy": 1e9}}}),
    "other names": scores(scores={"personal": {"test": {"luck": 0.5}}}),
    "no names": scores(scores={"personal": {"test": {}}}),
    "no rows": scores(samples={}),
    "another model": scores(scores={"third": GOOD}),
    "another split": scores(scores={"personal": {"train": GOOD["test"]}}),
}


@pytest.mark.parametrize("name", list(SCORES))
def test_hostile_scores_spoil_only_their_own(name: str, tmp_path: Path) -> None:
    chosen = experiment("fedavg", rounds=1)
    link = InProcess(chosen, tmp_path / "state", hostile("evaluate", SCORES[name]))
    (record,) = link.run(tmp_path / "run")
    assert list(record["unevaluated"]) == [1]
    assert is_safe(record["unevaluated"][1])
    assert record["personal"]["test"].keys() == {"loss", "accuracy"}
    summaries = record["personal"]["test"].values()
    assert all(math.isfinite(number) for summary in summaries for number in summary.values())


def test_unknown_metrics_are_left_out(tmp_path: Path) -> None:
    def more(reply: Envelope) -> Envelope:
        found = fields(reply)["scores"]
        found["personal"]["test"]["luck"] = 1.0
        return changed(reply, scores=found)

    link = InProcess(experiment("fedavg", rounds=1), tmp_path / "state", hostile("evaluate", more))
    (record,) = link.run(tmp_path / "run")
    assert "unevaluated" not in record
    assert record["personal"]["test"].keys() == {"loss", "accuracy"}


def with_schema(**changes: Any) -> Forge:
    return lambda r: changed(r, data_schema={**fields(r)["data_schema"], **changes})


HELLOS: dict[str, Forge] = {
    "dtype is a list": with_schema(dtype=["float32"]),
    "2^31 classes": with_schema(classes=2**31 - 1),
    "an enormous row": with_schema(shape=[2**20, 2**20]),
    "10^18 steps": lambda r: changed(r, profile={"local_steps": 10**18}),
    "speed is a text": lambda r: changed(r, profile={"flops_per_second": "x"}),
    "speed is negative": lambda r: changed(r, profile={"flops_per_second": -1.0}),
    "huge rows": lambda r: changed(r, samples=HUGE),
    "a nested profile": lambda r: changed(r, profile={"a": {"b": 1}}),
    "NaN": lambda r: changed(r, profile={"a": math.nan}),
    "another client": lambda r: changed(r, client=4),
    "no client": lambda r: changed(r, client=-1),
    "an error with a surrogate": lambda _: Envelope('{"error": "A", "detail": "\\ud800"}'),
}


@pytest.mark.parametrize("name", list(HELLOS))
def test_a_hostile_hello_is_not_admitted(name: str, tmp_path: Path) -> None:
    chosen = experiment("fedavg", rounds=1, evaluate_every=0)
    InProcess(chosen, tmp_path / "state").run(tmp_path / "run")
    chosen = experiment("fedavg", rounds=2, evaluate_every=0)
    link = InProcess(chosen, tmp_path / "state", hostile("hello", HELLOS[name]))
    records = link.run(tmp_path / "run", resume=True)
    assert records[1]["dropped"] == {1: "not connected"}
    (line,) = {line for line in link.log if "node 101 is rejected" in line}
    assert is_safe(line)


def test_a_client_with_far_more_classes_than_others_is_named(tmp_path: Path) -> None:
    link = InProcess(
        experiment("fedavg"), tmp_path / "state", hostile("hello", with_schema(classes=10**6))
    )
    with pytest.raises(DataError, match="client 1 reports 1000000 classes"):
        link.run(tmp_path / "run")
    with pytest.raises(ParsiflError, match="the clients 1 of 4 have not reported"):
        link.run(tmp_path / "run", classes=10)


@pytest.mark.parametrize("odd", [0, 2])
def test_the_client_with_another_schema_is_named(odd: int, tmp_path: Path) -> None:
    other = hostile("hello", with_schema(name="other"), client=odd)
    with pytest.raises(DataError, match=f"the data of client {odd} have another schema"):
        InProcess(experiment("fedavg"), tmp_path / "state", other).run(tmp_path / "run")


def test_a_claim_of_many_rows_is_noted(tmp_path: Path) -> None:
    many = hostile("hello", lambda reply: changed(reply, samples=2**40 - 1))
    link = InProcess(experiment("fedavg", rounds=2), tmp_path / "state", many)
    records = link.run(tmp_path / "run")
    assert "client 1 has 100.0% of the weight" in records[0]["notes"][0]
    assert records[1]["notes"] == []


def test_a_claim_of_many_evaluated_rows_is_noted(tmp_path: Path) -> None:
    many = hostile("evaluate", scores(samples={"test": 2**40 - 1}))
    link = InProcess(experiment("fedavg", rounds=1), tmp_path / "state", many)
    (record,) = link.run(tmp_path / "run")
    assert "client 1 has 100.0% of the test rows" in record["notes"][0]


def test_scores_over_more_training_rows_than_declared_are_left_out(tmp_path: Path) -> None:
    def more(reply: Envelope) -> Envelope:
        found = fields(reply)["samples"]
        return changed(reply, samples={**found, "train": found["train"] + 1})

    chosen = experiment("fedavg", rounds=1, evaluation={"train": True})
    link = InProcess(chosen, tmp_path / "state", hostile("evaluate", more))
    (record,) = link.run(tmp_path / "run")
    assert list(record["unevaluated"]) == [1]
    assert "declared" in record["unevaluated"][1]


@pytest.mark.parametrize("part", ["down", "model"])
def test_a_message_with_nan_is_an_error_of_the_client_alone(part: str, tmp_path: Path) -> None:
    def spoil(kind: Kind, who: int, request: Envelope, answer: Callable[[], Envelope]) -> Answer:
        if kind != "evaluate" or who != 1:
            return answer()
        from tests.flower.test_server import _poisoned

        poisoned = _poisoned(Envelope("{}", {"upload": request.parts[part]})).parts["upload"]
        parts = {**request.parts, part: poisoned}
        return link.site(1)("evaluate", Envelope(request.text, parts))

    link = InProcess(experiment("fedavg", rounds=1), tmp_path / "state", spoil)
    (record,) = link.run(tmp_path / "run")
    assert list(record["unevaluated"]) == [1]
    assert record["unevaluated"][1].startswith("WireError")


def test_texts_of_a_client_stay_on_its_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    secret = "label 57 of /home/berlin/ward7"

    def fail(*_: Any) -> None:
        raise DataError(secret)

    chosen = experiment("fedavg", rounds=1, evaluate_every=0)
    link = InProcess(chosen, tmp_path / "state")
    site = link.site

    def failing(client: int) -> Any:
        if client == 1:
            from parsifl.flower import client as module

            def answer(kind: Kind, request: Envelope) -> Envelope:
                with monkeypatch.context() as patch:
                    if kind == "train":
                        patch.setattr(module.RemoteClient, "_prepare", fail)
                    return site(1)(kind, request)

            return answer
        return site(client)

    link.site = failing  # type: ignore[method-assign]
    # Flower disables existing loggers when it opens its database
    monkeypatch.setattr(logging.getLogger("parsifl"), "disabled", True)
    (record,) = link.run(tmp_path / "run")
    assert record["dropped"] == {1: "DataError (details are in the log of the client's node)"}
    assert secret in caplog.text


@pytest.mark.parametrize("text", ["a\nb", "\x1b[2J", "\ud800", "\u202eabc", "x" * 10**6, ""])
def test_printable_texts(text: str) -> None:
    found = printable(text)
    assert found.isprintable()
    assert len(found) <= 500
    found.encode()
