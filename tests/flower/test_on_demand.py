"""Deployments that take minutes: what is killed, who is refused, what a user types."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from tests.flower.inprocess import simulated
from tests.records import read_metrics
from tests.sites.deployment.test_regression import in_process

from parsifl.core import tree
from parsifl.engine.experiment import Experiment

pytest.importorskip("flwr", reason="needs flwr: install the extra parsifl[flower]")

from tests.flower.deployed import app_of, deploy_counted, limit, server_state, tabled, until
from tests.flower.test_documentation import table

from parsifl.flower.app_template import write_app
from parsifl.flower.cluster import NAME, Cluster, follow, run_on_flower
from parsifl.flower.settings import PROCESS_FILE, Deployment, to_config
from parsifl.flower.tls import KeyFolder, add_node, make_keys
from parsifl.sites import load
from parsifl.sites.deployment.agreement import read_csv
from parsifl.sites.deployment.regression import MODEL_FILE

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        "PARSIFL_DEPLOY" not in os.environ,
        reason="deploys for minutes: `make deploy` sets PARSIFL_DEPLOY=1, as CI does",
    ),
]
RESUME = {"deployment.resume": True}


def asked_to_train(cluster: Cluster, node: int, times: int) -> bool:
    log = cluster.log_tail(f"node{node}", 1 << 20)
    return log.count("Receiving: train message") >= times


def test_killed_processes_and_a_resumed_run_give_the_same_bits(tmp_path: Path) -> None:
    chosen = Experiment("ditto", data="digits", clients=3, rounds=3, evaluate_every=0)
    out = tmp_path / "run"
    app = app_of(chosen, tmp_path / "app", out, quorum=1.0, timeout=120.0)
    with limit(900), Cluster(tmp_path / "cluster", 3, secure=False, workers=False) as cluster:
        cluster.submit(app)
        until(lambda: asked_to_train(cluster, 1, 2), "round 2")
        os.kill(int((out / PROCESS_FILE).read_text()), signal.SIGKILL)
        cluster.kill_node(1)
        assert len(read_metrics(out)) == 1
        cluster.start_node(1)
        follow(cluster, cluster.submit(app, **RESUME), out)
    assert [record["trained"] for record in read_metrics(out)] == [3, 3, 3]
    assert tree.same(server_state(out, chosen), simulated(chosen).server)


def worker_of(cluster: Cluster, node: int) -> int:
    """Return the process of a node's worker."""
    for path in Path("/proc").glob("[0-9]*"):
        try:
            command = (path / "cmdline").read_bytes()
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue  # it has just ended
        if b"parsifl.flower.worker" in command and parent == cluster.node_pid(node):
            return int(path.name)
    raise AssertionError("the node has no worker")


def test_a_killed_worker_is_replaced_and_the_run_ends_with_the_same_bits(tmp_path: Path) -> None:
    chosen = Experiment("ditto", data="digits", clients=3, rounds=3)
    out = tmp_path / "run"
    app = app_of(chosen, tmp_path / "app", out, quorum=1.0, timeout=120.0)
    with limit(900), Cluster(tmp_path / "cluster", 3, workers=True) as cluster:
        run = cluster.submit(app)
        until(lambda: asked_to_train(cluster, 1, 2), "round 2")
        killed = worker_of(cluster, 1)
        os.kill(killed, signal.SIGKILL)
        follow(cluster, run, out)
        assert worker_of(cluster, 1) != killed
    records, expected = read_metrics(out), simulated(chosen)
    assert [record["trained"] for record in records] == [3, 3, 3]
    assert [record["personal"] for record in records] == [r["personal"] for r in expected.metrics]
    assert tree.same(server_state(out, chosen), expected.server)


