from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from scipy.sparse import csr_matrix
from tests.support.fixtures import classifier, clients
from torch import nn

from parsifl.algorithms.fedavg import FedAvg
from parsifl.core import tree
from parsifl.core.algorithm import ClientInfo
from parsifl.core.batching import BatchSpec, DataRequest
from parsifl.core.errors import CapabilityError, ConfigError, DataError
from parsifl.core.keys import Key
from parsifl.engine.batch_sampler import BatchSampler, Infos
from parsifl.engine.simulate import simulate
from parsifl.linear.glm import GLM
from parsifl.nn.neural import NeuralProblem


def test_infos_are_made_on_demand() -> None:
    infos = Infos(clients((6, 9), profiles=[{"width": 0.5}, {}]))
    assert len(infos) == 2
    assert infos[0] == ClientInfo(0, 6, {"width": 0.5})
    assert list(infos) == list(infos[0:2]) == [infos[0], infos[1]]


def test_a_shard_reads_training_rows_only_and_follows_its_key() -> None:
    data, work = (
        clients((6, 9)),
        DataRequest({"a": BatchSpec(4, steps=5), "b": BatchSpec(4, steps=5)}, rows=True),
    )
    shards = BatchSampler(data, classifier())
    first, same = (shards.draw(1, work, Key(3, round=2)) for _ in range(2))
    assert tree.same(first, same)
    assert set(first["a"].index.flatten().tolist()) <= set(data.train[1].tolist())
    assert not torch.equal(first["a"].index, first["b"].index)
    assert torch.equal(first.all_rows().x, torch.as_tensor(data.x)[data.train[1]])
    assert first.round == 2
    for other in (Key(4, round=2), Key(3, round=1)):
        assert not torch.equal(shards.draw(1, work, other)["a"].index, first["a"].index)


def test_a_window_of_clients_is_drawn_as_each_of_them_alone() -> None:
    shards, sizes = BatchSampler(clients((6, 9, 6, 6)), classifier()), [3, 1, 0, 2]
    long, short = (BatchSpec(4, steps=steps) for steps in (5, 2))
    works = [
        DataRequest({"a": long, "b": short}, rows=True),
        DataRequest({"a": long}),
        DataRequest(),
        DataRequest({"a": long}),
    ]
    found = shards.draw_many(sizes, works, Key(3, round=2))
    for client, work, shard in zip(sizes, works, found, strict=True):
        assert tree.same(shard, shards.draw(client, work, Key(3, round=2)))


def test_all_rows_must_be_asked_for() -> None:
    shard = BatchSampler(clients(), classifier()).draw(0, DataRequest(), Key(0))
    with pytest.raises(ConfigError, match="rows=True"):
        shard.all_rows()


def test_a_client_without_training_rows_is_named() -> None:
    data = clients((6, 9))
    empty = replace(data, train=[data.train[0], data.train[1][:0]])
    with pytest.raises(DataError, match="client 1 has no training rows"):
        simulate(FedAvg(), classifier(), empty, 1)


def test_integer_features_stay_integers() -> None:
    data = replace(clients(), x=torch.arange(46 * 4).reshape(46, 4)[: len(clients().y)])
    tokens = NeuralProblem(
        lambda: nn.Sequential(nn.Embedding(200, 1), nn.Flatten(), nn.Linear(4, 3)),
        dtype=torch.float64,
    )
    shard = BatchSampler(data, tokens).draw(0, DataRequest({"t": BatchSpec(2, steps=1)}), Key(0))
    assert shard["t"].batch(0).x.dtype == torch.int64
    assert shard["t"].weight.dtype == torch.float64


def test_a_csr_matrix_is_read_row_by_row() -> None:
    dense = np.eye(12)[:, :4]
    data = replace(clients((3, 3), test=3), x=csr_matrix(dense))
    rows = BatchSampler(data, GLM(4, "softmax", classes=3)).rows(np.array([2, 0]))
    assert np.array_equal(rows.x.matrix.toarray(), dense[[2, 0]])


def batch_norm() -> NeuralProblem:
    norm = nn.BatchNorm1d(4, track_running_stats=False)
    return NeuralProblem(nn.Sequential(norm, nn.Linear(4, 3)), dtype=torch.float64)


def test_padding_is_refused_where_rows_interact() -> None:
    with pytest.raises(CapabilityError, match="set last_batch to 'wrap' or 'drop'"):
        simulate(FedAvg(batch_size=4, local_steps=1), batch_norm(), clients((6, 9)), 1)


@pytest.mark.parametrize("partial", ["wrap", "drop"])
def test_whole_batches_are_fine_where_rows_interact(partial: Any) -> None:
    method = FedAvg(batch_size=4, local_steps=2, last_batch=partial)
    run = simulate(method, batch_norm(), clients((6, 9)), 1)
    assert not run.metrics[0]["dropped"]
