from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tests.algorithms import lowrank
from tests.algorithms.lowrank import Engine
from tests.reference_lowrank import Array, Slr, gradient, zeros
from tests.reference_sparse import float16, int8
from tests.support.fixtures import classifier
from torch import nn

from parsifl import wire
from parsifl.algorithms._bases.averaging import Mean
from parsifl.algorithms.feddyn import FedDyn
from parsifl.algorithms.fedslr import FedSLR, SlrServer, _all_dead
from parsifl.core import tree
from parsifl.core.errors import ConfigError, DroppedClientWarning
from parsifl.core.keys import Key
from parsifl.core.leaves import LowRank
from parsifl.data.clients import ClientData
from parsifl.engine.batch_sampler import BatchSampler, Infos
from parsifl.engine.simulate import simulate
from parsifl.engine.training import RoundEnd
from parsifl.linear.glm import GLM
from parsifl.nn.neural import NeuralProblem
from parsifl.solvers.svt import Compact

BASE: dict[str, Any] = {
    "eta_g": 2.0, "lam": 0.03, "mu": 0.1, "lr": 0.2, "lr_decay": 0.9, "weight_decay": 0.01,
}  # fmt: skip
VARIANTS: list[dict[str, Any]] = [
    {},
    {"solver": "local"},  # LPGD
    {"solver": "global"},  # GPGD
    {"global_penalty": "sparse"},  # S+S
    {"global_penalty": "sparse", "personal_penalty": "low-rank"},  # S+LR
    {"personal_penalty": "low-rank"},  # LR+LR
]


@pytest.mark.parametrize("participation", [1.0, lowrank.PARTICIPATION], ids=["all", "some"])
@pytest.mark.parametrize("engine", lowrank.ENGINES)
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: "-".join(v.values()) or "fedslr")
def test_one_mean_dual_gives_the_iterates_of_one_dual_a_client(
    variant: dict[str, Any], engine: Engine, participation: float
) -> None:
    """Algorithm 3 against Algorithm 1 (all take part) and Algorithm 2 (some do)."""
    method = FedSLR(**BASE, **variant, batch_size=4, local_steps=5, personal_epochs=1.0)
    w0 = lowrank.start()
    reference = Slr(**BASE, **variant)
    cohorts = lowrank.cohorts(participation=participation)
    expected = reference.rounds(w0, zeros(w0), cohorts, len(lowrank.SIZES), lowrank.draws(method))
    done = lowrank.run(method, engine, participation=participation)
    lowrank.assert_same(done.server.params, expected.w)
    for client, state in done.pool.store:
        lowrank.assert_same(state.personal, expected.p[client])
        mixed = {n: expected.w[n] + expected.p[client][n] for n in w0}
        lowrank.assert_same(done.personal(client).params, mixed)
        if method.solver == "dual":
            lowrank.assert_same(state.dual, expected.gamma[client])


@pytest.mark.parametrize("engine", lowrank.ENGINES)
@pytest.mark.parametrize(("precision", "rounded"), [("float16", float16), ("int8", int8)])
def test_over_a_lossy_wire_it_follows_the_same_equations(
    precision: Any, rounded: Any, engine: Engine
) -> None:
    """Both sides use what was transmitted. With a small lam, layers are sent dense."""
    settings = {**BASE, "lam": 1e-3}
    method = FedSLR(**settings, batch_size=4, local_steps=5, personal_epochs=1.0)
    w0 = lowrank.start()
    expected = Slr(**settings, wire=rounded).rounds(
        w0, zeros(w0), lowrank.cohorts(), len(lowrank.SIZES), lowrank.draws(method)
    )
    done = lowrank.run(method, engine, precision=precision)
    assert not any(isinstance(value, LowRank) for value in done.server.params.values())
    lowrank.assert_same(done.server.params, expected.w)
    for client, state in done.pool.store:
        lowrank.assert_same(state.personal, expected.p[client])
        lowrank.assert_same(state.dual, expected.gamma[client])


