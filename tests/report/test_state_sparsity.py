from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from tests.report.folders import make_run

from parsifl import NeuralProblem, get, simulate
from parsifl.engine.run_dir import read_runs
from parsifl.report import state_sparsity
from parsifl.report.page import render
from parsifl.report.state_sparsity import read_anatomy


def write(folder: Path, server: Any, client_form: Any, tensors: dict[str, Any]) -> None:
    """Write a checkpoint with 3 clients of one form; tensors are named as the engine does."""
    place = folder / "checkpoint" / "round-00000007"
    place.mkdir(parents=True)
    (place.parent / "LATEST").write_text(f"{place.name} 00000000")
    part = place.parent / "clients" / "part-00000001.safetensors"
    part.parent.mkdir()
    told = {"forms": [client_form], "clients": {str(client): 0 for client in range(3)}}
    state = {"round": 7, "server": server, "pool": {"segments": [[part.name, "0", 3]]}}
    (place / "state.json").write_text(json.dumps(state))
    save_file({k: v for k, v in tensors.items() if "/" not in k}, place / "server.safetensors")
    save_file({k: v for k, v in tensors.items() if "/" in k}, part, {"parsifl": json.dumps(told)})


def supports() -> dict[str, Any]:
    first, second, third = (np.zeros(8, np.float32) for _ in range(3))
    first[:4], second[2:6], third[4:] = 1, 1, 1
    return {"0/0": first, "1/0": second, "2/0": third}


def test_density_rank_and_overlap_of_known_states(tmp_path: Path) -> None:
    weight = np.outer([1.0, 2.0, 3.0, 4.0], [1.0, 0.0]).astype(np.float32)  # rank 1 of 2
    server = {"c": "Server", "f": {"params": {"d": {"w": "*"}}, "count": {"s": 3}}}
    write(tmp_path, server, {"d": {"v": "*"}}, {"0": weight, **supports()})
    found = read_anatomy(tmp_path)
    assert found is not None
    assert found.round == 7
    assert found.rows == ("server", "0", "1", "2")
    assert found.columns == ("params w", "v")
    assert found.density == ((0.5, None), (None, 0.5), (None, 0.5), (None, 0.5))
    assert found.rank[0] == (0.5, None)
    # supports {0..3}, {2..5}, {4..7}: two of six shared by neighbours, none by the ends
    expected = [[1, 1 / 3, 0], [1 / 3, 1, 1 / 3], [0, 1 / 3, 1]]
    np.testing.assert_allclose(found.overlap, expected, atol=1e-4)
    assert found.parsimonious


def test_what_the_server_keeps_for_each_client_is_shown_with_the_client(tmp_path: Path) -> None:
    masks = {"d": {str(client): {"d": {"w": "*"}} for client in range(3)}}
    tensors = {str(at): leaf for at, leaf in enumerate(supports().values())}
    write(tmp_path, {"d": {"masks": masks}}, {"s": None}, tensors)
    found = read_anatomy(tmp_path)
    assert found is not None
    assert found.rows == ("0", "1", "2")
    assert found.columns == ("masks w",)
    assert len(found.overlap) == 3


def test_a_plan_of_masks_is_a_picture_of_devices_and_blocks(tmp_path: Path) -> None:
    def static(*numbers: int) -> dict[str, Any]:
        return {"u": [{"s": number} for number in numbers]}

    plan = {"masks": {"u": [static(), static(0, 2)]}, "chosen": static(0, 1, 1)}
    server = {"c": "SubmodelServer", "f": {"params": {"d": {"w": "*"}}, **plan}}
    write(tmp_path, server, {"s": None}, {"0": np.ones(4, np.float32)})
    found = read_anatomy(tmp_path)
    assert found is not None
    assert np.array(found.masks).tolist() == [[0, 0, 0], [1, 0, 1], [1, 0, 1]]
    assert found.parsimonious


def test_dense_states_are_no_picture(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a")
    write(run, {"d": {"w": "*"}}, {"s": None}, {"0": np.eye(3, dtype=np.float32) + 1})
    found = read_anatomy(run)
    assert found is not None
    assert not found.parsimonious
    assert 'data-figure="inside"' not in render(read_runs([run]))


def test_a_checkpoint_that_is_absent_damaged_or_huge_is_no_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert read_anatomy(tmp_path) is None
    write(tmp_path, {"d": {"w": "*"}}, {"s": None}, {"0": np.zeros(4, np.float32)})
    assert read_anatomy(tmp_path) is not None
    monkeypatch.setattr(state_sparsity, "_MOST_BYTES", 10)
    assert read_anatomy(tmp_path) is None
    monkeypatch.undo()
    for name, content in (
        ("server.safetensors", "broken"),
        ("state.json", "[]"),
        ("../LATEST", ""),
    ):
        (tmp_path / "checkpoint" / "round-00000007" / name).write_text(content)
        assert read_anatomy(tmp_path) is None


def test_a_run_of_the_engine_can_be_looked_into(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    clients = [
        (random.normal(size=(24, 3)).astype(np.float32), random.integers(0, 2, 24))
        for _ in range(4)
    ]
    problem = NeuralProblem(lambda: torch.nn.Linear(3, 2))
    simulate(get("ditto", lr=0.1, local_steps=2), problem, clients, 2, run_dir=tmp_path)
    found = read_anatomy(tmp_path)
    assert found is not None
    assert found.round == 2
    assert found.rows == ("server", "0", "1", "2", "3")
    assert found.columns == ("bias", "weight")
    assert found.density == ((1.0, 1.0),) * 5


def test_the_page_has_a_place_for_it(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a")
    write(run, {"d": {"w": "*"}}, {"d": {"v": "*"}}, {"0": np.zeros(4, np.float32), **supports()})
    assert 'data-figure="inside"' in render(read_runs([run]))
