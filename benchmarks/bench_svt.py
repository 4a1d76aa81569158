"""Singular value thresholding of all layers of ResNet18, compared with `torch.linalg.svd`.

This is FedSLR's server step. Target: at most 0.6 of the time. The bound: the products that form
the smaller Gram matrix of each layer and apply it, at the peak rate of dense products. Cases: an
initialised model (full rank), one of low rank with its factors of the last round, one whose
spectrum decays evenly over five decades, and the server state in the second round of training.
"""

from __future__ import annotations

from functools import partial
from unittest import mock

import numpy as np
import torch
from timing import Row, chosen, interleaved, marked, products, progress, report, row
from torch import Tensor

from parsifl.algorithms.fedslr import FedSLR
from parsifl.core.keys import Key
from parsifl.core.leaves import dematricize, densify, matricize
from parsifl.core.problem import Params
from parsifl.engine.simulate import simulate
from parsifl.nn.models import build
from parsifl.nn.neural import NeuralProblem
from parsifl.solvers.svt import Compact, has_rank, svt_layers

TURNS = 3
CASES = {"initial": 1e-3, "trained": 1e-2, "decayed": 1e-3, "round 2": 1e-2}  # thresholds
GOAL = 1.67  # times as fast
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
    """Return initialised layers, in which no singular value is zero."""
    generator = Key(0, purpose="bench").torch_generator()
    return {
        str(number): torch.randn(shape, generator=generator) * (2 * shape[0] / _size(shape)) ** 0.5
        for number, shape in enumerate(shapes())
    }


def _size(shape: tuple[int, ...]) -> int:
    return int(torch.tensor(shape).prod())


def trained(threshold: float) -> tuple[Params, Compact]:
    """Return layers as in later rounds of FedSLR, and their factors of the previous round.

    An eighth of the singular values is above the threshold, decaying over three decades;
    the update of a round adds a little noise.
    """
    generator = Key(1, purpose="bench").torch_generator()
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
    """Return layers whose singular values decay evenly over five decades."""
    layers: Params = {}
    for name, value in initial().items():
        left, sizes, right = torch.linalg.svd(matricize(value), full_matrices=False)
        fallen = torch.logspace(1, -4, len(sizes))
        layers[name] = dematricize((left * fallen) @ right, tuple(value.shape))
    return layers


def second_round(threshold: float) -> tuple[Params, Compact | None]:
    """Return the input of the server step in the second round of FedSLR, and the previous model.

    Two clients with random images take a few steps each with ResNet18; eta_g is the paper's.
    """
    generator = Key(2, purpose="bench").numpy_generator()
    rows = [
        (generator.normal(size=(16, 3, 32, 32)).astype(np.float32), np.arange(16) % 10)
        for _ in range(2)
    ]
    seen: list[tuple[Params, Compact | None]] = []

    def watched(point: Params, threshold: float, near: Compact | None = None) -> Compact:
        seen.append((point, near))
        return svt_layers(point, threshold, near)

    method = FedSLR(
        eta_g=10.0, lam=threshold / 10, lr=0.1, batch_size=8, local_steps=2, personal_epochs=0.0
    )
    problem = NeuralProblem(partial(build, "resnet18"))
    with mock.patch("parsifl.algorithms.fedslr.svt_layers", watched):
        simulate(method, problem, rows, 2, evaluate_every=0)
    point, near = seen[-1]
    return {name: value for name, value in point.items() if value.ndim > 1}, near


def case(label: str, threshold: float) -> tuple[Params, Compact | None]:
    """Return the layers of a case and, if there are any, the factors of the last round."""
    if label == "round 2":
        return second_round(threshold)
    if label == "trained":
        return trained(threshold)
    return (initial() if label == "initial" else decayed()), None


def plain(params: Params, threshold: float) -> Params:
    """Decompose every layer completely."""
    result: Params = {}
    for name, value in params.items():
        if has_rank(tuple(value.shape)):
            left, sizes, right = torch.linalg.svd(matricize(value), full_matrices=False)
            kept = (left * (sizes - threshold).clamp(min=0.0)) @ right
            result[name] = dematricize(kept, tuple(value.shape))
    return result


def _difference(ours: dict[str, Tensor], theirs: Params) -> float:
    gaps = [(ours[n] - v).abs().max() / v.abs().max().clamp(min=1e-9) for n, v in theirs.items()]
    return float(torch.stack(gaps).max())


def operations(params: Params) -> float:
    """Return the operations of forming the smaller Gram matrix of every layer and applying it."""
    sides = [matricize(value).shape for value in params.values() if has_rank(tuple(value.shape))]
    return float(sum(4 * rows * columns * min(rows, columns) for rows, columns in sides))


def measure(label: str, threshold: float) -> list[Row]:
    """Compare both methods alternately."""
    params, before = case(label, threshold)
    ours, direct = partial(svt_layers, params, threshold, before), partial(plain, params, threshold)
    gap = _difference(densify(ours()), direct())
    found = interleaved({"plain": direct, "ours": ours}, TURNS, warm=True)
    ratio = found["ours"].median / found["plain"].median
    progress(f"{label}, threshold {threshold:g}: {ratio:.2f} of the time")
    reference, least = found["plain"].median, products(operations(params))
    name, note = f"{label}, threshold {threshold:g}", f"largest difference {gap:.1e}"
    rows = [
        row(name, timing, reference, "torch.linalg.svd", least, note) for timing in found.values()
    ]
    return [marked(each, GOAL) if each.candidate == "ours" else each for each in rows]


if __name__ == "__main__":
    found = [item for label in chosen(CASES) for item in measure(label, CASES[label])]
    raise SystemExit(report(found, __doc__))
