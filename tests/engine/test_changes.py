"""Compressed uploads, robust aggregation and server optimizers as text in a run's description."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.flower.inprocess import Answer, InProcess, simulated
from tests.support.fixtures import classifier, clients
from typer.testing import CliRunner

from parsifl import wire
from parsifl.algorithms.composed import AGGREGATIONS, Composed, CoordinateMedian
from parsifl.algorithms.fedavg import FedAvg
from parsifl.cli.app import app
from parsifl.core import tree
from parsifl.core.errors import ConfigError
from parsifl.engine import checkpoint, run_dir, study
from parsifl.engine.experiment import Experiment
from parsifl.engine.simulate import simulate
from parsifl.flower.message import Envelope, Kind
from parsifl.flower.settings import Deployment, read, to_config
from parsifl.solvers.server_optimizers import SERVER_OPTIMIZERS, Adam, Sgd
from parsifl.solvers.upload_transforms import UPLOADS, Delta, TopK, upload_transforms

FULL: dict[str, Any] = {
    "uploads": "topk:fraction=0.2",
    "aggregation": "median",
    "server_optimizer": "adam:lr=0.05",
}
QUICK = Experiment("fedavg", {"local_steps": 2}, clients=4, rounds=2, model="glm", **FULL)
WORDS = ["--upload", "topk:fraction=0.2", "--aggregation", "median"]
WORDS += ["--server-optimizer", "adam:lr=0.05"]


def test_a_run_takes_changes_as_text() -> None:
    problem, data, algorithm = classifier(), clients(), FedAvg(lr=0.1, local_steps=2)
    by_hand = Composed(
        algorithm,
        uploads=(Delta(), TopK(0.2)),
        aggregation=CoordinateMedian,
        server_optimizer=Adam(lr=0.05),
    )
    described = simulate(algorithm, problem, data, 3, **FULL)
    assert tree.same(described.server, simulate(by_hand, problem, data, 3).server)
    assert described.algorithm == by_hand


def test_the_command_line_a_file_and_a_sweep_know_them(tmp_path: Path) -> None:
    words = ["run", "fedavg", "--clients", "3", "--rounds", "1", "--set", "local_steps=1"]
    out, again = tmp_path / "run", tmp_path / "again"
    assert CliRunner().invoke(app, [*words, *WORDS, "--out", str(out)]).exit_code == 0
    composed = run_dir.read_config(out)["algorithm"]["composed"]
    assert composed["aggregation"] == "CoordinateMedian"
    assert [stage["name"] for stage in composed["uploads"]] == ["Delta", "TopK"]
    assert composed["server_optimizer"]["lr"] == 0.05
    file = tmp_path / "run.toml"
    file.write_text("".join(f"{name} = {json.dumps(text)}\n" for name, text in FULL.items()))
    ended = CliRunner().invoke(app, [*words, "--config", str(file), "--out", str(again)])
    assert ended.exit_code == 0, ended.output
    assert run_dir.read_config(again) == run_dir.read_config(out)
    grid = {"server_optimizer": ["none", "adam:lr=0.05"], "lr": ["0.1"]}
    planned = study.experiments(replace(QUICK, uploads=None, aggregation=None), grid, 1)
    built: list[Any] = [experiment.build_algorithm() for _, experiment in planned]
    assert built[0] == FedAvg(lr=0.1, local_steps=2)
    assert built[1].server_optimizer == Adam(lr=0.05)


def test_they_survive_the_configuration_of_an_app() -> None:
    written = to_config(QUICK, Deployment())
    assert read(written).experiment == QUICK
    plain = replace(QUICK, uploads=None, aggregation=None, server_optimizer=None)
    assert not FULL.keys() & to_config(plain, Deployment()).keys()


@pytest.mark.parametrize("name", [*FULL, "all"])
def test_a_deployment_gives_the_bits_and_bytes_of_the_simulation(name: str, tmp_path: Path) -> None:
    others = {other: None for other in FULL if name not in (other, "all")}
    chosen = replace(QUICK, **others)  # type: ignore[arg-type]
    records = InProcess(chosen, tmp_path / "state").run(tmp_path / "run")
    expected = simulated(chosen)
    saved = checkpoint.load(tmp_path / "run" / "checkpoint", chosen.build_algorithm().tree_types())
    assert saved is not None
    assert tree.same(saved.server, expected.server)
    for ours, theirs in zip(records, expected.metrics, strict=True):
        assert ours["bytes_up"] == theirs["bytes_up"]
        assert ours["notes"] == theirs["notes"] == []


def test_a_median_protects_a_deployment_from_a_client_that_sends_nonsense(tmp_path: Path) -> None:
    def poisoned(kind: Kind, client: int, _: Envelope, answer: Any) -> Answer:
        reply: Envelope = answer()
        if kind != "train" or client != 2:
            return reply
        upload = wire.decode(reply.parts["upload"], dict[str, torch.Tensor], limit=1 << 30)
        forged = {name: value * 0 + 1e6 for name, value in upload.items()}
        return replace(reply, parts={"upload": wire.encode(forged)})

    def largest(aggregation: str | None, name: str) -> float:
        chosen = replace(QUICK, uploads=None, aggregation=aggregation, server_optimizer=None)
        InProcess(chosen, tmp_path / name, poisoned).run(tmp_path / f"{name}-run")
        types = chosen.build_algorithm().tree_types()
        saved = checkpoint.load(tmp_path / f"{name}-run" / "checkpoint", types)
        assert saved is not None
        return max(float(leaf.abs().max()) for leaf in tree.leaves(saved.server))

    assert largest(None, "mean") > 1e4
    assert largest("median", "median") < 10


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"uploads": "topkk"}, "unknown upload transform 'topkk'; did you mean 'topk'"),
        ({"uploads": "topk:fracton=0.1"}, "did you mean 'fraction'"),
        ({"uploads": "topk:fraction=2"}, "TopK.fraction = '2'"),
        ({"uploads": "topk:fraction"}, "write name:option=value"),
        ({"uploads": ""}, "unknown upload transform"),
        ({"aggregation": "mode"}, "unknown aggregation 'mode'"),
        ({"aggregation": "median:fraction=1"}, "CoordinateMedian has no settings, got 'fraction'"),
        ({"server_optimizer": "adam:lr=-1"}, "Adam.lr = '-1'"),
        ({"server_optimizer": 3}, "server_optimizer = 3: Input should be a valid string"),
    ],
)
def test_what_cannot_be_read_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        simulate(FedAvg(), classifier(), clients(), 1, **change)


def test_what_an_algorithm_cannot_take_is_rejected_with_the_reason() -> None:
    with pytest.raises(ConfigError, match="reads every upload: remove `aggregation`"):
        Experiment("fedamp", aggregation="median").build_algorithm()
    with pytest.raises(ConfigError, match=r"is parameters; Scaffold keeps ScaffoldServer$"):
        Experiment("scaffold", server_optimizer="yogi").build_algorithm()
    with pytest.raises(ConfigError, match=r"uploads parameters; Local uploads nothing$"):
        Experiment("local", aggregation="median").build_algorithm()


def test_top_entries_are_those_of_the_change() -> None:
    assert upload_transforms("topk") == (Delta(), TopK())
    assert upload_transforms("delta+topk:fraction=0.5") == (Delta(), TopK(0.5))
    assert upload_transforms("delta") == (Delta(),)


@pytest.mark.parametrize("registry", [UPLOADS, AGGREGATIONS, SERVER_OPTIMIZERS])
def test_every_change_is_listed_and_shown(registry: Any) -> None:
    kind = {"upload transform": "uploads", "aggregation": "aggregations"}.get(
        registry.kind, "server-optimizers"
    )
    listed = json.loads(CliRunner().invoke(app, ["list", kind, "--json"]).output)
    assert set(listed) == set(registry.names())
    for name in registry.names():
        shown = CliRunner().invoke(app, ["show", name])
        assert registry.find(name).__name__ in shown.output
        fields = json.loads(CliRunner().invoke(app, ["show", name, "--json"]).output)["fields"]
        assert all(field["name"] in shown.output and field["description"] for field in fields)


def test_momentum_at_the_server_is_written_as_sgd() -> None:
    built: Any = Experiment("fedavg", server_optimizer="sgd:momentum=0.9").build_algorithm()
    assert built.server_optimizer == Sgd(momentum=0.9)
