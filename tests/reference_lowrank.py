"""Slow NumPy references from the papers' equations: FedSLR and its companions, one loop each.

The model is x -> W2 tanh(W1 x + b1) + b2 with the mean cross-entropy of a batch, its gradient
written out by hand. Nothing here comes from the library.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Weights = dict[str, Array]
Rows = tuple[Array, NDArray[np.int64], Array]
Draws = Callable[[int, int, str], Sequence[Rows]]
HEAD = ("2.weight", "2.bias")


def loss(w: Weights, rows: Rows) -> float:
    x, y, weight = rows
    logits = np.tanh(x @ w["0.weight"].T + w["0.bias"]) @ w["2.weight"].T + w["2.bias"]
    shifted = logits - logits.max(1, keepdims=True)
    losses = np.log(np.exp(shifted).sum(1)) - shifted[np.arange(len(y)), y]
    return float((losses * weight).sum() / weight.sum())


def gradient(w: Weights, rows: Rows) -> Weights:
    x, y, weight = rows
    hidden = np.tanh(x @ w["0.weight"].T + w["0.bias"])
    logits = hidden @ w["2.weight"].T + w["2.bias"]
    chance = np.exp(logits - logits.max(1, keepdims=True))
    chance /= chance.sum(1, keepdims=True)
    chance[np.arange(len(y)), y] -= 1
    error = chance * (weight / weight.sum())[:, None]
    back = (error @ w["2.weight"]) * (1 - hidden**2)
    return {
        "0.weight": back.T @ x,
        "0.bias": back.sum(0),
        "2.weight": error.T @ hidden,
        "2.bias": error.sum(0),
    }


def zeros(w: Weights) -> Weights:
    return {name: np.zeros_like(value) for name, value in w.items()}


def combine(function: Callable[..., Any], *trees: Weights) -> Weights:
    return {name: function(*(tree[name] for tree in trees)) for name in trees[0]}


def mean(trees: Iterable[Weights]) -> Weights:
    return combine(lambda *values: sum(values) / len(values), *trees)


def shrink(w: Weights, threshold: float, kind: str) -> Weights:
    """Equations (15) to (17): both proximal operators."""
    return combine(lambda value: _shrink(value, threshold, kind), w)


def _shrink(value: Array, threshold: float, kind: str) -> Array:
    if kind == "sparse":
        soft: Array = np.sign(value) * np.maximum(np.abs(value) - threshold, 0)
        return soft
    if value.ndim == 1:
        return value
    u, s, v = np.linalg.svd(value, full_matrices=False)
    low: Array = u @ np.diag(np.maximum(s - threshold, 0)) @ v
    return low


@dataclass(frozen=True)
class Slr:
    eta_g: float
    lam: float
    mu: float
    lr: float
    lr_decay: float = 1.0
    weight_decay: float = 0.0
    solver: Literal["dual", "local", "global"] = "dual"
    global_penalty: str = "low-rank"
    personal_penalty: str = "sparse"
    wire: Callable[[Array], Array] = np.asarray
    """What a tensor becomes on its way; lossy with "dual" and dense messages only."""

    def rounds(self, start: Weights, p0: Weights, cohorts: list[list[int]], clients: int,
               draws: Draws) -> SlrState:  # fmt: skip
        """Algorithm 2 (with eta_g * gamma): the server holds every gamma_i."""
        state = SlrState(start, [zeros(start) for _ in range(clients)], [p0] * clients)
        for t, cohort in enumerate(cohorts):
            lr = self.lr * self.lr_decay**t
            models, sent = [], combine(self.wire, state.w)
            for i in cohort:
                w = self._phase_one(sent, state.gamma[i], draws(t, i, "shared"), lr)
                if self.solver == "dual":
                    change = combine(lambda a, b: self.wire(a - b), w, sent)
                    w = combine(np.add, state.w, change)
                    state.gamma[i] = combine(
                        lambda g, c: g - c / self.eta_g, state.gamma[i], change
                    )
                models.append(w)
                state.p[i] = self._phase_two(sent, state.p[i], draws(t, i, "personal"), lr)
            state.w = self._server(models, state.gamma, lr)
        return state

    def _phase_one(self, w_t: Weights, gamma: Weights, rows: Sequence[Rows], lr: float) -> Weights:
        w = w_t
        pull = 1 / self.eta_g if self.solver == "dual" else 0.0
        for batch in rows:
            g = gradient(w, batch)
            w = combine(
                lambda v, d, c, o: v - lr * (d - c + pull * (v - o) + self.weight_decay * v),
                w, g, gamma, w_t,
            )  # fmt: skip
            if self.solver == "local":
                w = shrink(w, lr * self.lam, self.global_penalty)
        return w

    def _phase_two(self, w_t: Weights, p: Weights, rows: Sequence[Rows], lr: float) -> Weights:
        for batch in rows:
            g = gradient(combine(np.add, w_t, p), batch)
            p = combine(lambda v, d: v - lr * (d + self.weight_decay * v), p, g)
            p = shrink(p, lr * self.mu, self.personal_penalty)
        return p

    def _server(self, models: list[Weights], gamma: list[Weights], lr: float) -> Weights:
        if self.solver == "local":
            return mean(models)
        if self.solver == "global":
            return shrink(mean(models), lr * self.lam, self.global_penalty)
        point = combine(lambda w, g: w - self.eta_g * g, mean(models), mean(gamma))
        return shrink(point, self.eta_g * self.lam, self.global_penalty)


@dataclass
class SlrState:
    w: Weights
    gamma: list[Weights]
    p: list[Weights]


def dyn_rounds(
    start: Weights, alpha: float, lr: float, cohorts: list[list[int]], clients: int, draws: Draws
) -> Weights:
    """FedDyn's own server: h <- h - (alpha/N) sum (w_i - w); w <- mean w_i - h / alpha."""
    w, h, own = start, zeros(start), [zeros(start) for _ in range(clients)]
    for t, cohort in enumerate(cohorts):
        models = []
        for i in cohort:
            v = w
            for batch in draws(t, i, "train"):
                g = gradient(v, batch)
                v = combine(lambda a, d, c, o: a - lr * (d - c + alpha * (a - o)), v, g, own[i], w)
            own[i] = combine(lambda c, a, o: c - alpha * (a - o), own[i], v, w)
            models.append(v)
        drift = combine(lambda *vs: sum(v - vs[-1] for v in vs[:-1]), *models, w)
        h = combine(lambda a, d: a - alpha / clients * d, h, drift)
        w = combine(lambda a, b: a - b / alpha, mean(models), h)
    return w


