"""The ledger of a table: what every released sum revealed, and how far a row stands out in it.

From the sums of a request a server can compute X't for every t in the span of certain vectors with
one entry per row: the *block* of the request. The ledger holds the blocks of everything that ever
left a table, over runs, models and versions of the table, and computes the leverage of each row
and of each pair of rows in their span.
"""

from __future__ import annotations

import hashlib
import io
import secrets
import zipfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple, final

import numpy as np
import numpy.typing as npt

from parsifl.core.errors import DataError
from parsifl.engine.safe_files import replace_file

Array = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]
Digests = npt.NDArray[np.uint8]
_FORMAT = 1
_DIGEST = 16
_RANK = 1e-13
"""Smallest singular value of exact sums that counts: they are sent in float64."""


class Exposure(NamedTuple):
    """How far rows stand out.

    Attributes
    ----------
    single
        The largest leverage of a row.
    pair
        The largest eigenvalue of the projection on two rows. Only pairs that can exceed the limit
        are computed; it is at least `single`.
    rows
        The row or the two rows that stand out most, as positions in the ledger.
    dimensions
        The sum of all leverages: the dimensions that were used.
    """

    single: float
    pair: float
    rows: tuple[int, ...]
    dimensions: float


@final
@dataclass(frozen=True, eq=False)
class Ledger:
    """The blocks of all answers about one table.

    Attributes
    ----------
    columns
        The columns whose values identify a row; empty before the first answer.
    rows
        [rows, 16]: a keyed digest of every row that was ever in the table.
    vectors
        [rows, vectors]: the blocks, with a largest entry of 1 and zeros where a row was absent.
    noise
        [vectors]: the standard deviation of the noise in sums with this vector; 0: exact.
    requests
        The digests of answered requests, whose answers are the same if they are repeated.
    refused
        The digests of requests that were refused because of the rows, since the owner last acted.
    """

    columns: tuple[str, ...] = ()
    rows: Digests = field(default_factory=lambda: np.zeros((0, _DIGEST), np.uint8))
    vectors: Array = field(default_factory=lambda: np.zeros((0, 0)))
    noise: Array = field(default_factory=lambda: np.zeros(0))
    requests: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()

    @classmethod
    def read(cls, path: Path) -> Ledger:
        """Read a ledger; a missing file is an empty ledger, a damaged one is an error."""
        if not path.exists():
            return cls()
        try:
            with np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as parts:
                if int(parts["format"]) != _FORMAT:
                    raise ValueError("format")
                return cls(
                    tuple(parts["columns"].tolist()),
                    parts["rows"],
                    parts["vectors"],
                    parts["noise"],
                    tuple(parts["requests"].tolist()),
                    tuple(parts["refused"].tolist()),
                )
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            raise DataError(
                f"{path} is damaged or from another version ({type(error).__name__}); restore it "
                "from a backup, because it limits what may still leave the table"
            ) from None

    def write(self, path: Path) -> None:
        """Write the ledger to a file that only its owner can read."""
        data = io.BytesIO()
        np.savez(
            data,
            format=_FORMAT,
            columns=np.array(self.columns, np.str_),
            rows=self.rows,
            vectors=self.vectors,
            noise=self.noise,
            requests=np.array(self.requests, np.str_),
            refused=np.array(self.refused, np.str_),
        )
        replace_file(path, data.getvalue(), 0o600)

    def with_rows(
        self, table: Mapping[str, Sequence[str]], secret: bytes
    ) -> tuple[Ledger, Indices]:
        """Add the rows of a version of the table; return their positions in the ledger too.

        A row is identified by its values, and equal rows by their number. An unknown row was
        absent from all earlier sums, so its entries there are 0.
        """
        columns = tuple(sorted(table))
        if self.columns and columns != self.columns:
            raise DataError("the table has other columns than before")
        known = {row.tobytes(): position for position, row in enumerate(self.rows)}
        seen: Counter[str] = Counter()
        positions: list[int] = []
        added: list[Digests] = []
        for values in zip(*(table[name] for name in columns), strict=True):
            text = "".join(f"{len(value)}:{value}" for value in values)
            seen[text] += 1
            name = f"{seen[text]};{text}".encode()
            digest = hashlib.blake2b(name, digest_size=_DIGEST, key=secret).digest()
            position = known.setdefault(digest, len(known))
            if position == len(self.rows) + len(added):
                added.append(np.frombuffer(digest, np.uint8))
            positions.append(position)
        new = np.stack(added) if added else np.zeros((0, _DIGEST), np.uint8)
        absent = np.zeros((len(new), self.vectors.shape[1]))
        grown = replace(
            self,
            columns=columns,
            rows=np.concatenate([self.rows, new]),
            vectors=np.concatenate([self.vectors, absent]),
        )
        return grown, np.array(positions, np.int64)

    def with_block(self, request: str, block: Array, positions: Indices, noise: float) -> Ledger:
        """Add the block [rows of this version, vectors] of a request; the constant is exact.

        An exact vector that the ledger has already adds nothing.
        """
        if not np.isfinite(block).all():
            raise DataError("the sums are not finite")
        full = np.zeros((len(self.rows), block.shape[1] + 1))
        full[positions, 0] = 1.0
        full[positions, 1:] = block
        size = np.abs(full).max(axis=0)
        full = full[:, size > 0] / size[size > 0]
        level = np.where(np.arange(len(size)) == 0, 0.0, noise)[size > 0]
        exact = {self.vectors[:, i].tobytes() for i in np.flatnonzero(self.noise == 0.0)}
        new = [i for i in range(full.shape[1]) if level[i] or full[:, i].tobytes() not in exact]
        return replace(
            self,
            vectors=np.concatenate([self.vectors, full[:, new]], axis=1),
            noise=np.concatenate([self.noise, level[new]]),
            requests=(*self.requests, request),
        )

    def exposure(self, limit: float) -> Exposure:
        """Return how far rows and pairs stand out (pairs only if they can exceed `limit`)."""
        return exposure(root(self.vectors, self.noise), limit)


