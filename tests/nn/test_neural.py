from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parsifl.core.batching import Batch, Rows
from parsifl.core.errors import CapabilityError, ConfigError
from parsifl.core.keys import Key
from parsifl.core.problem import Layered, Problem, Scalable
from parsifl.nn import neural
from parsifl.nn.dropout import KeyedDropout
from parsifl.nn.neural import NeuralProblem


def linear() -> nn.Module:
    return nn.Linear(3, 2)


def batch(x: Tensor, y: Tensor, weight: list[float] | None = None, key: int = 0) -> Batch:
    given = torch.ones(len(y)) if weight is None else torch.tensor(weight)
    return Batch(x, y, given.to(x.dtype), torch.tensor(True), Key(key).tensor())


def test_it_is_a_layered_and_scalable_problem() -> None:
    problem = NeuralProblem(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)))
    assert isinstance(problem, Problem)
    assert isinstance(problem, Layered)
    assert isinstance(problem, Scalable)
    assert problem.supports_vmap
    assert (problem.primary_metric, problem.higher_is_better) == ("accuracy", True)
    regression = NeuralProblem(linear, "mse")
    assert (regression.primary_metric, regression.higher_is_better) == ("mse", False)


def test_a_factory_draws_new_parameters_for_every_seed_and_only_for_it() -> None:
    problem = NeuralProblem(linear)
    before = torch.get_rng_state()
    first = problem.init(Key(0))["weight"]
    assert torch.equal(first, problem.init(Key(0, round=5, client=3, purpose="x"))["weight"])
    assert not torch.equal(first, problem.init(Key(1))["weight"])
    assert torch.equal(before, torch.get_rng_state())


def test_a_module_gives_its_own_parameters_for_every_seed() -> None:
    module = nn.Linear(3, 2)
    problem = NeuralProblem(module, dtype=torch.float64)
    for seed in (0, 1):
        found = problem.init(Key(seed))["weight"]
        assert found.dtype == torch.float64
        assert torch.equal(found, module.weight.detach().double())
        found += 1  # the caller's own copy
    assert all(value.device.type == "meta" for value in problem.module.parameters())


def test_the_loss_is_a_weighted_mean_of_the_rows() -> None:
    problem = NeuralProblem(linear, dtype=torch.float64)
    params = {"weight": torch.eye(2, 3, dtype=torch.float64), "bias": torch.zeros(2).double()}
    x = torch.tensor([[2.0, 0, 0], [0, 1.0, 0], [5.0, 5.0, 5.0]]).double()
    y = torch.tensor([0, 0, 1])
    rows = [math.log(1 + math.exp(-2)), math.log(1 + math.exp(1)), math.log(2)]
    assert float(problem.loss(params, batch(x, y))) == pytest.approx(sum(rows) / 3)
    weighted = problem.loss(params, batch(x, y, [1.0, 2.0, 0.0]))
    assert float(weighted) == pytest.approx((rows[0] + 2 * rows[1]) / 3)
    assert float(problem.loss(params, batch(x, y, [0.0, 0.0, 0.0]))) == 0.0


def test_metrics_have_one_value_a_row() -> None:
    problem = NeuralProblem(linear)
    params = {"weight": torch.eye(2, 3), "bias": torch.zeros(2)}
    x, y = torch.eye(3)[:2], torch.tensor([0, 0])
    found = problem.metrics(params, Rows(x, y, torch.ones(2)))
    assert found["accuracy"].tolist() == [1.0, 0.0]
    assert found["loss"][0] < found["loss"][1]


def test_the_squared_error_takes_one_or_several_targets() -> None:
    one = NeuralProblem(lambda: nn.Linear(3, 1), "mse")
    params = {"weight": torch.ones(1, 3), "bias": torch.zeros(1)}
    rows = Rows(torch.eye(3), torch.tensor([1.0, 0.0, 3.0]), torch.ones(3))
    assert one.metrics(params, rows)["mse"].tolist() == [0.0, 1.0, 4.0]
    two = NeuralProblem(linear, "mse")
    params = {"weight": torch.ones(2, 3), "bias": torch.zeros(2)}
    rows = Rows(torch.eye(3)[:1], torch.tensor([[1.0, 3.0]]), torch.ones(1))
    assert two.metrics(params, rows)["mse"].tolist() == [2.0]


def test_targets_may_be_more_precise_than_the_parameters() -> None:
    problem = NeuralProblem(lambda: nn.Linear(3, 1), "mse")
    params, x = problem.init(Key(0)), torch.randn(4, 3, generator=Key(1).torch_generator())
    y = torch.tensor([0.5, -1.0, 2.0, 0.1], dtype=torch.float64)
    rows = batch(x, y, [1.0, 0.0, 1.0, 1.0])
    squares = (problem.predict(params, x)[:, 0] - y).square()
    torch.testing.assert_close(problem.loss(params, rows), squares[[0, 2, 3]].mean())


