"""Singular value thresholding over all layers of ResNet18 against `torch.linalg.svd` of each.

Prints the ratio of the two times (the goal is 0.6 or less) and the largest difference, for a model
as it is initialised (full rank), for one of low rank, given its factors of the last round, for one
whose spectrum falls evenly over five decades, and for what FedSLR's server meets in its second
round of training. Run it with ``python benchmarks/bench_svt.py`` (a minute on a quiet machine),
or with the names of some cases.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from parsifl.algorithms.fedslr import FedSLR
from parsifl.engine.simulate import simulate
from parsifl.keys import Key
from parsifl.messages import dematricize, densify, matricize
from parsifl.models import build
from parsifl.problem import Params
from parsifl.problems.neural import NeuralProblem
from parsifl.solvers.svt import Compact, has_rank, svt_layers

T = TypeVar("T")
REPEATS = 2
GOAL = 0.6
BLOCKS = ((64, 64, 1), (64, 64, 1), (64, 128, 2), (128, 128, 1), (128, 256, 2), (256, 256, 1),
          (256, 512, 2), (512, 512, 1))  # fmt: skip


def shapes() -> list[tuple[int, ...]]:
    """Return the shapes of the convolutions and of the linear layer of ResNet18 for CIFAR-10."""
    found: list[tuple[int, ...]] = [(64, 3, 3, 3)]
    for inner, outer, stride in BLOCKS:
        found += [(outer, inner, 3, 3), (outer, outer, 3, 3)]
        if stride > 1:
            found.append((outer, inner, 1, 1))
    return [*found, (10, 512)]


def initial() -> Params:
    """Return layers as they are initialised: every singular value is alive."""
    generator = Key(0, purpose="bench").torch()
    return {
        str(number): torch.randn(shape, generator=generator) * (2 * shape[0] / _size(shape)) ** 0.5
        for number, shape in enumerate(shapes())
    }


def _size(shape: tuple[int, ...]) -> int:
    return int(torch.tensor(shape).prod())


def trained(threshold: float) -> tuple[Params, Compact]:
    """Return layers as FedSLR has them later on, and their factors of the round before.

    An eighth of the singular values is alive, falling over three decades down to the threshold;
    the update of a round is noise that moves them a little.
    """
    generator = Key(1, purpose="bench").torch()
    layers: Params = {}
    for name, value in initial().items():
        left, sizes, right = torch.linalg.svd(matricize(value), full_matrices=False)
        count = max(len(sizes) // 8, 1)
        alive = threshold * torch.logspace(3.3, 0.3, count)
        low = (left[:, :count] * alive) @ right[:count]
        layers[name] = dematricize(low, tuple(value.shape))
    before = svt_layers(layers, threshold)
    for name, value in layers.items():
        rows, columns = matricize(value).shape
        scale = 0.3 * threshold / (rows**0.5 + columns**0.5)
        layers[name] = value + scale * torch.randn(value.shape, generator=generator)
    return layers, before


def decayed() -> Params:
    """Return layers whose singular values fall evenly over five decades, most of them alive."""
    layers: Params = {}
    for name, value in initial().items():
        left, sizes, right = torch.linalg.svd(matricize(value), full_matrices=False)
        fallen = torch.logspace(1, -4, len(sizes))
        layers[name] = dematricize((left * fallen) @ right, tuple(value.shape))
    return layers


def second_round(threshold: float) -> tuple[Params, Compact | None]:
    """Return what the server thresholds in the second round of FedSLR, and the model before it.

    Two clients with random pictures take a few steps each with ResNet18; eta_g is the paper's.
    """
    generator = Key(2, purpose="bench").numpy()
    rows = [
        (generator.normal(size=(16, 3, 32, 32)).astype(np.float32), np.arange(16) % 10)
        for _ in range(2)
    ]
    seen: list[tuple[Params, Compact | None]] = []

    def watched(point: Params, threshold: float, near: Compact | None = None) -> Compact:
        seen.append((point, near))
        return svt_layers(point, threshold, near)

    method = FedSLR(eta_g=10.0, lam=threshold / 10, lr=0.1, batch=8, steps=2, personal_epochs=0.0)
    problem = NeuralProblem(partial(build, "resnet18"))
    with mock.patch("parsifl.algorithms.fedslr.svt_layers", watched):
        simulate(method, problem, rows, 2, evaluate_every=0)
    point, near = seen[-1]
    return {name: value for name, value in point.items() if value.ndim > 1}, near


def case(label: str, threshold: float) -> tuple[Params, Compact | None]:
    """Return the layers of a case and, where there are any, the factors of the last round."""
    if label == "round 2":
        return second_round(threshold)
    if label == "trained":
        return trained(threshold)
    return (initial() if label == "initial" else decayed()), None


def plain(params: Params, threshold: float) -> Params:
    """Decompose every layer whole."""
    result: Params = {}
    for name, value in params.items():
        if has_rank(tuple(value.shape)):
            left, sizes, right = torch.linalg.svd(matricize(value), full_matrices=False)
            kept = (left * (sizes - threshold).clamp(min=0.0)) @ right
            result[name] = dematricize(kept, tuple(value.shape))
    return result


def _timed(work: Callable[[], T]) -> tuple[float, T]:
    started = time.perf_counter()
    result = work()
    return time.perf_counter() - started, result


def _difference(ours: dict[str, Tensor], theirs: Params) -> float:
    gaps = [(ours[n] - v).abs().max() / v.abs().max().clamp(min=1e-9) for n, v in theirs.items()]
    return float(torch.stack(gaps).max())


def _measured(label: str, threshold: float) -> float:
    """Measure both ways in turn; return the ratio of the best times: other work only adds."""
    params, before = case(label, threshold)
    ours, direct, gap = [], [], 0.0
    for _ in range(REPEATS):
        seconds, compact = _timed(partial(svt_layers, params, threshold, before))
        ours.append(seconds)
        seconds, whole = _timed(partial(plain, params, threshold))
        direct.append(seconds)
        gap = _difference(densify(compact), whole)
    ratio = min(ours) / min(direct)
    pairs = sorted(a / b for a, b in zip(ours, direct, strict=True))
    sys.stdout.write(
        f"{label:8} threshold {threshold:g}: {ratio:.2f} of plain at best "
        f"(pairs {pairs[0]:.2f} to {pairs[-1]:.2f}), largest difference {gap:.1e}\n"
    )
    sys.stdout.flush()
    return ratio


def main() -> int:
    """Measure the cases that the arguments name, or all."""
    labels = sys.argv[1:] or ("initial", "trained", "decayed", "round 2")
    worst = max(_measured(label, threshold) for label in labels for threshold in (1e-3, 1e-2))
    sys.stdout.write(f"worst {worst:.2f}, goal {GOAL}\n")
    return int(worst > GOAL)


if __name__ == "__main__":
    raise SystemExit(main())
