from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.fixtures import classifier, clients

from parsifl.algorithms.composed import Composed, CoordinateMedian
from parsifl.algorithms.ditto import Ditto
from parsifl.algorithms.fedamp import FedAMP
from parsifl.algorithms.fedavg import FedAvg
from parsifl.algorithms.fedprox import FedProx
from parsifl.algorithms.fedslr import FedSLR
from parsifl.algorithms.perfedmask import PerFedMask
from parsifl.algorithms.scaffold import Scaffold
from parsifl.core import registry, tree
from parsifl.core.algorithm import AnyAlgorithm, ClientInfo, ClientUpload
from parsifl.core.errors import CapabilityError, ConfigError
from parsifl.core.keys import Key
from parsifl.core.leaves import LowRank, densify
from parsifl.data.clients import ClientData
from parsifl.engine.simulate import simulate
from parsifl.solvers.server_optimizers import Adam, Sgd
from parsifl.solvers.upload_transforms import Delta, TopK
from parsifl.testing.conformance import run_checks
from parsifl.testing.conformance.examples import example_for
from parsifl.testing.conformance.harness import small, snapshot

SETTINGS: dict[str, Any] = {"lr": 0.1, "local_steps": 2, "batch_size": 4}
ENGINES: tuple[Any, ...] = ("loop", "vmap", "fused")
FULL: dict[str, Any] = {
    "uploads": (Delta(), TopK(0.2)),
    "aggregation": CoordinateMedian,
    "server_optimizer": Adam(lr=0.05),
}


@pytest.mark.filterwarnings("ignore:.* does not read local_steps of the device profiles")
@pytest.mark.parametrize("name", sorted(registry.algorithms()))
def test_without_changes_it_gives_the_bits_of_the_algorithm(name: str) -> None:
    algorithm = small(registry.find(name))
    example = example_for(algorithm)
    plain = simulate(algorithm, example.problem, example.data, 2, executor="loop")
    same = simulate(Composed(algorithm), example.problem, example.data, 2, executor="loop")
    assert tree.same(snapshot(plain), snapshot(same))


def adam(starts: np.ndarray[Any, Any], means: Any, rounds: int) -> np.ndarray[Any, Any]:
    """FedAdam of the paper (Algorithm 2), on any way to get the mean of a round."""
    w, m, v = starts.copy(), np.zeros_like(starts), np.zeros_like(starts)
    for _ in range(rounds):
        change = means(w) - w
        m = 0.9 * m + 0.1 * change
        v = 0.99 * v + 0.01 * change**2
        w = w + 0.05 * m / (np.sqrt(v) + 1e-3)
    return w


