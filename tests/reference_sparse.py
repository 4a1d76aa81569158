"""Slow NumPy versions of the sparse methods, written from the papers' equations.

A client is (Z, y); `draws[t][i]` lists the mini-batches (positions in the client's rows) of
client i in round t. Nothing here comes from the library.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Client = tuple[Array, Array]
Draws = Sequence[Sequence[Sequence[npt.NDArray[np.int64]]]]


def gradient(x: Array, z: Array, y: Array) -> Array:
    """Of (1/b) |y - Z x|^2."""
    return np.asarray(2 * z.T @ (z @ x - y) / len(y))


def hard(x: Array, tau: int) -> Array:
    """Keep the tau largest magnitudes; the lowest index wins a tie."""
    order = np.argsort(-np.abs(x), kind="stable")[:tau]
    out = np.zeros_like(x)
    out[order] = x[order]
    return out


def soft(x: Array, shrink: float) -> Array:
    return np.asarray(np.sign(x) * np.maximum(np.abs(x) - shrink, 0))


def weights(clients: Sequence[Client]) -> Array:
    sizes = np.array([len(y) for _, y in clients], dtype=float)
    return np.asarray(sizes / sizes.sum())


def fed_ht(clients: Sequence[Client], draws: Draws, tau: int, lr: float, *, local: bool) -> Array:
    """Algorithms 1 (local=False) and 2 (local=True) of Fed-HT."""
    x = np.zeros(clients[0][0].shape[1])
    for round_draws in draws:
        total = np.zeros_like(x)
        for p, (z, y), batches in zip(weights(clients), clients, round_draws, strict=True):
            mine = x.copy()
            for batch in batches:
                mine = mine - lr * gradient(mine, z[batch], y[batch])
                if local:
                    mine = hard(mine, tau)
            total += p * mine
        x = hard(total, tau)
    return x


def fed_mid(
    clients: Sequence[Client], draws: Draws, lr: float, server_lr: float, lam: float
) -> Array:
    x = np.zeros(clients[0][0].shape[1])
    for round_draws in draws:
        change = np.zeros_like(x)
        for p, (z, y), batches in zip(weights(clients), clients, round_draws, strict=True):
            mine = x.copy()
            for batch in batches:
                mine = soft(mine - lr * gradient(mine, z[batch], y[batch]), lr * lam)
            change += p * (mine - x)
        steps = len(round_draws[0])
        x = soft(x + server_lr * change, server_lr * lr * steps * lam)
    return x


def fed_dual_avg(
    clients: Sequence[Client],
    draws: Draws,
    lr: float,
    server_lr: float,
    prox: Callable[[Array, float], Array],
) -> Array:
    dual, elapsed = np.zeros(clients[0][0].shape[1]), 0.0
    for round_draws in draws:
        change = np.zeros_like(dual)
        for p, (z, y), batches in zip(weights(clients), clients, round_draws, strict=True):
            mine, time = dual.copy(), elapsed
            for batch in batches:
                mine = mine - lr * gradient(prox(mine, time), z[batch], y[batch])
                time += lr
            change += p * (mine - dual)
        dual = dual + server_lr * change
        elapsed += server_lr * len(round_draws[0]) * lr
    return prox(dual, elapsed)


def fed_grad_mp(
    clients: Sequence[Client],
    draws: Draws,
    tau: int,
    *,
    atoms: Array | None = None,
    radius: float = np.inf,
    wire: Callable[[Array], Array] = np.asarray,
) -> Array:
    """Algorithms 1 and 2 of FedGradMP with exact solves, with Lambda reset to the server's support.

    Parameters
    ----------
    atoms
        The dictionary, as columns; None: coordinates. The result is in its coefficients.
    radius
        The ball that holds x.
    wire
        What a message becomes on its way.
    """
    psi = np.eye(clients[0][0].shape[1]) if atoms is None else atoms
    lengths = np.linalg.norm(psi, axis=0)

    def nearest(a: Array) -> Array:
        """P_Lambda for the tau largest parts a_j psi_j, then the ball."""
        kept = np.flatnonzero(hard(a * lengths, tau))
        out = np.zeros_like(a)
        out[kept] = np.linalg.lstsq(psi[:, kept], psi @ a, rcond=None)[0]
        return np.asarray(out * min(1.0, radius / max(float(np.linalg.norm(psi @ out)), 1e-300)))

    x = np.zeros(psi.shape[1])
    for round_draws in draws:
        total = np.zeros_like(x)
        for p, (z, y), batches in zip(weights(clients), clients, round_draws, strict=True):
            seen, mine = z @ psi, wire(x)
            for batch in batches:
                proxy = gradient(mine, seen[batch], y[batch]) / lengths
                merged = np.union1d(np.flatnonzero(hard(proxy, 2 * tau)), np.flatnonzero(mine))
                b = np.zeros_like(x)
                b[merged] = np.linalg.lstsq(seen[:, merged], y, rcond=None)[0]
                mine = nearest(b)
            total += p * wire(mine)
        x = nearest(total)
    return x


def int8(values: Array) -> Array:
    """What a message becomes with 127 levels on each side of zero."""
    step = np.abs(values).max() / 127
    return np.asarray(np.round(values / step) * step if step else values)


def float16(values: Array) -> Array:
    return values.astype(np.float16).astype(np.float64)


def cosamp(z: Array, y: Array, tau: int, iterations: int) -> list[Array]:
    """Compressive sampling matching pursuit (Needell and Tropp 2009), all iterates."""
    x = np.zeros(z.shape[1])
    iterates = []
    for _ in range(iterations):
        proxy = z.T @ (y - z @ x)
        merged = np.union1d(np.argsort(-np.abs(proxy), kind="stable")[: 2 * tau], np.flatnonzero(x))
        b = np.zeros_like(x)
        b[merged] = np.linalg.lstsq(z[:, merged], y, rcond=None)[0]
        x = hard(b, tau)
        iterates.append(x)
    return iterates
