"""Slow NumPy references of the personalised methods, straight from their papers' equations.

Nothing here comes from parsifl: a softmax regression with its gradient in closed form, and the
rounds of FedMac, pFedMe, Per-FedAvg, FedAMP and HeurFedAMP as plain loops.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Whole = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Rows:
    """One mini-batch; a row of weight 0 is padding."""

    x: Array
    y: Whole
    weight: Array

    def part(self, number: int, size: int) -> Rows:
        cut = slice(number * size, (number + 1) * size)
        return Rows(self.x[cut], self.y[cut], self.weight[cut])


Draws = Callable[[int, int], list[Rows]]
"""The mini-batches of (round, client)."""


def gradient(model: Array, rows: Rows) -> Array:
    """Gradient of the mean cross-entropy of logits = x W' + b, with model = [W | b]."""
    logits = rows.x @ model[:, :-1].T + model[:, -1]
    chance = np.exp(logits - logits.max(1, keepdims=True))
    chance /= chance.sum(1, keepdims=True)
    chance[np.arange(len(rows.y)), rows.y] -= 1
    chance *= (rows.weight / rows.weight.sum())[:, None]
    return np.concatenate([chance.T @ rows.x, chance.sum(0)[:, None]], axis=1)


def soft(x: Array, shrink: float) -> Array:
    return np.sign(x) * np.maximum(np.abs(x) - shrink, 0.0)


def prune(model: Array, threshold: float, floor: float) -> Array:
    """Zero what is below the threshold, but keep the largest part `floor`."""
    order = np.argsort(-np.abs(model), axis=None)
    keep = np.zeros(model.size, bool)
    keep[order[: int(np.ceil(floor * model.size))]] = True
    keep |= np.abs(model).ravel() >= threshold
    return np.where(keep.reshape(model.shape), model, 0.0)


@dataclass(frozen=True)
class Coupling:
    """FedMac (distance = False) and pFedMe (distance = True)."""

    eta: float
    eta_p: float
    lam: float
    distance: bool
    gamma: float = 0.0
    gamma_w: float = 0.0
    rho: float = 1e-2
    proximal: bool = False
    inner: int = 1
    nu: float = 0.0

    def slope(self, theta: Array, w: Array, rows: Rows) -> Array:
        """Gradient of H~ in theta; without the l1 norm if that is handled by a proximal step."""
        smooth = 0.0 if self.proximal else self.gamma * np.tanh(theta / self.rho)
        pull = self.lam * (theta - w) if self.distance else -self.lam * w
        return gradient(theta, rows) + pull + smooth

    def client(self, start: Array, batches: list[Rows]) -> tuple[Array, Array]:
        theta, w = start.copy(), start.copy()
        for rows in batches:
            for _ in range(self.inner):
                slope = self.slope(theta, w, rows)
                new = theta - self.eta_p * slope
                if self.proximal:
                    new = soft(new, self.eta_p * self.gamma)
                    slope = (theta - new) / self.eta_p
                if (slope**2).sum() <= self.nu:
                    break
                theta = new
            if self.proximal:
                w = soft(w - self.eta * self.lam * (w - theta), self.eta * self.gamma_w)
            else:
                smooth = self.gamma_w * np.tanh(w / self.rho)
                w = w - self.eta * (self.lam * (w - theta) + smooth)
        return theta, w


def coupled_rounds(
    rule: Coupling,
    start: Array,
    cohorts: list[list[int]],
    draws: Draws,
    *,
    beta: float = 1.0,
    threshold: float = 0.0,
    floor: float = 0.0,
) -> Array:
    """Algorithm 1 of FedMac, with small entries sent as zeros."""
    w = start
    for round, cohort in enumerate(cohorts):
        sent = [rule.client(w, draws(round, i))[1] for i in cohort]
        sent = [prune(model, threshold, floor) for model in sent]
        w = prune((1 - beta) * w + beta * np.mean(sent, axis=0), threshold, floor)
    return w


