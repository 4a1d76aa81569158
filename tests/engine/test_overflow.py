"""Finite uploads that would overflow: the client is named, and the run keeps a finite state."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import parsifl
from parsifl.algorithms.fedavg import FedAvg
from parsifl.core import tree
from parsifl.core.algorithm import ClientUpdate
from parsifl.core.errors import ClientError, ParsiflError
from parsifl.core.keys import Key
from parsifl.engine.finite import inspect

PROBLEM = parsifl.GLM(5, dtype=torch.float32)


def client(seed: int, scale: float = 1.0) -> tuple[Any, Any]:
    x = np.random.default_rng(seed).normal(size=(80, 5)) * scale
    return x.astype(np.float32), x.sum(axis=1).astype(np.float32)


def run(clients: Any, rounds: int = 3, method: Any = None, **more: Any) -> Any:
    chosen = method or parsifl.get("fedavg", lr=0.1, local_steps=1)
    return parsifl.simulate(chosen, PROBLEM, clients, rounds, evaluate_every=0, **more)


@pytest.mark.parametrize("engine", ["loop", "fused"])
@pytest.mark.parametrize("algorithm", ["fedavg", "scaffold", "fedamp", "fedht"])
def test_a_client_whose_finite_upload_would_overflow_is_left_out_and_named(
    algorithm: str, engine: Any, tmp_path: Path
) -> None:
    others = [client(seed) for seed in range(3)]
    settings: dict[str, Any] = {"tau": 5} if algorithm == "fedht" else {}
    method = parsifl.get(algorithm, lr=0.1, **settings)
    found = run([*others, client(3, 1e18)], 2, method, executor=engine, run_dir=tmp_path / "run")
    assert tree.is_finite(found.server)
    for record in found.metrics:
        assert list(record["dropped"]) == [3]
        assert "upload" in record["dropped"][3]


def test_the_reason_tells_the_value_and_the_limit() -> None:
    found = run([client(0), client(1), client(2, 1e18)], 1)
    assert "too large" in (reason := found.metrics[0]["dropped"][2]), reason
    assert "1.84e+19" in reason


def test_large_values_that_overflow_nothing_change_nothing() -> None:
    clients = [client(0), client(1), client(2, 1e8)]
    found = run(clients, 1, executor="loop")
    assert found.metrics[0]["dropped"] == {}
    assert float(found.server["coef"].abs().max()) > 1e9


def spoil(monkeypatch: pytest.MonkeyPatch, change: Callable[[Tensor, Key], Tensor]) -> None:
    """Change what the server step of FedAvg gives."""
    whole = FedAvg.aggregate

    def aggregate(self: FedAvg, problem: Any, server: Any, total: Any, key: Key) -> Any:
        return tree.map(lambda leaf: change(leaf, key), whole(self, problem, server, total, key))

    monkeypatch.setattr(FedAvg, "aggregate", aggregate)


def test_an_aggregate_that_is_not_finite_stops_the_run_and_names_the_client(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(monkeypatch, lambda leaf, _: leaf**4)
    clients = [client(0), client(1), client(2, 1e8)]
    with pytest.raises(ClientError, match="client 2 failed in aggregation of round 1") as caught:
        run(clients, 3, run_dir=tmp_path / "run")
    assert "not finite" in str(caught.value)
    assert not list((tmp_path / "run" / "checkpoint").glob("round-*"))


def test_the_checkpoints_before_stay_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spoil(monkeypatch, lambda leaf, key: leaf + torch.inf if key.round == 2 else leaf)
    clients = [client(0), client(1)]
    with pytest.raises(ParsiflError, match=r"round 3: .* not finite.*no upload stands out"):
        run(clients, 5, run_dir=tmp_path / "run", checkpoint_seconds=0.0)
    names = sorted(p.name for p in (tmp_path / "run" / "checkpoint").glob("round-*"))
    assert names == ["round-00000001", "round-00000002"]
    found = run(clients, 2, run_dir=tmp_path / "run", resume=True)
    assert tree.same(found.server, run(clients, 2).server)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_limit_leaves_room_for_squares_where_the_type_has_it(dtype: torch.dtype) -> None:
    def found(value: float) -> str:
        upload = {"w": torch.tensor([1.0, -value], dtype=dtype)}
        return inspect(ClientUpdate(None, upload)).fault

    largest = torch.finfo(dtype).max
    assert found(1.0) == ""
    assert found(largest**0.45) == ""
    assert bool(found(largest / 2)) == (dtype != torch.float16)
    assert "not finite" in found(torch.inf)


def test_states_and_integers_have_no_limit() -> None:
    big: dict[str, Tensor] = {"w": torch.tensor([3e38])}
    assert inspect(ClientUpdate(big, {"n": torch.tensor([2**62])})).fault == ""
