"""Generated data with one client per group: Synthetic(alpha, beta), Fed-HT's and FedGradMP's."""

from __future__ import annotations

import math

import numpy as np

from parsifl.core.errors import ConfigError
from parsifl.core.keys import Key
from parsifl.data.dataset import Dataset
from parsifl.data.datasets.text import E2006_COLUMNS, RCV1_COLUMNS
from parsifl.data.download import Files
from parsifl.data.ragged import Array, Indices
from parsifl.data.registry import About, dataset

_GENERATED = "generated; nothing to fetch"
_LICENCE = "generated; nothing to fetch"


def _key(seed: int, name: str) -> Key:
    return Key(seed, purpose=f"data/{name}")


def _owners(sizes: list[int]) -> Indices:
    return np.repeat(np.arange(len(sizes)), sizes).astype(np.int64)


def _positive(**values: int) -> None:
    for name, value in values.items():
        if value < 1:
            raise ConfigError(f"{name} must be at least 1, got {value}")


@dataset(
    "synthetic",
    About(
        title="Synthetic(alpha, beta): one logistic model per client (pFedMe's version)",
        size="100 clients, 60 features, 10 classes, (lognormal(4, 2) + 50) * 5 samples each",
        citation="Li et al. (2020), FedProx; T. Dinh, Tran and Nguyen (2020), pFedMe",
        licence=_GENERATED,
        partition="natural-id",
    ),
)
def synthetic(
    _files: Files, *, alpha: float = 0.5, beta: float = 0.5, clients: int = 100, seed: int = 0
) -> Dataset:
    """Draw y = argmax(W_k x + b_k), x ~ N(v_k, diag(j^-1.2)).

    W_k, b_k ~ N(u_k, 1), u_k ~ N(0, alpha); v_k ~ N(B_k, 1), B_k ~ N(0, beta); alpha and beta are
    standard deviations, as in the generators of LEAF, FedProx and pFedMe.
    """
    _positive(clients=clients)
    features, classes = 60, 10
    scale = np.arange(1, features + 1) ** -0.6  # the root of the variance j^-1.2
    xs, ys = [], []
    for client in range(clients):
        draw = _key(seed, "synthetic").replace(client=client).numpy_generator()
        count = (int(draw.lognormal(4, 2)) + 50) * 5
        model_mean, input_mean = draw.normal(0, alpha), draw.normal(0, beta)
        weights = draw.normal(model_mean, 1, (features, classes))
        bias = draw.normal(model_mean, 1, classes)
        centre = draw.normal(input_mean, 1, features)
        x = centre + scale * draw.standard_normal((count, features))
        xs.append(x)
        ys.append(np.argmax(x @ weights + bias, axis=1))
    return Dataset(
        "synthetic",
        np.concatenate(xs),
        np.concatenate(ys).astype(np.int64),
        classes=classes,
        groups=_owners([len(y) for y in ys]),
        group_names=tuple(f"client {client}" for client in range(clients)),
    )


@dataset(
    "fedht-regression",
    About(
        title="Fed-HT simulation I: sparse linear regression",
        size="100 clients x 100 samples, 1,000 features of which 100 matter",
        citation="Tong, Liang, Zhu and Bi, Federated nonconvex sparse learning (Fed-HT)",
        licence=_GENERATED,
        partition="natural-id",
        dtype="float64",
    ),
)
def fedht_regression(
    _files: Files,
    *,
    alpha: float = 0.1,
    beta: float = 0.1,
    clients: int = 100,
    samples: int = 100,
    spread: str = "std",
    seed: int = 0,
) -> Dataset:
    """Draw y = z'x_i + b with x_i ~ N(u_i, 1) on the first 100 coordinates and b ~ N(u_i, 1).

    u_i ~ N(0.1, alpha); z ~ N(v_i, diag(j^-1.2)), v_i ~ N(B_i, 1), B_i ~ N(0, beta). The noise has
    the mean u_i, as printed. spread=std reads N(., alpha) as a standard deviation (as the LEAF
    and FedProx code does), spread=variance as a variance.
    """
    scales = _deviations(spread, alpha, beta)
    x, y, truth = _fedht(_key(seed, "fedht-regression"), scales, clients, samples, np.float64)
    return Dataset(
        "fedht-regression",
        x,
        y,
        groups=_owners([samples] * clients),
        group_names=tuple(f"client {client}" for client in range(clients)),
        truth=truth,
    )


