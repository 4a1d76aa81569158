"""Guards of a site: its limits, and its record of released values, which later requests meet."""

from __future__ import annotations

import fcntl
import hashlib
import io
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, final

import numpy as np
import numpy.typing as npt
from pydantic import StringConstraints

from parsifl.algorithms._bases.sparsity import SparsitySettings
from parsifl.core import config, registry
from parsifl.core.algorithm import ClientInfo
from parsifl.core.config import Count, Fraction
from parsifl.core.errors import DataError, ParsiflError
from parsifl.data.table_encoding import (
    Array,
    TableColumn,
    is_words,
    named_levels,
    observed,
)
from parsifl.data.tables import Column
from parsifl.engine.experiment import Experiment
from parsifl.engine.safe_files import replace_file
from parsifl.flower.client import make_private
from parsifl.flower.logs import node_log
from parsifl.sites.deployment.agreement import Agreement, Family, Prepared
from parsifl.sites.deployment.ledger import Exposure, Indices, Ledger, site_secret
from parsifl.sites.search.fedbestsubset import FedBestSubset

Mask = npt.NDArray[np.bool_]
_PREFIX = "guard-"
SEPARATOR = "|"
"""Between the entries of a list in the node's configuration."""
_SMALLEST, _LARGEST, _FARTHEST = 1e-100, 1e100, 1e6
_RANK = 1e-13
"""Smallest singular value that counts, relative to the largest: sums are sent in float64."""
_GRAM_RANK = 1e-9
"""The same for the eigenvalues of inner products of matrices."""
Profile = Literal["strict", "standard"]
PROFILES: Mapping[Profile, tuple[float, float]] = {"strict": (0.5, 0.7), "standard": (0.8, 0.9)}
"""The largest leverage of a row, and of a pair."""
AUDIT_FILE = "audit.jsonl"
_UNREAD = ("runs", "agreement", "requests")


class Refusal(ParsiflError):
    """A site refuses a request; `rule` is the code that is sent with the message."""

    def __init__(self, rule: str, text: str) -> None:
        super().__init__(text)
        self.rule = rule


@final
@dataclass(frozen=True)
class Guards:
    """The limits of one site; the node's configuration sets them, as in `guard-rows=20`.

    Parameters
    ----------
    rows
        The smallest number of rows, and of values in a column of numbers, that may be summed.
    cell
        The smallest number of rows in a level, or in a cell of two levels.
    sites
        The smallest number of sites in a run.
    ratio
        The largest number of columns in a message, as a fraction of the site's rows.
    rounds
        The largest number of training requests that are answered in a run.
    runs
        The largest number of runs that are answered about the same rows.
    profile
        The limits of leverage: "strict" (.5 for a row and .7 for a pair) or "standard" (.8, .9).
    leverage
        The largest leverage of a row in everything that was released about the table; None: that
        of the profile; 1 switches the rule off.
    pair
        The same for two rows, if `cell` is above 2.
    refusals
        After this many refusals that depend on the rows, the site answers no further questions
        about the table until its owner acts.
    table
        The name of the table: its ledger is `ledger-NAME.npz` in the state directory.
    algorithms
        The algorithms that may train on the table, separated by `|` in the node's configuration.
        FedBestSubset is the only one for families other than "linear".
    release
        "auto", or "manual": a person at the site approves each reply before it leaves.
    """

    rows: Count = 10
    cell: Count = 3
    sites: Count = 3
    ratio: Fraction = 1 / 3
    rounds: Count = 100
    runs: Count = 10
    profile: Profile = "strict"
    leverage: Fraction | None = None
    pair: Fraction | None = None
    refusals: Count = 3
    table: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_-]{1,64}$")] = "table"
    algorithms: tuple[str, ...] = ("fedbestsubset",)
    release: Literal["auto", "manual"] = "auto"

    def __post_init__(self) -> None:
        config.check(self)
        for name in self.algorithms:
            registry.find(name)

    @classmethod
    def of(cls, node: Mapping[str, Any]) -> Guards:
        """Read the guards from a node's configuration.

        >>> Guards.of({"partition-id": 0, "guard-rows": 20}).rows
        20
        >>> Guards.of({"guard-algorithms": "fedbestsubset|fedgradmp"}).algorithms
        ('fedbestsubset', 'fedgradmp')
        """
        limits = {k.removeprefix(_PREFIX): v for k, v in node.items() if k.startswith(_PREFIX)}
        if "algorithms" in limits:
            limits["algorithms"] = tuple(str(limits["algorithms"]).split(SEPARATOR))
        return config.build(cls, limits)

    @property
    def row_limit(self) -> float:
        """The largest leverage of a row."""
        return PROFILES[self.profile][0] if self.leverage is None else self.leverage

    @property
    def pair_limit(self) -> float:
        """The largest leverage of a pair, at least that of a row; 1 if pairs are not protected."""
        if self.cell <= 2:
            return 1.0
        return max(PROFILES[self.profile][1] if self.pair is None else self.pair, self.row_limit)

    def columns(self, rows: int) -> int:
        """Return the maximum number of columns in a message of a site with this many rows."""
        return int(self.ratio * rows + 1e-9)


