"""Real SuperLinks and SuperNodes on loopback, as children of the test."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tests.flower.inprocess import simulated
from tests.flower.test_regression import in_process

from parsifl import tree
from parsifl.algorithm import message_types
from parsifl.engine import checkpoint
from parsifl.engine.folder import read_metrics
from parsifl.experiment import Experiment

pytest.importorskip("flwr", reason="needs flwr: install the extra parsifl[flower]")

from parsifl.flower.certificates import KeyFolder, add_node, make_keys
from parsifl.flower.cluster import NAME, Cluster
from parsifl.flower.regression import MODEL_FILE, LinearModel
from parsifl.flower.scaffold import write_app
from parsifl.flower.settings import PROCESS_FILE, Deployment, to_config
from parsifl.flower.tables import read_csv
from parsifl.flower.trial import follow, run_on_flower

pytestmark = pytest.mark.slow
on_demand = pytest.mark.skipif(
    "PARSIFL_DEPLOY" not in os.environ,
    reason="deploys for minutes: set PARSIFL_DEPLOY=1, as CI does",
)


def until(condition: Callable[[], bool], seconds: float, what: str) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"{what}: not within {seconds:g} s"
        time.sleep(0.2)


def server_state(path: Path, chosen: Experiment) -> object:
    found = checkpoint.load(path / "checkpoint", message_types(chosen.method()))
    assert found is not None
    return found.server


def test_a_deployment_gives_the_same_bits_as_one_process(tmp_path: Path) -> None:
    """FedSLR keeps two trees on the client, and its soft-thresholded model travels sparse."""
    chosen = Experiment(
        "fedslr", {"global_penalty": "sparse", "lam": 0.05}, data="digits", clients=3,
        rounds=2, evaluate_every=2, validation=0.1,
    )  # fmt: skip
    deployed = run_on_flower(chosen, tmp_path / "run", secure=False)
    expected = simulated(chosen)
    assert tree.same(deployed.server, expected.server)
    for ours, theirs in zip(deployed.metrics, expected.metrics, strict=True):
        for name in ("bytes_up", "bytes_down", "flops", "info", "dropped"):
            assert ours[name] == theirs[name], name
    assert deployed.metrics[1]["personal"] == expected.metrics[1]["personal"]
    assert deployed.metrics[1]["global"] == expected.metrics[1]["global"]
    assert deployed.metrics[1]["bytes_down"] < 0.9 * deployed.metrics[1]["dense_down"]
    states = list((tmp_path / "run" / "flower" / "state").rglob("*.state"))
    assert len(states) == 6
    for folder in {path.parent for path in states}:
        assert folder.stat().st_mode & 0o777 == 0o700


@on_demand
def test_killed_processes_and_a_resumed_run_give_the_same_bits(tmp_path: Path) -> None:
    chosen = Experiment("ditto", data="digits", clients=3, rounds=3, evaluate_every=0)
    out, app = tmp_path / "run", tmp_path / "app"
    plan = Deployment(out=str(out), quorum=1.0, wait=300.0, timeout=200.0)
    write_app(app, "partition", to_config(chosen, plan), "trial")
    with Cluster(tmp_path / "cluster", 3, secure=False) as cluster:
        cluster.submit(app)
        until(lambda: len(read_metrics(out)) == 1, 200, "round 1")
        time.sleep(4)  # round 2 is under way
        cluster.kill_node(1)
        os.kill(int((out / PROCESS_FILE).read_text()), signal.SIGKILL)
        assert len(read_metrics(out)) == 1
        cluster.start_node(1)
        run = cluster.submit(app, **{"deployment.resume": True})
        follow(cluster, run, out)
    records = read_metrics(out)
    assert [record["trained"] for record in records] == [3, 3, 3]
    assert tree.same(server_state(out, chosen), simulated(chosen).server)


@on_demand
def test_nodes_without_a_registered_key_or_with_another_authority_are_refused(
    tmp_path: Path,
) -> None:
    cluster = Cluster(tmp_path / "cluster", 1, secure=True)
    strangers = make_keys(tmp_path / "strangers", 1)
    assert cluster.keys is not None
    add_node(cluster.keys, 2)
    try:
        cluster.start_link()
        cluster.register([0])
        cluster.start_node(0)
        cluster.start_node(1, plain=True)
        cluster.start_node(2)
        authority = str(strangers.authority)
        mine = str(cluster.keys.node(0))
        cluster.spawn_node(
            3, ["--root-certificates", authority, "--auth-supernode-private-key", mine]
        )
        refused = {1: "registered", 2: "2004", 3: "CERTIFICATE_VERIFY_FAILED"}
        until(
            lambda: all(cluster.node_exit(number) is not None for number in (1, 2)),
            90,
            "nodes without a registered key end",
        )
        until(lambda: refused[3] in cluster.log_tail("node3", 20000), 90, "another authority")
        for number, reason in refused.items():
            assert reason in cluster.log_tail(f"node{number}", 20000)
            assert cluster.node_exit(number) != 0
        listed = cluster.nodes()
        assert [node["status"] for node in listed] == ["online"], listed
        assert cluster.node_exit(0) is None
    finally:
        cluster.stop()


@on_demand
def test_a_secured_regression_over_tables_is_the_fit_in_process(tmp_path: Path) -> None:
    app, out = tmp_path / "app", tmp_path / "app" / "run"
    chosen = Experiment(
        "fedgradmp", {"tau": 4, "batch": None}, clients=3, rounds=4, evaluate_every=0
    )
    plan = Deployment(out=str(out))
    write_app(app, "sparse-regression", to_config(chosen, plan), "study")
    files = f'data="{app}/examples/hospital{{id}}.csv"'
    with Cluster(tmp_path / "cluster", 3, node_config=files) as cluster:
        follow(cluster, cluster.submit(app), out)
    model = LinearModel.load(out / MODEL_FILE)
    tables = [read_csv(app / "examples" / f"hospital{i}.csv") for i in range(3)]
    coef, intercept = in_process(tables)
    assert np.array_equal(model.coef_, coef)
    assert model.intercept_ == intercept


@on_demand
@pytest.mark.parametrize("simulation", [False, True])
def test_a_secured_or_simulated_trial_runs(simulation: bool, tmp_path: Path) -> None:
    if simulation:
        pytest.importorskip("ray", reason="needs flwr[simulation]")
    chosen = Experiment("fedavg", data="digits", clients=2, rounds=1, evaluate_every=0)
    deployed = run_on_flower(chosen, tmp_path / "run", simulation=simulation)
    assert tree.same(deployed.server, simulated(chosen).server)
    if simulation:
        return
    keys = KeyFolder(tmp_path / "run" / "flower" / "keys")
    assert keys.key.stat().st_mode & 0o777 == 0o600
    config = (tmp_path / "run" / "flower" / "flwr" / "config.toml").read_text()
    assert json.dumps(str(keys.authority)) in config
    assert "insecure" not in config
    assert NAME in config
