"""Generated sparse data that look like tf-idf text, at the width of RCV1 or of E2006."""

from __future__ import annotations

import numpy as np

from parsifl.core.errors import ConfigError
from parsifl.core.keys import Key
from parsifl.data.dataset import Dataset
from parsifl.data.datasets.text import E2006_COLUMNS, RCV1_COLUMNS
from parsifl.data.download import Files
from parsifl.data.registry import About, dataset

_LICENCE = "generated; nothing to fetch"


@dataset(
    "text-like",
    About(
        title="Generated text-like data as wide as RCV1 (a stand-in for it)",
        size="20,000 documents, 47,236 features (CSR), 2 classes",
        citation="none: a stand-in, say so where results are shown",
        licence=_LICENCE,
        partition="natural-id",
        dtype="float64",
    ),
)
def text_like(
    _files: Files,
    *,
    rows: int = 20_000,
    columns: int = RCV1_COLUMNS,
    words: int = 75,
    topics: int = 10,
    support: int = 200,
    seed: int = 0,
) -> Dataset:
    """Draw documents of about `words` distinct words (Zipf) in `topics`, and a sparse classifier.

    Groups are topics. Half of a document's words come from its topic's own order of frequency.
    The label is the sign of x'truth above its median; `truth` has `support` non-zeros.
    """
    return _generate("text-like", rows, columns, words, topics, support, Key(seed))


@dataset(
    "text-like-e2006",
    About(
        title="Generated text-like data as wide as E2006-tfidf (a stand-in for it)",
        size="3,308 documents, 150,360 features (CSR), a number to predict",
        citation="none: a stand-in, say so where results are shown",
        licence=_LICENCE,
        partition="natural-id",
        dtype="float64",
    ),
)
def text_like_e2006(
    _files: Files,
    *,
    rows: int = 3_308,
    columns: int = E2006_COLUMNS,
    words: int = 1_200,
    topics: int = 10,
    support: int = 200,
    seed: int = 0,
) -> Dataset:
    """Draw as text-like; the target is x'truth plus a little noise."""
    return _generate("text-like-e2006", rows, columns, words, topics, support, Key(seed))


def _generate(
    name: str, rows: int, columns: int, words: int, topics: int, support: int, key: Key
) -> Dataset:
    from scipy.sparse import csr_matrix

    if not (1 <= topics <= rows and 1 <= support <= columns and 1 <= words <= columns):
        raise ConfigError(f"{name}: topics, support and words must be at least 1 and fit the size")
    draw = key.replace(purpose=f"data/{name}").numpy_generator()
    lengths = np.clip(draw.lognormal(np.log(words), 0.5, rows).astype(np.int64), 3, columns)
    groups = draw.integers(topics, size=rows)
    groups[:topics] = np.arange(topics)  # no topic stays without a document
    total = int(lengths.sum())
    # Zipf by inverse transform: rank r with probability about 1 / r
    ranks = np.floor(np.exp(draw.random(total) * np.log(columns))).astype(np.int64) - 1
    orders = np.stack([draw.permutation(columns) for _ in range(topics + 1)])
    owners = np.repeat(np.arange(rows), lengths)
    order = np.where(draw.random(total) < 0.5, topics, groups[owners])
    x = csr_matrix((np.ones(total), (owners, orders[order, ranks])), shape=(rows, columns))
    x.sum_duplicates()
    x.data = 1 + np.log(x.data)
    frequency = np.bincount(x.indices, minlength=columns)
    x.data *= np.log((1 + rows) / (1 + frequency))[x.indices] + 1
    norms = np.sqrt(np.asarray(x.multiply(x).sum(axis=1)).ravel())
    x.data /= np.repeat(norms, np.diff(x.indptr))
    truth = np.zeros(columns)
    chosen = np.argsort(-frequency, kind="stable")[:support]  # words that documents really use
    truth[chosen] = draw.standard_normal(support)
    scores = np.asarray(x @ truth)
    classify = name == "text-like"
    noisy = scores + 0.1 * scores.std() * draw.standard_normal(rows)
    return Dataset(
        name,
        x,
        (noisy > np.median(noisy)).astype(np.int64) if classify else noisy,
        classes=2 if classify else None,
        groups=groups.astype(np.int64),
        group_names=tuple(f"topic {topic}" for topic in range(topics)),
        truth=truth,
    )
