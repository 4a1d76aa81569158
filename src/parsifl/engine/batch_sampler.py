"""Draw the data of a `DataRequest` by key and return them as `ClientRoundData`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, overload

import numpy as np
import torch

from parsifl.core.algorithm import ClientInfo
from parsifl.core.batching import (
    Batches,
    BatchSpec,
    ClientRoundData,
    DataRequest,
    Index,
    Rows,
    schedule,
)
from parsifl.core.errors import DataError
from parsifl.core.keys import Key
from parsifl.core.problem import Problem
from parsifl.data.clients import ClientData
from parsifl.engine.checks import check_fit
from parsifl.engine.threads import single_threaded
from parsifl.linear.design import as_design


class Infos(Sequence[ClientInfo]):
    """The `ClientInfo` of every client, created on demand: a million clients cost nothing."""

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


class BatchSampler:
    """Draws the data of clients for one problem, in the dtype of its parameters."""

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
        with (
            single_threaded()
        ):  # two rows: threads would wait for each other longer than they compute
            check_fit(problem, params, data, self._x, self._y)

    def draw(self, client: int, work: DataRequest, key: Key) -> ClientRoundData:
        """Draw the data that `work` requests from the client's training rows."""
        return self.draw_many([client], [work], key)[0]

    def draw_many(
        self, clients: Sequence[int], works: Sequence[DataRequest], key: Key
    ) -> list[ClientRoundData]:
        """Draw the data of many clients; clients with equally many rows are drawn together."""
        alike: dict[tuple[str, BatchSpec, int], list[int]] = {}
        rows_of = self._data.rows_by_client("train")
        owned = [rows_of[client] for client in clients]
        for position, (rows, work) in enumerate(zip(owned, works, strict=True)):
            if work.batches and not len(rows):
                raise DataError(f"client {clients[position]} has no training rows; remove it")
            for name, draw in work.batches.items():
                alike.setdefault((name, draw, len(rows)), []).append(position)
        draws: list[dict[str, Batches]] = [{} for _ in clients]
        for (name, draw, _), positions in alike.items():
            drawn = key.replace(purpose=f"batches/{name}")
            members = [clients[position] for position in positions]
            drawn_batches = self._batches(
                [owned[position] for position in positions], draw, members, drawn
            )
            for position, batches in zip(positions, drawn_batches, strict=True):
                draws[position][name] = batches
        own_keys = key.replace(purpose="local").tensors(clients)
        return [
            ClientRoundData(batches_of, self.rows(rows) if work.rows else None, own_key, key.round)
            for batches_of, rows, work, own_key in zip(draws, owned, works, own_keys, strict=True)
        ]

    def rows(self, rows: Index) -> Rows:
        """Gather rows by number, each with weight 1."""
        index = torch.from_numpy(np.ascontiguousarray(rows))
        weight = torch.ones(len(rows), dtype=self._dtype)
        return Rows(self._x[index], self._y[index], weight)

    def _batches(
        self, rows: Sequence[Index], draw: BatchSpec, clients: Sequence[int], key: Key
    ) -> Iterator[Batches]:
        """Draw for clients with equally many rows."""
        samples = len(rows[0])
        draw.check(samples, batch_statistics=self._problem.uses_batch_statistics)
        positions, valid = schedule(samples, draw, key.generators(clients))
        read = np.broadcast_to(positions, (len(clients), *positions.shape[1:]))
        index = torch.from_numpy(
            np.array([rows_of[at] for rows_of, at in zip(rows, read, strict=True)])
        )
        weight = torch.from_numpy(valid).to(self._dtype)
        active = torch.ones(len(weight), dtype=torch.bool)
        for rows_of, own_key in zip(index.unbind(), key.tensors(clients), strict=True):
            yield Batches(
                x=self._x,
                y=self._y,
                index=rows_of,
                weight=weight,
                active=active,
                key=own_key,
                augment=self._data.augment,
                fixed=self._problem.uses_batch_statistics,
            )


def _cast(values: Any, dtype: torch.dtype) -> Any:
    """Convert real numbers to the given dtype; labels and tokens are unchanged."""
    return values.to(dtype) if values.dtype.is_floating_point else values
