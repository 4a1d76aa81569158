"""The protocol without a network: the same bits as in one process, whatever goes wrong."""

from __future__ import annotations

import json
import re
import shutil
import warnings
from collections.abc import Callable
from dataclasses import fields as settings_of
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.flower.inprocess import Answer, Fault, InProcess, changed, fields, honest, simulated
from tests.records import read_metrics

from parsifl import wire
from parsifl.core import registry, tree
from parsifl.core.errors import CheckpointError, DataError, ParsiflError
from parsifl.engine import checkpoint
from parsifl.engine.experiment import Experiment
from parsifl.engine.settings import Evaluation
from parsifl.flower.message import Envelope, Kind

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
FEW = {"local_steps": 2, "inner": 2, "tune_epochs": 1.0, "eta_g": 0.1}
LINEAR = ("distributediht", "fedht", "fediterht", "fedgradmp", "inexactfedgradmp")


def experiment(algorithm: str, **changes: object) -> Experiment:
    settings = {"algorithm": algorithm, "data": "digits", "clients": 4, "rounds": 3, "model": "glm"}
    return Experiment.read({**settings, **changes})


def deep(algorithm: str, **changes: object) -> Experiment:
    """Return an experiment with a network where the algorithm can train one, and few steps."""
    if algorithm in LINEAR:
        return experiment(algorithm, **changes)
    method: Any = registry.find(algorithm)
    known = {item.name for item in settings_of(method)}
    few = {name: value for name, value in FEW.items() if name in known}
    return experiment(algorithm, model="mlp:hidden=8+8", settings=few, **changes)


def server_state(path: Path, method: Experiment) -> object:
    found = checkpoint.load(path / "checkpoint", method.build_algorithm().tree_types())
    assert found is not None
    return found.server


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.bits] if name in MATRIX else [])
        for name in registry.algorithms()
        if name != "fedbestsubset"  # all clients take part: see the golden trajectories
    ],
)
def test_every_algorithm_gives_the_bits_and_books_of_the_simulation(
    name: str, tmp_path: Path
) -> None:
    chosen = deep(name, participation=0.5, validation=0.1, rounds=2)
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


@pytest.mark.parametrize("precision", ["exact", "float16", "int8"])
def test_low_rank_uploads_are_factors_on_both_sides(precision: str, tmp_path: Path) -> None:
    settings = {"solver": "local", "lam": 10.0, "local_steps": 2}
    chosen = experiment(
        "fedslr", model="mlp:hidden=8+8", settings=settings, precision=precision, rounds=2
    )
    records = InProcess(chosen, tmp_path / "state").run(tmp_path / "run")
    expected = simulated(chosen)
    assert tree.same(server_state(tmp_path / "run", chosen), expected.server)
    for ours, theirs in zip(records, expected.metrics, strict=True):
        assert {k: ours[k] for k in SAME} == {k: theirs[k] for k in SAME}
        assert not ours["dropped"]
    assert records[-1]["bytes_up"] < 0.2 * records[-1]["dense_up"]


@pytest.mark.parametrize("name", ["ditto", "fedslr"])
@pytest.mark.parametrize("precision", ["bfloat16", "int8"])
def test_short_values_are_the_same_on_both_sides(precision: str, name: str, tmp_path: Path) -> None:
    chosen = deep(name, precision=precision, rounds=2)
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
    sent: list[Envelope] = []

    def watch(kind: Kind, _: int, __: Envelope, answer: Callable[[], Envelope]) -> Answer:
        reply = answer()
        if kind != "train":
            sent.append(reply)
        return reply

    chosen = experiment("ditto", rounds=1)
    InProcess(chosen, tmp_path / "state", watch).run(tmp_path / "run")
    assert len(sent) == 8
    assert all(not request.parts for request in sent)
    assert max(len(request.text) for request in sent) < 1000
    assert not list((tmp_path / "run" / "checkpoint").rglob("part-*"))  # nothing of a client


@pytest.mark.bits
def test_a_killed_server_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    """Killed after the clients of round 2 worked, before their uploads were counted."""

    def kill(kind: Kind, client: int, request: Envelope, answer: Callable[[], Envelope]) -> Answer:
        reply = answer()
        if kind == "train" and fields(request)["round"] == 1 and client == 0:
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


@pytest.mark.parametrize(("seconds", "training"), [(0.0, 4), (3600.0, 5)])
def test_a_deployment_saves_a_checkpoint_as_often_as_its_setting_says(
    tmp_path: Path, seconds: float, training: int
) -> None:
    def kill(kind: Kind, client: int, request: Envelope, answer: Callable[[], Envelope]) -> Answer:
        if kind == "train" and fields(request)["round"] == 1 and client == 0:
            raise KeyboardInterrupt
        return answer()

    chosen = experiment("ditto", checkpoint_seconds=seconds)
    link = InProcess(chosen, tmp_path / "state", kill)
    with pytest.raises(KeyboardInterrupt):
        link.run(tmp_path / "run")
    assert (tmp_path / "run" / "checkpoint" / "LATEST").exists() == (training == 4)
    link.fault = honest
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the run .* was stopped before its first checkpoint")
        link.run(tmp_path / "run", resume=True)
    assert tree.same(server_state(tmp_path / "run", chosen), simulated(chosen).server)
    assert link.asked.count(("train", 0)) == training


