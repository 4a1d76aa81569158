"""What a server does with results: the way in which they come must not show."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from parsifl.algorithms.fedamp import FedAMP
from parsifl.algorithms.fedavg import FedAvg
from parsifl.core import tree
from parsifl.core.algorithm import AnyAlgorithm, ClientInfo
from parsifl.core.keys import Key
from parsifl.engine.flops import Cost
from parsifl.engine.gather import Arrival, Gathered
from parsifl.engine.network_model import NetworkModel
from parsifl.testing.fixtures import classifier

INFOS = [ClientInfo(client, 3 + client) for client in range(4)]


def gathered(method: AnyAlgorithm) -> Gathered:
    return Gathered(method, classifier(), INFOS, NetworkModel(), "exact", nullcontext)


def arrivals(uploads: list[dict[str, Tensor]]) -> list[Arrival]:
    return [
        Arrival(client, None, upload, {"loss": torch.tensor(1.0 + client)}, 0, 100, Cost(5, 7, 9))
        for client, upload in enumerate(uploads)
    ]


def drawn() -> list[dict[str, Tensor]]:
    draw = Key(0, purpose="test/gather").torch_generator()
    start = classifier().init(Key(0))
    return [
        tree.map(lambda leaf: torch.randn(leaf.shape, generator=draw, dtype=leaf.dtype), start)
        for _ in INFOS
    ]


def test_results_that_come_together_count_as_if_they_came_one_by_one() -> None:
    together, single = gathered(FedAvg()), gathered(FedAvg())
    everything = arrivals(drawn())
    together.receive(*everything)
    for arrival in everything:
        single.receive(arrival)
    assert vars(together.ledger) == vars(single.ledger)
    assert together.ledger.devices[0]["clients"] == len(INFOS)
    server = classifier().init(Key(0))
    assert tree.same(together.aggregate(server, Key(0)), single.aggregate(server, Key(0)))


def _across(leaf: Tensor) -> Tensor:
    return leaf.mT.contiguous().mT if leaf.ndim == 2 else leaf


@pytest.mark.bits
@pytest.mark.parametrize("method", [FedAvg(), FedAMP()], ids=["sum", "gather"])
def test_the_layout_of_uploads_in_memory_changes_no_bit(method: Any) -> None:
    problem = classifier()
    server = method.init_server(problem, INFOS, Key(0))
    uploads = drawn()
    across = [tree.map(_across, upload) for upload in uploads]
    assert any(not leaf.is_contiguous() for leaf in tree.leaves(across[0]))
    states = []
    for given in (uploads, across):
        server_side = gathered(method)
        server_side.receive(*arrivals(given))
        states.append(server_side.aggregate(server, Key(0)))
    assert tree.same(*states)
    assert all(leaf.is_contiguous() for state in states for leaf in tree.leaves(state))