def test_a_copied_personal_start_follows_the_same_equations() -> None:
    method = FedSLR(**BASE, p_init="copy", batch_size=4, local_steps=3)
    w0 = lowrank.start()
    p0 = {n: v if v.ndim > 1 else np.zeros_like(v) for n, v in w0.items()}
    expected = Slr(**BASE).rounds(
        w0, p0, lowrank.cohorts(), len(lowrank.SIZES), lowrank.draws(method)
    )
    for client, state in lowrank.run(method).pool.store:
        lowrank.assert_same(state.personal, expected.p[client])


@pytest.mark.parametrize("participation", [0.6, 1.0])
def test_without_a_penalty_it_is_feddyn(participation: float) -> None:
    # the two methods name their mini-batches differently: full batches make them the same rows
    full: dict[str, Any] = {"lr": 0.1, "batch_size": 24, "local_steps": 5}
    slr, dyn = FedSLR(lam=0.0, eta_g=4.0, **full), FedDyn(alpha=0.25, **full)
    ours = lowrank.run(slr, rounds=20, participation=participation)
    theirs = lowrank.run(dyn, rounds=20, participation=participation)
    lowrank.assert_same(ours.server.params, lowrank.arrays(theirs.server.params))
    lowrank.assert_same(ours.server.dual, lowrank.arrays(theirs.server.dual))


def test_the_personal_component_is_sparse_and_the_global_model_of_low_rank() -> None:
    done = lowrank.run(FedSLR(**{**BASE, "lam": 0.06}, batch_size=4, local_steps=5))
    w = lowrank.arrays(done.server.params)["0.weight"]
    kept = done.server.params["0.weight"]
    assert isinstance(kept, LowRank)
    assert np.linalg.matrix_rank(w) == kept.left.shape[1] < min(w.shape)
    for _, state in done.pool.store:
        flat = torch.cat([value.reshape(-1) for value in state.personal.values()])
        assert 0 < int((flat != 0).sum()) < flat.numel()


def test_the_global_model_does_not_read_personal_components() -> None:
    usual, pure = (
        lowrank.run(FedSLR(**{**BASE, "mu": mu}, batch_size=4, local_steps=5)) for mu in (0.1, 10)
    )
    for name, value in lowrank.arrays(usual.server.params).items():
        np.testing.assert_array_equal(value, lowrank.arrays(pure.server.params)[name])
    for _, state in pure.pool.store:
        assert not any(value.any() for value in state.personal.values())


# ---------------------------------------------------------------- bytes
@pytest.mark.parametrize("rank", [1, 5, 40])
def test_a_layer_of_rank_r_costs_its_factors_and_never_more_than_dense(rank: int) -> None:
    rows, columns = 384, 192
    draw = torch.Generator().manual_seed(rank)
    left = torch.randn(rows, rank, generator=draw)
    exact = left @ torch.randn(rank, columns, generator=draw)
    noise = 1e-4 * torch.randn(rows, columns, generator=draw)
    point = {"conv": (exact + noise).reshape(128, 3, 64, 3).swapaxes(1, 2).contiguous()}
    sent = FedSLR(lam=1e-2, eta_g=10.0)._prox(point, 10.0)
    size = wire.size(sent)
    assert abs(size / (4 * rank * (rows + columns)) - 1) < 0.01 or rank == 1
    assert size < 4 * rank * (rows + columns) + 64
    assert size < wire.size(point)


def test_a_layer_of_full_rank_is_sent_dense() -> None:
    point = {"w": torch.randn(40, 30, generator=torch.Generator().manual_seed(0))}
    sent = FedSLR(lam=1e-6, eta_g=1.0)._prox(point, 1.0)
    assert isinstance(sent["w"], torch.Tensor)
    assert wire.size(sent) <= wire.size(point)


# ---------------------------------------------------------------- theory
def test_with_exact_local_solves_the_dual_is_the_local_gradient() -> None:
    eta_g = 0.2
    method = FedSLR(
        eta_g=eta_g, lam=0.02, lr=0.1, batch_size=24, local_steps=400, personal_epochs=0.0
    )
    before = lowrank.run(method, "fused", rounds=2, participation=1.0)
    after = lowrank.run(method, "fused", rounds=3, participation=1.0)
    w_t, old = lowrank.arrays(before.server.params), dict(before.pool.store)
    for client, state in after.pool.store:
        dual, previous = lowrank.arrays(state.dual), lowrank.arrays(old[client].dual)
        w_i = {n: w_t[n] - eta_g * (dual[n] - previous[n]) for n in w_t}  # equation (5)
        slope = gradient(w_i, lowrank.all_rows(client))
        for name in slope:
            np.testing.assert_allclose(dual[name], slope[name], atol=1e-8)


