"""Simulated sites for sparse regression, in regimes from easy to hard."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from parsifl.core.keys import Key

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class SimulatedSites:
    """Rows with their sites, and the coefficients that they were drawn with."""

    x: Array
    y: Array
    groups: npt.NDArray[np.int64]
    truth: Array
    family: str


@dataclass(frozen=True)
class Regime:
    """How sites are drawn.

    Attributes
    ----------
    family
        "gaussian", "binomial", "poisson" or "cox".
    sizes
        The rows of each site.
    features, nonzero
        The number of columns, and of coefficients that are not 0.
    rho
        The correlation of neighbouring columns (Toeplitz).
    shift
        The standard deviation of a site's means; scales differ by exp(0.7 N) too.
    noise
        The standard deviations of the noise, assigned to sites cyclically.
    intercepts
        The standard deviation of the sites' intercepts.
    copies
        Every second column nearly repeats the one before it.
    strength, base
        A factor of the coefficients, and the intercept.
    """

    family: str = "gaussian"
    sizes: Sequence[int] = (250, 250, 250, 250)
    features: int = 100
    nonzero: int = 10
    rho: float = 0.5
    shift: float = 0.0
    noise: Sequence[float] = (1.0,)
    intercepts: float = 0.0
    copies: bool = False
    strength: float = 1.0
    base: float = 0.0

    def draw(self, seed: int = 0) -> SimulatedSites:
        """Draw rows."""
        draw = Key(seed, purpose="regime").numpy_generator()
        groups = np.repeat(np.arange(len(self.sizes)), self.sizes)
        x = self._columns(draw, len(groups))
        if self.shift:
            for site in range(len(self.sizes)):
                scale = np.exp(0.7 * draw.standard_normal(self.features))
                move = self.shift * draw.standard_normal(self.features)
                x[groups == site] = x[groups == site] * scale + move
        truth = np.zeros(self.features)
        chosen = draw.choice(self.features, self.nonzero, replace=False)
        signs = draw.choice([-1.0, 1.0], self.nonzero)
        truth[chosen] = self.strength * signs * draw.uniform(0.5, 1.5, self.nonzero)
        levels = self.base + self.intercepts * draw.standard_normal(len(self.sizes))
        u = x @ truth + levels[groups]
        return SimulatedSites(x, self._targets(draw, u, groups), groups, truth, self.family)

    def _columns(self, draw: np.random.Generator, rows: int) -> Array:
        x = draw.standard_normal((rows, self.features))
        rest = np.sqrt(1 - self.rho**2)
        for column in range(1, self.features):
            x[:, column] = self.rho * x[:, column - 1] + rest * x[:, column]
        if self.copies:
            pairs = x[:, 1::2].shape[1]
            fresh = draw.standard_normal((rows, pairs))
            x[:, 1::2] = 0.995 * x[:, 0 : 2 * pairs : 2] + 0.1 * fresh
        return x

    def _targets(self, draw: np.random.Generator, u: Array, groups: Any) -> Array:
        if self.family == "gaussian":
            spread = np.resize(np.asarray(self.noise), len(self.sizes))
            return np.asarray(u + spread[groups] * draw.standard_normal(len(u)))
        if self.family == "binomial":
            return (draw.random(len(u)) < 1 / (1 + np.exp(-u))).astype(np.float64)
        if self.family == "poisson":
            return draw.poisson(np.exp(np.clip(u, -5, 5))).astype(np.float64)
        time = draw.exponential(np.exp(-np.clip(u, -5, 5)))
        censored = draw.exponential(1.0, len(u))
        seen = (time <= censored).astype(np.float64)
        return np.stack([np.ceil(50 * np.minimum(time, censored)), seen], axis=1)


_UNEQUAL = (10, 20, 50, 100, 200, 500, 1000, 5000)
REGIMES: Mapping[str, Regime] = {
    "Toeplitz 0.5": Regime(),
    "Toeplitz 0.9": Regime(rho=0.9),
    "covariate shift": Regime(shift=2.0),
    "unequal noise": Regime(noise=(0.3, 1.0, 3.0, 6.0)),
    "sizes 10 to 5,000": Regime(sizes=_UNEQUAL),
    "site intercepts": Regime(intercepts=3.0),
    "collinear": Regime(copies=True),
    "20 sites": Regime(sizes=(50,) * 20, features=200),
    "n << p": Regime(sizes=(25,) * 4, features=1000, nonzero=5),
    "weak signals": Regime(strength=0.15),
    "p = 2,000, 20 sites": Regime(sizes=(100,) * 20, features=2000),
    "binary": Regime("binomial"),
    "binary, Toeplitz 0.9": Regime("binomial", rho=0.9),
    "binary, rare events": Regime("binomial", sizes=(500,) * 4, base=-5.0),
    "binary, n << p": Regime("binomial", sizes=(50,) * 4, features=500, nonzero=5),
    "binary, 20 sites of 40": Regime("binomial", sizes=(40,) * 20, features=60, nonzero=6),
    "binary, weak signals": Regime("binomial", sizes=(500,) * 4, strength=0.2),
    "counts": Regime("poisson", strength=0.3),
    "counts, Toeplitz 0.9": Regime("poisson", strength=0.2, rho=0.9),
    "survival": Regime("cox", features=60, nonzero=6),
    "survival, Toeplitz 0.9": Regime("cox", features=60, nonzero=6, rho=0.9),
}
"""Regimes by name."""


def smaller(regime: Regime, rows: int) -> Regime:
    """Return a regime whose sites have at most this many rows.

    >>> smaller(Regime(), 10).sizes
    (10, 10, 10, 10)
    """
    return replace(regime, sizes=tuple(min(size, rows) for size in regime.sizes))
