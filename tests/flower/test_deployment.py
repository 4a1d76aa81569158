"""A real SuperLink and SuperNodes on loopback, as children of the test."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.flower.inprocess import simulated

from parsifl.core import tree
from parsifl.engine.experiment import Experiment

pytest.importorskip("flwr", reason="needs flwr: install the extra parsifl[flower]")

from tests.flower.deployed import deploy_counted, limit, server_state


@pytest.mark.slow
def test_a_deployment_gives_the_same_bits_as_one_process(tmp_path: Path) -> None:
    """FedSLR keeps two trees on the client, and its soft-thresholded model travels sparse."""
    chosen = Experiment(
        "fedslr", {"global_penalty": "sparse", "lam": 0.05}, data="digits", clients=3,
        rounds=2, evaluate_every=2, validation=0.1,
    )  # fmt: skip
    with limit(300):
        records, relay = deploy_counted(chosen, tmp_path)
    expected = simulated(chosen)
    assert tree.same(server_state(tmp_path / "run", chosen), expected.server)
    for ours, theirs in zip(records, expected.metrics, strict=True):
        for name in ("bytes_up", "bytes_down", "flops", "metrics", "dropped"):
            assert ours[name] == theirs[name], name
    assert records[1]["personal"] == expected.metrics[1]["personal"]
    assert records[1]["global"] == expected.metrics[1]["global"]
    assert records[1]["bytes_down"] < 0.9 * records[1]["dense_down"]
    states = list((tmp_path / "cluster" / "state").rglob("*.state"))
    assert len(states) == 6
    for folder in {path.parent for path in states}:
        assert folder.stat().st_mode & 0o777 == 0o700
    booked = sum(record["bytes_up"] for record in records)
    assert booked < relay.up < booked + 400_000  # Flower's own: records, HTTP, polling
    assert relay.down > sum(record["bytes_down"] for record in records)
