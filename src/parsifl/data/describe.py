"""The label distribution of the clients as plain data and as text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

import numpy as np

from parsifl.data.clients import ClientData
from parsifl.data.ragged import Array, Ragged

_SYMBOLS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


@final
@dataclass(frozen=True)
class Bar:
    """One client: its number of rows, and the segments (class, width) of its bar."""

    client: int
    train: int
    validation: int
    test: int
    stretches: tuple[tuple[int, int], ...]

    def text(self) -> str:
        """Return the bar in characters, one symbol per class."""
        return "".join(_SYMBOLS[label % len(_SYMBOLS)] * width for label, width in self.stretches)


def bars(data: ClientData, width: int = 40, limit: int = 50) -> list[Bar]:
    """Return a bar for each of the first `limit` clients, `width` cells divided by label shares.

    >>> from parsifl.data.clients import ClientData
    >>> own = ClientData.of([(np.zeros((4, 1)), np.array([0, 0, 1, 1]))], test=0.0)
    >>> bars(own, width=4)[0].text()
    '0011'
    """
    train, held, test = (Ragged.of(part).sizes for part in (data.train, data.validation, data.test))
    shown = min(len(data), limit)
    if data.classes is None:
        fills = [np.zeros(0, dtype=np.int64)] * shown
    else:
        shares = data.shares()[:shown]
        fills = [_cells(row, width) for row in shares]
    return [
        Bar(
            client=i,
            train=int(train[i]),
            validation=int(held[i]),
            test=int(test[i]),
            stretches=tuple((int(c), int(fill[c])) for c in np.flatnonzero(fill)),
        )
        for i, fill in enumerate(fills)
    ]


def _cells(shares: Array, width: int) -> Array:
    """Round shares to whole cells that add up to `width` (largest remainders)."""
    ideal = shares * width
    cells = np.floor(ideal + 1e-9).astype(np.int64)
    order = np.argsort(cells - ideal, kind="stable")
    cells[order[: width - int(cells.sum())]] += 1
    return cells


def summary(data: ClientData) -> dict[str, Any]:
    """Return sizes and, for class labels, the distribution of every client, as JSON values."""
    train, held, test = (Ragged.of(part).sizes for part in (data.train, data.validation, data.test))
    return {
        "name": data.name,
        "clients": len(data),
        "classes": data.classes,
        "features": list(data.x.shape[1:]),
        "augment": data.augment,
        "train": train.tolist(),
        "validation": held.tolist(),
        "test": test.tolist(),
        "shares": None if data.classes is None else np.round(data.shares(), 6).tolist(),
    }