@dataset(
    "fedht-classification",
    About(
        title="Fed-HT simulation II: sparse logistic regression",
        size="100 clients x 1,000 samples, 1,000 features of which 100 matter, 2 classes",
        citation="Tong, Liang, Zhu and Bi, Federated nonconvex sparse learning (Fed-HT)",
        licence=_GENERATED,
        partition="natural-id",
        dtype="float64",  # a linear model, as in the paper
    ),
)
def fedht_classification(
    _files: Files,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
    clients: int = 100,
    samples: int = 1000,
    spread: str = "std",
    seed: int = 0,
) -> Dataset:
    """Draw as in simulation I; the tenth of each client's samples with the largest y has label 1.

    Features are kept as float32: at full size they take 0.4 GB, and 0.8 GB as float64 for training.
    """
    scales = _deviations(spread, alpha, beta)
    key = _key(seed, "fedht-classification")
    x, y, truth = _fedht(key, scales, clients, samples, np.float32)
    ranks = np.argsort(np.argsort(-y.reshape(clients, samples), axis=1), axis=1)
    return Dataset(
        "fedht-classification",
        x,
        (ranks < max(1, samples // 10)).astype(np.int64).ravel(),
        classes=2,
        groups=_owners([samples] * clients),
        group_names=tuple(f"client {client}" for client in range(clients)),
        truth=truth,
    )


def _deviations(spread: str, alpha: float, beta: float) -> tuple[float, float]:
    if spread not in ("std", "variance"):
        raise ConfigError(f"spread must be std or variance, got '{spread}'")
    return (alpha, beta) if spread == "std" else (math.sqrt(alpha), math.sqrt(beta))


def _fedht(
    key: Key, scales: tuple[float, float], clients: int, samples: int, number: type
) -> tuple[Array, Array, Array]:
    """Return pooled z and y, and the true coefficients, clients x features."""
    _positive(clients=clients, samples=samples)
    dimension, support = 1000, 100
    deviation = np.arange(1, dimension + 1) ** -0.6
    x: Array = np.empty((clients * samples, dimension), dtype=number)
    y = np.empty(clients * samples)
    truth = np.zeros((clients, dimension))
    for client in range(clients):
        draw = key.replace(client=client).numpy_generator()
        mean, input_mean = draw.normal(0.1, scales[0]), draw.normal(0, scales[1])
        truth[client, :support] = draw.normal(mean, 1, support)
        centre = draw.normal(input_mean, 1, dimension)
        rows = slice(client * samples, (client + 1) * samples)
        x[rows] = centre + deviation * draw.standard_normal((samples, dimension))
        y[rows] = x[rows] @ truth[client] + draw.normal(mean, 1, samples)
    return x, y, truth


@dataset(
    "fedgradmp",
    About(
        title="FedGradMP's sparse recovery: every client measures the same sparse vector",
        size="50 clients x 100 samples, 1,000 features, a 10-sparse unit vector",
        citation="Jeong, Needell and Qin, Federated gradient matching pursuit (FedGradMP)",
        licence=_GENERATED,
        partition="natural-id",
        dtype="float64",
    ),
)
def fedgradmp(
    _files: Files,
    *,
    alpha: float = 1.0,
    decay: float = 1.1,
    sparsity: int = 10,
    clients: int = 50,
    samples: int = 100,
    dimension: int = 1000,
    noise: float = 0.0,
    seed: int = 0,
) -> Dataset:
    """Draw y = A_i x + e with entries of A_i ~ N(mu_i, i^-decay), mu_i ~ N(0, alpha), i = 1, 2 ...

    The second arguments are variances, noise too. x is sparse, on the unit sphere, and the same
    for all clients; it is returned as `truth`.
    """
    _positive(sparsity=sparsity, clients=clients, samples=samples, dimension=dimension)
    if sparsity > dimension:
        raise ConfigError(f"sparsity={sparsity} exceeds dimension={dimension}")
    key = _key(seed, "fedgradmp")
    draw = key.numpy_generator()
    truth = np.zeros(dimension)
    truth[draw.choice(dimension, sparsity, replace=False)] = draw.standard_normal(sparsity)
    truth /= np.linalg.norm(truth)
    blocks = []
    for client in range(clients):
        draw = key.replace(client=client).numpy_generator()
        mean = draw.normal(0, math.sqrt(alpha))
        deviation = (client + 1) ** (-decay / 2)
        blocks.append(draw.normal(mean, deviation, (samples, dimension)))
    x = np.concatenate(blocks)
    errors = key.replace(purpose="data/fedgradmp/noise").numpy_generator().standard_normal(len(x))
    return Dataset(
        "fedgradmp",
        x,
        x @ truth + math.sqrt(noise) * errors,
        groups=_owners([samples] * clients),
        group_names=tuple(f"client {client}" for client in range(clients)),
        truth=truth,
    )


@dataset(
    "text-like",
    About(
        title="Generated text-like data with the width of RCV1",
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
        title="Generated text-like data with the width of E2006-tfidf",
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
    groups[:topics] = np.arange(topics)  # no topic is left without a document
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
