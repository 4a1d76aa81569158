from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests import trajectories
from tests.flower.inprocess import InProcess

from parsifl.core import registry
from parsifl.data.clients import ClientData
from parsifl.engine import checkpoint
from parsifl.engine.run import Run

TOLERANCE = 1e-12
NAMES = sorted(registry.algorithms())

pytestmark = pytest.mark.filterwarnings("ignore")


class Deployed(InProcess):
    """Sites in this process that hold the data of the golden trajectories."""

    def __post_init__(self) -> None:
        self._data: ClientData = trajectories.data_of(self.experiment.algorithm)
        self.clients = {100 + i: i for i in range(len(self._data))}


def check(name: str, done: Run) -> None:
    golden = trajectories.stored(name)
    assert trajectories.gap(done.server, golden["server"]) <= TOLERANCE
    states = {str(i): state for i, state in done.pool.store}
    assert states.keys() == golden["clients"].keys()
    for client, state in states.items():
        assert trajectories.gap(state, golden["clients"][client]) <= TOLERANCE
    for client, leaves in golden["personal"].items():
        assert trajectories.gap(done.personal(int(client)).params, leaves) <= TOLERANCE
    assert [record["flops"] for record in done.metrics] == golden["flops"]
    check_bytes(done.metrics, golden)


def check_bytes(records: Sequence[Mapping[str, Any]], golden: Mapping[str, Any]) -> None:
    # an entry that cancels to zero in one executor only changes the length by a few bytes
    for way in ("bytes_up", "bytes_down"):
        assert [record[way] for record in records] == pytest.approx(golden[way], rel=0.02)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("engine", ["loop", "fused"])
def test_every_executor_follows_the_golden_trajectory(name: str, engine: Any) -> None:
    check(name, trajectories.run(name, engine))


@pytest.mark.parametrize("name", NAMES)
def test_in_process_flower_follows_the_golden_trajectory(name: str, tmp_path: Path) -> None:
    sites = Deployed(trajectories.experiment_of(name), tmp_path / "sites")
    records = sites.federation(tmp_path / "run").run()
    types = trajectories.method_of(name).tree_types()
    saved = checkpoint.load(tmp_path / "run" / "checkpoint", types)
    golden = trajectories.stored(name)
    assert saved is not None
    assert trajectories.gap(saved.server, golden["server"]) <= TOLERANCE
    check_bytes([record.to_json() for record in records], golden)
