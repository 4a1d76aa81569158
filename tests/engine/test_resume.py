"""A run that is killed with SIGKILL, again and again, ends as if nothing had happened."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.records import read_metrics
from tests.support.fixtures import classifier, clients

from parsifl.algorithms.ditto import Ditto
from parsifl.core import tree
from parsifl.engine.settings import Evaluation
from parsifl.engine.simulate import simulate
from parsifl.engine.training import RoundEnd
from parsifl.testing.conformance.harness import snapshot

# The driver forks a child for each attempt, so that everything is imported once; with one thread
# torch may be used before a fork.
DRIVER = """
import hashlib, json, os, random, signal, sys, time
from pathlib import Path
from parsifl.core import tree
from parsifl.algorithms.ditto import Ditto
from parsifl.engine import simulate as module
from parsifl.testing.conformance.harness import snapshot
from tests.support.fixtures import classifier, clients

folder, engine, seed, every = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
module.simulate(Ditto(local_steps=1), classifier(), clients(), 1, executor=engine)  # imports


def digest(run):
    leaves, structure = tree.flatten(snapshot(run))
    value = hashlib.sha256(repr(tree.names(structure)).encode())
    for leaf in leaves:
        value.update(leaf.contiguous().numpy().tobytes())
    return value.hexdigest()


def attempt(name):
    child = os.fork()
    if child:
        return child
    try:
        method = Ditto(lr=0.1, local_steps=3, batch_size=4, momentum=0.5)
        data = clients((6, 9, 8, 11, 7, 5))
        run = module.simulate(
            method, classifier(), data, 25, participation=0.5, executor=engine, seed=4,
            run_dir=folder / name, resume=True, checkpoint_seconds=every, evaluate_every=5,
        )
        (folder / f"{name}.tmp").write_text(digest(run))
        os.replace(folder / f"{name}.tmp", folder / f"{name}.txt")  # a kill leaves no half
    finally:
        os._exit(0)


def lines():
    metrics = folder / "killed" / "metrics.jsonl"
    return len(metrics.read_bytes().splitlines()) if metrics.exists() else 0


os.waitpid(attempt("whole"), 0)
generator = random.Random(seed)
kills = []
while not (folder / "killed.txt").exists():
    child = attempt("killed")
    target, ended = lines() + generator.randint(0, 8), False
    while not ended and (lines() < target or len(kills) >= 6):
        ended = os.waitpid(child, os.WNOHANG)[0] == child
        time.sleep(0.001)
    if not ended:
        time.sleep(generator.uniform(0.0, 0.03))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        kills.append(lines())
print(json.dumps(kills))
"""


def timeless(record: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in record.items() if name != "seconds"}


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize(
    ("engine", "seed", "every"),
    [("loop", 0, 0.0), ("fused", 1, 0.0), ("fused", 2, 0.05)],
)
def test_a_killed_run_ends_with_the_same_bits(
    tmp_path: Path, engine: str, seed: int, every: float
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, str(tmp_path), engine, str(seed), str(every)],
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    kills = json.loads(done.stdout)
    assert kills
    assert any(0 < lines < 25 for lines in kills)  # at least one in the middle of the run
    assert (tmp_path / "killed.txt").read_text() == (tmp_path / "whole.txt").read_text()
    whole, killed = read_metrics(tmp_path / "whole"), read_metrics(tmp_path / "killed")
    assert [timeless(record) for record in killed] == [timeless(record) for record in whole]
    assert len(killed) == 25
    scores = [(tmp_path / name / "clients.json").read_text() for name in ("whole", "killed")]
    assert scores[0] == scores[1]


class Stop(BaseException):
    """Like a kill, but at a known place."""


@pytest.mark.filterwarnings("ignore:the run in .* was stopped before its first checkpoint")
@pytest.mark.parametrize("stop", [1, 3, 4])
@pytest.mark.parametrize("every", [0.0, 1e9])
def test_a_run_that_stops_after_any_round_goes_on_from_its_checkpoint(
    tmp_path: Path, stop: int, every: float
) -> None:
    method, problem, data = Ditto(lr=0.1, local_steps=2, batch_size=4), classifier(), clients()
    options: dict[str, Any] = {
        "participation": 0.5,
        "evaluation": Evaluation(clients="sampled"),
        "precision": "bfloat16",
        "checkpoint_seconds": every,
    }

    def interrupt(event: RoundEnd) -> None:
        if event.record.round == stop:
            raise Stop

    with pytest.raises(Stop):
        simulate(method, problem, data, 5, run_dir=tmp_path, callbacks=[interrupt], **options)
    seen: list[int] = []
    resumed = simulate(
        method, problem, data, 5, run_dir=tmp_path, resume=True,
        callbacks=[lambda event: seen.append(event.record.round)], **options,
    )  # fmt: skip
    # a callback is called before the round is recorded
    assert seen == list(range(stop if every == 0 else 1, 6))
    whole = simulate(method, problem, data, 5, **options)
    assert tree.same(snapshot(resumed), snapshot(whole))
    assert [timeless(r) for r in resumed.metrics] == [timeless(r) for r in whole.metrics]
