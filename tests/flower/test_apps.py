"""The Flower apps themselves, with a grid that hands messages over in this process."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="needs flwr: install the extra parsifl[flower]")

import numpy as np
import torch
from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.supercore.task_identity import TaskIdentity
from tests.flower.inprocess import simulated
from tests.flower.test_settings import flat
from tests.records import read_metrics

import parsifl.flower
from parsifl.core import tree
from parsifl.core.errors import CapabilityError, CheckpointError, ParsiflError
from parsifl.core.problem import Problem
from parsifl.engine import checkpoint
from parsifl.engine.experiment import Experiment
from parsifl.flower.app_template import write_app
from parsifl.flower.settings import DONE_FILE, ERROR_FILE, Deployment, to_config
from parsifl.nn.neural import NeuralProblem
from parsifl.sites import deployment, load
from parsifl.sites.deployment.agreement import RegressionSpec, read_csv
from parsifl.sites.deployment.regression import MODEL_FILE

SPEC = RegressionSpec("days")
ALLOWED = {"guard-algorithms": "fedgradmp"}
"""In the configuration of nodes whose owners allow another algorithm than the default."""


class HandOver:
    """A grid whose nodes are calls of a ClientApp."""

    def __init__(
        self, app: ClientApp, nodes: dict[int, dict[str, Any]], config: dict[str, Any]
    ) -> None:
        self._app, self._nodes, self._config = app, nodes, config
        self._replies: dict[str, list[Message]] = {}
        self.broken: set[int] = set()
        self.silent: set[int] = set()

    def get_node_ids(self) -> Iterable[int]:
        return list(self._nodes)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        pushed = []
        for message in messages:
            name = str(len(self._replies))
            message.metadata.__dict__["_message_id"] = name
            silent = message.metadata.dst_node_id in self.silent
            self._replies[name] = [] if silent else self._answers(message)
            pushed.append(name)
        return pushed

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        names = sorted(message_ids, reverse=True)  # replies come as they like
        return [reply for name in names for reply in self._replies[name]]

    def _answers(self, message: Message) -> list[Message]:
        node = message.metadata.dst_node_id
        if node in self.broken:
            return [Message(Error(5, "gone"), reply_to=message)]
        context = Context(1, node, self._nodes[node], RecordDict(), self._config)
        first = self._app(message, context)
        # the same once more, as after a reply that was sent twice: the first one counts
        return [first, Message(Error(0, "a duplicate"), reply_to=message)]


@pytest.fixture
def identity(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let messages be made outside a Flower process."""
    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)


def run(
    server: ServerApp,
    client: ClientApp,
    config: dict[str, Any],
    nodes: list[dict[str, Any]],
    broken: tuple[int, ...] = (),
    silent: tuple[int, ...] = (),
) -> None:
    numbered = {70 + number: node for number, node in enumerate(nodes)}
    grid: Any = HandOver(client, numbered, flat(config))
    grid.broken, grid.silent = set(broken), set(silent)
    server(grid, Context(1, 1, {}, RecordDict(), flat(config)))


def nodes(root: Path) -> list[dict[str, Any]]:
    return [{"partition-id": i, "state-dir": str(root)} for i in range(3)]


@pytest.mark.usefixtures("identity")
def test_the_apps_give_the_bits_of_the_simulation(tmp_path: Path) -> None:
    chosen = Experiment("ditto", data="digits", clients=3, rounds=2)
    config = to_config(chosen, Deployment(out=str(tmp_path / "run")))
    apps = parsifl.flower.server_app(), parsifl.flower.client_app()
    run(*apps, config, nodes(tmp_path / "state"))
    found = checkpoint.load(tmp_path / "run" / "checkpoint", chosen.build_algorithm().tree_types())
    assert found is not None
    assert tree.same(found.server, simulated(chosen).server)
    assert (tmp_path / "run" / DONE_FILE).exists()


@pytest.mark.usefixtures("identity")
def test_nobody_waits_for_a_dead_node_whose_client_is_back(tmp_path: Path) -> None:
    chosen = Experiment("fedavg", data="digits", clients=3, rounds=1, evaluate_every=0)
    config = to_config(chosen, Deployment(out=str(tmp_path / "run")))
    apps = parsifl.flower.server_app(), parsifl.flower.client_app()
    told = nodes(tmp_path / "state")
    started = time.monotonic()
    run(
        *apps, config, [told[1], *told], silent=(70,)
    )  # node 70 was client 1, and is not missed yet
    assert time.monotonic() - started < 30  # a greeting would be waited for 90 seconds
    found = checkpoint.load(tmp_path / "run" / "checkpoint", chosen.build_algorithm().tree_types())
    assert found is not None
    assert tree.same(found.server, simulated(chosen).server)