def test_a_server_that_is_killed_while_judging_goes_on(tmp_path: Path) -> None:
    def kill(kind: Kind, client: int, request: Envelope, answer: Callable[[], Envelope]) -> Answer:
        reply = answer()
        if kind == "evaluate" and fields(request)["round"] == 2 and client == 0:  # the last one
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

    def lose(kind: Kind, client: int, request: Envelope, answer: Callable[[], Envelope]) -> Answer:
        reply = answer()  # the client has worked and stored its state
        if kind == "train" and fields(request)["round"] == 1 and client == 2 and not lost:
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

    def late(kind: Kind, client: int, request: Envelope, answer: Callable[[], Envelope]) -> Answer:
        if kind != "train" or client != 3:
            return answer()
        seen.append(fields(request)["accepted"])
        reply = answer()
        return None if fields(request)["round"] == 1 else reply

    chosen = experiment("ditto", evaluate_every=0)
    link = InProcess(chosen, tmp_path / "state", late)
    records = link.run(tmp_path / "run")
    assert [sorted(r["dropped"]) for r in records] == [[], [3], []]
    assert records[1]["dropped"][3] == "no answer in time"
    assert seen == [0, 1, 1]  # it goes on from the round that was counted


def _upload(reply: Envelope, change: Callable[[dict[str, torch.Tensor]], object]) -> Envelope:
    message = wire.decode(reply.parts["upload"], dict[str, torch.Tensor])
    return Envelope(reply.text, {"upload": wire.encode(change(message))})


def _poisoned(reply: Envelope) -> Envelope:
    """Return an upload with a NaN in it, which `encode` itself would refuse."""
    message = wire.decode(reply.parts["upload"], dict[str, torch.Tensor])
    name = next(iter(message))
    marked = {**message, name: torch.full_like(message[name], 7.25)}
    data = bytearray(wire.encode(marked))
    needle, nan = torch.tensor(7.25), torch.tensor(float("nan"))
    at = bytes(data).index(needle.numpy().tobytes())
    data[at : at + 4] = nan.numpy().tobytes()
    return Envelope(reply.text, {"upload": _with_checksum(bytes(data))})


def _with_checksum(data: bytes) -> bytes:
    from parsifl.wire import frame

    _, version, flags, _ = frame.PREFIX.unpack_from(data)
    crc = frame.checksum(flags, [data[frame.PREFIX.size :]])
    return frame.PREFIX.pack(frame.MAGIC, version, flags, crc) + data[frame.PREFIX.size :]


FORGERIES: dict[str, tuple[Callable[[Envelope], Answer], str]] = {
    "stale round": (lambda r: changed(r, round=0), "round: a reply for 0"),
    "another client": (lambda r: changed(r, client=0), "client: a reply for 0"),
    "another run": (lambda r: changed(r, experiment="0" * 32), "experiment: a reply"),
    "no number": (lambda r: changed(r, round="1"), "round: Input should be a valid integer"),
    "text": (lambda r: changed(r, metrics={"loss": "nan"}), "metrics.loss: Input"),
    "no upload": (lambda r: Envelope(r.text), "upload: expected one part"),
    "noise": (lambda r: Envelope(r.text, {"upload": b"\x00" * 100}), "magic"),
    "cut off": (lambda r: Envelope(r.text, {"upload": r.parts["upload"][:-3]}), "checksum"),
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
    "bomb": (lambda r: _upload(r, lambda m: {**m, "z": torch.zeros(1 << 24)}), "above the limit"),
    "not a number": (_poisoned, "NaN"),
    "its own failure": (
        lambda _: Envelope('{"error": "DataError"}'),
        "DataError (details are in the log",
    ),
}


@pytest.mark.parametrize("forgery", list(FORGERIES))
def test_a_bad_answer_is_refused_and_named_and_the_round_goes_on(
    forgery: str, tmp_path: Path
) -> None:
    forge, reason = FORGERIES[forgery]

    def fault(kind: Kind, client: int, request: Envelope, answer: Callable[[], Envelope]) -> Answer:
        reply = answer()
        if kind == "train" and client == 1 and fields(request)["round"] == 1:
            return forge(reply)
        return reply

    chosen = experiment("fedavg", rounds=2, evaluate_every=0)
    records = InProcess(chosen, tmp_path / "state", fault).run(tmp_path / "run")
    assert list(records[1]["dropped"]) == [1]
    assert reason in records[1]["dropped"][1]
    assert records[1]["trained"] == 3


