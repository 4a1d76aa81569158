from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.fixtures import TinyFedAvg, classifier, clients
from torch import nn

from parsifl.algorithms.fedavg import FedAvg
from parsifl.algorithms.fedgradmp import FedGradMP
from parsifl.algorithms.fedht import FedHT
from parsifl.algorithms.fedmac import FedMac
from parsifl.algorithms.fedrep import FedRep
from parsifl.algorithms.inexactfedgradmp import InexactFedGradMP
from parsifl.algorithms.perfedmask import PerFedMask
from parsifl.core.algorithm import ClientUpdate
from parsifl.core.errors import (
    ClientError,
    ConfigError,
    DataError,
    DivergenceWarning,
    ParsiflWarning,
)
from parsifl.engine.run import Run
from parsifl.engine.simulate import simulate
from parsifl.linear.glm import GLM
from parsifl.nn.neural import NeuralProblem


def test_a_client_that_does_not_exist_is_refused() -> None:
    run = simulate(FedAvg(local_steps=1), classifier(), clients((6, 9)), 1, evaluate_every=0)
    for client in (-1, 2):
        with pytest.raises(ConfigError, match="between 0 and 1"):
            run.personal(client)


@pytest.mark.parametrize("change", [{"rounds": 0}, {"evaluate_every": -1}])
def test_impossible_counts_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="Input should be greater than or equal to"):
        simulate(FedAvg(), classifier(), clients(), **{"rounds": 1, **change})


def test_an_unknown_precision_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"precision = 'int9': .* did you mean 'int8'"):
        simulate(FedAvg(), classifier(), clients(), 1, precision="int9")  # type: ignore[arg-type]  # a user's mistake


def test_own_arrays_and_own_module_are_enough() -> None:
    generator = np.random.default_rng(0)
    own = [(generator.normal(size=(8, 4)), generator.integers(0, 3, 8)) for _ in range(3)]
    run = simulate(FedAvg(lr=0.1, local_steps=2), NeuralProblem(nn.Linear(4, 3)), own, 2)
    assert run.metrics[-1]["global"]["test"]["accuracy"]["mean"] >= 0
    assert run.bytes_up > 0
    assert run.model.params["weight"].shape == (3, 4)


@dataclass(frozen=True)
class Failing(TinyFedAvg):
    """FedAvg whose clients fail in some rounds, counted from 0."""

    first: int = 1
    last: int = 100

    def client_update(
        self, problem: Any, received: Any, state: Any, data: Any
    ) -> ClientUpdate[None, Any]:
        if self.first <= data.round <= self.last:
            raise RuntimeError("out of luck.")
        return super().client_update(problem, received, state, data)


def fail(rounds: int = 8, **changes: Any) -> Any:
    first, last = changes.pop("first", 1), changes.pop("last", 100)
    method = Failing(lr=0.1, local_steps=1, batch_size=4, first=first, last=last)
    return simulate(method, classifier(), clients((6, 9)), rounds, executor="loop", **changes)


def test_a_run_without_clients_stops_after_three_rounds() -> None:
    with pytest.raises(ClientError, match=r"round 4: .*luck.*in 3 consecutive rounds"):
        fail(first=1)
    with pytest.raises(ClientError, match=r"round 1: .*every other client"):
        fail(first=0)
    with pytest.raises(ClientError, match="round 6"):
        fail(first=1, patience=5)


def test_a_run_recovers_within_its_patience() -> None:
    found = fail(first=1, last=2)
    assert [record.trained for record in found.records] == [2, 0, 0, 2, 2, 2, 2, 2]


def test_patience_counts_over_a_resumed_run(tmp_path: Path) -> None:
    fail(rounds=3, run_dir=tmp_path)
    with pytest.raises(ClientError, match="round 4"):
        fail(rounds=8, run_dir=tmp_path, resume=True)


def test_dropped_clients_are_warned_about_once() -> None:
    with pytest.warns(ParsiflWarning, match=r"Client 0 was dropped in round 2: .*luck\.$") as found:
        fail(first=1, last=2)
    assert len(found) == 2


def test_a_client_that_diverges_is_named_with_the_learning_rate() -> None:
    pairs = [(np.ones((8, 2)), np.arange(8) / 8), (1e200 * np.ones((8, 2)), np.arange(8) / 8)]
    told = r"Client 1 diverged in round 1 \(.*\) and was dropped\. Lower `lr` \(now 0.1\)"
    with pytest.warns(ParsiflWarning, match=told):
        simulate(FedAvg(lr=0.1, local_steps=3), GLM(2, "squared"), pairs, 1, evaluate_every=0)


