"""Turns a request for data (`Work`) into tensors (`Shard`), by key."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, overload

import numpy as np
import torch

from parsifl.algorithm import ClientInfo
from parsifl.data.clients import ClientData
from parsifl.errors import CapabilityError, DataError
from parsifl.keys import Key
from parsifl.problem import Problem
from parsifl.problems.design import as_design
from parsifl.work import Batches, Draw, Rows, Shard, Work, schedule


class Infos(Sequence[ClientInfo]):
    """What the server knows of each client, made on demand: a million clients cost nothing."""

    def __init__(self, data: ClientData) -> None:
        self._data = data

    def __len__(self) -> int:
        return len(self._data)

    @overload
    def __getitem__(self, index: int) -> ClientInfo: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[ClientInfo]: ...
    def __getitem__(self, index: int | slice) -> ClientInfo | Sequence[ClientInfo]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return ClientInfo(index, len(self._data.train[index]), self._data.profiles[index])

    def __iter__(self) -> Iterator[ClientInfo]:
        return (self[i] for i in range(len(self)))


class Shards:
    """Draws the shards of a data set for one problem, in the dtype of its parameters."""

    def __init__(self, data: ClientData, problem: Problem) -> None:
        self._data = data
        self._problem = problem
        self._dtype = next(iter(problem.init(Key(0)).values())).dtype
        check = getattr(problem, "check_targets", None)  # a GLM knows which targets it can read
        if check is not None:
            check(data.y)
        self._x: Any = _cast(as_design(data.x), self._dtype)
        self._y: Any = _cast(data.y, self._dtype)

    def shard(self, client: int, work: Work, key: Key) -> Shard:
        """Draw what `work` asks for from the client's training rows."""
        rows = self._data.train[client]
        if work.draws and not len(rows):
            raise DataError(f"client {client} has no training rows to draw from; leave it out")
        here = key.at(client=client)
        draws = {name: self._batches(rows, name, draw, here) for name, draw in work.draws.items()}
        everything = self.rows(rows) if work.rows else None
        return Shard(draws, everything, here.at(purpose="local").tensor(), key.round)

    def rows(self, rows: np.ndarray[Any, np.dtype[np.int64]]) -> Rows:
        """Gather rows by their numbers, each of weight 1."""
        index = torch.from_numpy(np.ascontiguousarray(rows))
        weight = torch.ones(len(rows), dtype=self._dtype)
        return Rows(self._x[index], self._y[index], weight)

    def _batches(self, rows: Any, name: str, draw: Draw, key: Key) -> Batches:
        if (
            self._problem.rows_interact
            and draw.partial == "pad"
            and len(rows) % draw.rows(len(rows))
        ):
            raise CapabilityError(
                "this model normalises over the batch, so a padded batch would not be exact: set "
                "partial to 'wrap' or 'drop', or adapt the model with GroupNorm"
            )
        drawn = key.at(purpose=f"batches/{name}")
        generator = None if draw.batch is None else drawn.numpy()  # all rows come in their order
        positions, valid = schedule(len(rows), draw, generator)
        return Batches(
            x=self._x,
            y=self._y,
            index=torch.from_numpy(rows[positions]),
            weight=torch.from_numpy(valid).to(self._dtype),
            active=torch.ones(len(positions), dtype=torch.bool),
            key=drawn.tensor(),
            augment=self._data.augment,
            fixed=self._problem.rows_interact,
        )


def _cast(values: Any, dtype: torch.dtype) -> Any:
    """Return real numbers in the given dtype; labels and tokens stay what they are."""
    return values.to(dtype) if values.dtype.is_floating_point else values