@pytest.mark.parametrize("number", range(2))
def test_a_process_killed_at_random_changes_nothing(number: int, tmp_path: Path) -> None:
    seed = int(os.environ.get("PARSIFL_FAULTS") or random.SystemRandom().randrange(2**32)) + number
    print(f"seed {seed}")  # noqa: T201 - shown if the test fails
    draw = random.Random(seed)
    chosen = Experiment("ditto", data="digits", clients=3, rounds=3)
    out = tmp_path / "run"
    app = app_of(chosen, tmp_path / "app", out, quorum=1.0, timeout=120.0)
    with limit(900), Cluster(tmp_path / "cluster", 3, secure=False, workers=True) as cluster:
        run = cluster.submit(app)
        until(lambda: asked_to_train(cluster, 0, 1), "round 1")
        time.sleep(draw.uniform(0.0, 10.0))
        victim, node = draw.choice(["server", "node", "worker"]), draw.randrange(3)
        print(victim, node)  # noqa: T201
        if victim == "server":
            os.kill(int((out / PROCESS_FILE).read_text()), signal.SIGKILL)
            run = cluster.submit(app, **RESUME)
        elif victim == "node":
            cluster.kill_node(node)
            cluster.start_node(node)
        else:
            os.kill(worker_of(cluster, node), signal.SIGKILL)
        follow(cluster, run, out)
    records, expected = read_metrics(out), simulated(chosen)
    assert [record["trained"] for record in records] == [3, 3, 3]
    assert tree.same(server_state(out, chosen), expected.server)
    for record, whole in zip(records, expected.metrics, strict=True):
        assert record["personal"] == whole["personal"] or record["unevaluated"]


def test_a_killed_superlink_comes_back_and_the_run_is_resumed_with_the_same_bits(
    tmp_path: Path,
) -> None:
    chosen = Experiment("ditto", data="digits", clients=3, rounds=2, evaluate_every=0)
    out = tmp_path / "run"
    app = app_of(chosen, tmp_path / "app", out, quorum=1.0)
    with limit(900), Cluster(tmp_path / "cluster", 3, secure=False, workers=False) as cluster:
        cluster.submit(app)
        until(lambda: asked_to_train(cluster, 0, 2), "round 2")
        server = Path("/proc") / (out / PROCESS_FILE).read_text()
        cluster.kill_link()
        until(lambda: not server.exists(), "the server ends with its SuperLink")
        cluster.start_link()  # with its database, as a supervisor would
        assert len(read_metrics(out)) == 1
        follow(cluster, cluster.submit(app, **RESUME), out)
        assert all(cluster.node_exit(node) is None for node in range(3))
    assert [record["trained"] for record in read_metrics(out)] == [3, 3]
    assert tree.same(server_state(out, chosen), simulated(chosen).server)


def test_nodes_without_a_registered_key_or_with_another_authority_are_refused(
    tmp_path: Path,
) -> None:
    cluster = Cluster(tmp_path / "cluster", 1, secure=True)
    strangers = make_keys(tmp_path / "strangers", 1)
    assert cluster.keys is not None
    add_node(cluster.keys, 2)
    refused = {1: "registered", 2: "2004", 3: "CERTIFICATE_VERIFY_FAILED"}
    try:
        with limit(900):
            cluster.start_link()
            cluster.register([0])
            cluster.start_node(0)
            cluster.start_node(1, plain=True)
            cluster.start_node(2)
            authority, mine = str(strangers.authority), str(cluster.keys.node(0))
            cluster.spawn_node(
                3, ["--root-certificates", authority, "--auth-supernode-private-key", mine]
            )
            for number, reason in refused.items():
                until(partial(told, cluster, number, reason), f"node {number} is refused", 120)
            for number in (1, 2):
                until(partial(has_ended, cluster, number), f"node {number} ends", 60)
            assert all(cluster.node_exit(number) != 0 for number in refused)
            listed = cluster.nodes()
            assert [node["status"] for node in listed] == ["online"], listed
            assert cluster.node_exit(0) is None
    finally:
        cluster.stop()


def told(cluster: Cluster, node: int, reason: str) -> bool:
    return reason in cluster.log_tail(f"node{node}", 20000)


