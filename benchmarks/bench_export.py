"""What an exported ResNet18 of about 1.3 M parameters costs, beside the dense one of 11.2 M.

Prints parameters, bytes of the file, milliseconds a batch of 20 and their ratio, for the global
model (low rank: to be at least twice as fast as dense) and for a client's (a sparse part on top:
file within 5 % of its numbers and positions, latency not above that of the dense model).
Run it with ``python benchmarks/bench_export.py``.
"""

from __future__ import annotations

import sys
import tempfile
from functools import partial
from pathlib import Path

import torch

from parsifl.engine.export import Export, export
from parsifl.keys import Key
from parsifl.messages import LowRank, matricize
from parsifl.models import build
from parsifl.problem import Model, Params
from parsifl.problems.neural import NeuralProblem
from parsifl.solvers.svt import has_rank

RANK = 0.058
"""Share of the singular values that is kept: this gives about 1.3 M parameters."""
OWN = 0.04
"""Share of the entries that a client changes: 0.45 M, as in the paper."""
BATCH, REPEATS = 20, 15
FASTER, FILE, SLOWER = 2.0, 1.05, 1.05


def low_rank(params: Params) -> Params:
    """Return the parameters with every layer that has a rank cut down."""
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
    """Return the parameters with some entries moved: a client's sparse part."""
    draw = Key(1, purpose="bench").torch()
    return {
        name: value + (torch.rand(value.shape, generator=draw) < OWN) * 0.01
        for name, value in params.items()
    }


def _measured(label: str, exported: Export) -> tuple[float, float]:
    """Print the report of a model; return its latency over dense and its file over the bound."""
    x = torch.randn(BATCH, 3, 32, 32, generator=Key(2, purpose="bench").torch())
    with tempfile.TemporaryDirectory() as folder:
        found = exported.report(x, Path(folder) / "model.safetensors", REPEATS)
    share = found["milliseconds"] / found["dense_milliseconds"]
    size = found["file_bytes"] / found["ideal_bytes"]
    sys.stdout.write(
        f"{label:7} {found['parameters']:9,} of {found['dense_parameters']:,} parameters, "
        f"file {found['file_bytes']:,} bytes ({size:.4f} of numbers and positions), "
        f"{found['milliseconds']:.1f} ms against {found['dense_milliseconds']:.1f} dense "
        f"({1 / share:.2f} times faster), largest difference {found['largest_difference']:.1e}\n"
    )
    return share, size


def main() -> int:
    """Measure both exports; the exit code tells whether every mark was reached."""
    problem = NeuralProblem(partial(build, "resnet18"))
    shared = low_rank(problem.init(Key(0)))
    model = Model(problem, shared)
    share, size = _measured("global", export(model))
    own_share, own_size = _measured("client", export(Model(problem, changed(shared)), model, 0))
    reached = 1 / share >= FASTER and own_share <= SLOWER and max(size, own_size) <= FILE
    return int(not reached)


if __name__ == "__main__":
    raise SystemExit(main())