class Convex:
    """A linear regression with several outputs a client: convex, with a known L."""

    outputs, features, clients, rows = 4, 5, 3, 30

    def __init__(self) -> None:
        draw = np.random.default_rng(1)
        truth = draw.normal(size=(self.outputs, 2)) @ draw.normal(size=(2, self.features))
        self.x = [draw.normal(size=(self.rows, self.features)) for _ in range(self.clients)]
        shifts = [0.3 * draw.normal(size=truth.shape) for _ in range(self.clients)]
        self.y = [
            x @ (truth + shift).T + 0.1 * draw.normal(size=(self.rows, self.outputs))
            for x, shift in zip(self.x, shifts, strict=True)
        ]
        hessians = [2 / self.outputs * x.T @ x / self.rows for x in self.x]
        self.smoothness = max(float(np.linalg.eigvalsh(h)[-1]) for h in hessians)
        self.problem = NeuralProblem(
            lambda: nn.Linear(self.features, self.outputs, bias=False), "mse", dtype=torch.float64
        )
        self.data = ClientData.of(list(zip(self.x, self.y, strict=True)), test=0.0)

    def value(self, client: int, w: Array) -> float:
        return float(np.mean((self.x[client] @ w.T - self.y[client]) ** 2))

    def slope(self, client: int, w: Array) -> Array:
        x, y = self.x[client], self.y[client]
        found: Array = 2 * (x @ w.T - y).T @ x / y.size
        return found

    def walk(self, method: FedSLR, rounds: int) -> Iterator[tuple[Array, list[Array]]]:
        """Give w and every gamma_i after each round, all clients taking part."""
        infos, shards = Infos(self.data), BatchSampler(self.data, self.problem)
        server = method.init_server(self.problem, infos, Key(0))
        down = method.broadcast(self.problem, server, infos[0], Key(0))
        states = [method.init_client(self.problem, info, down, Key(0)) for info in infos]
        for round in range(rounds):
            total: Mean | None = None
            for info in infos:
                key = Key(0, round=round)
                shard = shards.draw(info.id, method.batches(info, round), key)
                done = method.client_update(self.problem, server.params, states[info.id], shard)
                states[info.id] = done.state
                part = method.contribute(self.problem, done.upload, method.weight(info))
                total = tree.accumulate(total, part)
            assert total is not None
            server = method.aggregate(self.problem, server, total, Key(0, round=round))
            w = lowrank.arrays(server.params)["weight"]
            yield w, [state.dual["weight"].numpy() for state in states]


LAM = 0.1


def test_the_potential_of_the_proof_never_rises() -> None:
    """Definition 1, with exact local solves and eta_g = 1 / (2 L)."""
    convex = Convex()
    eta_g = 1 / (2 * convex.smoothness)
    method = FedSLR(
        eta_g=eta_g, lam=LAM, lr=1 / (3 * convex.smoothness), batch_size=convex.rows,
        local_steps=30,
        personal_epochs=0.0,
    )  # fmt: skip
    w_t = convex.problem.init(Key(0))["weight"].numpy()
    old = [np.zeros_like(w_t)] * convex.clients
    values = []
    for w, gammas in convex.walk(method, 15):
        terms = []
        for i, (new, before) in enumerate(zip(gammas, old, strict=True)):
            w_i = w_t - eta_g * (new - before)
            gap = w - w_i
            terms.append(convex.value(i, w_i) + np.sum(new * gap) + np.sum(gap**2) / (2 * eta_g))
        nuclear = np.linalg.svd(w, compute_uv=False).sum()
        values.append(float(np.mean(terms) + LAM * nuclear))
        w_t, old = w, gammas
    falls = -np.diff(values)
    assert (falls >= -1e-10).all()
    assert falls[0] > 1e-3


