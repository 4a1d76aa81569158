"""The data of a client in a round: requested by `DataRequest`, provided as `ClientRoundData`.

Mini-batches are drawn by `Key(seed, round, client, name)`, so they are the same in every engine.
All shapes within a block of clients are equal: short batches repeat a row with weight 0, and a
client with fewer steps than the others has `active = False` in the remaining ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from parsifl.core import augment, keys
from parsifl.core.errors import CapabilityError, ConfigError, DataError

Partial = Literal["pad", "wrap", "drop", "redraw"]
Index = npt.NDArray[np.int64]
_LARGEST_ROUND = 10**9  # row numbers of a client that are drawn at once: 8 GB


@dataclass(frozen=True)
class BatchSpec:
    """A sequence of mini-batches without replacement, reshuffled each epoch or each step.

    Parameters
    ----------
    batch_size
        Rows per step; None takes all rows of the client in every step.
    steps, epochs
        The length of the sequence; give exactly one of them.
    last_batch
        What happens to an incomplete last batch: "pad" (zero weights, exact), "wrap" (filled
        from the next epoch) or "drop". "redraw" has no epochs: every step draws its rows
        independently of the others.
    """

    batch_size: int | None = 20
    steps: int | None = None
    epochs: float | None = None
    last_batch: Partial = "pad"

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.epochs is None):
            raise ConfigError("a BatchSpec needs either steps= or epochs=: give exactly one")
        if self.batch_size is not None and self.batch_size < 1:
            raise ConfigError(f"batch_size must be at least 1, got {self.batch_size}")
        is_integer = self.steps is None or type(self.steps) is int
        if not is_integer or not _is_number(self.epochs):
            raise ConfigError(
                "steps must be a whole number and epochs a finite one (also in a device profile), "
                f"got steps={self.steps!r}, epochs={self.epochs!r}"
            )
        if (self.steps or 0) < 0 or (self.epochs or 0) < 0:
            shown = f"steps={self.steps}" if self.epochs is None else f"epochs={self.epochs}"
            raise ConfigError(f"the number of steps must not be negative: got {shown}")

    def rows(self, samples: int) -> int:
        """Return the rows per step for a client with this many samples."""
        return samples if self.batch_size is None else self.batch_size

    def count(self, samples: int) -> int:
        """Return the number of steps for a client with this many samples."""
        if self.steps is not None:
            return self.steps
        batch = self.rows(samples)
        per_epoch = samples // batch if self.last_batch == "drop" else math.ceil(samples / batch)
        return round((self.epochs or 0.0) * per_epoch)

    def check(
        self, samples: int, *, client: str = "a client", batch_statistics: bool = False
    ) -> None:
        """Raise an error if a client with this many samples cannot draw this sequence.

        `client` is its name in errors; `batch_statistics` means that the model computes statistics
        over the rows of a batch.
        """
        if samples == 0:
            raise DataError(f"{client} has no training rows; remove it")
        steps, batch = self.count(samples), self.rows(samples)
        if steps * batch > _LARGEST_ROUND:
            raise ConfigError(
                f"{steps} steps of {batch} rows are too many for one round of a client: at most "
                f"{_LARGEST_ROUND:,} rows are drawn at once. Lower local_steps, epochs or "
                "batch_size"
            )
        if self.last_batch == "drop" and samples < batch and (self.steps or self.epochs):
            raise ConfigError(
                f'{client} has {samples} rows, batch_size is {batch}: last_batch="drop" leaves it '
                'no batch. Use a smaller batch_size, or last_batch="pad" or "wrap"'
            )
        if batch_statistics and self.last_batch == "pad" and samples % batch:
            raise CapabilityError(
                "this model normalizes over the batch, so a padded batch would not be exact: set "
                "last_batch to 'wrap' or 'drop', or use parsifl.models.adapt(module, norm='group')"
            )


def _is_number(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and math.isfinite(value))


@dataclass(frozen=True)
class DataRequest:
    """The mini-batch sequences that an algorithm reads, by name, and whether it reads all rows."""

    batches: Mapping[str, BatchSpec] = field(default_factory=dict)
    rows: bool = False


@dataclass(frozen=True)
class Batch:
    """One mini-batch: the loss is sum(weight * l) / sum(weight)."""

    x: Any
    y: Tensor
    weight: Tensor
    active: Tensor
    key: Tensor


@dataclass(frozen=True)
class Rows:
    """All rows of a client; padding has weight 0."""

    x: Any
    y: Tensor
    weight: Tensor


@dataclass(frozen=True)
class Batches:
    """A sequence of mini-batches as positions in pooled data, which clients share without copies.

    Shapes: `index` and `weight` [steps, rows], `active` [steps]. `ragged` means that some client
    of the block has fewer steps; `fixed` means that rows must not be padded further, because the
    model computes statistics over them.
    """

    x: Any
    y: Tensor
    index: Tensor
    weight: Tensor
    active: Tensor
    key: Tensor
    ragged: bool = False
    augment: str = ""
    fixed: bool = False

    def __len__(self) -> int:
        return self.index.shape[0]

    def __iter__(self) -> Iterator[Batch]:
        for step in range(len(self)):
            yield self.batch(step)

    @cached_property
    def _keys(self) -> Tensor:
        """The keys of all steps."""
        return keys.fold(self.key, torch.arange(len(self), device=self.key.device))

    def batch(self, step: int) -> Batch:
        """Gather the rows of one step."""
        rows = self.index[step]
        x = _taken(self.x, rows)
        key = self._keys[step]
        if self.augment:
            x = augment.apply(self.augment, x, key)
        return Batch(x, self.y[rows], self.weight[step], self.active[step], key)


def _taken(x: Any, rows: Tensor) -> Any:
    """Return x[rows] through `torch.embedding`, which takes half the time and supports vmap."""
    if not isinstance(x, Tensor) or x.ndim == 1 or not x.is_contiguous():
        return x[rows]
    rows_taken = torch.embedding(x.flatten(1), rows)
    return rows_taken if x.ndim == 2 else rows_taken.reshape(*rows.shape, *x.shape[1:])


@dataclass(frozen=True)
class ClientRoundData:
    """The data of one client for one round, as requested by the algorithm."""

    batches: dict[str, Batches]
    rows: Rows | None
    key: Tensor
    round: int

    def __getitem__(self, name: str) -> Batches:
        return self.batches[name]

    def all_rows(self) -> Rows:
        """Return all rows; requires `rows=True` in the algorithm's `DataRequest`."""
        if self.rows is None:
            raise ConfigError(
                "the algorithm reads all rows, but its batches() does not request rows=True"
            )
        return self.rows


