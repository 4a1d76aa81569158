from __future__ import annotations

from typing import Any

import pytest

from parsifl.core import registry
from parsifl.core.errors import ConfigError
from parsifl.engine.experiment import Experiment

PRESETS = [
    (name, preset) for name, kind in registry.algorithms().items() for preset in kind.presets
]


@pytest.mark.parametrize(("name", "preset"), PRESETS)
def test_every_preset_builds_and_names_its_source(name: str, preset: str) -> None:
    method: Any = registry.get(name, preset=preset)
    wanted = type(method).presets[preset]
    assert {field: getattr(method, field) for field in wanted.settings} == dict(wanted.settings)
    assert wanted.source
    if preset.startswith("paper:"):
        assert any(word in wanted.source for word in ("Section", "Table", "Figure", "Appendix"))
        assert wanted.run


def test_settings_override_the_preset() -> None:
    method: Any = registry.get("fedslr", preset="paper:cifar10", lam=0.5)
    assert (method.lam, method.eta_g, method.epochs) == (0.5, 10.0, 2.0)


def test_local_steps_replace_the_epochs_of_a_preset() -> None:
    method: Any = registry.get("perfedmask", preset="paper:cifar10", local_steps=3)
    assert (method.local_steps, method.epochs) == (3, None)
    method = registry.get("perfedmask", preset="paper:cifar10", epochs=1.0)
    assert method.epochs == 1.0


def test_every_paper_has_one() -> None:
    named = {name for name, preset in PRESETS if preset.startswith("paper:")}
    assert named >= {"fedslr", "fedmac", "fedht", "fediterht", "fedgradmp", "perfedmask"}


def test_hard_thresholding_has_steps_of_the_papers_grid() -> None:
    for name in ("fedht", "fediterht", "distributediht"):
        for preset in ("paper:simulations", "paper:mnist"):
            method: Any = registry.get(name, preset=preset)
            assert method.lr in (10.0, 1.0, 0.6, 0.3, 0.1, 0.06, 0.03, 0.01, 0.001)
            assert method.local_steps in ((1,) if name == "distributediht" else (3, 5, 8, 10))


def test_an_unknown_preset_is_rejected_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="did you mean 'paper:cifar10'"):
        registry.get("fedslr", preset="paper:cifr10")
    with pytest.raises(ConfigError, match="FedAvg has no presets"):
        registry.get("fedavg", preset="paper:mnist")


def test_fedmac_can_send_few_bytes() -> None:
    """Its defaults have no zeros: the smoothed norm never reaches them."""

    def sent(**settings: Any) -> float:
        run = Experiment(
            "fedmac", settings, data="digits", clients=10, rounds=30, evaluate_every=0
        ).run()
        record = run.records[-1]
        return (record.bytes_up + record.bytes_down) / (record.dense_up + record.dense_down)

    assert sent(gamma=1e-3) > 0.95
    assert sent(preset="few-bytes") < 0.5
