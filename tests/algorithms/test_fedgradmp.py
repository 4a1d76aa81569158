"""FedGradMP against NumPy and CoSaMP, and its inexact version against it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from tests.algorithms import sparse
from tests.reference_sparse import Array, cosamp, fed_grad_mp, float16, int8

from parsifl.algorithms._bases.averaging import Mean
from parsifl.algorithms.fedgradmp import FedGradMP
from parsifl.algorithms.inexactfedgradmp import InexactFedGradMP
from parsifl.core.batching import Batch
from parsifl.core.errors import CapabilityError, ConfigError
from parsifl.core.keys import Key
from parsifl.data.clients import ClientData
from parsifl.engine import executors
from parsifl.engine.batch_sampler import BatchSampler, Infos
from parsifl.engine.executors import Task
from parsifl.engine.simulate import simulate
from parsifl.linear.glm import GLM
from parsifl.linear.sparsity import dictionary
from parsifl.nn.neural import NeuralProblem

PRUNINGS: tuple[Literal["largest", "omp"], ...] = ("largest", "omp")


def test_it_follows_the_paper() -> None:
    pooled = sparse.data(sparse.clients(noise=0.3))
    method = FedGradMP(tau=2, local_steps=2, batch_size=5)
    drawn = sparse.draws(method, GLM(sparse.WIDTH), pooled, 3, "select")
    expected = fed_grad_mp(sparse.rows_of(pooled), drawn, tau=2)
    found = sparse.trained(method, pooled, 3)
    np.testing.assert_allclose(found, expected, atol=1e-12)


WIRES: dict[Any, Callable[[Array], Array]] = {
    "exact": np.asarray,
    "float16": float16,
    "int8": int8,
}


@pytest.mark.parametrize("precision", WIRES)
@pytest.mark.parametrize("radius", [None, 0.5], ids=["free", "ball"])
@pytest.mark.parametrize("lengths", [None, "unit", "raw"])
def test_dictionaries_balls_and_lossy_wires_follow_the_paper(
    lengths: str | None, radius: float | None, precision: Any
) -> None:
    pooled = sparse.data(sparse.clients(noise=0.3))
    atoms = None if lengths is None else dictionary.gaussian(sparse.WIDTH, 20, seed=4).numpy()
    if atoms is not None and lengths == "raw":
        atoms = atoms * np.geomspace(0.1, 10, 20)
    problem = GLM(sparse.WIDTH, "squared", dictionary=atoms)
    method = InexactFedGradMP(
        tau=2, local_steps=2, batch_size=5, solver="least-squares", radius=radius
    )
    drawn = sparse.draws(method, problem, pooled, 3, "select")
    expected = fed_grad_mp(
        sparse.rows_of(pooled), drawn, 2, atoms=atoms, radius=radius or np.inf,
        wire=WIRES[precision],
    )  # fmt: skip
    done = simulate(method, problem, pooled, 3, evaluate_every=0, precision=precision)
    np.testing.assert_allclose(done.server["coef"], expected, rtol=1e-12, atol=1e-12)
    assert expected.any()


def test_one_client_with_full_batches_is_cosamp_step_by_step() -> None:
    draw = np.random.default_rng(3)
    z = draw.standard_normal((40, 60))
    truth = np.zeros(60)
    truth[[3, 30, 59]] = [1.0, -2.0, 0.5]
    y = z @ truth + 0.1 * draw.standard_normal(40)
    iterates = cosamp(z, y, 3, 4)
    pooled = ClientData.of([(z, y)], test=0.0)
    for round, expected in enumerate(iterates, start=1):
        method = FedGradMP(tau=3, local_steps=1, batch_size=None)
        found = sparse.trained(method, pooled, round, problem=GLM(60, "squared-half"))
        np.testing.assert_allclose(found, expected, atol=1e-12)
    deep = sparse.trained(
        FedGradMP(tau=3, local_steps=4, batch_size=None), pooled, 1, problem=GLM(60, "squared-half")
    )
    np.testing.assert_allclose(deep, iterates[-1], atol=1e-12)


@pytest.mark.parametrize(
    "method",
    [
        FedGradMP(tau=2, local_steps=2, batch_size=5),
        InexactFedGradMP(tau=2, local_steps=2, batch_size=5, solver="gd"),
        InexactFedGradMP(tau=2, local_steps=2, batch_size=5, solver="svrg", inner_steps=20),
        InexactFedGradMP(
            tau=2, local_steps=2, batch_size=5, solver="sgd", inner_steps=9, radius=1.0
        ),
        InexactFedGradMP(tau=2, local_steps=2, batch_size=5, solver="newton"),
    ],
)
@pytest.mark.parametrize("kind", ["squared", "logistic", "softmax"])
def test_batched_is_sequential_and_csr_is_dense(
    method: FedGradMP | InexactFedGradMP, kind: str
) -> None:
    draw = np.random.default_rng(0)
    made = []
    for rows in (14, 20, 17):
        z = draw.standard_normal((rows, 12)) * (draw.random((rows, 12)) < 0.7)
        y = z[:, 0] if kind == "squared" else draw.integers(0, 3 if kind == "softmax" else 2, rows)
        made.append((z, y))
    problem = GLM(12, kind, classes=3 if kind == "softmax" else None, l2=0.05, intercept=True)
    dense = ClientData.of(made, test=0.0)
    sparse.same_batched(method, dense, 2, problem=problem)
    csr = ClientData.of([(sp.csr_matrix(z), y) for z, y in made], test=0.0)
    found = sparse.trained(method, csr, 2, problem=problem)
    expected = sparse.trained(method, dense, 2, problem=problem)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    assert int((found[..., :-1] != 0).sum(-1).max()) <= 2


def test_the_paper_s_recovery_reaches_machine_precision() -> None:
    draw = np.random.default_rng(0)
    truth = np.zeros(200)
    truth[draw.choice(200, 5, replace=False)] = draw.standard_normal(5)
    truth /= np.linalg.norm(truth)
    made = []
    for client in range(1, 11):
        z = draw.normal(draw.standard_normal(), client**-0.55, (50, 200))
        made.append((z, z @ truth))
    found = sparse.trained(
        FedGradMP(tau=5, batch_size=20), sparse.data(made), 4, problem=GLM(200, "squared-half")
    )
    assert np.linalg.norm(found.numpy() - truth) < 1e-14


@pytest.mark.bits
@pytest.mark.parametrize("scope", ["row", "all"])
def test_a_client_alone_agrees_with_itself_in_a_block(scope: Any) -> None:
    # Up to rounding only: how MKL rounds depends on where a matrix starts in memory (AVX2), and in
    # a block it starts where that of the previous client ends.
    draw = np.random.default_rng(1)
    truth = np.where(np.arange(80) < 5, 3.0, 0.0)
    made = [draw.standard_normal((40, 80)) for _ in range(7)]
    pooled = ClientData.of([(z, z @ truth + draw.standard_normal(40)) for z in made], test=0.0)
    method, problem = (
        FedGradMP(tau=5, local_steps=3, batch_size=15, scope=scope),
        GLM(80, "squared-half"),
    )
    tasks = [
        Task(i.id, ({"coef": torch.from_numpy(truth)}, None, shard))
        for i in Infos(pooled)
        for shard in [BatchSampler(pooled, problem).draw(i.id, method.batches(i, 0), Key(0))]
    ]
    whole = executors.run(partial(method.client_update, problem), tasks, "vmap", 64).results
    alone = executors.run(partial(method.client_update, problem), tasks, "loop", 1).results
    for client, found in alone.items():
        expected = whole[client].upload["coef"]
        torch.testing.assert_close(found.upload["coef"], expected, rtol=1e-12, atol=0)


def test_nearly_exact_inner_solvers_give_the_exact_method() -> None:
    pooled = sparse.data(sparse.clients(noise=0.3))
    exact = sparse.trained(FedGradMP(tau=2, local_steps=2, batch_size=5), pooled, 3)
    settings: list[tuple[Any, int]] = [("gd", 20000), ("newton", 5), ("least-squares", 1)]
    for solver, steps in settings:
        method = InexactFedGradMP(
            tau=2, local_steps=2, batch_size=5, solver=solver, inner_steps=steps, delta=1e-14
        )
        found = sparse.trained(method, pooled, 3)
        torch.testing.assert_close(found, exact, atol=1e-8, rtol=0)


def test_the_ball_holds_the_model() -> None:
    pooled = sparse.data(sparse.clients())
    found = sparse.trained(InexactFedGradMP(tau=3, radius=0.5, batch_size=5), pooled, 3)
    assert float(found.norm()) <= 0.5 + 1e-12
    assert float(found.norm()) > 0.4


def test_softmax_rejects_omp_over_all_classes() -> None:
    draw = np.random.default_rng(0)
    rows = [(draw.standard_normal((30, 6)), draw.integers(0, 3, 30))]
    problem = GLM(6, "softmax", classes=3, dictionary=dictionary.gaussian(6, 8), l2=0.1)
    method = FedGradMP(tau=2, prune="omp", scope="all")
    with pytest.raises(ConfigError, match="scope='row'"):
        simulate(method, problem, rows, 1, evaluate_every=0)
    for fine in (FedGradMP(tau=2, prune="omp"), FedGradMP(tau=2, scope="all")):
        simulate(fine, problem, rows, 1, evaluate_every=0)
    vector = GLM(6, "squared-half", dictionary=dictionary.gaussian(6, 8))
    simulate(method, vector, [(x, y.astype(float)) for x, y in rows], 1, evaluate_every=0)


@pytest.mark.parametrize("atoms", [None, dictionary.gaussian(30, 40, seed=1)])
def test_the_start_is_pruned_and_within_the_ball(atoms: torch.Tensor | None) -> None:
    problem = GLM(
        30,
        "squared-half",
        intercept=True,
        start=np.arange(1.0, 32.0 if atoms is None else 42.0),
        dictionary=atoms,
    )
    free = FedGradMP(tau=2).init_server(problem, [], Key(0))["coef"]
    assert int((free != 0).sum()) == 3
    if atoms is None:
        assert free.nonzero()[:, 0].tolist() == [28, 29, 30]
    ball = InexactFedGradMP(tau=2, radius=1.5).init_server(problem, [], Key(0))["coef"]
    x = ball[:-1] if atoms is None else atoms @ ball[:-1]
    assert float(x.norm()) == pytest.approx(1.5)
    assert ball[-1] == problem.init(Key(0))["coef"][-1]
    draw = np.random.default_rng(0)
    rows = [(draw.standard_normal((40, 30)), draw.standard_normal(40))]
    done = simulate(FedGradMP(tau=2), problem, rows, 1, test=0.0, evaluate_every=0)
    assert done.records[0].bytes_down < 250


@pytest.mark.parametrize("kind", ["intercept", "keep", "dictionary"])
def test_the_ball_does_not_hold_coefficients_that_are_exempt_from_sparsity(kind: str) -> None:
    draw = np.random.default_rng(2)
    z = [draw.standard_normal((40, 10)) for _ in range(3)]
    x = np.where(np.arange(10) < 2, 1.2, 0.0)
    kept, atoms = (4, None) if kind == "keep" else (10, None)
    if kind == "dictionary":
        atoms = 3 * dictionary.orthonormal(10, 10, seed=2)
    made = [(rows, rows @ x + 20 * (rows[:, 4] if kind == "keep" else 1.0)) for rows in z]
    problem = GLM(
        10, "squared-half", intercept=kind != "keep", keep=(4,) * (kind == "keep"), dictionary=atoms
    )
    found = []
    for radius in (5.0, 1.0):
        method = InexactFedGradMP(tau=10, batch_size=None, solver="least-squares", radius=radius)
        found.append(sparse.trained(method, sparse.data(made), 4, problem=problem))
    plain = np.append(x, 20.0) if kept == 10 else np.where(np.arange(10) == 4, 20.0, x)
    if atoms is not None:
        plain[:10] = torch.linalg.solve(atoms, torch.from_numpy(x)).numpy()
    np.testing.assert_allclose(found[0], plain, atol=1e-9)
    rest = np.delete(found[1].numpy(), kept) * (1 if atoms is None else 3)
    assert np.linalg.norm(rest) == pytest.approx(1.0)
    assert abs(float(found[1][kept]) - 20.0) < 1.0


@pytest.mark.parametrize("length", [5.0, 0.2])
def test_with_a_dictionary_the_ball_holds_the_model_and_not_its_coefficients(length: float) -> None:
    psi = length * dictionary.orthonormal(sparse.WIDTH, sparse.WIDTH, seed=2)
    made = sparse.data(sparse.clients())
    method = InexactFedGradMP(tau=3, radius=0.5, batch_size=5, solver="least-squares")
    problem = GLM(sparse.WIDTH, "squared", dictionary=psi)
    found = sparse.trained(method, made, 3, problem=problem)
    unit = GLM(sparse.WIDTH, "squared", dictionary=psi / length)
    torch.testing.assert_close(found * length, sparse.trained(method, made, 3, problem=unit))
    assert 0.3 < float((psi @ found).norm()) <= 0.5 + 1e-12


def test_a_selecting_batch_is_never_short() -> None:
    """Assumption 4: every iteration draws b rows anew from all rows of the client."""
    method, pooled = FedGradMP(tau=2, local_steps=6, batch_size=5), sparse.data(sparse.clients())
    (round,) = sparse.draws(method, GLM(sparse.WIDTH), pooled, 1, "select")
    for batches in round:
        assert [len(batch) for batch in batches] == [5] * 6


def test_fewer_rows_than_coefficients_take_the_minimiser_nearest_to_the_iterate() -> None:
    draw = np.random.default_rng(0)
    truth = np.zeros(60)
    truth[:20] = draw.standard_normal(20)
    made = [(z, z @ truth) for z in (draw.standard_normal((15, 60)) for _ in range(12))]
    problem, pooled = GLM(60, "squared-half"), sparse.data(made)
    method = FedGradMP(tau=20, batch_size=10)
    errors = [
        float(np.linalg.norm(sparse.trained(method, pooled, t, problem=problem).numpy() - truth))
        for t in (1, 12)
    ]
    assert errors[1] < 0.5 * errors[0]


def test_an_orthonormal_dictionary_is_a_rotation() -> None:
    psi = dictionary.orthonormal(sparse.WIDTH, sparse.WIDTH, seed=2)
    made = sparse.clients(noise=0.3)
    rotated = [(z @ psi.numpy(), y) for z, y in made]
    method = FedGradMP(tau=3, batch_size=5)
    plain = sparse.trained(method, sparse.data(rotated), 2)
    found = sparse.trained(
        method, sparse.data(made), 2, problem=GLM(sparse.WIDTH, "squared", dictionary=psi)
    )
    torch.testing.assert_close(found, plain, atol=1e-9, rtol=0)


def test_a_redundant_dictionary_recovers_what_is_sparse_in_it() -> None:
    psi = dictionary.gaussian(20, 40, seed=1)
    truth = psi[:, [3, 31]] @ torch.tensor([1.0, -1.0]).double()
    draw = np.random.default_rng(0)
    made = [(z, z @ truth.numpy()) for z in (draw.standard_normal((30, 20)) for _ in range(4))]
    problem = GLM(20, "squared-half", dictionary=psi)
    found = sparse.trained(FedGradMP(tau=2, batch_size=20), sparse.data(made), 6, problem=problem)
    assert float((psi @ found - truth).norm()) < 1e-12


def test_groups_are_selected_together() -> None:
    found = sparse.trained(
        FedGradMP(tau=1, groups=3, batch_size=None), sparse.data(sparse.clients()), 2
    )
    assert found.nonzero()[:, 0].tolist() in [[0, 1, 2], [3, 4, 5], [6, 7, 8]]


def test_no_local_steps_change_nothing() -> None:
    found = sparse.trained(FedGradMP(tau=2, local_steps=0), sparse.data(sparse.clients()), 2)
    assert not found.any()


def test_tau_beyond_the_dimension_is_least_squares() -> None:
    made = [sparse.clients(noise=0.3)[1]]
    found = sparse.trained(FedGradMP(tau=100, batch_size=None), sparse.data(made), 1)
    expected = np.linalg.lstsq(*made[0], rcond=None)[0]
    np.testing.assert_allclose(found, expected, atol=1e-11)


def test_a_client_with_one_class_only_still_ends_finite() -> None:
    draw = np.random.default_rng(0)
    made = [(draw.standard_normal((20, 5)), np.full(20, label)) for label in (0, 1)]
    pooled = ClientData.of(made, test=0.0)
    found = sparse.trained(FedGradMP(tau=2), pooled, 3, problem=GLM(5, "logistic", l2=0.01))
    assert torch.isfinite(found).all()


def test_a_neural_problem_is_refused_by_what_it_lacks() -> None:
    problem = NeuralProblem(lambda: torch.nn.Linear(sparse.WIDTH, 1), loss="mse")
    with pytest.raises(CapabilityError, match="SupportSolvable"):
        simulate(FedGradMP(), problem, sparse.data(sparse.clients()), 1)


def test_operations_are_counted() -> None:
    run = simulate(
        FedGradMP(tau=1, local_steps=2, batch_size=5),
        GLM(sparse.WIDTH),
        sparse.data(sparse.clients()),
        1,
    )
    rows = [9, 14, 11]
    expected = sum(2 * (2 * 5 * sparse.WIDTH + 2 * n * 3 * 3) for n in rows)
    assert run.metrics[0]["flops"] in (expected, None)


def test_orthonormal_atoms_are_pruned_alike_by_size_and_by_pursuit() -> None:
    draw = np.random.default_rng(5)
    psi = dictionary.orthonormal(8, 8, seed=2)
    clients = [(draw.standard_normal((20, 8)), draw.standard_normal(20)) for _ in range(3)]
    problem = GLM(8, "squared-half", dictionary=psi)
    found = [
        simulate(
            FedGradMP(tau=2, batch_size=5, prune=prune),
            problem,
            ClientData.of(clients, test=0.0),
            3,
        ).model.params["coef"]
        for prune in PRUNINGS
    ]
    torch.testing.assert_close(found[0], found[1])


def test_pruning_by_cost_is_backward_elimination() -> None:
    draw = np.random.default_rng(3)
    x = draw.standard_normal((60, 6))  # as many columns as an iteration merges: none is left out
    x[:, 1] = x[:, 0] + 0.01 * draw.standard_normal(60)
    y = x @ [1.0, 1.0, 0.3, -0.2, 0.0, 0.1] + draw.standard_normal(60)
    left = list(range(6))

    def solved(columns: list[int]) -> Any:
        return np.linalg.lstsq(x[:, columns], y)[0]

    def loss(columns: list[int]) -> float:
        return float(((y - x[:, columns] @ solved(columns)) ** 2).sum())

    while len(left) > 3:  # two and the one that is kept
        candidates = [c for c in left if c != 4]
        left.remove(min(candidates, key=lambda c: loss([d for d in left if d != c])))
    method = FedGradMP(tau=2, local_steps=1, batch_size=60, prune="cost")
    found = sparse.trained(method, sparse.data([(x, y)]), 1, problem=GLM(6, keep=[4]))
    assert np.flatnonzero(found).tolist() == left
    np.testing.assert_allclose(found[left], solved(left), atol=1e-6)


@pytest.mark.parametrize("seed", range(5))
def test_pruning_by_cost_with_few_rows_does_not_depend_on_rounding(seed: int) -> None:
    """Once columns outnumber rows, most removals are free, and rounding must not order them."""
    draw = np.random.default_rng(seed)
    x, y = draw.random((11, 30)), draw.integers(0, 3, 11).astype(float)
    method = FedGradMP(tau=3, local_steps=3, batch_size=None, prune="cost")
    found = []
    for order in (range(11), draw.permutation(11), np.repeat(np.arange(11), 2)):
        rows = sparse.data([(x[order] - x.mean(0), y[order] - y.mean())])
        found.append(sparse.trained(method, rows, 3, problem=GLM(30, "squared-half")))
    assert np.count_nonzero(found[0]) == 3
    for other in found[1:]:
        np.testing.assert_allclose(other, found[0], atol=1e-9)


@pytest.mark.parametrize("prune", PRUNINGS)
def test_the_lengths_of_atoms_do_not_change_the_method(prune: Literal["largest", "omp"]) -> None:
    psi = dictionary.gaussian(20, 40, seed=1)
    truth = psi[:, [3, 31]] @ torch.tensor([1.0, -1.0]).double()
    draw = np.random.default_rng(0)
    made = [(z, z @ truth.numpy()) for z in (draw.standard_normal((30, 20)) for _ in range(4))]
    method = FedGradMP(tau=2, local_steps=1, batch_size=20, prune=prune)
    scale = torch.from_numpy(np.geomspace(0.1, 10, 40))
    scale[[3, 31]] = 0.01  # the true atoms look small
    found = []
    for atoms in (psi, psi * scale):
        problem = GLM(20, "squared-half", dictionary=atoms)
        found.append(atoms @ sparse.trained(method, sparse.data(made), 2, problem=problem))
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=1e-10)


LENGTHS_DO_NOT_MATTER = {
    "gd": InexactFedGradMP(tau=2, batch_size=None, solver="gd", inner_steps=7),
    "svrg": InexactFedGradMP(tau=2, batch_size=None, solver="svrg", inner_steps=30),
    "sgd": InexactFedGradMP(tau=2, batch_size=None, solver="sgd", inner_steps=30),
    "newton": InexactFedGradMP(tau=2, batch_size=None, solver="newton"),
    "few rows": FedGradMP(tau=4, batch_size=None),
    "refit": FedGradMP(tau=2, batch_size=None, refit_from=2),
}


@pytest.mark.parametrize("datafit", ["squared-half", "logistic", "softmax"])
@pytest.mark.parametrize("solver", LENGTHS_DO_NOT_MATTER)
def test_no_solver_depends_on_the_lengths_of_atoms(solver: str, datafit: str) -> None:
    draw = np.random.default_rng(1)
    psi = dictionary.gaussian(12, 20, seed=1)
    made: list[Any] = []
    for rows in (11, 14, 16) if datafit == "squared-half" else (110, 140, 160):
        z = draw.standard_normal((rows, 12))  # classes that can be separated have no minimizer
        u = z @ (psi[:, 3] - psi[:, 11]).numpy() + draw.standard_normal(rows)
        classes = np.digitize(u, [-1, 1]) if datafit == "softmax" else (u > 0).astype(int)
        made.append((z, u if datafit == "squared-half" else classes))
    scale = torch.from_numpy(10 ** draw.uniform(-3, 3, 20))
    steps = 1 if datafit == "squared-half" else 3
    found = []
    for atoms in (psi, psi * scale):
        problem = GLM(12, datafit, classes=3 if datafit == "softmax" else None, dictionary=atoms)
        method = LENGTHS_DO_NOT_MATTER[solver]
        coef = sparse.trained(method, sparse.data(made), steps, problem=problem)
        found.append(coef @ atoms.mT)
    torch.testing.assert_close(found[1], found[0], rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("length", [0.01, 1.0, 100.0])
@pytest.mark.parametrize("solver", ["gd", "svrg"])
def test_delta_is_a_distance_of_models(length: float, solver: Any) -> None:
    draw, atoms = np.random.default_rng(0), length * dictionary.gaussian(20, 6, seed=2)
    atoms[:, 1] = atoms[:, 0] + 0.3 * atoms[:, 1]  # correlated
    z = draw.standard_normal((80, 20))
    made = sparse.data([(z, z @ atoms.sum(1).numpy() / length + draw.standard_normal(80))])
    problem = GLM(20, "squared-half", dictionary=atoms)
    method = InexactFedGradMP(
        tau=6, batch_size=None, local_steps=1, solver=solver, delta=1e-2, inner_steps=10**5
    )
    exact = FedGradMP(tau=6, batch_size=None, local_steps=1)
    found, best = (sparse.trained(m, made, 1, problem=problem) for m in (method, exact))
    assert 1e-4 < float((atoms @ (found - best)).norm()) <= 1e-2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"spare_vectors": True}, "spare_vectors"),
        ({"scope": "layer"}, "scope='all'"),
        ({"groups": 2, "prune": "omp"}, "groups"),
    ],
)
@pytest.mark.parametrize("kind", [FedGradMP, InexactFedGradMP])
def test_options_without_effect_are_refused(
    kind: Any, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        kind(**settings)


def test_the_authors_are_those_of_the_paper() -> None:
    for kind in (FedGradMP, InexactFedGradMP):
        assert kind.cites.startswith("Jeong, Needell and Qin")


@pytest.mark.parametrize("engine", ["loop", "vmap"])
@pytest.mark.parametrize("weighting", ["samples", "uniform"])
def test_a_refit_is_pooled_least_squares_on_the_support(weighting: Any, engine: Any) -> None:
    made = sparse.clients(noise=0.5)
    method = FedGradMP(tau=3, batch_size=5, refit_from=2, weighting=weighting)
    problem = GLM(sparse.WIDTH, "squared-half", l2=0.1, intercept=True)
    done = simulate(method, problem, sparse.data(made), 3, executor=engine, evaluate_every=0)
    found = done.server["coef"].numpy()
    kept = np.flatnonzero(found)
    assert len(kept) == 4
    gram, right = np.diag([0.1, 0.1, 0.1, 0.0]), np.zeros(4)
    total = sum(len(y) for _, y in made)
    for z, y in made:
        share = len(y) / total if weighting == "samples" else 1 / 3
        columns = np.column_stack([z, np.ones(len(y))])[:, kept]
        gram = gram + share * columns.T @ columns / len(y)
        right = right + share * columns.T @ y / len(y)
    np.testing.assert_allclose(found[kept], np.linalg.solve(gram, right), rtol=1e-9)
    assert done.records[-1].bytes_up < 3 * (16 * 8 + 4 * 8 + 300)


@pytest.mark.parametrize("datafit", ["logistic", "softmax"])
@pytest.mark.parametrize("seed", range(3))
def test_a_refit_never_increases_the_loss_of_the_pooled_rows(datafit: str, seed: int) -> None:
    draw = np.random.default_rng(seed)
    truth = np.where(np.arange(60) < 5, 2.0, 0.0)
    made: list[Any] = []
    for count in (40, 60, 80):
        z = draw.standard_normal((count, 60))
        u = z @ truth + draw.logistic(size=count)
        made.append((z, (u > 0).astype(int) if datafit == "logistic" else np.digitize(u, [-2, 2])))
    x, y = (torch.from_numpy(np.concatenate(part)) for part in zip(*made, strict=True))
    batch = Batch(x, y, torch.ones(len(y)), torch.tensor(True), torch.tensor(0))
    problem = GLM(60, datafit, classes=3 if datafit == "softmax" else None)
    method = FedGradMP(tau=5, batch_size=None, refit_from=3)
    losses: list[float] = []
    for rounds in (*range(3, 9), 60):
        found = sparse.trained(method, sparse.data(made), rounds, problem=problem)
        losses.append(float(problem.loss({"coef": found}, batch)))
    assert losses == sorted(losses, reverse=True)
    coef = found.requires_grad_()
    (slope,) = torch.autograd.grad(problem.loss({"coef": coef}, batch), coef)
    assert losses[-1] < 0.5 * losses[0]
    assert float(slope[coef != 0].abs().max()) < 1e-2


def test_a_loss_without_a_quadratic_bound_cannot_be_refitted() -> None:
    draw = np.random.default_rng(0)
    rows = [(draw.standard_normal((30, 6)), draw.poisson(1.0, 30)) for _ in range(2)]
    with pytest.raises(CapabilityError, match="bounded curvature"):
        simulate(FedGradMP(tau=2, refit_from=1), GLM(6, "poisson"), rows, 2, evaluate_every=0)


@pytest.mark.parametrize("datafit", ["logistic", "softmax"])
def test_refits_of_other_losses_reach_their_pooled_minimum(datafit: str) -> None:
    draw = np.random.default_rng(0)
    rows = [(draw.standard_normal((60, 6)), draw.integers(2, size=60)) for _ in range(3)]
    classes = 2 if datafit == "softmax" else None
    problem = GLM(6, datafit, l2=0.1, classes=classes)
    method = FedGradMP(tau=3, refit_from=2)
    done = simulate(method, problem, rows, 9, test=0.0, evaluate_every=0)
    coef = done.server["coef"].requires_grad_()
    x, y = (torch.from_numpy(np.concatenate(part)) for part in zip(*rows, strict=True))
    batch = Batch(x, y, torch.ones(len(y)), torch.tensor(True), torch.tensor(0))
    (slope,) = torch.autograd.grad(problem.loss({"coef": coef}, batch), coef)
    assert float(slope[coef != 0].abs().max()) < 1e-9


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1, "2", True, None])
def test_an_impossible_importance_is_refused(value: Any) -> None:
    rows = [(x, x[:, 0]) for x in np.random.default_rng(0).standard_normal((2, 30, 4))]
    with pytest.raises(ConfigError, match="the importance of client 0 is"):
        simulate(FedGradMP(tau=3), GLM(4), rows, 1, profiles=[{"importance": value}, {}])


def test_a_cohort_of_weight_zero_leaves_the_model_unchanged() -> None:
    draw = np.random.default_rng(0)
    rows = [(x, x @ [1.0, 0, 0, 2.0]) for x in draw.standard_normal((2, 30, 4))]
    profiles: list[dict[str, Any]] = [{"importance": 0}, {}]
    run = simulate(
        FedGradMP(tau=2), GLM(4), rows, 4, test=0.0, participation=0.5, profiles=profiles
    )
    assert torch.equal(run.model.params["coef"].round(decimals=8), torch.tensor([1.0, 0, 0, 2.0]))
    alone = Mean.of({"coef": torch.ones(4)}, 0.0)
    server = {"coef": torch.tensor([1.0, 0.0, 0.0, 2.0])}
    assert FedGradMP(tau=2).aggregate(GLM(4), server, alone, Key(0)) is server
    with pytest.raises(ConfigError, match="every client has weight 0"):
        simulate(FedGradMP(tau=2), GLM(4), rows, 1, profiles=[{"importance": 0}] * 2)


@pytest.mark.parametrize(
    ("problem", "choice", "message"),
    [
        (GLM(6, dictionary=dictionary.gaussian(6, 8)), {}, "without a dictionary"),
        (GLM(6), {"groups": ((0, 1), (2, 3, 4, 5))}, "without a dictionary|groups"),
        (GLM(6, "softmax", classes=3), {"scope": "all"}, "row by row"),
    ],
)
def test_pruning_by_cost_rejects_at_the_start_what_it_cannot_do(
    problem: GLM, choice: dict[str, Any], message: str
) -> None:
    x = np.random.default_rng(0).standard_normal((30, 6))
    rows = [(x, np.arange(30) % 3 if problem.classes else x[:, 0])]
    with pytest.raises(ConfigError, match=message):
        simulate(FedGradMP(tau=2, prune="cost", **choice), problem, rows, 1, evaluate_every=0)
