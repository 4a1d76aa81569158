from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from parsifl.core.errors import ConfigError
from parsifl.engine.experiment import Experiment
from parsifl.engine.settings import Evaluation
from parsifl.flower import settings
from parsifl.flower.settings import Deployment


def flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten tables as Flower does."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            found.update(flat(value, f"{prefix}{name}."))
        else:
            found[prefix + name] = value
    return found


def test_an_experiment_survives_the_configuration_of_an_app() -> None:
    chosen = Experiment(
        "ditto",
        {"lr": 0.25, "personal_epochs": 2},
        clients=5,
        partition="dirichlet:alpha=0.1",
        evaluation=Evaluation(fine_tune_steps=3),
    )
    plan = Deployment(out="here", quorum=0.8, resume=True)
    found = settings.read(flat(settings.to_config(chosen, plan)))
    assert found.experiment.build_algorithm() == chosen.build_algorithm()
    assert replace(found.experiment, settings={}) == replace(chosen, settings={})
    assert found.deployment == plan
    assert found.clients == 5


def test_the_number_of_clients_must_be_said() -> None:
    with pytest.raises(ConfigError, match="clients is not set"):
        settings.read({"algorithm": "fedavg"})


@pytest.mark.parametrize(
    ("name", "value"), [("quorum", 1.5), ("timeout", 0.0), ("retries", -1), ("qorum", 0.5)]
)
def test_impossible_deployments_are_refused(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=name):
        settings.read({"algorithm": "fedavg", "clients": 2, f"deployment.{name}": value})
