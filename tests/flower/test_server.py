"""The protocol without a network: the same bits as in one process, whatever goes wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.flower.inprocess import Answer, InProcess, honest, simulated
from tests.records import read_metrics

from parsifl import wire
from parsifl.core import registry, tree
from parsifl.core.errors import CheckpointError, DataError, ParsiflError
from parsifl.engine import checkpoint
from parsifl.engine.evaluation import Evaluation
from parsifl.engine.experiment import Experiment
from parsifl.flower.message import Letter
from parsifl.flower.transport import Kind

SAME = (
    "cohort",
    "trained",
    "bytes_up",
    "bytes_down",
    "dense_up",
    "dense_down",
    "entropy_up",
    "flops",
    "metrics",
)
MATRIX = ("ditto", "fedavg", "fedgradmp", "fedht", "fedslr", "scaffold")  # in `make test-matrix`
LINEAR = ("distributediht", "fedht", "fediterht", "fedgradmp", "inexactfedgradmp")


def experiment(algorithm: str, **changes: object) -> Experiment:
    model = "glm" if algorithm in LINEAR else "mlp:hidden=8+8"
    settings = {"algorithm": algorithm, "data": "digits", "clients": 4, "rounds": 3, "model": model}
    return Experiment.read({**settings, **changes})


def server_state(path: Path, method: Experiment) -> object:
    found = checkpoint.load(path / "checkpoint", method.method().tree_types())
    assert found is not None
    return found.server


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.bits] if name in MATRIX else [])
        for name in registry.algorithms()
    ],
)
def test_every_algorithm_gives_the_bits_and_books_of_the_simulation(
    name: str, tmp_path: Path
) -> None:
    chosen = experiment(name, participation=0.5, validation=0.1, rounds=2)
    records = InProcess(chosen, tmp_path / "state").run(tmp_path / "run")
    expected = simulated(chosen)
    assert tree.same(server_state(tmp_path / "run", chosen), expected.server)
    for ours, theirs in zip(records, expected.metrics, strict=True):
        assert {k: ours[k] for k in SAME} == {k: theirs[k] for k in SAME}
        assert ours.get("personal") == theirs.get("personal")
        for split, scores in theirs.get("global", {}).items():  # in one process all rows at once
            for metric, summary in scores.items():
                assert ours["global"][split][metric] == pytest.approx(summary, rel=1e-5)
        assert ours["notes"] == theirs["notes"] == []


@pytest.mark.parametrize("precision", ["bfloat16", "int8"])
def test_short_values_are_the_same_on_both_sides(precision: str, tmp_path: Path) -> None:
    chosen = experiment("ditto", precision=precision, rounds=2)
    InProcess(chosen, tmp_path / "state").run(tmp_path / "run")
    assert tree.same(server_state(tmp_path / "run", chosen), simulated(chosen).server)


def test_who_would_upload_values_beyond_the_precision_is_left_out_on_both_sides(
    tmp_path: Path,
) -> None:
    settings = {"lr": 1.2e5, "local_steps": 1}  # some clients come to more than 65504
    chosen = experiment(
        "fedavg", model="glm", precision="float16", rounds=1, settings=settings, evaluate_every=0
    )
    records = InProcess(chosen, tmp_path / "state").run(tmp_path / "run")
    expected = simulated(chosen)
    assert 0 < len(records[0]["dropped"]) < 4
    assert records[0]["dropped"] == expected.metrics[0]["dropped"]
    assert tree.same(server_state(tmp_path / "run", chosen), expected.server)


def test_fine_tuning_and_sampled_clients_are_judged_as_in_one_process(tmp_path: Path) -> None:
    evaluation = Evaluation(fine_tune_steps=2, clients="sampled")
    chosen = replace(experiment("fedavg", participation=0.5, rounds=2), evaluation=evaluation)
    records = InProcess(chosen, tmp_path / "state").run(tmp_path / "run")
    expected = simulated(chosen).metrics
    assert [r["personal"] for r in records] == [r["personal"] for r in expected]


def test_the_server_never_sees_rows_or_personal_models(tmp_path: Path) -> None:
    sent: list[Letter] = []

    def watch(kind: Kind, _: int, __: Letter, answer: Callable[[], Letter]) -> Answer:
        reply = answer()
        if kind != "train":
            sent.append(reply)
        return reply

    chosen = experiment("ditto", rounds=1)
    InProcess(chosen, tmp_path / "state", watch).run(tmp_path / "run")
    assert len(sent) == 8
    assert all(not letter.parts for letter in sent)
    assert max(len(json.dumps(dict(letter.meta))) for letter in sent) < 1000
    assert not list((tmp_path / "run" / "checkpoint").rglob("part-*"))  # nothing of a client


@pytest.mark.bits
def test_a_killed_server_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    """Killed after the clients of round 2 worked, before their uploads were counted."""

    def kill(kind: Kind, client: int, letter: Letter, answer: Callable[[], Letter]) -> Answer:
        reply = answer()
        if kind == "train" and letter.meta["round"] == 1 and client == 0:
            raise KeyboardInterrupt
        return reply

    chosen = experiment("ditto")
    link = InProcess(chosen, tmp_path / "state", kill)
    with pytest.raises(KeyboardInterrupt):
        link.run(tmp_path / "run")
    link.fault = honest
    resumed = link.run(tmp_path / "run", resume=True)
    expected = simulated(chosen)
    assert tree.same(server_state(tmp_path / "run", chosen), expected.server)
    assert [r["personal"] for r in resumed] == [r["personal"] for r in expected.metrics]
    assert link.asked.count(("train", 0)) == 4


def test_a_server_that_is_killed_while_judging_goes_on(tmp_path: Path) -> None:
    def kill(kind: Kind, client: int, letter: Letter, answer: Callable[[], Letter]) -> Answer:
        reply = answer()
        if kind == "evaluate" and letter.meta["round"] == 1 and client == 0:  # the last one
            raise KeyboardInterrupt
        return reply

    chosen = experiment("scaffold")
    link = InProcess(chosen, tmp_path / "state", kill)
    with pytest.raises(KeyboardInterrupt):
        link.run(tmp_path / "run")
    link.fault = honest
    link.run(tmp_path / "run", resume=True)
    assert tree.same(server_state(tmp_path / "run", chosen), simulated(chosen).server)


def test_a_lost_reply_is_asked_for_again_and_changes_nothing(tmp_path: Path) -> None:
    lost: list[int] = []

    def lose(kind: Kind, client: int, letter: Letter, answer: Callable[[], Letter]) -> Answer:
        reply = answer()  # the client has worked and stored its state
        if kind == "train" and letter.meta["round"] == 1 and client == 2 and not lost:
            lost.append(client)
            return None
        return reply

    chosen = experiment("ditto")
    link = InProcess(chosen, tmp_path / "state", lose)
    link.run(tmp_path / "run", quorum=1.0)
    assert lost == [2]
    assert tree.same(server_state(tmp_path / "run", chosen), simulated(chosen).server)


def test_a_late_client_is_left_out_and_comes_back_with_its_old_state(tmp_path: Path) -> None:
    seen: list[int] = []

    def late(kind: Kind, client: int, letter: Letter, answer: Callable[[], Letter]) -> Answer:
        if kind != "train" or client != 3:
            return answer()
        seen.append(letter.meta["ack"])
        reply = answer()
        return None if letter.meta["round"] == 1 else reply

    chosen = experiment("ditto", evaluate_every=0)
    link = InProcess(chosen, tmp_path / "state", late)
    records = link.run(tmp_path / "run")
    assert [sorted(r["dropped"]) for r in records] == [[], [3], []]
    assert records[1]["dropped"][3] == "no answer in time"
    assert seen == [0, 1, 1]  # it goes on from the round that was counted


def _replaced(reply: Letter, **changes: object) -> Letter:
    return Letter({**reply.meta, **changes}, reply.parts)


def _upload(reply: Letter, change: Callable[[dict[str, torch.Tensor]], object]) -> Letter:
    message = wire.decode(reply.parts["upload"], dict[str, torch.Tensor])
    return Letter(reply.meta, {"upload": wire.encode(change(message))})


def _poisoned(reply: Letter) -> Letter:
    """Return an upload with a NaN in it, which `encode` itself would refuse."""
    message = wire.decode(reply.parts["upload"], dict[str, torch.Tensor])
    name = next(iter(message))
    marked = {**message, name: torch.full_like(message[name], 7.25)}
    data = bytearray(wire.encode(marked))
    needle, nan = torch.tensor(7.25), torch.tensor(float("nan"))
    at = bytes(data).index(needle.numpy().tobytes())
    data[at : at + 4] = nan.numpy().tobytes()
    return Letter(reply.meta, {"upload": _with_checksum(bytes(data))})


def _with_checksum(data: bytes) -> bytes:
    from parsifl.wire import frame

    _, version, flags, _ = frame.PREFIX.unpack_from(data)
    crc = frame.checksum(flags, [data[frame.PREFIX.size :]])
    return frame.PREFIX.pack(frame.MAGIC, version, flags, crc) + data[frame.PREFIX.size :]


FORGERIES: dict[str, tuple[Callable[[Letter], Answer], str]] = {
    "stale round": (lambda r: _replaced(r, round=0), "round: an answer for 0"),
    "another client": (lambda r: _replaced(r, client=0), "client: an answer for 0"),
    "another run": (lambda r: _replaced(r, experiment="0" * 32), "experiment: an answer"),
    "no number": (lambda r: _replaced(r, round="1"), "round: expected int"),
    "info not finite": (lambda r: _replaced(r, info={"loss": "nan"}), "info: expected finite"),
    "no upload": (lambda r: Letter(r.meta), "upload: expected one part"),
    "noise": (lambda r: Letter(r.meta, {"upload": b"\x00" * 100}), "WireError"),
    "cut off": (lambda r: Letter(r.meta, {"upload": r.parts["upload"][:-3]}), "WireError"),
    "wrong shape": (
        lambda r: _upload(r, lambda m: {**m, next(iter(m)): torch.ones(2, 2)}),
        "instead of",
    ),
    "missing layer": (lambda r: _upload(r, lambda m: dict(list(m.items())[1:])), "missing"),
    "one layer more": (lambda r: _upload(r, lambda m: {**m, "z": torch.ones(1)}), "not expected"),
    "wrong dtype": (
        lambda r: _upload(r, lambda m: {k: v.double() for k, v in m.items()}),
        "float64",
    ),
    "oversized": (
        lambda r: _upload(r, lambda m: {**m, "z": torch.ones(1 << 20)}),
        "but dense it would have",
    ),
    "bomb": (lambda r: _upload(r, lambda m: {**m, "z": torch.zeros(1 << 24)}), "over the limit"),
    "not a number": (_poisoned, "NaN"),
    "its own failure": (
        lambda _: Letter({"error": "DataError: no rows"}),
        "DataError: no rows",
    ),
}


@pytest.mark.parametrize("forgery", list(FORGERIES))
def test_a_bad_answer_is_refused_and_named_and_the_round_goes_on(
    forgery: str, tmp_path: Path
) -> None:
    forge, reason = FORGERIES[forgery]

    def fault(kind: Kind, client: int, letter: Letter, answer: Callable[[], Letter]) -> Answer:
        reply = answer()
        if kind == "train" and client == 1 and letter.meta["round"] == 1:
            return forge(reply)
        return reply

    chosen = experiment("fedavg", rounds=2, evaluate_every=0)
    records = InProcess(chosen, tmp_path / "state", fault).run(tmp_path / "run")
    assert list(records[1]["dropped"]) == [1]
    assert reason in records[1]["dropped"][1]
    assert records[1]["trained"] == 3


def test_too_few_uploads_stop_the_run_which_can_be_resumed(tmp_path: Path) -> None:
    def silent(kind: Kind, client: int, letter: Letter, answer: Callable[[], Letter]) -> Answer:
        gone = kind == "train" and client != 0 and letter.meta["round"] == 1
        return None if gone else answer()

    chosen = experiment("ditto")
    link = InProcess(chosen, tmp_path / "state", silent)
    with pytest.raises(ParsiflError, match=r"round 2: 1 uploads arrived and 2 are needed"):
        link.run(tmp_path / "run", retries=1)
    assert link.asked.count(("train", 1)) == 3
    assert len(read_metrics(tmp_path / "run")) == 1
    link.fault = honest
    link.run(tmp_path / "run", resume=True)
    assert tree.same(server_state(tmp_path / "run", chosen), simulated(chosen).server)


def test_a_lost_state_folder_is_named(tmp_path: Path) -> None:
    import shutil

    def lose(kind: Kind, _: int, letter: Letter, answer: Callable[[], Letter]) -> Answer:
        if kind == "train" and letter.meta["round"] == 1:
            shutil.rmtree(tmp_path / "state", ignore_errors=True)
        return answer()

    link = InProcess(experiment("ditto"), tmp_path / "state", lose)
    with pytest.raises(ParsiflError, match="no state of round 1"):
        link.run(tmp_path / "run")
    assert link.asked.count(("train", 0)) == 2  # asking again would not help


def test_a_client_that_comes_back_with_other_data_is_not_admitted(tmp_path: Path) -> None:
    chosen = experiment("fedavg", rounds=1)
    link = InProcess(chosen, tmp_path / "state")
    link.run(tmp_path / "run")

    def other(kind: Kind, client: int, _: Letter, answer: Callable[[], Letter]) -> Answer:
        reply = answer()
        return _replaced(reply, samples=5) if kind == "hello" and client == 2 else reply

    again = InProcess(replace(chosen, rounds=2), tmp_path / "state", other)
    records = again.run(tmp_path / "run", resume=True)
    assert records[1]["dropped"] == {2: "not connected"}
    assert any("client 2 began this run with" in line for line in again.log)


def test_a_second_node_that_claims_a_client_waits_until_the_first_is_gone(tmp_path: Path) -> None:
    chosen = experiment("fedavg", rounds=2, evaluate_every=0)
    link = InProcess(chosen, tmp_path / "state", clients={100: 0, 101: 1, 102: 2, 103: 3, 200: 1})

    def leave(kind: Kind, client: int, _: Letter, answer: Callable[[], Letter]) -> Answer:
        if kind == "train" and client == 0:  # the last one to be asked
            link.clients.pop(101, None)
        return answer()

    link.fault = leave
    records = link.run(tmp_path / "run")
    assert any("claims client 1, which node 101 is already" in line for line in link.log)
    assert [r["trained"] for r in records] == [4, 4]


def test_missing_clients_are_named_after_the_wait(tmp_path: Path) -> None:
    link = InProcess(experiment("fedavg"), tmp_path / "state", clients={100: 0, 101: 1, 103: 3})
    with pytest.raises(ParsiflError, match=r"the clients 2 of 4 have not reported"):
        link.run(tmp_path / "run", wait=0.01)


def test_a_folder_that_holds_a_run_is_left_alone(tmp_path: Path) -> None:
    link = InProcess(experiment("fedavg", rounds=1), tmp_path / "state")
    link.run(tmp_path / "run")
    with pytest.raises(CheckpointError, match="already holds a run"):
        link.run(tmp_path / "run")


def test_a_folder_of_another_configuration_is_refused(tmp_path: Path) -> None:
    link = InProcess(experiment("fedavg", rounds=1), tmp_path / "state")
    link.run(tmp_path / "run")
    other = InProcess(experiment("fedavg", rounds=1, settings={"lr": 0.5}), tmp_path / "state")
    with pytest.raises(CheckpointError, match=r"algorithm\.lr"):
        other.run(tmp_path / "run", resume=True)


def test_clients_whose_data_have_another_form_are_told_so(tmp_path: Path) -> None:
    def wide(kind: Kind, client: int, _: Letter, answer: Callable[[], Letter]) -> Answer:
        reply = answer()
        if kind != "hello" or client != 1:
            return reply
        return _replaced(reply, facts={**reply.meta["facts"], "shape": [9]})

    link = InProcess(experiment("fedavg"), tmp_path / "state", wide)
    with pytest.raises(DataError, match="the data of client 1 have another form"):
        link.run(tmp_path / "run")


def test_a_client_that_cannot_be_judged_is_named(tmp_path: Path) -> None:
    def refuse(kind: Kind, client: int, _: Letter, answer: Callable[[], Letter]) -> Answer:
        reply = answer()
        if kind == "evaluate" and client == 0:
            return _replaced(reply, scores={"personal": {"test": {"accuracy": "high"}}})
        return Letter({"error": "MemoryError"}) if kind == "evaluate" and client == 1 else reply

    link = InProcess(experiment("fedavg", rounds=1), tmp_path / "state", refuse)
    (record,) = link.run(tmp_path / "run")
    assert sorted(record["unevaluated"]) == [0, 1]
    assert "scores.personal.test" in record["unevaluated"][0]
    detail = json.loads((tmp_path / "run" / "clients.json").read_text())
    assert detail["personal"]["test"]["clients"] == [2, 3]