def test_the_limit_is_that_of_centralised_proximal_gradient() -> None:
    convex = Convex()
    step = 1 / (2 * convex.smoothness)
    method = FedSLR(
        eta_g=step, lam=LAM, lr=1 / (3 * convex.smoothness), batch_size=convex.rows, local_steps=8,
        personal_epochs=0.0,
    )  # fmt: skip
    *_, (found, _) = convex.walk(method, 120)
    w = np.zeros_like(found)
    for _ in range(2000):
        slope = np.mean([convex.slope(i, w) for i in range(convex.clients)], 0)
        u, s, v = np.linalg.svd(w - step * slope, full_matrices=False)
        w = (u * np.maximum(s - step * LAM, 0)) @ v
    assert np.linalg.matrix_rank(w) < min(w.shape)
    np.testing.assert_allclose(found, w, atol=1e-7)


# ---------------------------------------------------------------- bad input
@pytest.mark.parametrize("solver", ["dual", "local", "global"])
def test_a_penalty_that_kills_every_layer_is_said_once_and_goes_on(solver: Any) -> None:
    method = FedSLR(lam=1000.0, eta_g=0.5, batch_size=4, local_steps=3, solver=solver)
    with pytest.warns(UserWarning, match="lam=1000 left no singular value in any layer") as said:
        done = lowrank.run(method, rounds=3)
    assert len(said) == 1
    assert not lowrank.arrays(done.server.params)["0.weight"].any()
    if solver != "local":  # whose zeros are sent dense
        assert [record["metrics"]["dead_layers"] for record in done.metrics] == [0, 2, 2]


def test_a_model_that_starts_at_zero_and_never_leaves_it_is_said_too() -> None:
    problem = NeuralProblem(lambda: nn.Linear(6, 3, bias=False))
    method = FedSLR(lam=1000.0, local_steps=2)
    server = SlrServer({"weight": torch.zeros(3, 6)}, {"weight": torch.zeros(3, 6)}, 2)
    total = Mean.of({"weight": torch.ones(3, 6)}, 1.0)
    with pytest.warns(UserWarning, match="no singular value"):
        method.aggregate(problem, server, total, Key(0, round=0))
    method.aggregate(problem, server, total, Key(0, round=1))  # it was said before


def test_the_penalty_that_is_named_as_the_limit_is_the_limit() -> None:
    with pytest.warns(UserWarning, match="no singular value") as said:
        lowrank.run(FedSLR(lam=100.0, eta_g=0.5, batch_size=4, local_steps=3), rounds=1)
    limit = float(str(said[0].message).partition("(below ")[2].partition(" ")[0])
    with pytest.warns(UserWarning, match="no singular value"):
        lowrank.run(FedSLR(lam=1.1 * limit, eta_g=0.5, batch_size=4, local_steps=3), rounds=1)
    below = FedSLR(lam=0.9 * limit, eta_g=0.5, batch_size=4, local_steps=3)
    done = lowrank.run(below, rounds=1)  # no warning
    assert any(weights.any() for weights in lowrank.arrays(done.server.params).values())


def test_target_bytes_without_a_layer_are_named_with_the_bytes_that_leave_one() -> None:
    def run(target: int) -> None:
        method = FedSLR(lr=0.2, eta_g=2.0, target_bytes=target, batch_size=4, local_steps=5)
        lowrank.run(method, rounds=1)

    vectors = sum(v.size * v.itemsize for v in lowrank.start().values() if v.ndim == 1)
    with pytest.warns(UserWarning, match="no singular value") as said:
        run(vectors + 1)
    text = str(said[0].message)
    assert f"FedSLR's target_bytes={vectors + 1} left no" in text
    assert "lam" not in text
    least = int(text.partition("Raise target_bytes (to ")[2].partition(" ")[0])
    run(least)  # no warning
    with pytest.warns(UserWarning, match="no singular value"):
        run(least - 1)


def test_a_target_rank_without_a_layer_is_named() -> None:
    server = SlrServer({"weight": torch.zeros(3, 3)}, {"weight": torch.zeros(3, 3)}, 2)
    total = Mean.of({"weight": torch.eye(3)}, 1.0)  # all singular values are equal
    problem = NeuralProblem(lambda: nn.Linear(3, 3, bias=False))
    with pytest.warns(UserWarning, match=r"target_rank=2 left no .*\. Raise target_rank\.$"):
        FedSLR(eta_g=2.0, target_rank=2).aggregate(problem, server, total, Key(0))


