from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from tests.algorithms import personal
from tests.reference_personal import Coupling, coupled_rounds, gradient, prune
from torch import nn

from parsifl.algorithms.fedmac import FedMac
from parsifl.algorithms.pfedme import PFedMe
from parsifl.core import config, tree
from parsifl.core.errors import ConfigError
from parsifl.core.keys import Key
from parsifl.engine.simulate import simulate
from parsifl.linear.glm import GLM
from parsifl.nn.neural import NeuralProblem

BASE: dict[str, Any] = {"lr": 0.2, "outer_lr": 3.0, "lam": 0.1, "batch_size": 4, "local_steps": 5}
SPARSE = {**BASE, "gamma": 0.05, "gamma_w": 0.01, "rho": 0.1}
PROXIMAL = {**SPARSE, "l1": "proximal", "gamma": 0.3, "gamma_w": 0.02}


def reference(method: FedMac) -> Coupling:
    return Coupling(
        eta=method.outer_lr,
        eta_p=method.lr,
        lam=method.lam,
        distance=False,
        gamma=method.gamma,
        gamma_w=method.gamma_w,
        rho=method.rho,
        proximal=method.l1 == "proximal",
        inner=method.inner,
        nu=method.accuracy,
    )


def expected(method: FedMac) -> Any:
    return coupled_rounds(
        reference(method),
        personal.start(),
        personal.cohorts(),
        personal.draws(method),
        beta=method.beta,
        threshold=method.threshold,
        floor=method.floor,
    )