def rare(counts: Sequence[Mapping[str, int]], cell: int) -> set[str]:
    """Return the levels to merge, so that no level has fewer than `cell` rows.

    The merged level must be large enough too: if it is not, the smallest others are added to it.

    Parameters
    ----------
    counts
        The number of rows of each level, in the table and in relevant parts of it, such as the
        rows of one class. A level that is absent there is not too small.

    Examples
    --------
    >>> sorted(rare([{"a": 5, "b": 4, "c": 1}], 3))
    ['b', 'c']
    """
    merged = {level for part in counts for level, count in part.items() if count < cell}
    others = sorted(counts[0].keys() - merged, key=lambda level: (counts[0][level], level))

    def small() -> bool:
        sums = [sum(part.get(level, 0) for level in merged) for part in counts]
        return any(0 < total < cell for total in sums)

    while merged and others and small():
        merged.add(others.pop(0))
    return merged


def check_algorithm(experiment: Experiment, family: Family, guards: Guards) -> None:
    """Check that the owner of the table allows the algorithm of a run.

    The run's configuration names the algorithm, so the person who starts a run chooses it. The
    rules for sums cover FedBestSubset. In a linear regression with full batches other algorithms
    combine products of columns; in other families they combine rows in ways that no rule covers.
    """
    method = experiment.build_algorithm()
    if type(method) not in map(registry.find, guards.algorithms):
        raise Refusal(
            "algorithm",
            f"it does not answer '{experiment.algorithm}'; for a linear regression its owner can "
            "add the algorithm to guard-algorithms",
        )
    if isinstance(method, FedBestSubset):
        if method.intercepts != "shared":
            raise Refusal("algorithm", "settings.intercepts must be 'shared'")
    elif family != "linear":
        raise Refusal("algorithm", f"the family '{family}' needs the algorithm 'fedbestsubset'")


def check_plan(experiment: Experiment, client: int, rows: int, guards: Guards) -> None:
    """Check the settings of a run: enough rows and sites, full batches, few coefficients."""
    if rows < guards.rows:
        raise Refusal("rows", f"its table has fewer than {guards.rows} rows")
    if (experiment.clients or 0) < guards.sites:
        raise Refusal("sites", f"the run has fewer than {guards.sites} sites")
    method = experiment.build_algorithm()
    draws = method.batches(ClientInfo(client, rows, {}), 0).batches.values()
    if any(draw.batch_size is not None and draw.batch_size < rows for draw in draws):
        raise Refusal("batch", "the run draws mini-batches; set batch_size to none (all rows)")
    if isinstance(method, FedBestSubset):
        check_width(method.tau, rows, guards)
    if isinstance(method, SparsitySettings) and method.density is None:
        check_width(method.tau, rows, guards)


def check_width(columns: int, rows: int, guards: Guards) -> None:
    """Check that a message has few columns for the number of rows behind it."""
    if columns > guards.columns(rows):
        raise Refusal(
            "ratio",
            f"more columns than {guards.ratio:.3g} times its rows would leave in one message; "
            "choose a smaller tau",
        )


