"""A problem of one's own reaches every fast path that it declares."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import parsifl
from parsifl.core.batching import Batch, Rows
from parsifl.core.errors import DataError, RowError
from parsifl.core.keys import Key
from parsifl.core.problem import ExecutionHints, LayerChain, Params, Problem, execution
from parsifl.engine import threads
from parsifl.engine.executors import choose_executor
from parsifl.nn.layer_chain import Activate, Linear

ROOT = Path(__file__).parents[2]


class TwoLayers:
    """tanh(x A' + a) B' + b with cross-entropy, written without modules."""

    primary_metric, higher_is_better = "accuracy", True
    supports_vmap, uses_batch_statistics = True, False

    def init(self, key: Key) -> Params:
        draw = torch.Generator().manual_seed(key.seed)
        shapes = {"A": (5, 4), "a": (5,), "B": (3, 5), "b": (3,)}
        return {
            name: torch.randn(shape, generator=draw, dtype=torch.float64) / 3
            for name, shape in shapes.items()
        }

    def predict(self, params: Params, x: Any) -> Tensor:
        output: Tensor = (x @ params["A"].T + params["a"]).tanh() @ params["B"].T + params["b"]
        return output

    def loss(self, params: Params, batch: Batch) -> Tensor:
        losses = self._losses(self.predict(params, batch.x), batch.y)
        return (losses * batch.weight).sum() / batch.weight.sum().clamp(min=1)

    def _losses(self, output: Tensor, y: Tensor) -> Tensor:
        return -output.log_softmax(-1).gather(1, y[:, None])[:, 0]

    def metrics(self, params: Params, rows: Rows) -> dict[str, Tensor]:
        output = self.predict(params, rows.x)
        return {
            "accuracy": (output.argmax(-1) == rows.y).double(),
            "loss": self._losses(output, rows.y),
        }


class Declared(TwoLayers):
    """The same, with its layers."""

    layer_chain = LayerChain(
        (Linear("A", "a"), Activate("tanh"), Linear("B", "b")), "cross-entropy"
    )
    execution = ExecutionHints(block_size=3)


class Small(TwoLayers):
    """The same as a problem whose products are too small for threads, in large blocks."""

    execution = ExecutionHints(block_size=50, single_threaded=True)


def clients(count: int = 7) -> list[tuple[Any, Any]]:
    draw = np.random.default_rng(0)
    return [(draw.normal(size=(10 + i, 4)), draw.integers(0, 3, 10 + i)) for i in range(count)]


@pytest.mark.parametrize("name", ["fedavg", "fedprox", "ditto", "scaffold", "perfedavg", "fedslr"])
def test_a_declared_chain_runs_in_the_fused_solver_with_equal_results(name: str) -> None:
    algorithm = parsifl.get(name, local_steps=4, batch_size=5)
    fused = parsifl.simulate(algorithm, Declared(), clients(), 3)
    loop = parsifl.simulate(algorithm, TwoLayers(), clients(), 3, executor="loop")
    assert fused.metrics[0]["executor"] == "fused"
    assert loop.metrics[0]["executor"] == "loop"
    assert not fused.metrics[-1]["notes"]
    for client in range(7):
        ours, theirs = fused.personal(client).params, loop.personal(client).params
        for key, value in theirs.items():
            torch.testing.assert_close(ours[key], value, rtol=0, atol=1e-9)


def test_the_fused_solver_is_really_used(monkeypatch: pytest.MonkeyPatch) -> None:
    from parsifl.solvers.fused import steps

    blocks: list[int] = []
    walk = steps.Block.walk

    def counted(self: Any) -> Any:
        blocks.append(1)
        return walk(self)

    monkeypatch.setattr(steps.Block, "walk", counted)
    algorithm = parsifl.get("fedavg", local_steps=2, batch_size=5)
    parsifl.simulate(algorithm, Declared(), clients(6), 1)
    assert len(blocks) == 2  # six clients in blocks of three
    parsifl.simulate(algorithm, TwoLayers(), clients(6), 1)
    assert len(blocks) == 2


def test_hints_decide_blocks_and_threads() -> None:
    plain, small = TwoLayers(), Small()
    assert execution(plain) == ExecutionHints()
    assert choose_executor("auto", plain) == ("vmap", 10)
    assert choose_executor("auto", small) == ("vmap", 50)
    assert choose_executor("auto", Declared()) == ("fused", 3)
    assert threads.thread_scope(small) is threads.single_threaded
    assert threads.thread_scope(plain) is not threads.single_threaded

    class Alone(Declared):
        execution = ExecutionHints(per_client_threads=True)

    class Unfused(Declared):
        execution = ExecutionHints(fused=False)

    assert choose_executor("auto", Alone())[0] == "threads"
    assert choose_executor("fused", Alone())[0] == "fused"
    assert choose_executor("auto", Unfused())[0] == "vmap"


def test_a_problem_may_check_its_data_and_rows_are_traced_to_clients() -> None:
    class Checked(TwoLayers):
        def check_data(self, params: Params, x: Any, y: Tensor) -> None:
            if x.shape[1] != len(params["A"][0]):
                raise DataError(f"got {x.shape[1]} features, expected 4")
            wrong = (y > 2).nonzero()[:, 0].tolist()
            if wrong:
                raise RowError(wrong, lambda row: f"class {int(y[row])}, expected 0 to 2")

    data = clients(3)
    algorithm = parsifl.get("fedavg", local_steps=1)
    parsifl.simulate(algorithm, Checked(), data, 1)
    data[1][1][4] = 9
    with pytest.raises(DataError, match="client 1 has class 9, expected 0 to 2"):
        parsifl.simulate(algorithm, Checked(), data, 1)
    with pytest.raises(DataError, match="got 6 features, expected 4"):
        parsifl.simulate(algorithm, Checked(), [(np.ones((4, 6)), np.zeros(4, int))] * 2, 1)


def test_outputs_are_scored_together_where_a_problem_can() -> None:
    seen: list[int] = []

    class Scored(Declared):
        def output_metrics(self, output: Tensor, y: Tensor) -> dict[str, Tensor]:
            seen.append(len(y))
            return {
                "accuracy": (output.argmax(-1) == y).double(),
                "loss": self._losses(output, y),
            }

    algorithm = parsifl.get("ditto", local_steps=2, batch_size=5)
    together = parsifl.simulate(algorithm, Scored(), clients(), 1)
    apart = parsifl.simulate(algorithm, Declared(), clients(), 1)
    assert seen
    assert max(seen) > max(len(y) for _, y in clients()) // 4  # rows of several clients
    scores = [{**run.summary(), "seconds": None} for run in (together, apart)]
    assert scores[0] == scores[1]


def recognised(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "isinstance":
            kinds = ast.unparse(node.args[1])
            if any(kind in kinds for kind in ("NeuralProblem", "GLM", "SupportSolvable")):
                yield f"{path.name}: {ast.unparse(node)}"


def test_no_problem_is_recognised_by_its_class() -> None:
    assert isinstance(TwoLayers(), Problem)
    package = ROOT / "src/parsifl"
    own = (package / "nn", package / "linear")
    others = [p for p in package.rglob("*.py") if not any(o in p.parents for o in own)]
    assert [found for path in others for found in recognised(path)] == []