def has_ended(cluster: Cluster, node: int) -> bool:
    return cluster.node_exit(node) is not None


def test_a_secured_regression_over_tables_is_the_fit_in_process(tmp_path: Path) -> None:
    app, out = tmp_path / "app", tmp_path / "app" / "run"
    chosen = Experiment(
        "fedgradmp", {"tau": 4, "batch_size": None}, clients=3, rounds=2, evaluate_every=0
    )
    write_app(app, "sparse-regression", to_config(chosen, Deployment(out=str(out))), "study")
    files = f'data="{app}/examples/hospital{{id}}.csv" guard-algorithms="fedgradmp"'
    with limit(900), Cluster(tmp_path / "cluster", 3, node_config=files) as cluster:
        follow(cluster, cluster.submit(app), out)
    model = load(out / MODEL_FILE)
    tables = [read_csv(app / "examples" / f"hospital{i}.csv") for i in range(3)]
    coef, intercept = in_process(tables, rounds=2)
    assert np.allclose(model.coef_, coef, rtol=1e-12, atol=1e-14)
    assert model.intercept_ == pytest.approx(intercept, rel=1e-12)


def test_an_interrupted_command_leaves_no_process_and_is_resumed(tmp_path: Path) -> None:
    """TLS and node keys are the default of the command."""
    out = tmp_path / "run"
    command = [
        str(Path(sys.executable).with_name("parsifl")), "run", "ditto", "--engine", "flower",
        "--clients", "2", "--rounds", "4", "--evaluate-every", "0", "--out", str(out),
    ]  # fmt: skip
    heed_interrupts = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    with limit(900):
        # a shell's background jobs ignore SIGINT, and so would what they start
        first = subprocess.Popen(
            command, stderr=subprocess.PIPE, text=True, preexec_fn=heed_interrupts
        )
        try:
            until(lambda: len(read_metrics(out)) >= 1, "round 1")
        finally:
            first.send_signal(signal.SIGINT)
            _, told = first.communicate(timeout=60)
        assert first.returncode != 0
        assert "Traceback" not in told
        assert processes_of(tmp_path) == []
        done = subprocess.run([*command, "--resume"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "starting a SuperLink" in done.stderr
    assert "round 4 of 4" in done.stderr
    chosen = Experiment("ditto", clients=2, rounds=4, evaluate_every=0)
    assert tree.same(server_state(out, chosen), simulated(chosen).server)
    assert processes_of(tmp_path) == []
    keys = KeyFolder(out / "flower" / "keys")
    assert keys.key.stat().st_mode & 0o777 == 0o600
    config = (out / "flower" / "flwr" / "config.toml").read_text()
    assert json.dumps(str(keys.authority)) in config
    assert "insecure" not in config
    assert NAME in config


def processes_of(folder: Path) -> list[str]:
    """Return the commands of processes whose environment names a folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if str(folder).encode() in (path / "environ").read_bytes():
                found.append((path / "cmdline").read_text().replace("\0", " "))
        except OSError:
            continue  # it has just ended
    return found


def test_the_simulation_runtime_gives_the_same_bits(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="needs Ray: install the extra parsifl[flower-sim]")
    chosen = Experiment("ditto", data="digits", clients=3, rounds=2, evaluate_every=2)
    with limit(900):
        deployed = run_on_flower(chosen, tmp_path / "run", simulation=True)
    expected = simulated(chosen)
    assert tree.same(deployed.server, expected.server)
    assert deployed.metrics[1]["personal"] == expected.metrics[1]["personal"]
    assert processes_of(tmp_path) == []


def test_the_bytes_on_the_socket_are_about_those_of_the_documentation(tmp_path: Path) -> None:
    name = "FedIterHT, tau = 500"
    with limit(900):
        _, relay = deploy_counted(tabled(name), tmp_path)
    written = table()[name]
    # polling goes on as long as the run takes, which differs by machine
    assert 0.5 < relay.up / written["socket up"] < 2
    assert 0.5 < relay.down / written["socket down"] < 2