def check_agreement(agreement: Agreement, own: Prepared, guards: Guards) -> None:
    """Check an agreement from the server against the site's own table."""
    if agreement.sites < guards.sites:
        raise Refusal("sites", f"the run has fewer than {guards.sites} sites left")
    if agreement.spec != own.spec:
        target = own.spec.target
        raise Refusal("target", f"the run does not predict '{target}', as this site expects")
    preprocessing, features = agreement.preprocessing, own.features
    if sorted(column.name for column in preprocessing.columns) != sorted(features):
        raise Refusal("columns", "the agreed columns are not the columns of its table")
    worded = own.spec.family == "logistic"
    reach = 1.0 if worded else _FARTHEST * (1 + _size(own.numbers(own.spec.target)))
    if preprocessing.rows < own.rows or not abs(agreement.target_mean) <= reach:
        raise Refusal("agreement", "the agreed numbers of rows and means are impossible")
    if worded and not named_levels(own.columns, own.spec.target) <= set(agreement.classes):
        raise Refusal("target", "the agreed classes are not those of its table")
    for column in preprocessing.columns:
        _check_column(column, own)


def _check_column(column: TableColumn, own: Prepared) -> None:
    values = own.columns[column.name]
    if observed(values).any() and bool(column.levels) is not is_words(values):
        raise Refusal(
            "kinds", f"column '{column.name}': numbers here and words there, or vice versa"
        )
    known = set(column.levels)
    fits = len(column.mean) == len(column.scale) == (len(known) - 1 if known else 1)
    if len(known) != len(column.levels) or not fits:
        raise Refusal("levels", f"column '{column.name}': its levels are malformed")
    worded = known and is_words(values)
    if worded and not named_levels(own.columns, column.name) <= known:
        raise Refusal("levels", f"column '{column.name}': levels of this site are missing")
    means, scales = np.array(column.mean), np.array(column.scale)
    # distant means and extreme scales would turn rounding and overflow into comparisons of values;
    # the limit follows from sums that the server has, so a refusal reveals nothing new
    reach = 1.0 if known else _FARTHEST * (1 + _size(own.numbers(column.name)))
    plausible = (np.abs(means) <= reach) & (scales >= _SMALLEST) & (scales <= _LARGEST)
    if not plausible.all():
        raise Refusal("scales", f"column '{column.name}': an impossible mean or scale")


def _size(values: Array) -> float:
    return float(np.sqrt(np.mean(values * values))) if len(values) else _LARGEST / _FARTHEST


def check_support(
    support: Sequence[Any], width: int, experiment: Experiment, rows: int, guards: Guards
) -> list[int]:
    """Return the positions of the selected columns, if the run may request them."""
    method = experiment.build_algorithm()
    most = method.sparsity.count(width) if isinstance(method, SparsitySettings) else width
    inside = all(type(place) is int and 0 <= place < width for place in support)
    if not inside or len(set(support)) != len(support) or len(support) > most:
        raise Refusal("support", f"expected at most {most} different positions of columns")
    check_width(len(support), rows, guards)
    return list(support)


def check_cells(
    own: Prepared, names: Sequence[str], x: Array, products: Sequence[int], guards: Guards
) -> None:
    """Check that no product of two columns is a sum over a few rows.

    Parameters
    ----------
    names
        The column of the table to which each column of `x` belongs.
    x
        The columns of the design matrix whose sums are sent; targets are checked as well.
    products
        The positions of the columns by which the others are multiplied: those of the curvature and
        those with a coefficient, because a gradient contains products with them.
    """
    width, targets = len(names), [own.columns[name] for name in own.spec.columns]
    factors = {*products, *range(width, width + len(targets))}
    masks, owner, multiplied = [], [], []
    columns = zip((*names, *own.spec.columns), (*x.T, *targets), strict=True)
    for position, (label, values) in enumerate(columns):
        if (mask := _spot(values)) is not None:
            masks += [mask, ~mask]
            owner += [label, label]
            multiplied += [position in factors] * 2
    for name in dict.fromkeys(names):
        if not is_words(own.columns[name]):
            masks.append(observed(own.columns[name]))
            owner.append(name)
            multiplied.append(any(names[position] == name for position in products))
    if not any(multiplied):
        return
    every = np.stack(masks).astype(np.float64)  # products of integers are slow
    cells = every[multiplied] @ every.T
    small = np.argwhere((cells > 0) & (cells < guards.cell))
    if len(small):
        first, second = owner[np.flatnonzero(multiplied)[small[0, 0]]], owner[small[0, 1]]
        raise Refusal(
            "cell",
            f"the columns '{first}' and '{second}' share a cell of fewer than {guards.cell} rows; "
            "merge levels or remove a column",
        )


