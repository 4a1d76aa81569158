"""A client that sends finite values which overflow the sum: left out, named, nothing lost."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.flower.inprocess import Answer, InProcess, fields, simulated

from parsifl import wire
from parsifl.core import tree
from parsifl.core.errors import DivergenceWarning
from parsifl.core.leaves import LowRank, densify
from parsifl.engine import checkpoint
from parsifl.engine.experiment import Experiment
from parsifl.flower.message import Envelope, Kind
from parsifl.solvers.svt import Compact


def experiment(algorithm: str, rounds: int = 3) -> Experiment:
    return Experiment.read(
        {"algorithm": algorithm, "data": "digits", "clients": 3, "rounds": rounds, "model": "mlp"}
    )


def huge(kind: Kind, client: int, request: Envelope, answer: Callable[[], Envelope]) -> Answer:
    """Client 1 sends 3e38 in round 2."""
    reply = answer()
    if kind == "train" and client == 1 and fields(request)["round"] == 1:
        whole = wire.decode(reply.parts["upload"], dict[str, torch.Tensor])
        spoilt = tree.map(lambda leaf: torch.full_like(leaf, 3e38), whole)
        return Envelope(reply.text, {"upload": wire.encode(spoilt)})
    return reply


@pytest.mark.parametrize("algorithm", ["fedavg", "fedamp"])
def test_a_finite_upload_cannot_destroy_the_run(algorithm: str, tmp_path: Path) -> None:
    chosen = experiment(algorithm)
    records = InProcess(chosen, tmp_path / "state", huge).run(tmp_path / "run")
    assert [list(record["dropped"]) for record in records] == [[], [1], []]
    assert "too large" in records[1]["dropped"][1]
    found = checkpoint.load(tmp_path / "run" / "checkpoint", chosen.build_algorithm().tree_types())
    assert found is not None
    assert tree.is_finite(found.server)


def test_a_model_that_grows_without_bound_is_reported_as_in_one_process(tmp_path: Path) -> None:
    settings = {"lam": 3.0, "outer_lr": 0.1, "lr": 0.05}
    chosen = replace(experiment("fedmac", rounds=12), settings=settings, model="mlp:hidden=5")
    link = InProcess(chosen, tmp_path / "state")
    found = link.run(tmp_path / "run")
    (first,) = [record["round"] for record in found if record["notes"]]
    assert first < 12
    (note,) = found[first - 1]["notes"]
    told = r"The run diverged: the global model holds values up to .*e\+.*Lower `lr` \(now 0.05\)"
    assert re.match(told, note)
    assert [line for line in link.log if "diverged" in line] == [f"warning: {note}"]
    with pytest.warns(DivergenceWarning, match=told):
        run = simulated(chosen)
    assert [list(record.notes) for record in run.records] == [record["notes"] for record in found]
    link = InProcess(replace(chosen, rounds=13), tmp_path / "state")
    link.run(tmp_path / "run", resume=True)
    assert [line.startswith("warning: ") for line in link.log if "diverged" in line] == [True]


def large_factors(
    kind: Kind, client: int, request: Envelope, answer: Callable[[], Envelope]
) -> Answer:
    """Client 1 sends factors of ordinary values with a huge product, in round 2."""
    reply = answer()
    if kind == "train" and client == 1 and fields(request)["round"] == 1:
        whole = wire.decode(reply.parts["upload"], Compact)
        spoilt: Compact = {}
        for name, value in densify(whole).items():
            spoilt[name] = value
            if value.ndim == 2:
                left, right = torch.full((len(value), 1), 1e15), torch.full((1, len(value.T)), 1e15)
                spoilt[name] = LowRank(left, right, tuple(value.shape))
        return Envelope(reply.text, {"upload": wire.encode(spoilt)})
    return reply


def test_the_product_of_factors_is_checked(tmp_path: Path) -> None:
    chosen = replace(experiment("fedslr"), settings={"solver": "local", "lam": 1.0})
    records = InProcess(chosen, tmp_path / "state", large_factors).run(tmp_path / "run")
    assert [list(record["dropped"]) for record in records] == [[], [1], []]
    assert "too large" in records[1]["dropped"][1]


@pytest.mark.parametrize("algorithm", ["ditto", "scaffold"])
def test_a_damaged_checkpoint_gives_way_to_the_one_before_with_the_same_bits(
    algorithm: str, tmp_path: Path
) -> None:
    link = InProcess(experiment(algorithm), tmp_path / "state")
    link.run(tmp_path / "run")
    place = tmp_path / "run" / "checkpoint"
    (place / "round-00000003" / "state.json").write_text("damaged")
    longer = experiment(algorithm, rounds=5)
    link.experiment = longer
    with pytest.warns(UserWarning, match="round-00000003 cannot be read"):
        link.run(tmp_path / "run", resume=True)
    found = checkpoint.load(place, longer.build_algorithm().tree_types())
    assert found is not None
    assert tree.same(found.server, simulated(longer).server)