def test_a_run_in_which_every_client_diverges_says_to_lower_the_rate() -> None:
    with pytest.raises(ClientError, match=r"every other client\)\. Lower `lr` \(now 1e\+200\)"):
        simulate(FedAvg(lr=1e200, local_steps=3), classifier(), clients((6, 9)), 2)


def test_huge_scores_are_recorded_without_warnings_of_numpy() -> None:
    run = simulate(FedAvg(lr=1e30, local_steps=3), classifier(), clients((6, 9)), 1)
    assert run.records[0].scores["global"]["test"]["loss"]["mean"] > 1e100


def test_a_model_that_grows_without_bound_is_warned_of() -> None:
    """lam above the strong convexity of the losses: the values stay finite for a long time."""
    draw = np.random.default_rng(0)
    own = [(x, (x[:, 0] > 0).astype(int)) for x in (draw.normal(size=(20, 5)) for _ in range(3))]
    method = FedMac(lam=3.0, outer_lr=0.3, lr=0.05)
    with pytest.warns(DivergenceWarning, match=r"up to .*e\+.*Lower `lr` \(now 0.05\)"):
        run = simulate(method, GLM(5, "logistic"), own, 30, evaluate_every=0)
    assert float(run.server["coef"].abs().max()) > 1e9


def test_shared_layers_that_grow_without_bound_are_warned_of() -> None:
    """FedRep has no global model: the server's state holds the layers."""
    draw = np.random.default_rng(0)
    own = [(draw.normal(size=(20, 4)), np.arange(20) % 3) for _ in range(3)]
    problem = NeuralProblem(lambda: nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)))

    def train(lr: float) -> Run:
        return simulate(FedRep(lr=lr, local_steps=2), problem, own, 3, evaluate_every=0)

    expected = r"the server's state holds values up to .*e\+.*Lower `lr` \(now 1000\)"
    with pytest.warns(DivergenceWarning, match=expected):
        run = train(1e3)
    assert max(float(leaf.abs().max()) for leaf in run.server.values()) > 1e9
    assert any("diverged" in note for record in run.records for note in record.notes)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(0.1)


def test_profiles_describe_the_devices_of_plain_clients() -> None:
    generator = np.random.default_rng(0)
    own = [(generator.normal(size=(8, 4)), np.arange(8) % 3) for _ in range(3)]
    profiles = [{"local_steps": 2}, {}, {"local_steps": 0}]
    run = simulate(FedAvg(), classifier(), own, 1, profiles=profiles)
    assert [client.profile for client in run.pool.clients] == profiles
    data = clients((6, 9))
    run = simulate(FedAvg(), classifier(), data, 1, profiles=[{"epochs": 1}, {}])
    assert run.pool.clients[0].profile == {"epochs": 1}
    with pytest.raises(DataError, match="profiles has 1 clients but train has 2"):
        simulate(FedAvg(), classifier(), data, 1, profiles=[{}])


@pytest.mark.parametrize(
    ("algorithm", "entry"),
    [(FedHT(tau=2), "steps"), (PerFedMask(), "psi"), (PerFedMask(), "flops"), (FedAvg(), "width")],
)
def test_entries_of_a_profile_that_are_not_read_are_warned_of(algorithm: Any, entry: str) -> None:
    problem = classifier() if isinstance(algorithm, PerFedMask) else GLM(4, "softmax", classes=3)
    told = rf"does not read {entry} of the device profiles; it reads .*local_steps"
    with pytest.warns(ParsiflWarning, match=told):
        simulate(algorithm, problem, clients((6, 9)), 1, profiles=[{}, {entry: 1}])


def test_entries_that_fedgradmp_reads_cause_no_warning() -> None:
    problem, profile = GLM(4, "softmax", classes=3), {"importance": 2.0, "local_steps": 1}
    for algorithm in (FedGradMP(tau=2), InexactFedGradMP(tau=2)):
        simulate(algorithm, problem, clients((6, 9)), 1, profiles=[{}, profile])


@pytest.mark.parametrize("entry", ["epoch", "Epochs", "flops_per_secnd"])
def test_a_misspelt_entry_of_a_profile_is_rejected_by_every_algorithm(entry: str) -> None:
    with pytest.raises(ConfigError, match=f"client 1 has '{entry}'; did you mean"):
        simulate(FedAvg(), classifier(), clients((6, 9)), 1, profiles=[{}, {entry: 1}])