@pytest.mark.usefixtures("identity")
def test_who_does_not_answer_in_time_is_left_out(tmp_path: Path) -> None:
    chosen = Experiment("fedavg", data="digits", clients=3, rounds=1, evaluate_every=0)
    config = to_config(chosen, Deployment(out=str(tmp_path / "run"), timeout=1.0))
    client = parsifl.flower.client_app()
    numbered = {70 + number: node for number, node in enumerate(nodes(tmp_path / "state"))}
    grid: Any = HandOver(client, numbered, flat(config))
    push = grid.push_messages

    def late(messages: Iterable[Message]) -> Iterable[str]:
        sent = list(messages)
        grid.silent = {71} if sent[0].metadata.message_type.startswith("train") else set()
        return list(push(sent))

    grid.push_messages = late
    parsifl.flower.server_app()(grid, Context(1, 1, {}, RecordDict(), flat(config)))
    (record,) = read_metrics(tmp_path / "run")
    assert record["dropped"] == {1: "no answer in time"}


@pytest.mark.usefixtures("identity")
def test_own_data_and_an_own_problem(tmp_path: Path) -> None:
    seen: list[Any] = []

    def load(node: Any) -> tuple[Any, Any]:
        seen.append(node["partition-id"])
        draw = np.random.default_rng(node["partition-id"])
        return draw.standard_normal((20, 3)).astype(np.float32), draw.integers(0, 2, 20)

    def problem(data: Any) -> Problem:
        return NeuralProblem(lambda: torch.nn.Linear(data.x.shape[1], data.classes))

    chosen = Experiment("fedavg", clients=3, rounds=1)
    config = to_config(chosen, Deployment(out=str(tmp_path / "run")))
    server, client = parsifl.flower.server_app(problem), parsifl.flower.client_app(load, problem)
    strong = {"profile-flops_per_second": 1e9}
    run(server, client, config, [{**node, **strong} for node in nodes(tmp_path / "state")])
    assert set(seen) == {0, 1, 2}
    found = checkpoint.load(tmp_path / "run" / "checkpoint", chosen.build_algorithm().tree_types())
    assert found is not None
    assert found.server["weight"].shape == (2, 3)
    (state,) = (tmp_path / "run" / "checkpoint").glob("round-*/state.json")
    reported = json.loads(state.read_text())
    assert reported["pool"]["members"]["clients"][1]["hello"]["profile"] == {
        "flops_per_second": 1e9
    }


@pytest.mark.usefixtures("identity")
def test_why_a_run_failed_is_in_its_folder(tmp_path: Path) -> None:
    chosen = Experiment("fedavg", data="digits", clients=3, rounds=1)
    config = to_config(chosen, Deployment(out=str(tmp_path / "run"), wait=0.01))
    apps = parsifl.flower.server_app(), parsifl.flower.client_app()
    with pytest.raises(ParsiflError):
        run(*apps, config, nodes(tmp_path / "state"), broken=(71,))
    assert "the clients 1 of 3 have not reported" in (tmp_path / "run" / ERROR_FILE).read_text()
    assert not (tmp_path / "run" / DONE_FILE).exists()