def check_question(
    candidates: Sequence[int], used: Sequence[int], width: int, rows: int, guards: Guards
) -> None:
    """Check the request of a round: few columns in the matrix, and no coefficient outside it."""
    if len(set(candidates)) != len(candidates) or not all(0 <= c < width for c in candidates):
        raise Refusal("support", "the candidates are not different columns of the design matrix")
    if not set(used) <= set(candidates):
        raise Refusal("support", "a coefficient differs from zero outside the candidates")
    check_width(len(candidates), rows, guards)


def check_request(vectors: Array, labels: Sequence[str], guards: Guards) -> None:
    """Check that no row or pair stands out in the sums of one request.

    From a gradient X'r and a curvature X'(w X_C) a server computes X't for every t in the span of
    1, the residuals r, the weights w, and the products of weights and candidates. In a Cox model
    the curvature X'K X_C replaces the weights: t is in the span of 1, r and K X_C.

    Parameters
    ----------
    vectors
        The vectors [rows, number] that span t.
    labels
        The name of each vector, for the log of the site.
    """
    exposure = _exposure(vectors, guards)
    squares = _scaled(vectors) ** 2
    inside = squares[list(exposure.rows)].sum(axis=0)
    parts = inside / np.maximum(squares.sum(axis=0), np.finfo(float).tiny)
    cause = f"in this request, most of all by {labels[parts.argmax()]!r}"
    _refuse_if_exposed(exposure.share, guards, exposure.rows, cause)


def check_leverage(released: Array, asked: Array, guards: Guards) -> None:
    """Check that no row or pair can be isolated from released and requested sums.

    A sum over rows is X's with weights s. Any linear combination of sums that a server forms is
    X't with t in the span of all weights, including the equal weights of the first sums.

    Parameters
    ----------
    released
        The weights [requests, rows] of released sums.
    asked
        The weights [rows] of the requested sum.
    """
    every = np.concatenate([np.ones((1, len(asked))), released, asked[None]])
    exposure = _exposure(every.T, guards)
    _refuse_many(exposure.dimensions, len(asked), guards)
    _refuse_if_exposed(exposure.share, guards, exposure.rows, "with the earlier sums")


def _old(guards: Guards) -> float:
    return 0.9 if guards.leverage is None else guards.leverage


class _Exposure(NamedTuple):
    """The dimensions of a span, the largest leverage of a row or a pair, and these rows."""

    dimensions: int
    share: float
    rows: tuple[int, ...]


def _exposure(vectors: Array, guards: Guards) -> _Exposure:
    """Return how far a row or a pair stands out in the span of vectors [rows, number].

    A row stands out if the span nearly contains its unit vector: if its leverage, the diagonal
    entry of the projection P onto the span, is nearly 1. Two rows stand out if some t of length 1
    has nearly all of its squared length on them: if their block of P has an eigenvalue near 1.
    """
    basis, values, _ = np.linalg.svd(_scaled(vectors), full_matrices=False)
    basis = basis[:, values > _RANK * values[0]]
    single = np.minimum((basis**2).sum(axis=1), 1.0)  # 1 but for rounding
    worst = _Exposure(basis.shape[1], float(single.max()), (int(single.argmax()),))
    if guards.cell <= 2 or worst.share > _old(guards):
        return worst
    # an eigenvalue is at most the sum of both leverages, which add up to the dimensions: only
    # few rows need a check of their pairs
    for row in np.flatnonzero(single > _old(guards) / 2):
        mixed = basis @ basis[row]
        pairs = (single + single[row]) / 2 + np.sqrt(((single - single[row]) / 2) ** 2 + mixed**2)
        pairs = np.minimum(pairs, 1.0)
        pairs[row] = 0.0
        other = int(pairs.argmax())
        if pairs[other] > worst.share:
            worst = _Exposure(basis.shape[1], float(pairs[other]), (int(row), other))
    return worst


def _scaled(vectors: Array) -> Array:
    """Return vectors with a largest entry of 1; zero vectors remain zero."""
    if not np.isfinite(vectors).all():
        raise Refusal("leverage", "sums at these coefficients are not finite")
    size = np.abs(vectors).max(axis=0)
    scaled: Array = vectors / np.where(size > 0.0, size, 1.0)
    return scaled


