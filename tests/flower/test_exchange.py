from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from scipy.sparse import csr_matrix

from parsifl import wire
from parsifl.core.algorithm import ClientInfo
from parsifl.core.errors import WireError
from parsifl.core.keys import Key
from parsifl.core.leaves import LowRank
from parsifl.data.clients import ClientData
from parsifl.engine.experiment import Experiment, problem_for
from parsifl.flower.exchange import UploadTemplates
from parsifl.flower.hello import DataSchema


def expected(data: ClientData, algorithm: str, **settings: Any) -> tuple[UploadTemplates, Any, Any]:
    schema = DataSchema.of(data)
    problem = problem_for("glm", schema.example())
    method = Experiment(algorithm, settings).build_algorithm()
    server = method.init_server(problem, [ClientInfo(0, 30)], Key(0))
    down = method.broadcast(problem, server, ClientInfo(0, 30), Key(0))
    found = UploadTemplates(method, problem, schema)
    return found, found.of(down, ClientInfo(0, 30), Key(0)), down


def test_a_very_wide_sparse_matrix_is_never_made_dense() -> None:
    ones, place = np.ones(40, np.float32), np.arange(40)
    wide = csr_matrix((ones, (place, place)), shape=(40, 150_360))
    data = ClientData.of([(wide, np.arange(40) % 2)])
    _, form, _ = expected(data, "fedgradmp", tau=5)
    assert form.known
    assert form.flops is None


def test_work_is_done_once_for_each_form() -> None:
    rows = np.random.default_rng(0).standard_normal((40, 6))
    found, form, down = expected(ClientData.of([(rows, np.arange(40) % 2)]), "fedavg")
    assert found.of(down, ClientInfo(3, 30), Key(0, round=5)) is form
    assert found.of(down, ClientInfo(3, 31), Key(0)) is not form


def test_an_upload_is_held_against_its_form() -> None:
    rows = np.random.default_rng(0).standard_normal((40, 6))
    found, form, down = expected(ClientData.of([(rows, np.arange(40) % 2)]), "fedavg")
    good = wire.encode(down)
    assert found.read(good, form).keys() == down.keys()
    with pytest.raises(WireError, match="float32"):
        found.read(wire.encode({k: v.float() for k, v in down.items()}), form)
    with pytest.raises(WireError, match="dense it would have"):
        found.read(wire.encode({"coef": torch.ones(1 << 18, dtype=torch.float64)}), form)


def test_factors_replace_a_tensor_where_the_upload_may_be_compact() -> None:
    rows = np.random.default_rng(0).standard_normal((40, 6))
    data = ClientData.of([(rows, np.arange(40) % 3)])
    found, form, down = expected(data, "fedslr", solver="local")
    shape = tuple(down["coef"].shape)
    factors = LowRank(torch.ones(shape[0], 1).double(), torch.ones(1, shape[1]).double(), shape)
    assert isinstance(found.read(wire.encode({**down, "coef": factors}), form)["coef"], LowRank)
    with pytest.raises(WireError, match="coef"):
        found.read(wire.encode({**down, "coef": replace(factors, shape=shape[::-1])}), form)
    wrong = LowRank(torch.ones(7, 1).double(), torch.ones(1, shape[1]).double(), (7, shape[1]))
    with pytest.raises(WireError, match="coef"):
        found.read(wire.encode({**down, "coef": wrong}), form)
    found, form, down = expected(data, "fedavg")
    with pytest.raises(WireError, match="coef"):
        found.read(wire.encode({**down, "coef": factors}), form)
