"""Table 9 of FedSLR's paper: how fast a factorized ResNet18 is."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from parsifl.core.keys import Key
from parsifl.core.leaves import factored, matricize
from parsifl.core.problem import Params
from parsifl.engine.export import Export, StoredTensor
from parsifl.nn.models import build
from parsifl.nn.neural import NeuralProblem
from parsifl.solvers.svt import Compact, has_rank
from parsifl_reproduction.comparison import compare
from parsifl_reproduction.fedslr.setup import PAPER, falling
from parsifl_reproduction.recipe import Claim, Context, Job, Recipe, Result, Values, by_label

MILLIONS = {"1e-5": 7.33, "5e-5": 6.56, "1e-4": 5.54, "5e-4": 3.09, "1e-3": 1.27}
"""The paper's sizes by its lambda."""
DENSE, RATIO = 11.17, 10.98 / 6.53
BATCH = 20


def shrunk(params: Params, share: float, key: Key) -> Compact:
    """Return random layers of the same shapes whose factors have this share of their numbers."""
    draw = key.replace(purpose="latency").torch_generator()
    compact: Compact = {}
    for name, value in params.items():
        compact[name] = value
        if has_rank(tuple(value.shape)):
            rows, columns = matricize(value).shape
            rank = max(1, int(share * rows * columns / (rows + columns)))
            left = torch.randn(rows, rank, generator=draw) / rows**0.5
            right = torch.randn(rank, columns, generator=draw) / rank**0.5
            compact[name] = factored(left, right, tuple(value.shape))
    return compact


def _measure(size: str, seed: int, context: Context, _folder: Path | None) -> Values:
    width = 0.125 if context.smoke else 1.0
    problem, key = NeuralProblem(lambda: build("resnet18", width=width)), Key(seed)
    compact = shrunk(problem.init(key), MILLIONS[size] / DENSE, key)
    parts = {name: StoredTensor(value) for name, value in compact.items()}
    draw = key.replace(purpose="latency/rows").torch_generator()
    return Export(problem, parts).report(torch.randn(BATCH, 3, 32, 32, generator=draw))


def _plan(context: Context) -> list[Job]:
    return [
        Job(_label(size), seed, partial(_measure, size, seed, context))
        for seed in range(context.seeds)
        for size in MILLIONS
    ]


def _label(size: str) -> str:
    return f"{MILLIONS[size]:g} M"


def _conclude(_context: Context, results: Sequence[Result]) -> list[Claim]:
    grouped = by_label(results)

    def found(size: str, key: str) -> list[float]:
        return [float(run[key]) for run in grouped.get(_label(size), ())]

    times = {_label(size): found(size, "milliseconds") for size in MILLIONS}
    smallest = "1e-3"
    pairs = zip(found(smallest, "dense_milliseconds"), found(smallest, "milliseconds"), strict=True)
    ratio = [dense / thin for dense, thin in pairs]
    return [
        compare("the smallest model is faster than the dense one (milliseconds)",
                "10.98 against 6.53", found(smallest, "dense_milliseconds"), times["1.27 M"]),
        falling("latency falls with the size of the model (milliseconds)",
                "10.12, 9.30, 9.24, 7.62, 6.53", times),
        compare("the smallest model is faster by the paper's factor",
                f"{RATIO:.2f}", ratio, RATIO),
    ]  # fmt: skip


def _deviations(_context: Context) -> list[str]:
    return [
        "a CPU instead of a Tesla M60",
        "random factors of the sizes that the paper's lambda left, every layer shortened by the "
        "same share: latency depends on shapes alone, but trained layers differ in rank",
    ]


RECIPES = (
    Recipe(
        "fedslr-table9", "Latency of the factorized model", PAPER, _plan, _conclude, _deviations
    ),
)