def test_fedadam_takes_the_steps_of_the_paper() -> None:
    """Full batches make a round a function of the model alone."""
    problem, data = classifier(), clients((6, 6, 6))
    inner = FedAvg(lr=0.1, local_steps=2, batch_size=6)
    found = simulate(Composed(inner, server_optimizer=Adam(lr=0.05)), problem, data, 3)
    names = list(found.server.params)

    def flat(params: Any) -> np.ndarray[Any, Any]:
        return np.concatenate([params[name].numpy().ravel() for name in names])

    def mean(w: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        shapes = {name: found.server.params[name].shape for name in names}
        parts = np.split(w, np.cumsum([shapes[n].numel() for n in names])[:-1])
        start = {
            n: torch.from_numpy(p.copy()).reshape(shapes[n])
            for n, p in zip(names, parts, strict=True)
        }
        begun = replace_start(problem, start)
        return flat(simulate(inner, begun, data, 1, evaluate_every=0).server)

    wanted = adam(flat(problem.init(Key(0, purpose="server"))), mean, 3)
    assert flat(found.server.params) == pytest.approx(wanted, rel=1e-12, abs=1e-14)


def replace_start(problem: Any, start: Any) -> Any:
    class Begun(type(problem)):  # type: ignore[misc]  # the same problem from other parameters
        def init(self, key: Any) -> Any:  # noqa: ARG002 - the start is given
            return dict(start)

    made = object.__new__(Begun)
    made.__dict__.update(problem.__dict__)
    return made


def test_sgd_with_rate_one_changes_nothing_but_rounding() -> None:
    problem, data = classifier(), clients()
    plain = simulate(FedAvg(**SETTINGS), problem, data, 3)
    moved = simulate(Composed(FedAvg(**SETTINGS), server_optimizer=Sgd()), problem, data, 3)
    for name, value in plain.server.items():
        assert torch.allclose(moved.server.params[name], value, rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("algorithm", [FedAvg(**SETTINGS), FedProx(**SETTINGS), Ditto(**SETTINGS)])
def test_top_k_sends_few_entries_and_keeps_the_rest_for_later(
    algorithm: AnyAlgorithm, engine: Any
) -> None:
    problem, data = classifier(torch.float32), clients(dtype=torch.float32)
    composed = Composed(algorithm, uploads=(Delta(), TopK(0.05)))
    few = simulate(composed, problem, data, 3, executor=engine)
    loop = simulate(composed, problem, data, 3, executor="loop")
    assert few.bytes_up < 0.6 * simulate(algorithm, problem, data, 3).bytes_up
    assert not any(record.notes or record.dropped for record in few.records)
    for name, value in loop.server.items():
        assert torch.allclose(few.server[name], value, rtol=1e-4, atol=1e-5)
    residuals = [state.stages[1] for _, state in few.pool.store]
    assert any(float(tree.norm(residual)) > 0 for residual in residuals)


def test_with_all_entries_top_k_loses_nothing() -> None:
    problem, data = classifier(), clients()
    composed = Composed(FedAvg(**SETTINGS), uploads=(Delta(), TopK(1.0)))
    plain = simulate(FedAvg(**SETTINGS), problem, data, 3)
    found = simulate(composed, problem, data, 3)
    for name, value in plain.server.items():
        assert torch.allclose(found.server[name], value, rtol=1e-12, atol=1e-14)


def test_a_median_is_not_moved_by_a_minority() -> None:
    accumulator = CoordinateMedian()
    for client, value in enumerate((1.0, 2.0, 1e9, 3.0, -1e9)):
        upload = {"w": torch.tensor([value, 2 * value])}
        accumulator.add(ClientUpload(ClientInfo(client, 1), 1.0, upload))
    assert accumulator.total()["w"].tolist() == [2.0, 4.0]
    accumulator.add(ClientUpload(ClientInfo(9, 1), 1.0, {"w": torch.tensor([4.0, 8.0])}))
    assert accumulator.total()["w"].tolist() == [2.5, 5.0]
    with pytest.raises(CapabilityError, match="partial totals"):
        accumulator.merge(accumulator.total())


def test_a_median_of_factored_uploads_is_that_of_their_products() -> None:
    accumulator, rng = CoordinateMedian(), np.random.default_rng(0)
    products = []
    for client in range(4):
        left, right = rng.normal(size=(5, 2)), rng.normal(size=(2, 3))
        products.append(left @ right)
        factors = LowRank(torch.from_numpy(left), torch.from_numpy(right), (5, 3))
        accumulator.add(ClientUpload(ClientInfo(client, 1), 1.0, {"w": factors}))
    found = accumulator.total()["w"]
    np.testing.assert_allclose(found.numpy(), np.median(products, axis=0), rtol=1e-12)


@pytest.mark.parametrize("changes", [
    {"uploads": (Delta(), TopK(0.2))},
    {"aggregation": CoordinateMedian},
    {"server_optimizer": Adam()},
    FULL,
], ids=["uploads", "aggregation", "server", "all"])  # fmt: skip
def test_it_resumes_with_the_same_bits(changes: dict[str, Any], tmp_path: Path) -> None:
    algorithm = Composed(Ditto(**SETTINGS), **changes)
    problem, data = classifier(), clients()
    whole = simulate(algorithm, problem, data, 4)
    simulate(algorithm, problem, data, 2, run_dir=tmp_path)
    resumed = simulate(algorithm, problem, data, 4, run_dir=tmp_path, resume=True)
    assert tree.same(snapshot(resumed), snapshot(whole))


@pytest.mark.parametrize("algorithm", [FedAvg(**SETTINGS), Ditto(**SETTINGS)])
def test_it_keeps_the_promises_of_an_algorithm(algorithm: AnyAlgorithm) -> None:
    checks = [
        "batched equals one by one", "no fallback, no client dropped", "messages survive the wire",
        "resumed equals uninterrupted", "inputs stay as they are", "same key, same bits",
        "upload foreseen without data", "dtype and device kept",
    ]  # fmt: skip
    composed = Composed(algorithm, uploads=(Delta(), TopK(0.2)), server_optimizer=Adam())
    example = example_for(algorithm)
    for result in run_checks(composed, example.problem, example.data, checks=checks):
        assert result.status != "failed", f"{result.check}: {result.reason}"


@pytest.mark.parametrize("changes", [{"uploads": (TopK(1.0),)}, {"aggregation": CoordinateMedian}])
def test_changes_read_low_rank_uploads_as_tensors(changes: dict[str, Any]) -> None:
    algorithm = FedSLR(**SETTINGS, solver="local", lam=4.0)
    problem, data = classifier(), clients()
    plain = simulate(algorithm, problem, data, 1)
    assert plain.records[0].parameters_up < plain.records[0].parameters_down
    found = simulate(Composed(algorithm, **changes), problem, data, 1)
    assert not any(record.notes or record.dropped for record in found.records)
    if "uploads" in changes:
        for name, value in densify(plain.server.params).items():
            assert torch.allclose(densify(found.server.params)[name], value, atol=1e-12)


def identical(data: ClientData) -> ClientData:
    """Return six clients that have the rows and the profile of the first one."""
    return replace(
        data,
        train=[data.train[0]] * 6,
        validation=[data.validation[0]] * 6,
        test=[data.test[0]] * 6,
        profiles=({},) * 6,
    )


@pytest.mark.filterwarnings("ignore")  # defaults of some algorithms do not fit so small a model
@pytest.mark.parametrize("name", sorted(registry.algorithms()))
def test_identical_clients_have_their_mean_as_median(name: str) -> None:
    algorithm: Any = small(registry.find(name))
    if {"batch_size", "local_steps"} <= vars(algorithm).keys():  # full batches: no random rows
        algorithm = replace(algorithm, batch_size=1000)
    try:
        composed = Composed(algorithm, aggregation=CoordinateMedian)
    except ConfigError:
        return
    example = example_for(algorithm)
    data = identical(example.data)
    plain = simulate(algorithm, example.problem, data, 2, executor="loop")
    robust = simulate(composed, example.problem, data, 2, executor="loop")
    assert not any(record.dropped for record in robust.records)
    (means, structure), (medians, same) = tree.flatten(plain.server), tree.flatten(robust.server)
    assert structure == same
    for mean, median in zip(means, medians, strict=True):
        assert torch.allclose(median, mean, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("solver", ["dual", "global", "local"])
def test_the_dual_of_fedslr_moves_as_with_the_mean(solver: Any) -> None:
    algorithm = FedSLR(lr=0.1, local_steps=2, batch_size=100, solver=solver, lam=0.0)
    problem, data = classifier(), identical(clients())
    plain = simulate(algorithm, problem, data, 2)
    robust = simulate(Composed(algorithm, aggregation=CoordinateMedian), problem, data, 2)
    for part in ("params", "dual"):
        mean, median = (densify(getattr(run.server, part)) for run in (plain, robust))
        for name, value in mean.items():
            assert torch.allclose(median[name], value, rtol=1e-9, atol=1e-12)
    assert solver != "dual" or any(value.any() for value in plain.server.dual.values())


CHANGES: tuple[dict[str, Any], ...] = (
    {"uploads": (Delta(), TopK(0.5))},
    {"aggregation": CoordinateMedian},
    {"server_optimizer": Sgd()},
)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("changes", CHANGES, ids=["uploads", "aggregation", "server"])
@pytest.mark.parametrize("name", sorted(registry.algorithms()))
def test_what_is_accepted_runs(name: str, changes: dict[str, Any]) -> None:
    algorithm = small(registry.find(name))
    example = example_for(algorithm)
    if name == "perfedmask":  # clients that train different layers
        budgets = tuple({"budget": budget} for budget in np.linspace(0.3, 1, len(example.data)))
        example = replace(example, data=replace(example.data, profiles=budgets))
    try:
        composed = Composed(algorithm, **changes)
    except ConfigError:
        return
    run = simulate(composed, example.problem, example.data, 2, executor="loop")
    assert not any(record.dropped for record in run.records)


def test_what_does_not_fit_is_rejected() -> None:
    with pytest.raises(ConfigError, match="FedAMP reads every upload: remove `aggregation`"):
        Composed(FedAMP(), aggregation=CoordinateMedian)
    for changes in CHANGES[:2]:
        with pytest.raises(ConfigError, match="clients of PerFedMask upload submodels"):
            Composed(PerFedMask(), **changes)
    with pytest.raises(ConfigError, match="Scaffold keeps"):
        Composed(Scaffold(), server_optimizer=Adam())
    with pytest.raises(ConfigError, match="FedSLR keeps"):
        Composed(FedSLR(), server_optimizer=Adam())
    with pytest.raises(ConfigError, match="uploads"):
        Composed(Scaffold(), uploads=(TopK(0.1),))
    with pytest.raises(ConfigError, match="above 0"):
        TopK(0.0)
    with pytest.raises(ConfigError, match=r"Adam\.lr"):
        replace(Adam(), lr=-1.0)