def test_too_few_uploads_stop_the_run_which_can_be_resumed(tmp_path: Path) -> None:
    def silent(
        kind: Kind, client: int, request: Envelope, answer: Callable[[], Envelope]
    ) -> Answer:
        gone = kind == "train" and client != 0 and fields(request)["round"] == 1
        return None if gone else answer()

    chosen = experiment("ditto", evaluate_every=0)
    link = InProcess(chosen, tmp_path / "state", silent)
    with pytest.raises(ParsiflError, match=r"round 2: 1 uploads arrived, but 2 are needed"):
        link.run(tmp_path / "run", retries=1)
    assert link.asked.count(("train", 1)) == 3
    assert len(read_metrics(tmp_path / "run")) == 1
    link.fault = honest
    link.run(tmp_path / "run", resume=True)
    assert tree.same(server_state(tmp_path / "run", chosen), simulated(chosen).server)


def _losing(state: Path, client: int = 1) -> Fault:
    """Delete the state of one client before its second round."""

    def lose(kind: Kind, who: int, request: Envelope, answer: Callable[[], Envelope]) -> Answer:
        if kind == "train" and who == client and fields(request)["round"] == 1:
            for path in state.glob(f"*/client-{client}"):
                shutil.rmtree(path)
        return answer()

    return lose


def test_a_client_that_lost_its_state_is_reinitialized_and_noted(tmp_path: Path) -> None:
    link = InProcess(experiment("ditto"), tmp_path / "state", _losing(tmp_path / "state"))
    records = link.run(tmp_path / "run")
    assert [record["dropped"] for record in records] == [{}, {}, {}]
    # the request that finds the state missing evaluates round 1 and trains round 2
    evaluated = "client 1 was evaluated without its state, which is lost"
    trained = "client 1 had lost its state of round 1 and was reinitialized"
    assert [record["notes"] for record in records] == [[evaluated], [trained], []]


