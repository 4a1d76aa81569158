"""Slow NumPy references for devices of unequal strength, written from the papers' equations.

The model is x -> W4 tanh((W2 tanh((W0 x + b0) / r) + b2) / r) + b4 with the mean cross-entropy of
a batch; r is HeteroFL's scaler. Nothing here comes from the library.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Weights = dict[str, Array]
Rows = tuple[Array, NDArray[np.int64], Array]
Draws = Callable[[int, int], Sequence[Rows]]
BODY = ("0.weight", "0.bias"), ("2.weight", "2.bias")
HEAD = ("4.weight", "4.bias")


def gradient(w: Weights, rows: Rows, r: float = 1.0) -> Weights:
    x, y, weight = rows
    first = np.tanh((x @ w["0.weight"].T + w["0.bias"]) / r)
    second = np.tanh((first @ w["2.weight"].T + w["2.bias"]) / r)
    logits = second @ w["4.weight"].T + w["4.bias"]
    chance = np.exp(logits - logits.max(1, keepdims=True))
    chance /= chance.sum(1, keepdims=True)
    chance[np.arange(len(y)), y] -= 1
    error = chance * (weight / weight.sum())[:, None]
    back2 = (error @ w["4.weight"]) * (1 - second**2) / r
    back1 = (back2 @ w["2.weight"]) * (1 - first**2) / r
    return {
        "0.weight": back1.T @ x, "0.bias": back1.sum(0),
        "2.weight": back2.T @ first, "2.bias": back2.sum(0),
        "4.weight": error.T @ second, "4.bias": error.sum(0),
    }  # fmt: skip


def descend(
    w: Weights,
    batches: Sequence[Rows],
    lr: float,
    *,
    trained: Sequence[str] | None = None,
    r: float = 1.0,
    momentum: float = 0.0,
    decay: float = 0.0,
) -> Weights:
    """SGD of some of the parameters, as torch.optim.SGD would do it."""
    names = list(w) if trained is None else list(trained)
    w = {name: value.copy() for name, value in w.items()}
    speed = {name: np.zeros_like(w[name]) for name in names}
    for rows in batches:
        g = gradient(w, rows, r)
        for name in names:
            speed[name] = momentum * speed[name] + g[name] + decay * w[name]
        for name in names:
            w[name] = w[name] - lr * speed[name]
    return w


def cut(w: Weights, shapes: Mapping[str, tuple[int, ...]]) -> Weights:
    """The first channels of every layer."""
    return {n: v[tuple(slice(0, s) for s in shapes[n])].copy() for n, v in w.items()}


def average(w: Weights, parts: Sequence[tuple[float, Weights]]) -> Weights:
    """Entry by entry over those who have the entry; entries of nobody stay."""
    result = {}
    for name, value in w.items():
        new = value.copy()
        for index in np.ndindex(value.shape):
            owners = [
                (p, part[name][index])
                for p, part in parts
                if name in part and all(i < n for i, n in zip(index, part[name].shape, strict=True))
            ]
            if owners:
                new[index] = sum(p * v for p, v in owners) / sum(p for p, _ in owners)
        result[name] = new
    return result


def masked_rounds(
    w: Weights,
    masks: Sequence[Sequence[str]],
    cohorts: Sequence[Sequence[int]],
    sizes: Sequence[float],
    draws: Draws,
    lr: float,
    **options: float,
) -> Weights:
    """Equations (1) to (3) of PerFedMask: device n trains and sends the tensors masks[n]."""
    for t, cohort in enumerate(cohorts):
        sent = []
        for n in cohort:
            after = descend(w, draws(t, n), lr, trained=masks[n], **options)
            sent.append((sizes[n], {name: after[name] for name in masks[n]}))
        w = average(w, sent)
    return w


def sliced_rounds(
    w: Weights,
    widths: Sequence[float],
    shapes: Callable[[float], Mapping[str, tuple[int, ...]]],
    cohorts: Sequence[Sequence[int]],
    sizes: Sequence[float],
    draws: Draws,
    lr: float,
    masks: Sequence[Sequence[str]] | None = None,
) -> Weights:
    """HeteroFL: device n trains the corner of width r_n, with x / r_n after hidden layers."""
    for t, cohort in enumerate(cohorts):
        sent = []
        for n in cohort:
            names = list(w) if masks is None else list(masks[n])
            part = cut(w, shapes(widths[n]))
            after = descend(part, draws(t, n), lr, r=widths[n], trained=names)
            sent.append((sizes[n], {name: after[name] for name in names}))
        w = average(w, sent)
    return w


def nova_length(steps: int, rho: float) -> float:
    """Sum the accumulation vector of momentum, a_s = (1 - rho^(tau - s)) / (1 - rho)."""
    return sum((1 - rho ** (steps - s)) / (1 - rho) for s in range(steps))


def nova_rounds(
    w: Weights,
    cohorts: Sequence[Sequence[int]],
    sizes: Sequence[float],
    draws: Draws,
    lr: float,
    rho: float,
) -> Weights:
    """FedNova: w <- w - tau_eff sum p_i d_i."""
    for t, cohort in enumerate(cohorts):
        total = sum(sizes[n] for n in cohort)
        step = {name: np.zeros_like(value) for name, value in w.items()}
        effective = 0.0
        for n in cohort:
            batches = draws(t, n)
            after = descend(w, batches, lr, momentum=rho)
            length = nova_length(len(batches), rho)
            effective += sizes[n] / total * length
            for name in w:
                step[name] += sizes[n] / total * (w[name] - after[name]) / length
        w = {name: value - effective * step[name] for name, value in w.items()}
    return w