def partial_rounds(
    start: Weights, shared: set[str], lr: float, cohorts: list[list[int]], sizes: Sequence[int],
    draws: Draws, *, head_first: bool = False,
) -> tuple[Weights, list[Weights]]:  # fmt: skip
    """FedPer, LG-FedAvg and (head_first) FedRep: the shared part, and every client's own."""
    common = {name: start[name] for name in shared}
    own = [{n: v for n, v in start.items() if n not in shared} for _ in sizes]
    for t, cohort in enumerate(cohorts):
        models: list[tuple[float, Weights]] = []
        for i in cohort:
            w = {**common, **own[i]}
            phases = [("head", set(HEAD)), ("body", set(start) - set(HEAD))]
            for name, moving in phases if head_first else [("train", set(start))]:
                for batch in draws(t, i, name):
                    g = gradient(w, batch)
                    w = {n: v - lr * g[n] if n in moving else v for n, v in w.items()}
            own[i] = {name: w[name] for name in own[i]}
            models.append((sizes[i], {name: w[name] for name in shared}))
        total = sum(weight for weight, _ in models)
        common = {n: np.asarray(sum(k * w[n] for k, w in models) / total) for n in shared}
    return common, own


@dataclass
class Mixtures:
    w: Weights
    v: list[Weights]
    alpha: list[float] = field(default_factory=list)


def apfl_rounds(
    start: Weights, alpha: float, lr: float, cohorts: list[list[int]], sizes: Sequence[int],
    draws: Draws, *, adaptive: bool,
) -> Mixtures:  # fmt: skip
    """APFL: both gradients of a step on one batch, alpha at the first step of a round.

    A client's own model starts from the first global model that it receives.
    """
    own: dict[int, Weights] = {}
    w, shares = start, dict.fromkeys(range(len(sizes)), alpha)
    for t, cohort in enumerate(cohorts):
        models = []
        for i in cohort:
            a, v, u = shares[i], own.get(i, w), w
            for k, batch in enumerate(draws(t, i, "train")):
                mixed = combine(lambda p, q, a=a: a * p + (1 - a) * q, v, u)
                g, h = gradient(mixed, batch), gradient(u, batch)
                next_a = a
                if adaptive and k == 0:
                    slope = sum(float((g[n] * (v[n] - u[n])).sum()) for n in g)
                    next_a = min(max(a - lr * slope, 0.0), 1.0)
                v = combine(lambda p, d, a=a: p - lr * a * d, v, g)
                u = combine(lambda p, d: p - lr * d, u, h)
                a = next_a
            shares[i], own[i] = a, v
            models.append((sizes[i], u))
        total = sum(weight for weight, _ in models)
        w = {n: np.asarray(sum(k * m[n] for k, m in models) / total) for n in w}
    count = range(len(sizes))
    return Mixtures(w, [own.get(i, w) for i in count], [shares[i] for i in count])


def spa_rounds(
    start: Weights, masks: list[Weights], lr: float, prune: float, horizon: int,
    cohorts: list[list[int]], draws: Draws,
) -> tuple[Weights, list[Weights]]:  # fmt: skip
    """FedSpa, dense throughout; `masks` are the first masks (1-D tensors: all ones)."""
    w, masks = start, list(masks)
    for t, cohort in enumerate(cohorts):
        changes = []
        share = prune / 2 * (1 + math.cos(math.pi * min(t / horizon, 1)))
        for i in cohort:
            m = masks[i]
            first = v = combine(np.multiply, w, m)
            for batch in draws(t, i, "train"):
                v = combine(lambda a, d, b: (a - lr * d) * b, v, gradient(v, batch), m)
            changes.append(combine(np.subtract, v, first))
            g = gradient(v, draws(t, i, "probe")[0])
            masks[i] = {n: _moved(m[n], v[n], g[n], share) for n in w}
        w = combine(np.add, w, mean(changes))
    return w, masks


def _moved(mask: Array, v: Array, g: Array, share: float) -> Array:
    if mask.ndim == 1:
        return mask
    inside = [int(i) for i in np.flatnonzero(mask)]
    drop = round(share * len(inside))
    stay = sorted(inside, key=lambda i: -abs(v.flat[i]))[: len(inside) - drop]
    outside = [i for i in range(mask.size) if i not in set(stay)]
    grown = sorted(outside, key=lambda i: -abs(g.flat[i]))[:drop]
    new = np.zeros(mask.size)
    new[stay + grown] = 1
    return new.reshape(mask.shape)