@pytest.mark.parametrize("engine", personal.ENGINES)
@pytest.mark.parametrize(
    "settings",
    [
        BASE,
        SPARSE,
        PROXIMAL,
        {**BASE, "beta": 1.5},
        personal.by_epochs(BASE, 2.0),
        {**SPARSE, "inner": 3},
        personal.by_epochs({**SPARSE, "inner": 3}, 1.0),
        {**SPARSE, "inner": 6, "accuracy": 0.4},
        {**PROXIMAL, "inner": 6, "accuracy": 0.05},
        {**SPARSE, "threshold": 0.3, "floor": 0.5},
        {**SPARSE, "threshold": 100.0, "floor": 0.3},
        {**SPARSE, "threshold": 0.3, "floor": 0.0},
    ],
)
def test_rounds_match_algorithm_1(settings: dict[str, Any], engine: Any) -> None:
    method = FedMac(**settings)
    found = personal.array(personal.run(method, engine).server)
    np.testing.assert_allclose(found, expected(method), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("settings", [BASE, PROXIMAL, {**SPARSE, "threshold": 0.3, "floor": 0.2}])
def test_personal_model_is_theta_made_of_the_received_model(settings: dict[str, Any]) -> None:
    method = FedMac(**settings)
    done = personal.run(method)
    for client in range(len(personal.SIZES)):
        batches = personal.tuning(method, client, "train")
        theta, _ = reference(method).client(personal.array(done.server), batches)
        theta = prune(theta, method.threshold, method.floor) if method.threshold else theta
        found = personal.array(done.personal(client).params)
        np.testing.assert_allclose(found, theta, rtol=1e-12, atol=1e-12)


def test_accuracy_stops_some_but_not_all_inner_steps() -> None:
    """Guard the parametrised test above: its nu must bite, or it would test nothing."""
    method = FedMac(**{**SPARSE, "inner": 6, "accuracy": 0.4})
    every = expected(FedMac(**{**SPARSE, "inner": 6}))
    one = expected(FedMac(**SPARSE))
    found = expected(method)
    assert np.abs(found - every).max() > 1e-4
    assert np.abs(found - one).max() > 1e-4


@pytest.mark.bits
def test_everyone_training_equals_the_cohort_training_bit_for_bit() -> None:
    runs = [personal.run(FedMac(**SPARSE, trains=trains)) for trains in ("cohort", "everyone")]
    assert [run.metrics[0]["trained"] for run in runs] == [3, 5]
    assert tree.same(runs[0].server, runs[1].server)
    for client in range(len(personal.SIZES)):
        ours, theirs = (run.personal(client).params for run in runs)
        assert tree.same(ours, theirs)
    assert runs[0].metrics[-1]["personal"] == runs[1].metrics[-1]["personal"]
    assert runs[0].bytes_up == runs[1].bytes_up


def test_vanishing_lambda_is_local_sgd_with_a_moving_average() -> None:
    """With eta lambda = c fixed, theta is plain SGD and w_i its moving average of rate c."""
    rate = 0.3
    errors = []
    for lam in (1e-3, 1e-6):
        method = FedMac(lr=0.2, outer_lr=rate / lam, lam=lam, batch_size=4, local_steps=5)
        theta = w = personal.start()
        for rows in personal.draws(method)(0, 1):
            theta = theta - method.lr * gradient(theta, rows)
            w = (1 - rate) * w + rate * theta
        start, shard = personal.PROBLEM.init(Key(personal.SEED)), personal.shard(method, 0, 1)
        anchor = method.client_update(personal.PROBLEM, start, None, shard).upload
        own = method.personalize(personal.PROBLEM, start, None, shard).params
        gaps = (personal.array(own) - theta, personal.array(anchor) - w)
        errors.append(max(np.abs(gap).max() for gap in gaps))
    assert errors[1] < 1e-5
    assert errors[0] / errors[1] == pytest.approx(1000, rel=0.01)  # first order in lambda


class Gate(nn.Module):
    """No chain of layers, so that the steps cannot be fused."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(personal.FEATURES, personal.CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.linear(x) * torch.sigmoid(self.linear(x))
        return logits


@pytest.mark.parametrize(
    "settings",
    [SPARSE, PROXIMAL, {**SPARSE, "inner": 2}, {**SPARSE, "inner": 3, "accuracy": 0.1}],
)
def test_batched_equals_one_by_one_where_nothing_can_be_fused(settings: dict[str, Any]) -> None:
    problem = NeuralProblem(Gate, dtype=torch.float64)
    method = FedMac(**personal.by_epochs(settings, 1.5), threshold=0.1)
    runs = [simulate(method, problem, personal.DATA, 2, executor=e) for e in personal.ENGINES]
    assert [run.metrics[0]["executor"] for run in runs] == ["loop", "vmap"]
    assert not any(record["notes"] for record in runs[1].metrics)
    for name, leaf in runs[0].server.items():
        torch.testing.assert_close(runs[1].server[name], leaf, rtol=1e-12, atol=1e-13)


def test_floor_and_threshold_bound_what_travels() -> None:
    sparse = personal.run(FedMac(**{**SPARSE, "threshold": 100.0, "floor": 0.5}))
    size = personal.FEATURES * personal.CLASSES + personal.CLASSES
    kept = math.ceil(0.5 * size)
    assert int((personal.array(sparse.server) != 0).sum()) == kept
    assert sparse.metrics[-1]["metrics"]["density"] == pytest.approx(kept / size)
    theta = personal.array(sparse.personal(0).params)
    assert int((theta != 0).sum()) == kept


def test_sparse_model_costs_little_more_than_its_support() -> None:
    """Half of 79,510 entries: 32 bits a value and one bit an entry for the support."""
    problem = NeuralProblem(
        lambda: nn.Sequential(nn.Linear(784, 100), nn.ReLU(), nn.Linear(100, 10))
    )
    draw = np.random.default_rng(0)
    rows = [(draw.normal(size=(8, 784)).astype(np.float32), draw.integers(10, size=8))] * 3
    method = FedMac(local_steps=1, threshold=1e9, floor=0.5)
    done = simulate(method, problem, rows, 2, evaluate_every=0)
    record = done.metrics[1]  # the first model that goes down is not sparse yet
    sent = record["bytes_up"] + record["bytes_down"]
    dense = record["dense_up"] + record["dense_down"]
    assert 0.5 + 1 / 32 - 1e-3 < sent / dense < 0.535


def test_proximal_variant_has_exact_zeros_and_the_smooth_one_has_none() -> None:
    settings = {**BASE, "gamma": 0.5, "gamma_w": 0.1, "rho": 0.2}
    proximal = personal.run(FedMac(**settings, l1="proximal"))
    smooth = personal.run(FedMac(**settings))
    assert (personal.array(proximal.personal(0).params) == 0).any()
    assert (personal.array(smooth.personal(0).params) != 0).all()


def test_no_steps_leave_the_model_where_it_was() -> None:
    method = FedMac(**{**SPARSE, "local_steps": 0})
    np.testing.assert_allclose(personal.array(personal.run(method).server), personal.start())


def test_step_size_beyond_theorem_1_is_noted_in_the_record() -> None:
    method = FedMac(**BASE)
    noted = personal.run(method).metrics[0]["metrics"]["outer_lr_over_theorem_1"]
    # eta beta R (18 + 256) (lambda + gamma_w / rho), the least that the theorem can ask for
    assert noted == pytest.approx(3.0 * 5 * 274 * 0.1)
    small = FedMac(**{**BASE, "outer_lr": 1e-3, "lam": 0.01})
    assert "outer_lr_over_theorem_1" not in personal.run(small).metrics[0]["metrics"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"outer_lr": 20000.0}, "outer_lr \\* lam = 2 must be below 2"),
        ({"rho": 1e-300}, "rho = 1e-300 must be at least 1e-30"),
        ({"rho": 0.0}, "FedMac.rho"),
        ({"rho": -1.0}, "FedMac.rho"),
        ({"floor": 1.5}, "FedMac.floor"),
        ({"floor": -0.1}, "FedMac.floor"),
        ({"gamma": -1.0}, "FedMac.gamma"),
        ({"inner": 0}, "FedMac.inner"),
        ({"l1": "hard"}, "FedMac.l1"),
        ({"trains": "nobody"}, "FedMac.trains"),
        ({"inner": 2, "momentum": 0.9}, "momentum"),
    ],
)
def test_bad_settings_are_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        FedMac(**settings)


def test_client_with_one_row_takes_part() -> None:
    done = simulate(FedMac(**BASE), personal.PROBLEM, personal.with_rows(1), 1)
    assert done.metrics[0]["trained"] == len(personal.SIZES)
    assert not done.metrics[0]["dropped"]


@pytest.mark.parametrize("threshold", [0.0, 1e-3])
def test_client_that_diverges_is_dropped_and_not_averaged(threshold: float) -> None:
    draw = np.random.default_rng(0)
    rows = [draw.normal(size=(20, 3)) for _ in range(3)]
    rows[1] = rows[1] * 1e60
    data = [(x, draw.normal(size=20)) for x in rows]
    method = FedMac(lr=0.1, threshold=threshold, batch_size=10)
    done = simulate(method, GLM(3, "squared"), data, 1, evaluate_every=0)
    assert [int(client) for client in done.metrics[0]["dropped"]] == [1]


@pytest.mark.parametrize("engine", personal.ENGINES)
@pytest.mark.parametrize("family", [FedMac, PFedMe])
@pytest.mark.parametrize(
    "settings",
    [
        {"l1": "proximal", "gamma": 6.0, "gamma_w": 1e-3},
        {"l1": "proximal", "gamma": 6.0, "inner": 3, "accuracy": 1e-9},
        {"gamma": 6.0, "gamma_w": 1e-5, "rho": 1.0},
        {"threshold": 100.0, "floor": 0.0},
    ],
)
def test_unpenalized_coefficients_are_neither_shrunk_nor_cut(
    settings: dict[str, Any], family: Any, engine: Any
) -> None:
    draw = np.random.default_rng(1)
    data = []
    for _ in range(3):
        x = draw.normal(size=(40, 5))
        data.append((x, 3.0 + x[:, 4] + 0.1 * draw.normal(size=40)))
    problem = GLM(5, "squared", intercept=True, keep=[4], dtype=torch.float64)
    own = {"outer_lr": 0.02, "lam": 15.0} if family is PFedMe else {}
    method = family(lr=0.05, local_steps=20, **own, **{"inner": 1, **settings})
    done = simulate(method, problem, data, 10, executor=engine)
    for params in (done.server, done.personal(0).params):
        found = params["coef"]
        assert float(found[5]) == pytest.approx(3.0, abs=0.3)
        assert float(found[4]) == pytest.approx(1.0, abs=0.3)
        assert float(found[:4].abs().max()) < 0.2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"outer_lr": 2000.0, "gamma_w": 1e-5}, r"\(lam \+ gamma_w / rho\) = 2.2"),
        ({"gamma": 0.5}, "lr \\* gamma / rho = 2.5"),
    ],
)
def test_steps_at_which_the_smoothed_norm_oscillates_are_warned_of(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.warns(UserWarning, match=message):
        FedMac(**settings).init_server(personal.PROBLEM, [], Key(0))
    exact = FedMac(**settings, l1="proximal")  # the proximal step is stable at any length
    exact.init_server(personal.PROBLEM, [], Key(0))


def test_settings_survive_json() -> None:
    method = FedMac(**PROXIMAL, trains="everyone", threshold=0.1)
    assert config.build(FedMac, config.to_json(method)) == method


def test_dtype_is_kept() -> None:
    problem = NeuralProblem(lambda: nn.Linear(4, 3))
    rows = [(np.ones((4, 4), np.float32), np.array([0, 1, 2, 0]))] * 2
    done = simulate(FedMac(**SPARSE), problem, rows, 1)
    assert {leaf.dtype for leaf in done.server.values()} == {torch.float32}