@pytest.mark.parametrize(
    ("layers", "p_init", "advised"),
    [((6, 4, 3), "zero", True), ((6, 4, 3), "copy", False), ((6, 3), "zero", False)],
)
def test_copies_are_advised_where_zeros_cannot_train_hidden_layers(
    layers: tuple[int, ...], p_init: Any, advised: bool
) -> None:
    shapes = zip(layers[1:], layers, strict=False)
    point = {f"{number}.weight": torch.ones(shape) for number, shape in enumerate(shapes)}
    server = SlrServer({**point}, tree.zeros_like(point), 2)
    method = FedSLR(lam=1e3, p_init=p_init)
    with pytest.warns(UserWarning, match="no singular value") as said:
        method.aggregate(lowrank.PROBLEM, server, Mean.of(point, 1.0), Key(0))
    assert ("p_init='copy'" in str(said[0].message)) == advised


def test_a_model_of_vectors_alone_has_no_rank_to_lose() -> None:
    assert not _all_dead({"coef": torch.zeros(4)})
    assert not _all_dead({"bias": torch.zeros(2), "weight": torch.ones(2, 3)})


def test_a_layer_without_a_rank_stays_dense_and_is_named_once() -> None:
    problem = NeuralProblem(
        lambda: nn.Sequential(nn.Conv1d(1, 2, 3), nn.Flatten(), nn.Linear(6, 2))
    )
    draw = np.random.default_rng(0)
    data = [(draw.normal(size=(8, 1, 5)).astype(np.float32), np.arange(8) % 2) for _ in range(2)]
    with pytest.warns(UserWarning, match="leaves 0.weight dense") as said:
        done = simulate(FedSLR(lam=0.01, eta_g=1.0, local_steps=2), problem, data, 3)
    assert len(said) == 1
    assert isinstance(done.server.params["0.weight"], torch.Tensor)


def test_without_a_low_rank_penalty_nothing_is_said() -> None:
    method = FedSLR(global_penalty="sparse")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        method.init_server(lowrank.PROBLEM, [], Key(0))


def test_a_client_with_broken_data_is_dropped_and_named() -> None:
    draw = np.random.default_rng(0)
    data = [(draw.normal(size=(8, 6)), np.arange(8) % 3) for _ in range(3)]
    method = FedSLR(lam=0.01, local_steps=2, lr=0.1)
    clients = ClientData.of(data)
    assert isinstance(clients.x, torch.Tensor)
    clients.x[clients.train[1]] = torch.nan
    done = simulate(method, lowrank.PROBLEM, clients, 2, evaluate_every=0)
    assert list(done.metrics[-1]["dropped"]) == [1]
    assert done.metrics[-1]["trained"] == 2
    assert np.isfinite(lowrank.arrays(done.server.params)["0.weight"]).all()


@pytest.mark.parametrize("executor", ["loop", "vmap", "fused"])
@pytest.mark.parametrize(
    "settings", [{"solver": "local"}, {"personal_penalty": "low-rank", "eta_g": 2.0}]
)
def test_a_client_that_diverges_under_a_low_rank_step_is_advised_to_lower_lr(
    settings: Any, executor: Any
) -> None:
    draw = np.random.default_rng(0)
    data = [(draw.normal(size=(8, 4)), np.arange(8) % 3) for _ in range(3)]
    clients = ClientData.of(data)
    assert isinstance(clients.x, torch.Tensor)
    clients.x[clients.train[1]] *= 1e200  # the second step overflows
    method = FedSLR(lr=0.5, lam=1e-5, mu=1e-3, batch_size=4, local_steps=2, **settings)
    expected = r"^Client 1 diverged in round 1 \(upload .* is not finite\).* Lower `lr` \(now 0.5\)"
    with pytest.warns(DroppedClientWarning, match=expected) as said:
        simulate(method, classifier(), clients, 1, evaluate_every=0, executor=executor)
    assert len(said) == 1


