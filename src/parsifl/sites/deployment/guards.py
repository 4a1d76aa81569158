"""Guards of a site: its limits, and its record of released values, which later requests meet."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal, final

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
    noise
        The width of the noise in the sums of a logistic, Poisson or Cox regression, relative to
        their largest term.
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
    noise: Fraction = 0.03
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


def check_agreement(agreement: Agreement, table: Prepared, guards: Guards) -> None:
    """Check an agreement from the server against the site's own table."""
    if agreement.sites < guards.sites:
        raise Refusal("sites", f"the run has fewer than {guards.sites} sites left")
    if agreement.spec != table.spec:
        target = table.spec.target
        raise Refusal("target", f"the run does not predict '{target}', as this site expects")
    preprocessing, features = agreement.preprocessing, table.features
    if sorted(column.name for column in preprocessing.columns) != sorted(features):
        raise Refusal("columns", "the agreed columns are not the columns of its table")
    worded = table.spec.family == "logistic"
    reach = 1.0 if worded else _FARTHEST * (1 + _size(table.numbers(table.spec.target)))
    if preprocessing.rows < table.rows or not abs(agreement.target_mean) <= reach:
        raise Refusal("agreement", "the agreed numbers of rows and means are impossible")
    if worded and not named_levels(table.columns, table.spec.target) <= set(agreement.classes):
        raise Refusal("target", "the agreed classes are not those of its table")
    for column in preprocessing.columns:
        _check_column(column, table)


def _check_column(column: TableColumn, table: Prepared) -> None:
    values = table.columns[column.name]
    if observed(values).any() and bool(column.levels) is not is_words(values):
        raise Refusal(
            "kinds", f"column '{column.name}': numbers here and words there, or vice versa"
        )
    known = set(column.levels)
    fits = len(column.mean) == len(column.scale) == (len(known) - 1 if known else 1)
    if len(known) != len(column.levels) or not fits:
        raise Refusal("levels", f"column '{column.name}': its levels are malformed")
    worded = known and is_words(values)
    if worded and not named_levels(table.columns, column.name) <= known:
        raise Refusal("levels", f"column '{column.name}': levels of this site are missing")
    means, scales = np.array(column.mean), np.array(column.scale)
    # distant means and extreme scales would turn rounding and overflow into comparisons of values;
    # the limit follows from sums that the server has, so a refusal reveals nothing new
    reach = 1.0 if known else _FARTHEST * (1 + _size(table.numbers(column.name)))
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
    inside = all(type(position) is int and 0 <= position < width for position in support)
    if not inside or len(set(support)) != len(support) or len(support) > most:
        raise Refusal("support", f"expected at most {most} different positions of columns")
    check_width(len(support), rows, guards)
    return list(support)