@dataclass(frozen=True)
class MetaStep:
    """One local step of Per-FedAvg; delta = 0 is the first-order variant."""

    alpha: float
    eta: float
    batch: int
    delta: float = 0.0

    def client(self, start: Array, batches: list[Rows]) -> Array:
        w = start.copy()
        for rows in batches:
            first, second, third = (rows.part(number, self.batch) for number in range(3))
            v = gradient(w - self.alpha * gradient(w, first), second)
            step = v
            if self.delta:
                ahead = gradient(w + self.delta * v, third)
                behind = gradient(w - self.delta * v, third)
                step = v - self.alpha * (ahead - behind) / (2 * self.delta)
            w = w - self.eta * step
        return w


def meta_rounds(
    step: MetaStep, start: Array, cohorts: list[list[int]], draws: Draws, weights: Array
) -> Array:
    w = start
    for round, cohort in enumerate(cohorts):
        models = [step.client(w, draws(round, i)) for i in cohort]
        w = np.average(models, axis=0, weights=weights[cohort])
    return w


def distance_attention(models: Array, alpha: float, sigma: float) -> Array:
    """FedAMP: xi_ij = alpha A'(|w_i - w_j|^2) with A(x) = 1 - exp(-x / sigma)."""
    count = len(models)
    xi = np.zeros((count, count))
    for i in range(count):
        for j in range(count):
            if i != j:
                square = ((models[i] - models[j]) ** 2).sum()
                xi[i, j] = alpha * np.exp(-square / sigma) / sigma
        xi[i, i] = 1 - xi[i].sum()
    return xi


def angle_attention(models: Array, own: float, sigma: float) -> Array:
    """HeurFedAMP: the own weight is fixed, the rest is a softmax of cosines."""
    count = len(models)
    xi = np.zeros((count, count))
    for i in range(count):
        for j in range(count):
            if i != j:
                a, b = models[i].ravel(), models[j].ravel()
                xi[i, j] = np.exp(sigma * (a @ b) / (np.linalg.norm(a) * np.linalg.norm(b)))
        xi[i] *= (1 - own) / xi[i].sum()
        xi[i, i] = own
    return xi


def anchored_rounds(
    attention: Callable[[Array], Array],
    prox: float,
    eta: float,
    outer: float,
    start: Array,
    clients: int,
    cohorts: list[list[int]],
    draws: Draws,
) -> tuple[Array, Array]:
    """Return the personal models and the mixtures where an anchor follows each mini-batch."""
    thetas = np.stack([start] * clients)
    anchors, clouds = thetas.copy(), thetas.copy()
    for round, cohort in enumerate(cohorts):
        for i in cohort:
            theta, anchor = clouds[i].copy(), clouds[i].copy()
            for rows in draws(round, i):
                theta = theta - eta * (gradient(theta, rows) + prox * (theta - anchor))
                anchor = anchor - outer * prox * (anchor - theta)
            thetas[i], anchors[i] = theta, anchor
        clouds = np.tensordot(attention(anchors), anchors, axes=1)
    return thetas, clouds


def attentive_rounds(
    attention: Callable[[Array], Array],
    prox: float,
    eta: float,
    start: Array,
    clients: int,
    cohorts: list[list[int]],
    draws: Draws,
    *,
    from_cloud: bool = False,
) -> tuple[Array, Array]:
    """Return the clients' models and their mixtures after the rounds."""
    models = np.stack([start] * clients)
    clouds = models.copy()
    for round, cohort in enumerate(cohorts):
        arrived = models.copy()
        for i in cohort:
            w = (clouds if from_cloud else models)[i].copy()
            for rows in draws(round, i):
                w = w - eta * (gradient(w, rows) + prox * (w - clouds[i]))
            arrived[i] = w
        models = arrived
        clouds = np.tensordot(attention(models), models, axes=1)
    return models, clouds
