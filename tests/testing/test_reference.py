from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support import reference
from torch import nn

from parsifl.core import registry, tree
from parsifl.core.keys import Key
from parsifl.data.clients import ClientData
from parsifl.engine.batch_sampler import BatchSampler, Infos
from parsifl.engine.run import Run
from parsifl.engine.simulate import simulate
from parsifl.nn.neural import NeuralProblem

GOLDEN = Path(__file__).parents[1] / "golden"
ALGORITHMS = sorted(reference.ROUND)


def stored(algorithm: str, case: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((GOLDEN / f"{algorithm}.json").read_text())["cases"][case]
    return found


def federation(case: dict[str, Any]) -> tuple[NeuralProblem, ClientData]:
    module: nn.Module
    if case["model"] == "softmax":
        module = nn.Linear(reference.FEATURES, reference.CLASSES)
    else:
        module = nn.Sequential(
            nn.Linear(reference.FEATURES, reference.HIDDEN),
            nn.ReLU(),
            nn.Linear(reference.HIDDEN, reference.CLASSES),
        )
    module.double()
    values = {name: torch.from_numpy(reference.from_hex(v)) for name, v in case["initial"].items()}
    module.load_state_dict(values)
    rows = [np.array(part) for part in case["train"]]
    data = ClientData(
        x=torch.from_numpy(reference.from_hex(case["x"])),
        y=torch.tensor(case["y"]),
        train=rows,
        validation=[part[:0] for part in rows],
        test=rows,
        profiles=case["profiles"],
        classes=reference.CLASSES,
    )
    return NeuralProblem(module, dtype=torch.float64), data


def run(algorithm: str, case: dict[str, Any], rounds: int, engine: Any) -> Run:
    problem, data = federation(case)
    return simulate(
        registry.get(algorithm, **case["settings"]),
        problem,
        data,
        rounds,
        seed=case["seed"],
        participation=case["participation"],
        executor=engine,
        evaluate_every=0,
    )


def assert_close(state: Any, wanted: dict[str, Any]) -> None:
    leaves, structure = tree.flatten(state)
    found = dict(zip(tree.names(structure), leaves, strict=True))
    assert found.keys() == wanted.keys()
    for name, values in wanted.items():
        right = reference.from_hex(values)
        assert found[name].dtype == torch.float64
        np.testing.assert_allclose(
            found[name].numpy(), right, rtol=1e-12, atol=1e-12 * np.abs(right).max()
        )


@pytest.mark.parametrize("engine", ["loop", "fused"])
@pytest.mark.parametrize("case", sorted(reference.CASES))
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_engine_follows_the_golden_trajectory(algorithm: str, case: str, engine: str) -> None:
    golden = stored(algorithm, case)
    for rounds in (1, 2, reference.ROUNDS):
        result = run(algorithm, golden, rounds, engine)
        wanted = golden["rounds"][rounds - 1]
        assert_close(result.server, wanted["server"])
        states = {str(client): state for client, state in result.pool.store if state is not None}
        assert states.keys() == wanted["clients"].keys()
        for client, state in states.items():
            assert_close(state, wanted["clients"][client])


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_schedule_draws_the_stored_batches_and_cohorts(algorithm: str) -> None:
    golden = stored(algorithm, "softmax")
    problem, data = federation(golden)
    shards, infos = BatchSampler(data, problem), Infos(data)
    method = registry.get(algorithm, **golden["settings"])
    for number, wanted in enumerate(golden["rounds"]):
        assert list(map(int, wanted["batches"])) == wanted["cohort"]
        for client in wanted["cohort"]:
            key = Key(golden["seed"], number)
            shard = shards.draw(client, method.batches(infos[client], number), key)
            drawn = {
                name: [i[w > 0].tolist() for i, w in zip(b.index, b.weight, strict=True)]
                for name, b in shard.batches.items()
            }
            assert drawn == wanted["batches"][str(client)]


def test_the_golden_federation_has_short_batches_slow_clients_and_absentees() -> None:
    golden = stored("fedavg", "softmax")
    lengths = {len(b) for r in golden["rounds"] for c in r["batches"].values() for b in c["train"]}
    steps = {len(c["train"]) for r in golden["rounds"] for c in r["batches"].values()}
    assert len(lengths) > 1
    assert len(steps) > 1
    assert all(len(r["cohort"]) == 3 for r in golden["rounds"])
    assert len({tuple(r["cohort"]) for r in golden["rounds"]}) > 1


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_stored_files_are_what_the_reference_gives(algorithm: str) -> None:
    fresh = json.loads(json.dumps(reference.golden(algorithm)))
    kept = json.loads((GOLDEN / f"{algorithm}.json").read_text())
    for case, ours in fresh["cases"].items():
        theirs = kept["cases"][case]
        assert {k: v for k, v in ours.items() if k != "rounds"} == {
            k: v for k, v in theirs.items() if k != "rounds"
        }
        for one, other in zip(ours["rounds"], theirs["rounds"], strict=True):
            assert one["cohort"] == other["cohort"]
            assert one["batches"] == other["batches"]
            for name, values in one["server"].items():
                np.testing.assert_allclose(
                    reference.from_hex(values), reference.from_hex(other["server"][name]), 1e-13
                )


def test_the_command_writes_one_file_an_algorithm(tmp_path: Path) -> None:
    assert reference.main([str(tmp_path / "golden")]) == 0
    names = sorted(path.stem for path in (tmp_path / "golden").iterdir())
    assert names == ALGORITHMS


@pytest.mark.parametrize("model", sorted(reference.GRADIENTS))
def test_gradients_agree_with_finite_differences(model: str) -> None:
    setting = reference.golden_setting("fedavg", model)
    x, y, h = setting.x[:7], setting.y[:7], 1e-6

    def loss(params: reference.Params) -> float:
        if model == "softmax":
            logits = x @ params["weight"].T + params["bias"]
        else:
            hidden = np.maximum(x @ params["0.weight"].T + params["0.bias"], 0)
            logits = hidden @ params["2.weight"].T + params["2.bias"]
        top = logits.max(axis=1)
        total = np.log(np.exp(logits - top[:, None]).sum(axis=1)) + top
        return float((total - logits[np.arange(len(y)), y]).mean())

    gradient = reference.GRADIENTS[model](setting.initial, x, y)
    for name, value in setting.initial.items():
        for position in np.ndindex(value.shape):
            sides = []
            for sign in (1, -1):
                moved = {n: v.copy() for n, v in setting.initial.items()}
                moved[name][position] += sign * h
                sides.append(loss(moved))
            slope = (sides[0] - sides[1]) / (2 * h)
            assert gradient[name][position] == pytest.approx(slope, abs=1e-8)


def test_the_reference_imports_nothing_that_it_is_compared_with() -> None:
    tree_ = ast.parse(Path(reference.__file__).read_text())
    imported = {
        node.module for node in ast.walk(tree_) if isinstance(node, ast.ImportFrom) and node.module
    } | {a.name for node in ast.walk(tree_) if isinstance(node, ast.Import) for a in node.names}
    own = {name for name in imported if name.startswith("parsifl")}
    assert own == {"parsifl.core.keys", "parsifl.core.batching"}
    assert "torch" not in imported


def test_hexadecimal_floats_lose_nothing() -> None:
    values = np.random.default_rng(0).normal(size=(3, 2)) * 1e-200
    assert np.array_equal(reference.from_hex(reference.to_hex(values)), values)
