from __future__ import annotations

import time
from pathlib import Path

import pytest
from tests.support.fixtures import classifier, clients

from parsifl.algorithms.ditto import Ditto
from parsifl.engine import simulate as module
from parsifl.engine.profiling import PhaseTimer

PHASES = {
    "draw",
    "broadcast",
    "encode",
    "state",
    "count",
    "local",
    "check",
    "aggregate",
    "evaluate",
}


def test_laps_add_up_to_the_whole() -> None:
    started = time.perf_counter()
    laps = PhaseTimer()
    for phase in ("a", "b", "a"):
        time.sleep(0.002)
        laps.lap(phase)
    assert list(laps.seconds) == ["a", "b"]
    assert laps.seconds["a"] >= 0.004
    assert sum(laps.seconds.values()) <= time.perf_counter() - started


def test_time_is_shared_in_proportion() -> None:
    laps = PhaseTimer()
    time.sleep(0.002)
    laps.share({"a": 3.0, "b": 1.0})
    assert laps.seconds["a"] == pytest.approx(3 * laps.seconds["b"])
    laps.share({"c": 0.0, "d": 0.0})
    assert 0 < laps.seconds["c"] == laps.seconds["d"]


def test_every_round_records_its_seconds_by_phase(tmp_path: Path) -> None:
    started = time.perf_counter()
    run = module.simulate(
        Ditto(local_steps=2),
        classifier(),
        clients(),
        3,
        run_dir=tmp_path,
        checkpoint_seconds=0.0,
    )
    whole = time.perf_counter() - started
    first, *others = (set(record["seconds"]) for record in run.metrics)
    assert first == {*PHASES, "count-once"} - {"count"}
    assert others == [{*PHASES, "checkpoint"}] * 2
    profile = run.profile()
    assert sum(profile.values()) < whole
    assert list(profile.values()) == sorted(profile.values(), reverse=True)
    assert all(seconds >= 0 for seconds in profile.values())