def test_a_damaged_state_counts_as_lost(tmp_path: Path) -> None:
    def flip(kind: Kind, who: int, request: Envelope, answer: Callable[[], Envelope]) -> Answer:
        if kind == "train" and who == 2 and fields(request)["round"] == 1:
            (path,) = (tmp_path / "state").glob("*/client-2/*.state")
            data = bytearray(path.read_bytes())
            data[len(data) // 2] ^= 1
            path.write_bytes(bytes(data))
        return answer()

    records = InProcess(experiment("ditto"), tmp_path / "state", flip).run(tmp_path / "run")
    assert "client 2 had lost its state" in records[1]["notes"][0]
    assert records[2]["trained"] == 4


def test_a_client_that_lost_its_state_may_be_left_out(tmp_path: Path) -> None:
    link = InProcess(experiment("ditto"), tmp_path / "state", _losing(tmp_path / "state"))
    records = link.run(tmp_path / "run", lost_state="drop")
    assert [list(record["dropped"]) for record in records] == [[], [1], [1]]
    assert records[1]["dropped"][1].startswith("LostState")
    assert str(tmp_path) not in json.dumps(records)


def test_a_lost_state_may_stop_the_run(tmp_path: Path) -> None:
    link = InProcess(experiment("ditto"), tmp_path / "state", _losing(tmp_path / "state"))
    with pytest.raises(ParsiflError, match="client 1 has lost its state"):
        link.run(tmp_path / "run", lost_state="stop")
    assert link.asked.count(("train", 0)) == 2


def test_a_client_that_comes_back_with_other_data_is_not_admitted(tmp_path: Path) -> None:
    chosen = experiment("fedavg", rounds=1)
    link = InProcess(chosen, tmp_path / "state")
    link.run(tmp_path / "run")

    def other(kind: Kind, client: int, _: Envelope, answer: Callable[[], Envelope]) -> Answer:
        reply = answer()
        return changed(reply, samples=5) if kind == "hello" and client == 2 else reply

    again = InProcess(replace(chosen, rounds=2), tmp_path / "state", other)
    records = again.run(tmp_path / "run", resume=True)
    assert records[1]["dropped"] == {2: "not connected"}
    assert any("client 2 started this run with" in line for line in again.log)


@pytest.mark.parametrize("rebind", [False, True])
def test_a_client_belongs_to_the_node_that_reported_first(rebind: bool, tmp_path: Path) -> None:
    chosen = experiment("fedavg", rounds=2, evaluate_every=0)
    link = InProcess(chosen, tmp_path / "state", clients={100: 0, 101: 1, 102: 2, 103: 3, 200: 1})

    def leave(kind: Kind, client: int, _: Envelope, answer: Callable[[], Envelope]) -> Answer:
        if kind == "train" and client == 0:  # the last one to be asked
            link.clients.pop(101, None)
        return answer()

    link.fault = leave
    records = link.run(tmp_path / "run", rebind=rebind)
    assert any(
        "it claims to be client 1, which is node 101 in this run" in line for line in link.log
    )
    assert [record["trained"] for record in records] == [4, 4 if rebind else 3]


def test_a_claim_is_kept_in_the_checkpoint(tmp_path: Path) -> None:
    chosen = experiment("fedavg", rounds=1, evaluate_every=0)
    InProcess(chosen, tmp_path / "state").run(tmp_path / "run")
    nodes = {100: 0, 201: 1, 102: 2, 103: 3}  # node 201 takes the place of 101
    again = InProcess(replace(chosen, rounds=2), tmp_path / "state", clients=nodes)
    records = again.run(tmp_path / "run", resume=True)
    assert records[1]["dropped"] == {1: "not connected"}
    assert any("node 201 is rejected" in line for line in again.log)
    assert ("train", 1) not in again.asked


def test_nodes_with_new_ids_may_take_over_after_a_restart(tmp_path: Path) -> None:
    chosen = experiment("ditto", rounds=1)
    InProcess(chosen, tmp_path / "state").run(tmp_path / "run")
    longer, nodes = replace(chosen, rounds=2), {200 + number: number for number in range(4)}
    again = InProcess(longer, tmp_path / "state", clients=nodes)
    records = again.run(tmp_path / "run", resume=True, rebind=True)
    assert [record["trained"] for record in records] == [4, 4]
    assert tree.same(server_state(tmp_path / "run", longer), simulated(longer).server)


def test_a_node_cannot_change_its_client(tmp_path: Path) -> None:
    chosen = experiment("fedavg", rounds=1, evaluate_every=0)
    InProcess(chosen, tmp_path / "state").run(tmp_path / "run")
    nodes = {100: 0, 101: 2, 102: 1, 103: 3}
    again = InProcess(replace(chosen, rounds=2), tmp_path / "state", clients=nodes)
    records = again.run(tmp_path / "run", resume=True)
    assert sorted(records[1]["dropped"]) == [1, 2]


def test_a_table_of_nodes_decides_who_is_who(tmp_path: Path) -> None:
    chosen = experiment("fedavg", rounds=1, evaluate_every=0)
    nodes = {50: 1, 100: 0, 101: 1, 102: 2, 103: 3}
    link = InProcess(chosen, tmp_path / "state", clients=nodes)
    table = {"100": 0, "101": 1, "102": 2, "103": 3}
    (record,) = link.run(tmp_path / "run", nodes=table)
    assert record["trained"] == 4
    assert any("node 50 is rejected" in line for line in link.log)


def test_missing_clients_are_named_after_the_wait(tmp_path: Path) -> None:
    link = InProcess(experiment("fedavg"), tmp_path / "state", clients={100: 0, 101: 1, 103: 3})
    with pytest.raises(ParsiflError, match=r"the clients 2 of 4 have not reported"):
        link.run(tmp_path / "run", wait=0.01)


def test_entries_of_a_profile_that_are_not_read_are_logged(tmp_path: Path) -> None:
    chosen = experiment("fedavg", profiles="width=0.5,epochs=1", rounds=1)
    link = InProcess(chosen, tmp_path / "state")
    link.run(tmp_path / "run")
    told = [line for line in link.log if "does not read" in line]
    (line,) = told
    assert re.match(r"warning: \w+ does not read width of the device profiles; it reads", line)


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
    def wide(kind: Kind, client: int, _: Envelope, answer: Callable[[], Envelope]) -> Answer:
        reply = answer()
        if kind != "hello" or client != 1:
            return reply
        return changed(reply, data_schema={**fields(reply)["data_schema"], "shape": [9]})

    link = InProcess(experiment("fedavg"), tmp_path / "state", wide)
    with pytest.raises(DataError, match="the data of client 1 have another schema"):
        link.run(tmp_path / "run")


def test_a_client_that_cannot_be_judged_is_named(tmp_path: Path) -> None:
    def refuse(kind: Kind, client: int, _: Envelope, answer: Callable[[], Envelope]) -> Answer:
        reply = answer()
        if kind == "evaluate" and client == 0:
            return changed(reply, scores={"personal": {"test": {"accuracy": "high"}}})
        return Envelope('{"error": "MemoryError"}') if kind == "evaluate" and client == 1 else reply

    link = InProcess(experiment("fedavg", rounds=1), tmp_path / "state", refuse)
    (record,) = link.run(tmp_path / "run")
    assert sorted(record["unevaluated"]) == [0, 1]
    assert "scores.personal.test" in record["unevaluated"][0]
    detail = json.loads((tmp_path / "run" / "clients.json").read_text())
    assert detail["personal"]["test"]["clients"] == [2, 3]
