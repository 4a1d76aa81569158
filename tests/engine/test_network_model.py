from __future__ import annotations

import pytest

from parsifl.core.errors import ConfigError
from parsifl.engine.costs import NetworkModel


def test_seconds_add_latency_transfer_and_computing() -> None:
    network = NetworkModel(latency=0.15, up=100.0, down=1000.0)
    device = {"flops_per_second": 1e6}
    assert network.seconds(200, 500, 3_000_000, device) == pytest.approx(0.3 + 2 + 0.5 + 3)
    assert network.seconds(0, 500, None, device) == pytest.approx(0.15 + 0.5)
    assert network.seconds(0, 0, 3_000_000, {}) == 0.0
    assert NetworkModel().seconds(10**9, 10**9, None, {}) == 0.0


@pytest.mark.parametrize("setting", [{"up": 0.0}, {"down": -1.0}, {"latency": -0.1}])
def test_an_impossible_network_is_refused(setting: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=r"NetworkModel\."):
        NetworkModel(**setting)