def _log_exposure(worst: Exposure, vectors: Mapping[str, Array], rows: Indices) -> None:
    """Name the rows that stand out, and the vector with the largest share there, in the log."""
    here = np.flatnonzero(np.isin(rows, worst.rows))
    shares = {
        name: float((vector[here] ** 2).sum() / max((vector**2).sum(), np.finfo(float).tiny))
        for name, vector in vectors.items()
    }
    listed = " and ".join(str(row + 1) for row in here) or "that was removed or changed"
    node_log().warning(
        "row %s has a leverage of %.3f (pair: %.3f) in everything that was released, in this "
        "request most of all by %r: merge levels, limit extreme values, remove a column, or "
        "choose another guard-profile",
        listed, worst.single, worst.pair, max(shares, key=shares.__getitem__),
    )  # fmt: skip


class RiskSetProducts:
    """The matrix K of the curvature X'KX of a Cox model with Breslow's ties.

    With hazard ratios r, K_ij = -r_i r_j C(min(t_i, t_j)) off the diagonal, where C(t) adds up
    d / S^2 over the events until t, and S the ratios at risk; rows of K add up to 0. With rows in
    the order of time, an entry above the diagonal is a product, -early_i late_j.

    Parameters
    ----------
    log_ratios
        The logarithm of each row's hazard ratio.
    """

    def __init__(self, log_ratios: Array, *, time: Array, event: Array) -> None:
        ratio = np.exp(log_ratios - log_ratios.max())
        moments, place = np.unique(time, return_inverse=True)
        events = np.bincount(place, event, len(moments))
        at_risk = np.cumsum(np.bincount(place, ratio, len(moments))[::-1])[::-1]
        per_set = np.where(events > 0, 1 / np.maximum(at_risk, np.finfo(float).tiny), 0.0)
        self.order = order = np.argsort(place, kind="stable")
        squares = np.cumsum(events * per_set * per_set)[place]
        self.late = ratio[order]
        self.early = (ratio * squares)[order]
        self.diagonal = (ratio * (np.cumsum(events * per_set)[place] - ratio * squares))[order]

    def times(self, x: Array) -> Array:
        """Return K x for the columns of x [rows, columns], in time proportional to the rows."""
        # K times a constant is 0; from the first row, because constant columns are then exactly 0
        centered = x - x[0]
        centered = (centered - centered.mean(axis=0))[self.order]
        early, late, diagonal = (part[:, None] for part in (self.early, self.late, self.diagonal))
        before = _after((early * centered)[::-1])[::-1]
        product = diagonal * centered - early * _after(late * centered) - late * before
        by_row: Array = np.empty_like(product)
        by_row[self.order] = product
        return by_row


def check_products(
    released: Sequence[RiskSetProducts], asked: RiskSetProducts, guards: Guards
) -> None:
    """Check that no row or pair can be isolated from sums of products over pairs of rows.

    The curvature of a Cox model is X'KX with a matrix K [rows, rows]: the rows at risk are combined
    in each event. The server obtains X'TX with T in the span of all K and of the identity. A row or
    a pair stands out if some T of length 1 has nearly all of its squared length in their entries,
    whose shares in the projection onto the span are summed. The time is proportional to the rows,
    and to the square of the number of matrices.
    """
    every, rows = [*released, asked], len(asked.late)
    nothing, one = np.zeros((1, rows)), np.ones((1, rows))
    early = np.concatenate([nothing, [products.early for products in every]])
    late = np.concatenate([nothing, [products.late for products in every]])
    diagonal = np.concatenate([one, [products.diagonal for products in every]])
    with np.errstate(over="ignore", invalid="ignore"):
        inner = diagonal @ diagonal.T
        for i, j in zip(*np.triu_indices(len(inner)), strict=True):
            inner[i, j] += 2 * (early[i] * early[j]) @ _after(late[i] * late[j])
    inner = np.triu(inner) + np.triu(inner, 1).T
    if not np.isfinite(inner).all():
        raise Refusal("leverage", "sums at these coefficients are not finite")
    size = np.sqrt(np.diag(inner))
    size = np.where(size > 0, size, 1.0)
    values, vectors = np.linalg.eigh(inner / np.outer(size, size))
    kept = values > _GRAM_RANK * values[-1]
    into = (vectors[:, kept] / np.sqrt(values[kept])).T / size
    own = ((into @ diagonal) ** 2).sum(axis=0)
    worst = float(own.max())
    if guards.cell > 2:
        # the share of a pair is at most that of all entries of both rows, and these add up to
        # twice the dimensions, so only few rows need a check of their pairs
        total = own + _other_shares(early, late, into.T @ into)
        for row in np.flatnonzero(total > _old(guards) / 2 - 1e-6):
            before, after = early[:, :row] * late[:, [row]], early[:, [row]] * late[:, row + 1 :]
            share = ((into @ np.concatenate([before, after], axis=1)) ** 2).sum(axis=0)
            both = 2 * share + own[row] + np.delete(own, row)
            worst = max(worst, float(both.max(initial=0.0)))
    _refuse_many(int(kept.sum()), rows, guards)
    _refuse_if_exposed(worst, guards)