def schedule(
    samples: int, draw: BatchSpec, generators: Iterable[np.random.Generator]
) -> tuple[Index, npt.NDArray[np.bool_]]:
    """Draw which of its `samples` rows each client reads, with one generator per client.

    Returns positions [clients, steps, rows] and which of them are valid, [steps, rows]. Steps over
    all rows read them in order, the same for every client: [1, steps, rows].
    """
    draw.check(samples)
    steps, batch = draw.count(samples), draw.rows(samples)
    if draw.batch_size is None:
        every = np.tile(np.arange(samples), (1, steps, 1))
        return every, np.ones(every.shape[1:], np.bool_)
    if draw.last_batch == "wrap":
        read = min(samples, steps * batch)
        index = _orders(samples, math.ceil(steps * batch / samples), read, generators)
        index = index.reshape(len(index), -1)[:, : steps * batch]
        return index.reshape(len(index), steps, batch), np.ones((steps, batch), np.bool_)
    if draw.last_batch == "redraw":
        index = _orders(samples, steps, batch, generators)
        first = index[..., :1].repeat(max(0, batch - samples), -1)  # their weight is 0
        counts = np.arange(batch) < samples
        return np.concatenate([index, first], -1), np.tile(counts, (steps, 1))
    full, rest = divmod(samples, batch)
    per_epoch = full + (rest > 0 and draw.last_batch == "pad")
    epochs = math.ceil(steps / per_epoch) if steps else 0
    width = min(steps, per_epoch) * batch
    index = _orders(samples, epochs, width, generators)
    if samples < width:  # repeat the first row of the short batch; its weight is 0
        first = index[..., full * batch, None]
        index = np.concatenate([index, first.repeat(width - samples, -1)], -1)
    valid = np.tile(np.arange(width) < samples, epochs)
    return index.reshape(len(index), -1, batch)[:, :steps], valid.reshape(-1, batch)[:steps]


def _orders(
    samples: int, epochs: int, read: int, generators: Iterable[np.random.Generator]
) -> Index:
    """Shuffle the rows of every epoch: [clients, epochs, rows]."""
    drawn = [[each.permutation(samples)[:read] for _ in range(epochs)] for each in generators]
    return np.array(drawn, np.int64).reshape(len(drawn), epochs, min(read, samples))