def test_many_rows_are_judged_in_pieces_with_the_same_result(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problem = NeuralProblem(linear)
    params = problem.init(Key(0))
    x = torch.randn(11, 3, generator=Key(0).torch_generator())
    rows = Rows(x, torch.zeros(11, dtype=torch.int64), torch.ones(11))
    whole = problem.metrics(params, rows)
    monkeypatch.setattr(neural, "_CHUNK", 4)
    pieces = problem.metrics(params, rows)
    for name in whole:
        assert torch.allclose(whole[name], pieces[name])
        assert len(pieces[name]) == 11


def test_batch_statistics_make_rows_interact() -> None:
    norm = nn.BatchNorm1d(3, track_running_stats=False)
    assert NeuralProblem(nn.Sequential(norm, nn.Linear(3, 2))).uses_batch_statistics
    assert not NeuralProblem(nn.Sequential(nn.LayerNorm(3), nn.Linear(3, 2))).uses_batch_statistics


def test_dropout_follows_the_key_of_the_batch_and_is_off_in_prediction() -> None:
    problem = NeuralProblem(nn.Sequential(nn.Linear(3, 50), KeyedDropout(0.5), nn.Linear(50, 2)))
    params = problem.init(Key(0))
    x, y = torch.ones(4, 3), torch.zeros(4, dtype=torch.int64)
    losses = [float(problem.loss(params, batch(x, y, key=key))) for key in (1, 1, 2)]
    assert losses[0] == losses[1] != losses[2]
    assert torch.equal(problem.predict(params, x), problem.predict(params, x))


def test_the_loss_runs_for_many_clients_at_once() -> None:
    problem = NeuralProblem(linear, dtype=torch.float64)
    params = problem.init(Key(0))
    x = torch.randn(4, 5, 3, generator=Key(0).torch_generator()).double()
    y = torch.zeros(4, 5, dtype=torch.int64)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        return problem.loss(params, batch(x, y))

    batched = torch.func.vmap(loss)(x, y)
    assert torch.allclose(batched, torch.stack([loss(a, b) for a, b in zip(x, y, strict=True)]))


def test_a_factory_with_a_width_gives_narrower_problems_once() -> None:
    def build(width: float = 1.0) -> nn.Module:
        hidden = math.ceil(8 * width)
        return nn.Sequential(nn.Linear(3, hidden), nn.ReLU(), nn.Linear(hidden, 2))

    problem = NeuralProblem(build, "mse", dtype=torch.float64)
    half = problem.narrow(0.5)
    assert half is problem.narrow(0.5)
    assert half.shapes()["0.weight"] == (4, 3)
    assert problem.shapes()["0.weight"] == (8, 3)
    assert (half.row_loss.kind, half.dtype) == ("mse", torch.float64)


@pytest.mark.parametrize("source", [linear, nn.Linear(3, 2)])
def test_a_problem_of_one_width_says_how_to_make_more(source: Any) -> None:
    with pytest.raises(CapabilityError, match="takes width="):
        NeuralProblem(source).narrow(0.5)


def test_the_head_is_the_last_layer_or_the_one_that_is_named() -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    assert set(NeuralProblem(module).head) == {"2.weight", "2.bias"}
    assert set(NeuralProblem(module, head="0").head) == {"0.weight", "0.bias"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((linear, "hinge"), "loss must be"),
        ((lambda: 3,), "expected an nn.Module or a factory"),
        (("mlp",), "expected an nn.Module or a factory of one, got 'mlp'"),
    ],
)
def test_mistakes_are_told(arguments: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        NeuralProblem(*arguments)


@pytest.mark.parametrize("dtype", ["float32", torch.int64])
def test_parameters_are_real_numbers(dtype: Any) -> None:
    with pytest.raises(ConfigError, match=r"dtype must be torch.float32 or torch.float64, got"):
        NeuralProblem(linear, dtype=dtype)


def test_arrays_of_integers_are_numbers_or_tokens_as_the_model_wants() -> None:
    numbers, tokens = NeuralProblem(lambda: nn.Linear(3, 2)), NeuralProblem(nn.Embedding(9, 2))
    given = [[1, 2, 3], [4, 5, 6]]
    params = numbers.init(Key(0))
    assert torch.equal(
        numbers.predict(params, given),
        numbers.predict(params, torch.tensor(given, dtype=torch.float32)),
    )
    assert tokens.predict(tokens.init(Key(0)), given).shape == (2, 3, 2)
    with pytest.raises(RuntimeError, match="shapes"):
        numbers.predict(params, [[1.0, 2.0]])