def test_rounds_without_local_steps_are_refused_with_a_penalty() -> None:
    with pytest.raises(ConfigError, match="only shrinks"):
        FedSLR(local_steps=0)
    assert FedSLR(local_steps=0, lam=0.0).local_steps == 0


@pytest.mark.parametrize("bad", [{"eta_g": 0.0}, {"lam": -1.0}, {"mu": -1.0}, {"p_init": "x"}])
def test_settings_that_make_no_sense_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(bad))):
        FedSLR(**bad)


def test_a_penalty_that_no_parameter_feels_is_warned_of() -> None:
    problem = GLM(4, "squared")
    with pytest.warns(UserWarning, match="ignores lam=0.5: no parameter"):
        FedSLR(lam=0.5).init_server(problem, [], Key(0))
    for quiet in (FedSLR(lam=0.0), FedSLR(lam=0.5, global_penalty="sparse")):
        quiet.init_server(problem, [], Key(0))


@pytest.mark.parametrize(
    ("settings", "ignored"),
    [
        ({"target_rank": 2}, "target_rank=2"),
        ({"lam": 0.0, "target_rank": 2}, "target_rank=2"),
        ({"target_bytes": 1_234_567}, "target_bytes=1234567"),
        ({"lam": 0.0, "personal_penalty": "low-rank", "mu": 5.0}, "mu=5"),
        ({"lam": 0.5, "personal_penalty": "low-rank", "mu": 5.0}, "lam=0.5 and mu=5"),
        (
            {"lam": 0.0, "personal_penalty": "low-rank", "mu": 0.0, "refit_mu": 2.0}
            | {"refit_epochs": 1.0},
            "refit_mu=2",
        ),
    ],
)
def test_settings_without_a_matrix_to_act_on_are_named_in_one_warning(
    settings: dict[str, Any], ignored: str
) -> None:
    with pytest.warns(UserWarning, match=rf"^FedSLR ignores {ignored}: no parameter") as found:
        FedSLR(**settings).init_server(GLM(4, "squared"), [], Key(0))
    assert len(found) == 1


def test_a_target_rank_takes_the_place_of_lam() -> None:
    """The step is the threshold at the next singular value of each layer."""
    method = FedSLR(eta_g=2.0, target_rank=2, lr=0.2, batch_size=4, local_steps=5)
    point = {name: torch.from_numpy(value) for name, value in lowrank.start().items()}
    found = lowrank.arrays(method._prox(point, 2.0))
    for name, value in lowrank.start().items():
        if value.ndim < 2:
            np.testing.assert_array_equal(found[name], value)
            continue
        left, values, right = np.linalg.svd(value, full_matrices=False)
        wanted = (left * np.maximum(values - values[2], 0)) @ right
        np.testing.assert_allclose(found[name], wanted, atol=1e-12)
    done = lowrank.run(method)
    ranks = [np.linalg.matrix_rank(v) for v in lowrank.arrays(done.server.params).values()
             if v.ndim == 2]  # fmt: skip
    assert ranks == [2, 2]


@pytest.mark.parametrize("settings", [{"solver": "local"}, {"global_penalty": "sparse"}])
def test_a_target_rank_without_a_low_rank_step_is_rejected(settings: Any) -> None:
    with pytest.raises(ConfigError, match="target_rank needs a low-rank step"):
        FedSLR(target_rank=2, **settings)


