"""Cost of an exported ResNet18 with about 1.3 M parameters, compared with the dense one of 11.2 M.

Prints milliseconds per batch of 20, parameters and file size, for the global model (low rank;
target: at least twice as fast as dense) and for a client's model (with a sparse part; targets: file
within 5 % of its numbers and positions, latency not above that of the dense model).
"""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path

import torch
from timing import Row, at_most, interleaved, marked, products, report, row
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from parsifl.core.keys import Key
from parsifl.core.leaves import LowRank, matricize
from parsifl.core.problem import Model, Params
from parsifl.engine.export import Export, export
from parsifl.nn.models import build
from parsifl.nn.neural import NeuralProblem
from parsifl.solvers.svt import has_rank

RANK = 0.058
"""Fraction of the singular values that are kept, which gives about 1.3 M parameters."""
OWN = 0.04
"""Fraction of the entries that a client changes: 0.45 M, as in the paper."""
BATCH, TURNS = 20, 15
FASTER, FILE, NOT_SLOWER = 2.0, 1.05, 0.95


def low_rank(params: Params) -> Params:
    """Return the parameters with a reduced rank of every layer that has a rank."""
    found: Params = {}
    for name, value in params.items():
        found[name] = value
        if has_rank(tuple(value.shape)):
            left, sizes, right = torch.linalg.svd(matricize(value), full_matrices=False)
            rank = max(round(RANK * len(sizes)), 1)
            cut = LowRank(left[:, :rank] * sizes[:rank], right[:rank], tuple(value.shape))
            found[name] = cut.dense()
    return found


def changed(params: Params) -> Params:
    """Return the parameters with some entries changed: a client's sparse part."""
    draw = Key(1, purpose="bench").torch_generator()
    return {
        name: value + (torch.rand(value.shape, generator=draw) < OWN) * 0.01
        for name, value in params.items()
    }


def measure(label: str, exported: Export, asked: float) -> list[Row]:
    """Compare a compact model with the dense one."""
    x = torch.randn(BATCH, 3, 32, 32, generator=Key(2, purpose="bench").torch_generator())
    thin, dense = exported.module(), exported.dense_module()
    with tempfile.TemporaryDirectory() as folder:
        size = exported.save(Path(folder) / "model.safetensors") / exported.ideal_bytes
    with torch.no_grad():
        gap = float((thin(x) - dense(x)).abs().max())
        found = interleaved({"dense": lambda: dense(x), "export": lambda: thin(x)}, TURNS)
    numbers = f"file {size:.4f} of numbers and positions"
    note = f"{exported.parameters:,} parameters, {numbers}, largest difference {gap:.1e}"
    reference = found["dense"].median
    whole, ours = (
        row(label, found[name], reference, "dense", products(operations(module, x)), note)
        for name, module in (("dense", dense), ("export", thin))
    )
    return [whole, marked(ours, asked, at_most(FILE, size, "of numbers and positions"))]


def operations(module: nn.Module, x: Tensor) -> float:
    """Return the floating-point operations of a forward pass."""
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        module(x)
    return float(counter.get_total_flops())


def main() -> int:
    """Measure both exports."""
    problem = NeuralProblem(partial(build, "resnet18"))
    shared = low_rank(problem.init(Key(0)))
    model = Model(problem, shared)
    own = export(Model(problem, changed(shared)), model, 0)
    rows = measure("ResNet18, global", export(model), FASTER)
    rows += measure("ResNet18, a client's", own, NOT_SLOWER)
    return report(rows, __doc__)


if __name__ == "__main__":
    raise SystemExit(main())