def check_cells(
    table: Prepared, names: Sequence[str], x: Array, products: Sequence[int], guards: Guards
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
    width, targets = len(names), [table.columns[name] for name in table.spec.columns]
    factors = {*products, *range(width, width + len(targets))}
    masks, owner, multiplied = [], [], []
    columns = zip((*names, *table.spec.columns), (*x.T, *targets), strict=True)
    for position, (label, values) in enumerate(columns):
        if (mask := _spot(values)) is not None:
            masks += [mask, ~mask]
            owner += [label, label]
            multiplied += [position in factors] * 2
    for name in dict.fromkeys(names):
        if not is_words(table.columns[name]):
            masks.append(observed(table.columns[name]))
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
    """Check the request of a round: few columns in the matrix and few with a coefficient."""
    if len(set(candidates)) != len(candidates) or not all(0 <= c < width for c in candidates):
        raise Refusal("support", "the candidates are not different columns of the design matrix")
    check_width(len({*candidates, *used}), rows, guards)


def _log_exposure(worst: Exposure, vectors: Mapping[str, Array], rows: Indices) -> None:
    """Name the rows that stand out, and the vector with the largest share there, in the log."""
    here = np.flatnonzero(np.isin(rows, worst.rows))
    shares = {
        name: float((vector[here] ** 2).sum() / max((vector**2).sum(), np.finfo(float).tiny))
        for name, vector in vectors.items()
    }
    cause = max(shares, key=shares.__getitem__) if shares else "the number of rows"
    listed = " and ".join(str(row + 1) for row in here) or "that was removed or changed"
    node_log().warning(
        "row %s has a leverage of %.3f (pair: %.3f) in everything that was released, in this "
        "request most of all by %r: merge levels, limit extreme values, remove a column, or "
        "choose another guard-profile",
        listed, worst.single, worst.pair, cause,
    )  # fmt: skip


def _spot(values: Column) -> Mask | None:
    """Return where a column has its most common value; None if no value is common."""
    distinct, counts = np.unique(values, return_counts=True)
    usual = values == distinct[counts.argmax()]
    return usual if len(distinct) == 2 or 2 * int(usual.sum()) > len(values) else None


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
        """Return all entries, oldest first.

        A last line without its end was being written when the power failed, so that the answer
        did not leave. `write` keeps it as text.
        """
        complete, _ = self._lines()
        return [json.loads(line) for line in complete.decode().splitlines()]

    def _lines(self) -> tuple[bytes, bytes]:
        """Return all complete lines, and what follows them."""
        content = self._path.read_bytes() if self._path.exists() else b""
        end = content.rfind(b"\n") + 1
        return content[:end], content[end:]

    def ledger(
        self, table: Mapping[str, Sequence[str]], guards: Guards
    ) -> tuple[Ledger, Ledger, Indices]:
        """Return the ledger, with the rows of this version of the table, and their positions."""
        past = Ledger.read(self._path.with_name(f"ledger-{guards.table}.npz"))
        if len(past.refused) >= guards.refusals:
            raise Refusal("closed", "the ledger of its table is closed until the owner opens it")
        try:
            grown, rows = past.with_rows(table, self.secret())
        except DataError as error:
            raise Refusal("ledger", f"{error}; its owner can start a new ledger") from None
        return past, grown, rows

    def count_refusal(self, request: str, guards: Guards) -> None:
        """Count a refusal that depends on the rows, once for each question."""
        path = self._path.with_name(f"ledger-{guards.table}.npz")
        past = Ledger.read(path)
        if request not in past.refused:
            replace(past, refused=(*past.refused, request)).write(path)

    def secret(self) -> bytes:
        """Return the secret of the site."""
        return site_secret(self._path.parent)

    def write(self, entry: Mapping[str, Any]) -> None:
        """Add an entry and sync it to disk."""
        stamped = [{"time": datetime.now(UTC).isoformat(timespec="seconds"), **entry}]
        complete, fragment = self._lines()
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
        with os.fdopen(descriptor, "r+") as file:
            if fragment:
                node_log().warning("%s had an incomplete last line", self._path)
                stamped.insert(0, {"incomplete": fragment.decode(errors="replace")})
            file.seek(len(complete))
            file.truncate()
            file.write("".join(json.dumps(each) + "\n" for each in stamped))
            file.flush()
            os.fsync(file.fileno())

    def approved(self, name: str, kind: str, text: str) -> bool:
        """Return whether a reply was approved manually: its file was renamed to `approved-...`.

        A new reply is described in `pending-....json`.
        """
        beside = self._path.with_name
        if beside(f"approved-{name}.json").exists():
            return True
        content = json.dumps({"kind": kind, "reply": text}, indent=1)
        replace_file(beside(f"pending-{name}.json"), content.encode())
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
            The width of the noise in the sums, relative to their largest term.
        """
        path = self._path.with_name(f"ledger-{guards.table}.npz")
        past, grown, rows = self.ledger(table, guards)
        if request in past.requests:
            return
        block = np.column_stack([np.zeros((len(rows), 0)), *vectors.values()])
        if not np.isfinite(block).all():
            raise Refusal("leverage", "sums at these coefficients are not finite")
        grown = grown.with_block(request, block, rows, noise / np.sqrt(12))
        worst = grown.exposure(guards.pair_limit)
        if worst.single <= guards.row_limit and worst.pair <= guards.pair_limit:
            grown.write(path)
            return
        self.count_refusal(request, guards)
        _log_exposure(worst, vectors, rows)
        raise Refusal(
            "leverage",
            "a row or a pair would stand out in everything that was released about its table; ask "
            "for fewer columns, or set l2 if columns separate the classes or the events",
        )


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
