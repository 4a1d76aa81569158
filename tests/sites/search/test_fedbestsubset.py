from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.support.regimes import Regime

from parsifl.core.errors import CapabilityError, ConfigError
from parsifl.core.keys import Key
from parsifl.data.clients import ClientData
from parsifl.engine.simulate import simulate
from parsifl.linear.glm import GLM
from parsifl.sites import FederatedSparseClassifier, FederatedSparseCox
from parsifl.sites.families.cox import Cox
from parsifl.sites.search.fedbestsubset import FedBestSubset, as_search
from parsifl.sites.search.subset_state import Phase
from parsifl.testing.conformance import check_algorithm


def _clients(regime: Regime) -> tuple[ClientData, np.ndarray, np.ndarray, np.ndarray]:
    sites = regime.draw()
    own = [
        (sites.x[sites.groups == i], sites.y[sites.groups == i]) for i in range(len(regime.sizes))
    ]
    return ClientData.of(own, test=0.0), sites.x, sites.y, sites.groups


@pytest.mark.parametrize("engine", ["loop", "fused"])
def test_a_run_equals_the_estimator(engine: str) -> None:
    regime = Regime("binomial", sizes=(60, 80, 70), features=40, nonzero=3)
    data, x, y, groups = _clients(regime)
    run = simulate(
        FedBestSubset(tau=3),
        GLM(40, "logistic", intercept=True),
        data,
        20,
        executor=engine,  # type: ignore[arg-type]
    )
    model = FederatedSparseClassifier(3, standardize=False).fit(x, y, groups=groups)
    found = run.model.params["coef"].numpy()
    assert np.flatnonzero(found[:-1]).tolist() == model.support_.tolist()
    np.testing.assert_allclose(found[:-1], model.coef_[0], rtol=1e-7, atol=1e-9)
    assert found[-1] == pytest.approx(model.intercept_[0], rel=1e-7)
    assert as_search(run.server).phase == Phase.CONVERGED
    assert len({record["bytes_down"] for record in run.metrics[-3:]}) == 1  # it has ended


def test_a_cox_run_equals_the_estimator() -> None:
    data, x, y, groups = _clients(Regime("cox", sizes=(60, 80, 70), features=40, nonzero=3))
    run = simulate(FedBestSubset(tau=3), Cox(40), data, 20)
    model = FederatedSparseCox(3, standardize=False).fit(x, y, groups=groups)
    found = run.model.params["coef"].numpy()
    np.testing.assert_allclose(found, model.coef_, rtol=1e-7, atol=1e-9)


def test_it_conforms_with_survival_times_and_with_own_intercepts() -> None:
    survival, *_ = _clients(Regime("cox", sizes=(18, 14, 20), features=8, nonzero=2))
    check_algorithm(FedBestSubset(tau=2), Cox(8), survival)
    regime = Regime("binomial", sizes=(18, 14, 20), features=8, nonzero=2, intercepts=1.0)
    classes, *_ = _clients(regime)
    problem = GLM(8, "logistic", intercept=True)
    check_algorithm(FedBestSubset(tau=2, intercepts="own"), problem, classes)


def test_own_intercepts_belong_to_the_clients() -> None:
    regime = Regime("binomial", sizes=(60, 80, 70), features=20, nonzero=2, intercepts=2.0)
    data, *_ = _clients(regime)
    method = FedBestSubset(tau=2, intercepts="own")
    run = simulate(method, GLM(20, "logistic", intercept=True), data, 20)
    own = [float(run.personal(i).params["coef"][-1]) for i in range(3)]
    assert len({round(value, 6) for value in own}) == 3
    assert float(run.model.params["coef"][-1]) == 0.0
    with pytest.raises(CapabilityError, match="intercept"):
        simulate(method, GLM(20, "logistic"), data, 1)


def test_settings_that_cannot_work_are_refused() -> None:
    with pytest.raises(ConfigError, match="without gaps"):
        FedBestSubset(units=(0, 2))
    data, *_ = _clients(Regime(sizes=(20, 20), features=5, nonzero=1))
    with pytest.raises(ConfigError, match="2 entries for 5 columns"):
        simulate(FedBestSubset(tau=1, units=(0, 1)), GLM(5), data, 1)
    with pytest.raises(CapabilityError, match="softmax"):
        FedBestSubset(tau=1).init_server(GLM(5, "softmax", classes=2), [], Key(0))


def test_candidates_follow_the_bytes() -> None:
    method = FedBestSubset(tau=10)
    assert method.beside(1000, 10, quadratic=True) == 1000
    assert method.beside(2000, 10, quadratic=True) == 40
    assert method.beside(1000, 10, quadratic=False) == 40
    small = FedBestSubset(tau=10, max_bytes=20_000)
    assert 1 <= small.beside(1000, 10, quadratic=False) < 40
    assert small.upload_bytes(1000, 10, quadratic=False) <= 20_000


def test_single_precision_ends_too() -> None:
    regime = Regime("binomial", sizes=(60, 80, 70), features=10, nonzero=2)
    sites = regime.draw()
    own = [
        (sites.x[sites.groups == i].astype(np.float32), sites.y[sites.groups == i])
        for i in range(3)
    ]
    problem = GLM(10, "logistic", dtype=torch.float32)
    run = simulate(FedBestSubset(tau=2), problem, ClientData.of(own, test=0.0), 20)
    assert int(run.server.phase) in (Phase.CONVERGED, Phase.STALLED)