def _other_shares(early: Array, late: Array, weight: Array) -> Array:
    """Return the shares of the off-diagonal entries of each row."""
    found = np.zeros(early.shape[1])
    for i, j in zip(*np.triu_indices(len(weight)), strict=True):
        a, b = early[i] * early[j], late[i] * late[j]
        part = a * _after(b) + b * _after(a[::-1])[::-1]
        found += (weight[i, j] if i == j else 2 * weight[i, j]) * part
    return found


def _after(values: Array) -> Array:
    """Return the sum of the values after each value, along the first axis.

    >>> _after(np.array([1.0, 2.0, 3.0]))
    array([5., 3., 0.])
    """
    later: Array = np.cumsum(values[:0:-1], axis=0)[::-1]
    return np.concatenate([later, np.zeros_like(values[:1])])


def _refuse_if_exposed(
    share: float, guards: Guards, rows: Sequence[int] = (), cause: str = ""
) -> None:
    """Refuse sums in which a row or a pair stands out; only the node's log names the rows."""
    if share > _old(guards):
        if rows:
            listed = " and ".join(str(row + 1) for row in rows)
            node_log().warning(
                "row %s has a leverage of %.3f %s: merge levels, limit extreme values, remove a "
                "column, or raise guard-leverage", listed, share, cause
            )  # fmt: skip
        raise Refusal(
            "leverage",
            "a row or a pair would stand out in these sums, alone or combined with earlier ones; "
            "if columns separate the classes or the events, set l2",
        )


def _refuse_many(dimensions: int, rows: int, guards: Guards) -> None:
    if dimensions > guards.columns(rows):
        raise Refusal(
            "leverage",
            f"the released sums would span more dimensions than {guards.ratio:.3g} times its rows",
        )


def _spot(values: Column) -> Mask | None:
    """Return where a column has its most common value; None if no value is common."""
    found, counts = np.unique(values, return_counts=True)
    usual = values == found[counts.argmax()]
    return usual if len(found) == 2 or 2 * int(usual.sum()) > len(values) else None


def few_differ(values: Array, cell: int) -> bool:
    """Return whether a column is constant except in fewer than `cell` rows.

    >>> few_differ(np.array([0.0, 0.0, 0.0, 7.0]), 3)
    True
    """
    _, counts = np.unique(values, return_counts=True)
    return 0 < len(values) - int(counts.max(initial=0)) < cell


