"""Losses and gradients of GLMs against autograd and closed forms."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from sklearn.metrics import mean_poisson_deviance
from torch import Tensor

from parsifl.algorithms.fedgradmp import FedGradMP
from parsifl.algorithms.fedht import FedHT
from parsifl.core.batching import Batch, Batches, Rows
from parsifl.core.errors import ConfigError, DataError
from parsifl.core.keys import Key
from parsifl.core.problem import Problem, Selection, SupportSolvable
from parsifl.data.clients import ClientData
from parsifl.engine.simulate import simulate
from parsifl.linear.design import as_design
from parsifl.linear.glm import GLM
from parsifl.solvers import restricted

DRAW = np.random.default_rng(1)
X = DRAW.standard_normal((9, 4))
PSI = torch.from_numpy(DRAW.standard_normal((4, 6)))
PROBLEMS = {
    "squared": lambda: GLM(4, "squared", l2=0.1),
    "squared-half": lambda: GLM(4, "squared-half", intercept=True, l2=0.2, keep=(1,)),
    "weighted": lambda: GLM(4, "squared-half", weighted=True, intercept=True),
    "logistic": lambda: GLM(4, "logistic", l2=0.1, intercept=True),
    "softmax": lambda: GLM(4, "softmax", classes=3, l2=0.1),
    "softmax-intercept": lambda: GLM(4, "softmax", classes=3, intercept=True),
    "dictionary": lambda: GLM(4, "squared-half", dictionary=PSI, intercept=True),
}


def _targets(problem: GLM) -> Tensor:
    draw = np.random.default_rng(2)
    if problem.weighted:
        return torch.from_numpy(np.stack([draw.standard_normal(9), draw.random(9)], 1))
    if problem.datafit.classes:
        return torch.from_numpy(draw.integers(0, problem.classes or 2, 9))
    return torch.from_numpy(draw.standard_normal(9))


def _coefficients(problem: GLM) -> Tensor:
    shape = problem.init(Key(0))["coef"].shape
    return torch.from_numpy(np.random.default_rng(3).standard_normal(tuple(shape)))


def _batch(x: Any, y: Tensor, rows: list[int], weight: list[float]) -> Batch:
    chosen = torch.tensor(rows)
    active, key = torch.tensor(True), torch.tensor(0)
    return Batch(x[chosen], y[chosen], torch.tensor(weight).double(), active, key)


@pytest.mark.parametrize("name", sorted(PROBLEMS))
@pytest.mark.parametrize("form", ["dense", "csr"])
def test_gradients_in_closed_form_are_those_of_the_loss(name: str, form: str) -> None:
    problem = PROBLEMS[name]()
    x: Any = torch.from_numpy(X) if form == "dense" else as_design(sp.csr_matrix(X))
    y, coef = _targets(problem), _coefficients(problem)
    blocks = [([0, 2, 5], [1.0, 1.0, 1.0]), ([3, 8, 3], [1.0, 1.0, 0.0])]
    expected = [
        torch.func.grad(problem.loss)({"coef": coef}, _batch(x, y, *block))["coef"]
        for block in blocks
    ]
    rows = torch.tensor([block[0] for block in blocks])
    weight = torch.tensor([block[1] for block in blocks]).double()
    both, data = torch.stack([coef, coef]), Selection(x, y, rows, weight)
    found = problem.gradients(both, data, problem.predictions(both, data))
    torch.testing.assert_close(found, torch.stack(expected), rtol=1e-12, atol=1e-12)
    active, key = torch.ones(2, dtype=torch.bool), torch.tensor(0)
    steps = problem.compact(Batches(x, y, rows, weight, active, key), coef)
    assert (steps is None) == (form == "dense" or name == "dictionary")
    for step in range(2):
        if steps is None:
            break
        again = steps.gradient(coef[..., steps.positions], step)
        torch.testing.assert_close(again, expected[step][..., steps.positions])


@pytest.mark.parametrize("name", sorted(PROBLEMS))
def test_the_restricted_loss_is_the_loss_on_the_support(name: str) -> None:
    problem = PROBLEMS[name]()
    x, y = torch.from_numpy(X), _targets(problem)
    coef = _coefficients(problem)
    width = problem.width
    index = torch.tensor([0, width - 1, 2, 0])
    valid = torch.tensor([True, True, True, False])
    if coef.ndim == 2:
        index, valid = index.expand(3, 4), valid.expand(3, 4)
    mask = torch.zeros(width).scatter(0, torch.tensor([0, width - 1, 2]), torch.ones(3)).double()
    coef = coef * mask
    rows, weight = torch.arange(9)[None], torch.ones(1, 9).double()
    part = problem.restrict(coef[None], Selection(x, y, rows, weight), index[None], valid[None])
    batch = _batch(x, y, list(range(9)), [1.0] * 9)
    torch.testing.assert_close(
        restricted.loss(part, part.start)[0], problem.loss({"coef": coef}, batch)
    )
    full = torch.func.grad(problem.loss)({"coef": coef}, batch)["coef"]
    lengths = torch.ones(()) if part.lengths is None else part.lengths[0]
    torch.testing.assert_close(
        restricted.gradient(part, part.start)[0] * valid * lengths, full.gather(-1, index) * valid
    )


@pytest.mark.parametrize("form", ["dense", "csr"])
@pytest.mark.parametrize("kind", ["plain", "intercept", "dictionary"])
@pytest.mark.parametrize("size", [2, 7], ids=["few", "all"])
def test_classes_with_supports_of_their_own_share_columns(form: str, kind: str, size: int) -> None:
    """A support for each client and class; together they use few of the columns, or all."""
    draw = np.random.default_rng(4)
    pool, psi = draw.standard_normal((9, 12)), torch.from_numpy(draw.standard_normal((12, 15)))
    x: Any = torch.from_numpy(pool) if form == "dense" else as_design(sp.csr_matrix(pool))
    atoms = psi if kind == "dictionary" else None
    problem = GLM(12, "softmax", classes=3, l2=0.1, intercept=kind == "intercept", dictionary=atoms)
    y = torch.from_numpy(draw.integers(0, 3, 9))
    order = torch.from_numpy(draw.random((2, 3, problem.width))).argsort(-1)
    index, valid = order[..., :size].sort(-1).values, torch.ones(2, 3, size, dtype=torch.bool)
    index[1, 2, -1], valid[1, 2, -1] = 0, False  # an unused place
    z = torch.from_numpy(draw.standard_normal((2, 3, size))) * valid
    coef = torch.zeros(2, 3, problem.width).double().scatter_add(-1, index, z)
    data = Selection(x, y, torch.tensor([[0, 2, 5], [3, 8, 1]]), torch.ones(2, 3).double())
    part = problem.restrict(coef, data, index, valid)
    assert part.columns.shape == (2, 3, min(3 * size, problem.width))
    u = problem.predictions(coef, data)
    lengths = torch.ones(()).double()
    if kind == "dictionary":
        lengths = torch.linalg.vector_norm(psi, dim=0)[index]
        torch.testing.assert_close(part.lengths, lengths)
    z = z * lengths
    torch.testing.assert_close(part.start, z)
    torch.testing.assert_close(restricted.predictor(part, z), u, rtol=1e-12, atol=1e-12)
    slope = problem.gradients(coef, data, u).gather(-1, index) * valid
    found = restricted.gradient(part, z) * valid * lengths
    torch.testing.assert_close(found, slope, rtol=1e-12, atol=1e-12)


def test_squared_scalings_follow_the_papers() -> None:
    y = torch.from_numpy(X @ np.ones(4) + 1.0)
    batch = _batch(torch.from_numpy(X), y, list(range(9)), [1.0] * 9)
    ones = {"coef": torch.ones(4).double()}
    assert float(GLM(4, "squared").loss(ones, batch)) == pytest.approx(1.0)
    assert float(GLM(4, "squared-half").loss(ones, batch)) == pytest.approx(0.5)


def test_the_intercept_is_neither_penalised_nor_thresholded() -> None:
    problem = GLM(2, "squared", l2=10.0, intercept=True, keep=(0,))
    assert problem.unpenalized == {"coef": (0, 2)}
    batch = _batch(torch.zeros(9, 2).double(), torch.full((9,), 3.0).double(), [0], [1.0])
    assert float(problem.loss({"coef": torch.tensor([0.0, 0.0, 3.0]).double()}, batch)) == 0.0


def test_metrics_of_each_kind() -> None:
    x = torch.tensor([[1.0], [-1.0]]).double()
    rows = Rows(x, torch.tensor([1, 1]), torch.ones(2))
    metrics = GLM(1, "logistic").metrics({"coef": torch.ones(1).double()}, rows)
    assert metrics["accuracy"].tolist() == [1.0, 0.0]
    numbers = Rows(x, torch.tensor([2.0, 0.0]).double(), torch.ones(2))
    assert GLM(1).metrics({"coef": torch.ones(1).double()}, numbers)["mse"].tolist() == [1.0, 1.0]
    logits = {"coef": torch.tensor([[1.0], [-1.0]]).double()}
    found = GLM(1, "softmax", classes=2).metrics(logits, Rows(x, torch.tensor([0, 0]), rows.weight))
    assert found["accuracy"].tolist() == [1.0, 0.0]


def test_metrics_of_counts_compare_means() -> None:
    x, y = np.array([[1.0], [-1.0], [2.0]]), np.array([3.0, 0.0, 7.0])
    offset, weight, l2 = np.array([0.0, 0.5, -1.0]), np.array([1.0, 2.0, 0.0]), 0.4
    coef = {"coef": torch.tensor([0.8], dtype=torch.float64)}
    mean = np.exp(0.8 * x[:, 0])
    expected = {
        "loss": mean - y * np.log(mean),
        "deviance": poisson_deviances(y, mean),
        "mse": (y - mean) ** 2,
    }
    rows = Rows(torch.tensor(x), torch.tensor(y), torch.ones(3))
    found = GLM(1, "poisson").metrics(coef, rows)
    assert list(found) == list(expected)
    for name, values in expected.items():
        np.testing.assert_allclose(found[name].numpy(), values, rtol=1e-12)
    problem = GLM(1, "poisson", l2=l2, weighted=True, offset=True)
    assert (problem.primary_metric, problem.higher_is_better) == ("deviance", False)
    rows = Rows(rows.x, torch.tensor(np.stack([y, weight, offset], 1)), torch.ones(3))
    found, mean = problem.metrics(coef, rows), mean * np.exp(offset)
    np.testing.assert_allclose(found["deviance"].numpy(), poisson_deviances(y, mean), rtol=1e-12)
    objective = weight * (mean - y * np.log(mean)) + l2 * 0.64 / 2
    np.testing.assert_allclose(found["objective"].numpy(), objective, rtol=1e-12)


def poisson_deviances(y: Any, mean: Any) -> Any:
    return np.array([mean_poisson_deviance([a], [b]) for a, b in zip(y, mean, strict=True)])


def test_it_offers_what_pursuit_needs() -> None:
    problem: Problem = GLM(3)
    assert isinstance(problem, SupportSolvable)
    assert problem.init(Key(0))["coef"].dtype == torch.float64


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"features": 0}, "features must be a number of at least 1"),
        ({"features": "squared"}, "features must be a number of at least 1, got 'squared'"),
        ({"features": 2, "datafit": None}, "unknown datafit 'None'"),
        ({"features": 2, "l2": -1.0}, "l2 must be finite"),
        ({"features": 2, "l2": "a"}, "l2 must be finite and at least 0, got 'a'"),
        ({"features": 2, "l2": float("nan")}, "l2 must be finite"),
        ({"features": 2, "datafit": "softmax"}, "softmax needs classes="),
        ({"features": 2, "datafit": "logistic", "classes": 3}, "use softmax"),
        ({"features": 2, "datafit": "gamma"}, "unknown datafit"),
        ({"features": 2, "keep": (2,)}, "keep names coefficient 2"),
        ({"features": 2, "keep": 1}, "keep must list positions of coefficients, got 1"),
        ({"features": 2, "keep": ["age"]}, "keep must list positions of coefficients"),
        ({"features": 2, "keep": [0.5]}, "keep must list positions of coefficients"),
        (
            {"features": 2, "dictionary": torch.eye(3)},
            r"dictionary has shape \[3, 3\].* 2 features",
        ),
        ({"features": True}, "features must be a number of at least 1, got True"),
        ({"features": 2, "datafit": "softmax", "classes": "3"}, "at least 2, got '3'"),
        ({"features": 2, "dtype": "float32"}, "dtype must be torch.float64 or .*, got 'float32'"),
    ],
)
def test_impossible_settings_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        GLM(**arguments)


def test_a_dictionary_may_be_an_array() -> None:
    atoms = np.linspace(0, 1, 6).reshape(2, 3)
    found = GLM(2, dictionary=atoms).dictionary
    assert found is not None
    np.testing.assert_array_equal(found.numpy(), atoms)


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (np.zeros(9), "target and a weight"),
        (np.stack([np.zeros(9), np.full(9, -1.0)], 1), "negative"),
        (np.stack([np.zeros(9), np.full(9, np.nan)], 1), "not finite"),
        (np.stack([np.full(9, np.nan), np.ones(9)], 1), "NaN"),
    ],
)
def test_weighted_targets_are_checked(targets: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        GLM(4, weighted=True).check_targets(torch.from_numpy(targets))


def test_a_simulation_refuses_labels_that_are_none() -> None:
    clients = [(X, DRAW.standard_normal(9)) for _ in range(3)]
    with pytest.raises(DataError, match="labels 0 and 1"):
        simulate(FedHT(tau=2), GLM(4, "logistic"), clients, 1)
    with pytest.raises(DataError, match=r"labels 0 \.\. 1"):
        simulate(FedHT(tau=2), GLM(4, "softmax", classes=2), clients, 1)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_simulation_refuses_numbers_that_are_not_finite(bad: float) -> None:
    broken, y = X.copy(), DRAW.standard_normal(9)
    broken[2, 1] = bad
    with pytest.raises(DataError, match=r"finite|NaN"):
        simulate(FedHT(tau=2), GLM(4), [(X, y), (broken, y)], 1)
    with pytest.raises(DataError, match=r"finite|NaN"):
        simulate(FedHT(tau=2), GLM(4), [(X, y), (X, np.where(y > 0, y, bad))], 1)


def test_more_coefficients_than_there_are_keep_all() -> None:
    y = X @ np.array([1.0, -2.0, 3.0, 0.5])
    run = simulate(FedGradMP(tau=99, batch_size=None), GLM(4, "squared-half"), [(X, y), (X, y)], 3)
    assert np.allclose(run.model.params["coef"].numpy(), [1.0, -2.0, 3.0, 0.5])


def test_a_round_tells_how_many_clients_have_too_few_rows() -> None:
    y = X @ np.array([1.0, 0.0, 0.0, 0.0])
    data = ClientData.of([(X, y), (X[:2], y[:2])], test=0.0)
    run = simulate(
        FedGradMP(tau=1, batch_size=None), GLM(4, "squared-half"), data, 1, evaluate_every=0
    )
    assert run.metrics[0]["metrics"]["underdetermined"] == pytest.approx(2 / 11)


def test_a_start_is_where_training_begins() -> None:
    start = np.array([3.0, -1.0, 0.5])
    problem = GLM(3, start=start, l2=0.1)
    assert problem.with_l2(0.2).init(Key(0))["coef"].tolist() == start.tolist()
    assert repr(problem) != repr(GLM(3, start=2 * start, l2=0.1))
    rows = [(np.eye(3), np.zeros(3))]
    done = simulate(FedHT(tau=2, local_steps=0), problem, rows, 1, test=0.0, evaluate_every=0)
    assert done.server["coef"].tolist() == [3.0, -1.0, 0.0]


@pytest.mark.parametrize("start", [np.zeros(4), np.array([0.0, np.nan, 0.0])])
def test_a_start_of_another_shape_or_not_finite_is_rejected(start: Any) -> None:
    with pytest.raises(ConfigError, match="start must hold finite numbers of shape"):
        GLM(3, start=start)


def test_labels_of_either_coding_give_the_same_model() -> None:
    draw = np.random.default_rng(0)
    x, y = draw.standard_normal((30, 3)), draw.integers(2, size=30)
    found = [
        simulate(FedHT(tau=2), GLM(3, "logistic"), [(x, labels)], 3, evaluate_every=0).server
        for labels in (y, 2 * y - 1, (2 * y - 1).astype(float))
    ]
    assert torch.equal(found[0]["coef"], found[1]["coef"])
    assert torch.equal(found[0]["coef"], found[2]["coef"])


@pytest.mark.parametrize(
    ("atoms", "message"),
    [
        (np.full((3, 3), np.nan), "real, finite numbers"),
        (np.eye(3, dtype=complex), "real, finite numbers"),
        (np.zeros((3, 0)), "a column per atom"),
    ],
)
def test_an_impossible_dictionary_is_rejected_at_once(atoms: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        GLM(3, dictionary=atoms)


def test_a_start_that_is_not_finite_is_rejected_as_such() -> None:
    with pytest.raises(ConfigError, match=r"shape \[3\], got NaN or infinite entries"):
        GLM(3, start=np.array([np.nan, 0, 0]))