def test_target_bytes_bound_what_is_sent() -> None:
    """All layers share the smallest threshold at which the values fit."""
    start = lowrank.start()
    dense = sum(value.size * value.itemsize for value in start.values())
    method = FedSLR(eta_g=2.0, target_bytes=dense // 2, lr=0.2, batch_size=4, local_steps=5)
    done = lowrank.run(method)
    sent = sum(leaf.numel() * leaf.element_size() for leaf in tree.leaves(done.server.params))
    assert 0.2 * dense < sent <= dense // 2
    point = {name: torch.from_numpy(value) for name, value in start.items()}
    taus = set()
    for name, value in lowrank.arrays(method._prox(point, 2.0)).items():
        if value.ndim == 2:
            before = np.linalg.svd(start[name], compute_uv=False)
            after = np.linalg.svd(value, compute_uv=False)
            taus |= {round(gap, 9) for gap in (before - after)[after > 1e-9]}
    assert len(taus) == 1
    roomy = FedSLR(target_bytes=2 * dense, lr=0.2)
    assert lowrank.arrays(roomy._prox(point, 2.0)).keys() == start.keys()
    lowrank.assert_same(roomy._prox(point, 2.0), start)


def test_target_bytes_that_cannot_be_met_or_combined_are_rejected() -> None:
    with pytest.raises(ConfigError, match="target_bytes=4 leaves nothing for the layers"):
        FedSLR(target_bytes=4).init_server(lowrank.PROBLEM, lowrank.INFOS, Key(0))
    with pytest.raises(ConfigError, match="mutually exclusive"):
        FedSLR(target_bytes=4000, target_rank=2)
    with pytest.raises(ConfigError, match="target_bytes needs a low-rank step"):
        FedSLR(target_bytes=4000, solver="local")


def _normed(buffers: Any) -> NeuralProblem:
    """A model with 28 numbers without a rank, 72 in layers, and 16 in buffers."""
    layers = [(5, 8), (8, 4)]
    return NeuralProblem(
        lambda: nn.Sequential(
            nn.Linear(*layers[0]), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(*layers[1])
        ),
        buffers=buffers,
    )


def _sent_bytes(buffers: Any, target: int) -> list[int]:
    """Return the bytes of the values that the server sends after each of three rounds."""
    draw = np.random.default_rng(0)
    features = [draw.normal(size=(40, 5)).astype(np.float32) for _ in range(3)]
    data = [(x, draw.integers(0, 4, size=40)) for x in features]
    sizes: list[int] = []

    def measure(event: RoundEnd) -> None:
        sent = event.algorithm.broadcast(event.problem, event.server, lowrank.INFOS[0], Key(0))
        sizes.append(sum(leaf.numel() * leaf.element_size() for leaf in tree.leaves(sent)))

    method = FedSLR(lr=0.1, eta_g=2.0, target_bytes=target, last_batch="drop")
    simulate(method, _normed(buffers), data, 3, callbacks=[measure])
    return sizes


@pytest.mark.parametrize(
    ("buffers", "target"),
    [("average", 230), ("average", 250), ("average", 300), ("local", 165), ("local", 200)],
)
def test_target_bytes_count_the_buffers_that_are_sent(buffers: Any, target: int) -> None:
    sizes = _sent_bytes(buffers, target)
    layer = 4 * 13  # the largest step: one more rank of the first layer
    assert all(target - layer <= size <= target for size in sizes), sizes


@pytest.mark.parametrize(("buffers", "least"), [("average", 176), ("local", 112)])
def test_target_bytes_must_exceed_what_is_sent_without_the_layers(buffers: Any, least: int) -> None:
    def start(target: int) -> None:
        method = FedSLR(lr=0.1, eta_g=2.0, target_bytes=target)
        method.init_server(_normed(buffers), lowrank.INFOS, Key(0))

    with pytest.raises(ConfigError, match=f"target_bytes={least} leaves .* take {least} bytes"):
        start(least)
    start(least + 1)


def test_eta_g_may_be_a_ratio_of_the_local_steps() -> None:
    common: dict[str, Any] = {"lam": 0.03, "mu": 0.1, "lr": 0.2, "batch_size": 4, "local_steps": 5}
    by_ratio = lowrank.run(FedSLR(**common, eta_g_ratio=0.5))
    plain = lowrank.run(FedSLR(**common, eta_g=2.0))
    lowrank.assert_same(by_ratio.server.params, lowrank.arrays(plain.server.params))
    with pytest.raises(ConfigError, match=r"eta_g_ratio=0\.5 needs a fixed number of local_steps"):
        FedSLR(eta_g_ratio=0.5, epochs=2.0)


@pytest.mark.parametrize("eta_g", [1e3, 50.1, 0.4, 1e-3])
def test_a_step_far_from_the_papers_ratio_is_warned_of(eta_g: float) -> None:
    method = FedSLR(eta_g=eta_g, lr=0.1, local_steps=10)
    ratio = re.escape(f"eta_g = {1 / eta_g:.2g}")
    with pytest.warns(UserWarning, match=f"{ratio} is far .* Try eta_g=2"):
        method.init_server(lowrank.PROBLEM, lowrank.INFOS, Key(0))


def test_devices_far_from_a_ratio_are_warned_of_with_the_ratio_that_fits_them() -> None:
    clients = [replace(info, profile={"local_steps": 200}) for info in lowrank.INFOS]
    method = FedSLR(lr=0.1, local_steps=10, eta_g_ratio=0.5)
    expected = r"eta_g = 10 is far .*: eta_g_ratio=0\.5 is meant .* Try eta_g_ratio=0\.025$"
    with pytest.warns(UserWarning, match=expected):
        method.init_server(lowrank.PROBLEM, clients, Key(0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        replace(method, eta_g_ratio=0.025).init_server(lowrank.PROBLEM, clients, Key(0))


@pytest.mark.parametrize("eta_g", [50.0, 2.0, 0.41])
@pytest.mark.filterwarnings("error")
def test_a_step_near_the_papers_ratio_is_not_warned_of(eta_g: float) -> None:
    method = FedSLR(eta_g=eta_g, lr=0.1, local_steps=10)
    method.init_server(lowrank.PROBLEM, lowrank.INFOS, Key(0))
    FedSLR().init_server(lowrank.PROBLEM, lowrank.INFOS, Key(0))  # nor are the defaults


@pytest.mark.parametrize("engine", lowrank.ENGINES)
def test_a_refit_fits_the_component_to_the_final_model(engine: Engine) -> None:
    plain = FedSLR(**BASE, batch_size=4, local_steps=5)
    method = FedSLR(**BASE, batch_size=4, local_steps=5, refit_epochs=2.0, refit_mu=0.3)
    done, before = lowrank.run(method, engine), lowrank.run(plain, engine)
    lowrank.assert_same(done.server.params, lowrank.arrays(before.server.params))
    reference = Slr(**{**BASE, "mu": 0.3})
    w = lowrank.arrays(done.server.params)
    key = Key(lowrank.SEED, round=lowrank.ROUNDS - 1, purpose="tuning")
    for client, state in done.pool.store:
        wanted = method.personalization_batches(lowrank.INFOS[client])
        batches = BatchSampler(lowrank.DATA, lowrank.PROBLEM).draw(client, wanted, key)["refit"]
        rows = [(b.x.numpy(), b.y.numpy(), b.weight.numpy()) for b in batches]
        lr = 0.2 * 0.9 ** (lowrank.ROUNDS - 1)
        p = reference._phase_two(w, lowrank.arrays(state.personal), rows, lr)
        lowrank.assert_same(done.personal(client).params, {n: w[n] + p[n] for n in w})


@pytest.mark.parametrize("engine", lowrank.ENGINES)
@pytest.mark.parametrize("lam", [0.0, 0.7])
def test_lpgd_uploads_the_factors_of_each_local_model(lam: float, engine: Engine) -> None:
    method = FedSLR(**{**BASE, "lam": lam}, solver="local", batch_size=4, local_steps=5)
    done = lowrank.run(method, engine, rounds=1)
    expected = 0
    start: Compact = {**lowrank.PROBLEM.init(Key(lowrank.SEED))}
    for client in lowrank.cohorts(rounds=1)[0]:
        wanted = method.batches(lowrank.INFOS[client], 0)
        data = BatchSampler(lowrank.DATA, lowrank.PROBLEM).draw(client, wanted, Key(lowrank.SEED))
        state = method.init_client(lowrank.PROBLEM, lowrank.INFOS[client], start, Key(0))
        trained = method.client_update(lowrank.PROBLEM, start, state, data).upload
        for value in lowrank.arrays(trained).values():
            factors = np.linalg.matrix_rank(value) * sum(value.shape) if value.ndim > 1 else np.inf
            expected += int(min(factors, value.size))
    assert done.records[0].parameters_up == expected
    shorter = done.records[0].entropy_up < done.records[0].dense_up
    assert shorter == (lam > 0)


def test_uploads_with_a_dual_stay_dense() -> None:
    done = lowrank.run(FedSLR(**{**BASE, "lam": 0.2}, batch_size=4, local_steps=5), rounds=1)
    assert done.records[0].entropy_up == done.records[0].dense_up
