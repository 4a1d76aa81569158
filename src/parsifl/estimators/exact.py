"""The lossless solver in one process: rounds of `FedBestSubset`, and what follows from its sums."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from parsifl import wire
from parsifl.algorithms.fedbestsubset import BestSubsetQuestion, FedBestSubset, as_search
from parsifl.core.algorithm import ClientInfo, ClientUpload
from parsifl.core.batching import ClientRoundData, Rows
from parsifl.core.keys import Key
from parsifl.core.problem import CurvatureSums, Params, Summable
from parsifl.estimators.moments import Array, Indices
from parsifl.linear.design import as_design
from parsifl.solvers.best_subset import Phase, Search


@dataclass(frozen=True, eq=False)
class Sites:
    """The rows of every site, as `client_update` reads them."""

    rows: tuple[Rows, ...]
    infos: tuple[ClientInfo, ...]

    @classmethod
    def of(cls, x: Any, targets: torch.Tensor, parts: list[Indices]) -> Sites:
        """Cut rows into sites; a single site is not copied."""
        dense = isinstance(x, np.ndarray)
        pool: Any = torch.from_numpy(np.ascontiguousarray(x)) if dense else as_design(x)
        cut = []
        for part in parts:
            index = torch.from_numpy(np.ascontiguousarray(part))
            own = pool if len(parts) == 1 and len(part) == len(targets) else pool[index]
            y = targets if own is pool else targets[index]
            cut.append(Rows(own, y, torch.ones(len(part), dtype=torch.float64)))
        infos = tuple(ClientInfo(i, len(part)) for i, part in enumerate(parts))
        return cls(tuple(cut), infos)


@dataclass(frozen=True, eq=False)
class ExactFit:
    """The outcome of the rounds."""

    search: Search
    history: list[dict[str, Any]]
    bytes_up: int
    bytes_down: int


def exact_fit(
    algorithm: FedBestSubset, problem: Summable, sites: Sites, start: Array, *, rounds: int
) -> ExactFit:
    """Run the rounds of the algorithm until it has ended, or for `rounds` of them."""
    algorithm.check_capabilities(problem)
    server, history, up, down = algorithm.started(problem, torch.from_numpy(start)), [], 0, 0
    key, nobody = Key(0), torch.tensor(0)
    for number in range(1, rounds + 1):
        total = algorithm.accumulator(problem)
        sent = received = 0
        message = algorithm.broadcast(problem, server, sites.infos[0], key)
        size = wire.size(message)
        for info, rows in zip(sites.infos, sites.rows, strict=True):
            data = ClientRoundData({}, rows, nobody, number)
            upload = algorithm.client_update(problem, message, None, data).upload
            received, sent = received + size, sent + wire.size(upload)
            total.add(ClientUpload(info, float(info.samples), upload, message))
        server = algorithm.aggregate(problem, server, total.total(), key)
        up, down = up + sent, down + received
        history.append(
            {
                "round": number,
                "trained": len(sites.rows),
                "bytes_up": sent,
                "bytes_down": received,
                "loss": float(server.loss),
                "support": server.support.nonzero()[:, 0].tolist(),
            }
        )
        if int(server.phase) >= Phase.CONVERGED:
            break
    return ExactFit(as_search(server), history, up, down)


def site_sums(
    algorithm: FedBestSubset, problem: Summable, sites: Sites, params: Params, columns: Indices
) -> list[CurvatureSums]:
    """Return what every site answers at given coefficients, for the columns given."""
    question = BestSubsetQuestion(params, params, torch.from_numpy(columns))
    nobody = torch.tensor(0)
    return [
        algorithm.client_update(
            problem, question, None, ClientRoundData({}, rows, nobody, 0)
        ).upload
        for rows in sites.rows
    ]