class Audit:
    """The audit file: one line of JSON per answer, with time, request, and size or rule.

    Parameters
    ----------
    folder
        The directory of one client in the node's state directory; readable only by the owner.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / AUDIT_FILE

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the record while a request is checked against it and written to it."""
        make_private(self._path.parent)
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def entries(self) -> list[dict[str, Any]]:
        """Return all entries, oldest first."""
        if not self._path.exists():
            return []
        return [json.loads(line) for line in self._path.read_text().splitlines()]

    def write(self, entry: Mapping[str, Any]) -> None:
        """Add an entry and sync it to disk."""
        stamped = {"time": datetime.now(UTC).isoformat(timespec="seconds"), **entry}
        descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        with os.fdopen(descriptor, "a") as file:
            file.write(json.dumps(stamped) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def approved(self, name: str, kind: str, text: str) -> bool:
        """Return whether a reply was approved manually: its file was renamed to `approved-...`.

        A new reply is described in `pending-....json`.
        """
        place = self._path.with_name
        if place(f"approved-{name}.json").exists():
            return True
        content = json.dumps({"kind": kind, "reply": text}, indent=1)
        replace_file(place(f"pending-{name}.json"), content.encode())
        return False

    def enter(
        self,
        request: str,
        table: Mapping[str, Sequence[str]],
        vectors: Mapping[str, Array],
        noise: float,
        guards: Guards,
    ) -> None:
        """Check the block of a request with the ledger of the table, and add it.

        Parameters
        ----------
        request
            A digest of everything that determines the answer: an equal question is free.
        table
            The values of this version of the table, which identify its rows.
        vectors
            The block: vectors [rows] by name, for the log of the site.
        noise
            The standard deviation of the noise in the sums, relative to their largest term.
        """
        path = self._path.with_name(f"ledger-{guards.table}.npz")
        past = Ledger.read(path)
        if len(past.refused) >= guards.refusals:
            raise Refusal("closed", "the ledger of its table is closed until the owner opens it")
        try:
            grown, rows = past.with_rows(table, site_secret(self._path.parent))
            if request in past.requests:
                return
            block = np.column_stack([np.ones(len(rows)), *vectors.values()])
            grown = grown.with_block(request, block, rows, noise)
        except DataError as error:
            raise Refusal("ledger", f"{error}; its owner can start a new ledger") from None
        worst = grown.exposure(guards.pair_limit)
        if worst.single <= guards.row_limit and worst.pair <= guards.pair_limit:
            grown.write(path)
            return
        if request not in past.refused:
            replace(past, refused=(*past.refused, request)).write(path)
        _log_exposure(worst, dict(zip(("(rows)", *vectors), block.T, strict=True)), rows)
        raise Refusal(
            "leverage",
            "a row or a pair would stand out in everything that was released about its table; ask "
            "for fewer columns, or set l2 if columns separate the classes or the events",
        )

    def release(
        self,
        table: str,
        weights: Array,
        guards: Guards,
        products: Callable[[Array], RiskSetProducts] | None = None,
    ) -> None:
        """Check the row weights [2, rows] of sums against those of earlier sums, and store them.

        They stay in a file of the site as long as the table is the same, whatever the model. With
        `products` the second row does not hold weights, but the values that define a matrix over
        pairs of rows.
        """
        kind = "sums" if products is None else "risk-sets"
        path = self._path.with_name(f"released-{table}-{kind}.npy")
        past = np.load(path) if path.exists() else np.zeros((0, *weights.shape))
        if any(np.array_equal(weights, known) for known in past):
            return  # asked before: the answer is the same
        check_leverage(past[:, 0], weights[0], guards)
        if products is None:
            check_leverage(past[:, 1], weights[1], guards)
        else:
            check_products([products(row) for row in past[:, 1]], products(weights[1]), guards)
        data = io.BytesIO()
        np.save(data, np.concatenate([past, weights[None]]))
        replace_file(path, data.getvalue())
        path.chmod(0o600)


def digest(*values: Any) -> str:
    """Return a digest of JSON values and bytes."""
    state = hashlib.sha256()
    for value in values:
        data = value if isinstance(value, bytes) else json.dumps(value, sort_keys=True).encode()
        state.update(len(data).to_bytes(8) + data)
    return state.hexdigest()[:32]


def check_history(
    entries: list[dict[str, Any]], request: Mapping[str, Any], rounds: int, guards: Guards
) -> None:
    """Check that a request adds little to what the server already knows.

    A run has one agreement and one request for products; repeating a request is harmless, because
    the answer is the same. The number of runs about the same rows is limited as well, because the
    server names the runs and may invent new ones.

    Parameters
    ----------
    request
        Its `kind`, `table`, `run`, `agreement` and `request`: a kind, and digests.
    rounds
        How many training requests the run has.
    """
    past = [
        entry
        for entry in entries
        # a request that was refused after this check counts too: a refusal reveals something
        if "request" in entry
        and entry["table"] == request["table"]
        and entry.get("rule") not in _UNREAD
    ]
    runs = {entry["run"] for entry in past}
    if request["run"] not in runs and len(runs) >= guards.runs:
        raise Refusal("runs", f"{guards.runs} runs about these rows were answered (guard-runs)")
    same = [entry for entry in past if entry["run"] == request["run"]]
    if any(entry["agreement"] != request["agreement"] for entry in same):
        raise Refusal("agreement", "the agreement has changed within the run")
    known = {entry["request"] for entry in same if entry["kind"] == request["kind"]}
    most = 1 if request["kind"] == "products" else min(rounds, guards.rounds)
    if request["request"] not in known and len(known) >= most:
        raise Refusal("requests", f"the run has asked for {request['kind']} {most} times already")
