"""The support that clients find together, against that of pooled orthogonal matching pursuit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from parsifl.algorithm import AnyMethod
from parsifl.algorithms.fedgradmp import FedGradMP
from parsifl.algorithms.fedht import FedHT
from parsifl.algorithms.fediterht import FedIterHT
from parsifl.algorithms.inexactfedgradmp import InexactFedGradMP
from parsifl.data.clients import ClientData
from parsifl.data.ragged import Ragged
from parsifl.data.registry import load
from parsifl.engine.simulate import simulate
from parsifl.errors import ClientError
from parsifl.keys import Key
from parsifl.problems.glm import GLM
from parsifl.recipes.recipe import Claim, Context, Job, Recipe, Result, Values, spread

Array = npt.NDArray[np.float64]
TAU = 10
MOST_EXCESS = 0.05
"""A loss at most five percent above that of the pooled fit counts as equal to it."""


@dataclass(frozen=True)
class Table:
    """Standardised features, a centred target, and the rows of each client."""

    x: Array
    y: Array
    parts: list[npt.NDArray[np.int64]]

    def data(self) -> ClientData:
        """Return what the engine reads; nobody is judged."""
        nobody = Ragged.from_sizes(np.zeros(0, np.int64), np.zeros(len(self.parts), np.int64))
        x, y = torch.from_numpy(self.x), torch.from_numpy(self.y)
        profiles: tuple[dict[str, Any], ...] = ({},) * len(self.parts)
        return ClientData(x, y, Ragged.of(self.parts), nobody, nobody, profiles, name="support")

    def refitted(self, support: npt.NDArray[np.int64]) -> float:
        """Return the mean squared error of pooled least squares on a support."""
        columns = self.x[:, support]
        coefficients = np.linalg.lstsq(columns, self.y, rcond=None)[0]
        return float(np.mean((columns @ coefficients - self.y) ** 2))

    def pooled(self) -> npt.NDArray[np.int64]:
        """Return the support of orthogonal matching pursuit on all rows."""
        from sklearn.linear_model import orthogonal_mp

        found = orthogonal_mp(self.x, self.y, n_nonzero_coefs=TAU)
        return np.flatnonzero(found)


def crime(context: Context, _seed: int) -> Table:
    """Return Communities and Crime, a client for each of 46 states."""
    made: Any = load("communities-crime", context.data_dir)
    parts = [np.flatnonzero(made.groups == state) for state in np.unique(made.groups)]
    return _table(made.x, made.y, parts)


def golub(context: Context, seed: int) -> Table:
    """Return the leukemia genes, the 38 patients dealt to 4 hospitals; the target is 0 or 1."""
    made: Any = load("golub-leukemia", context.data_dir)
    order = Key(seed, purpose="sparse-support").numpy().permutation(len(made))
    return _table(made.x, made.y.astype(np.float64), np.array_split(order, 4))


def _table(x: Array, y: Array, parts: list[npt.NDArray[np.int64]]) -> Table:
    """Standardise; the moments are sums over clients, so that no rows have to be pooled."""
    scale = x.std(axis=0)
    return Table((x - x.mean(axis=0)) / np.where(scale > 0, scale, 1.0), y - y.mean(), parts)


TABLES = {"Communities and Crime": crime, "Golub": golub}
