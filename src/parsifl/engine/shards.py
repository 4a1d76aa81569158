"""Turns a request for data (`Work`) into tensors (`Shard`), by key."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, overload

import numpy as np
import torch

from parsifl.algorithm import ClientInfo
from parsifl.data.clients import ClientData
from parsifl.engine.fit import check_fit
from parsifl.engine.threads import one_core
from parsifl.errors import CapabilityError, DataError
from parsifl.keys import Key
from parsifl.problem import Problem
from parsifl.problems.design import as_design
from parsifl.work import Batches, Draw, Index, Rows, Shard, Work, schedule


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
        params = problem.init(Key(0))
        self._dtype = next(iter(params.values())).dtype
        check = getattr(problem, "check_targets", None)  # a GLM knows which targets it can read
        if check is not None:
            check(data.y)
        self._x: Any = _cast(as_design(data.x), self._dtype)
        self._y: Any = _cast(data.y, self._dtype)
        with one_core():  # two rows: threads would wait for each other longer than they compute
            check_fit(problem, params, data, self._x, self._y)

    def shard(self, client: int, work: Work, key: Key) -> Shard:
        """Draw what `work` asks for from the client's training rows."""
        return self.window([client], [work], key)[0]

    def window(self, clients: Sequence[int], works: Sequence[Work], key: Key) -> list[Shard]:
        """Draw the shards of many clients; those with equally many rows are drawn together."""
        alike: dict[tuple[str, Draw, int], list[int]] = {}
        owned = [self._data.train[client] for client in clients]
        for place, (rows, work) in enumerate(zip(owned, works, strict=True)):
            if work.draws and not len(rows):
                raise DataError(
                    f"client {clients[place]} has no training rows to draw from; leave it out"
                )
            for name, draw in work.draws.items():
                alike.setdefault((name, draw, len(rows)), []).append(place)
        draws: list[dict[str, Batches]] = [{} for _ in clients]
        for (name, draw, _), places in alike.items():
            drawn = key.at(purpose=f"batches/{name}")
            members = [clients[place] for place in places]
            found = self._batches([owned[place] for place in places], draw, members, drawn)
            for place, batches in zip(places, found, strict=True):
                draws[place][name] = batches
        own_keys = key.at(purpose="local").tensors(clients)
        return [
            Shard(own, self.rows(rows) if work.rows else None, own_key, key.round)
            for own, rows, work, own_key in zip(draws, owned, works, own_keys, strict=True)
        ]

    def rows(self, rows: Index) -> Rows:
        """Gather rows by their numbers, each of weight 1."""
        index = torch.from_numpy(np.ascontiguousarray(rows))
        weight = torch.ones(len(rows), dtype=self._dtype)
        return Rows(self._x[index], self._y[index], weight)

    def _batches(
        self, rows: Sequence[Index], draw: Draw, clients: Sequence[int], key: Key
    ) -> Iterator[Batches]:
        """Draw for clients with equally many rows."""
        samples = len(rows[0])
        padded = draw.partial == "pad" and samples % draw.rows(samples)
        if self._problem.rows_interact and padded:
            raise CapabilityError(
                "this model normalises over the batch, so a padded batch would not be exact: set "
                "partial to 'wrap' or 'drop', or adapt the model with GroupNorm"
            )
        positions, valid = schedule(samples, draw, key.generators(clients))
        read = np.broadcast_to(positions, (len(clients), *positions.shape[1:]))
        index = torch.from_numpy(np.array([own[at] for own, at in zip(rows, read, strict=True)]))
        weight = torch.from_numpy(valid).to(self._dtype)
        active = torch.ones(len(weight), dtype=torch.bool)
        for own, own_key in zip(index.unbind(), key.tensors(clients), strict=True):
            yield Batches(
                x=self._x,
                y=self._y,
                index=own,
                weight=weight,
                active=active,
                key=own_key,
                augment=self._data.augment,
                fixed=self._problem.rows_interact,
            )


def _cast(values: Any, dtype: torch.dtype) -> Any:
    """Return real numbers in the given dtype; labels and tokens stay what they are."""
    return values.to(dtype) if values.dtype.is_floating_point else values