@pytest.mark.usefixtures("identity")
@pytest.mark.parametrize("error", [ValueError("odd \ud800"), ParsiflError("odd \ud800")])
def test_any_failure_leaves_its_reason(
    error: Exception,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr("parsifl.flower.server.Federation.run", fail)
    chosen = Experiment("fedavg", data="digits", clients=3, rounds=1)
    config = to_config(chosen, Deployment(out=str(tmp_path / "run")))
    with pytest.raises(type(error)):
        run(parsifl.flower.server_app(), parsifl.flower.client_app(), config, [])
    assert "odd " in (tmp_path / "run" / ERROR_FILE).read_text()
    assert all(record.getMessage().isprintable() for record in caplog.records)


@pytest.mark.usefixtures("identity")
def test_a_regression_over_tables(tmp_path: Path) -> None:
    write_app(tmp_path / "app", "sparse-regression", {}, "study")
    chosen = Experiment(
        "fedgradmp", {"tau": 4, "batch_size": None}, clients=3, rounds=2, evaluate_every=0
    )
    config = to_config(chosen, Deployment(out=str(tmp_path / "run")))
    places = [
        {**node, **ALLOWED, "data": str(tmp_path / "app" / "examples" / f"hospital{i}.csv")}
        for i, node in enumerate(nodes(tmp_path / "state"))
    ]
    client = deployment.regression_client_app(lambda node: read_csv(node["data"]), SPEC)
    run(deployment.regression_server_app(SPEC), client, config, places)
    model = load(tmp_path / "run" / MODEL_FILE)
    assert model.preprocessing_ is not None
    assert model.preprocessing_.rows == 400
    assert np.count_nonzero(model.coef_) == 4


@pytest.mark.usefixtures("identity")
def test_a_node_declares_missing_codes_and_sets_its_guards(tmp_path: Path) -> None:
    write_app(tmp_path / "app", "sparse-regression", {}, "study")
    files = [tmp_path / "app" / "examples" / f"hospital{i}.csv" for i in range(3)]
    files[1].write_text(files[1].read_text().replace("NA", "--"))
    header, first, rest = files[1].read_text().split("\n", 2)
    files[1].write_text("\n".join([header, first.replace(first.split(",")[1], "<40"), rest]))
    chosen = Experiment("fedgradmp", {"tau": 4, "batch_size": None}, clients=3, rounds=2)
    app = deployment.regression_client_app(lambda n: read_csv(n["data"]), SPEC, ["--"])
    server = deployment.regression_server_app(SPEC)
    places = [
        {**node, **ALLOWED, "data": str(file)}
        for node, file in zip(nodes(tmp_path / "state"), files, strict=True)
    ]
    config = to_config(chosen, Deployment(out=str(tmp_path / "bad"), wait=0.01))
    with pytest.raises(ParsiflError, match=r"site 1 refuses \(rule 'numbers'\): column 'pulse'"):
        run(server, app, config, places)
    places[1]["missing"] = "<40|."
    places[2]["guard-rows"] = 1000
    with pytest.raises(ParsiflError, match=r"site 2 refuses \(rule 'rows'\)"):
        run(server, app, config, places)
    del places[2]["guard-rows"]
    config = to_config(chosen, Deployment(out=str(tmp_path / "run")))
    run(server, app, config, places)
    assert "--" not in (tmp_path / "run" / MODEL_FILE).read_text()


def test_mods_that_cannot_read_our_messages_are_refused() -> None:
    from flwr.clientapp.mod import fixedclipping_mod, message_size_mod

    assert parsifl.flower.client_app(mods=[message_size_mod])
    with pytest.raises(CapabilityError, match="fixedclipping_mod"):
        parsifl.flower.client_app(mods=[fixedclipping_mod])


@pytest.mark.usefixtures("identity")
@pytest.mark.parametrize("form", ["", "json"])
def test_the_log_of_the_server_is_in_the_run_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    monkeypatch.setenv("PARSIFL_LOG", form)
    loggers = [logging.getLogger(name) for name in ("parsifl", "flwr")]
    before = [(list(log.handlers), log.propagate, log.level) for log in loggers]
    loggers[1].setLevel(logging.INFO)
    chosen = Experiment("fedavg", data="digits", clients=3, rounds=1, evaluate_every=0)
    apps = parsifl.flower.server_app(), parsifl.flower.client_app()
    try:
        config = to_config(chosen, Deployment(out=str(tmp_path / "run")))
        run(*apps, config, nodes(tmp_path / "state"))
        with pytest.raises(CheckpointError):  # a run without resume
            run(*apps, config, nodes(tmp_path / "state"))
    finally:
        for log, (handlers, propagate, level) in zip(loggers, before, strict=True):
            assert [h for h in log.handlers if isinstance(h, logging.FileHandler)] == []
            log.handlers, log.propagate, log.level = handlers, propagate, level
    lines = (tmp_path / "run" / "server.log").read_text().splitlines()
    messages = [json.loads(line)["message"] if form else line for line in lines]
    assert any("round 1 of 1 is done" in text for text in messages)
    assert any("the run has failed: " in text and "already holds" in text for text in messages)