def root(vectors: Array, noise: Array) -> Array:
    """Return Q [rows, vectors] such that QQ' is the projection onto the span of vectors.

    Vectors of noisy sums count as far as the noise allows: V (V'V + D^2)^-1 V' with the noise D,
    within what is orthogonal to the exact vectors. An estimate of one entry of a column from all
    sums then has the variance 1 - h_i, relative to that of the column, with h_i = (QQ')_ii.
    """
    exact, noisy = vectors[:, noise == 0.0], vectors[:, noise > 0.0]
    basis = np.zeros((len(vectors), 0))
    if exact.shape[1]:
        basis, values, _ = np.linalg.svd(exact, full_matrices=False)
        basis = basis[:, values > _RANK * values[0]]
    if not noisy.shape[1]:
        return basis
    rest = noisy - basis @ (basis.T @ noisy)
    rest = (rest - basis @ (basis.T @ rest)) / noise[noise > 0.0]  # twice, against rounding
    lower = np.linalg.cholesky(rest.T @ rest + np.eye(rest.shape[1]))
    return np.concatenate([basis, np.linalg.solve(lower, rest.T).T], axis=1)


def exposure(basis: Array, limit: float) -> Exposure:
    """Return the exposure of rows and pairs in the projection QQ'."""
    single = np.minimum((basis**2).sum(axis=1), 1.0)  # 1 but for rounding
    first = int(single.argmax())
    worst = Exposure(float(single[first]), float(single[first]), (first,), float(single.sum()))
    # an eigenvalue is at most the sum of both leverages, which add up to the dimensions: only
    # few rows need a check of their pairs
    for row in np.flatnonzero(single + worst.single > limit):
        mixed = basis @ basis[row]
        pairs = (single + single[row]) / 2 + np.hypot((single - single[row]) / 2, mixed)
        pairs[row] = 0.0
        other = int(pairs.argmax())
        if pairs[other] > worst.pair:
            worst = worst._replace(pair=min(float(pairs[other]), 1.0), rows=(int(row), other))
    return worst


def site_secret(folder: Path) -> bytes:
    """Return the secret of a site, which is drawn once and stays in its state directory."""
    path = folder / "secret"
    if not path.exists():
        replace_file(path, secrets.token_bytes(32), 0o600)
    return path.read_bytes()
