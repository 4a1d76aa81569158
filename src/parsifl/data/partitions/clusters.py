"""Clients made of parts of clusters (the split of Fed-HT's real data)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from parsifl.core.errors import ConfigError, DataError
from parsifl.core.keys import Key
from parsifl.data.partitions.registry import partitioner
from parsifl.data.ragged import Array, Ragged

if TYPE_CHECKING:
    from parsifl.data.dataset import Dataset


@partitioner("kmeans", reads="dataset")
def kmeans(
    dataset: Dataset,
    clients: int,
    key: Key,
    *,
    clusters: int = 10,
    parts: int = 20,
    picks: int = 2,
    by: str = "features",
) -> Ragged:
    """Cut each of `clusters` into `parts`; every client picks `picks` clusters and a part of each.

    Clusters come from K-means on the features, or are the labels (by=labels, for MNIST). Clients
    pick independently, so two may hold the same part, as the sizes in Fed-HT's Table II imply.
    """
    numbers = _clusters(dataset, clusters, by, key)
    present = np.unique(numbers)
    if not 1 <= picks <= len(present) or parts < 1:
        raise ConfigError(
            f"picks must be 1 to {len(present)}, the number of clusters, and parts at least 1; "
            f"got picks={picks}, parts={parts}"
        )
    draw = key.replace(purpose=f"{key.purpose}/picks").numpy_generator()
    pieces = []
    for cluster in present:
        rows = draw.permutation(np.flatnonzero(numbers == cluster))
        pieces.append(np.array_split(rows, min(parts, len(rows))))
    chosen = []
    for _ in range(clients):
        hand = draw.choice(len(present), picks, replace=False)
        chosen.append(np.concatenate([pieces[c][int(draw.integers(len(pieces[c])))] for c in hand]))
    return Ragged.of(chosen)


def _clusters(dataset: Dataset, clusters: int, by: str, key: Key) -> Array:
    if by == "labels":
        if dataset.classes is None:
            raise DataError(f"'{dataset.name}' has no labels; use by=features")
        return dataset.y
    if by != "features":
        raise ConfigError(f"by must be features or labels, got '{by}'")
    if not 1 <= clusters <= len(dataset):
        raise ConfigError(f"clusters must be 1 to {len(dataset)}, got {clusters}")
    from sklearn.cluster import KMeans

    x = dataset.x.reshape(len(dataset), -1) if isinstance(dataset.x, np.ndarray) else dataset.x
    model = KMeans(clusters, n_init=1, max_iter=50, random_state=key.word() % (1 << 32))
    return np.asarray(model.fit_predict(x))
