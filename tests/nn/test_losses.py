"""Losses beside the two that have a name: those of PyTorch, and functions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from parsifl import simulate
from parsifl.algorithms import Ditto, FedAvg, FedRep, PerFedAvg
from parsifl.core.batching import Batch
from parsifl.core.errors import ConfigError, DataError
from parsifl.core.keys import Key
from parsifl.core.metrics import Metric
from parsifl.engine.fingerprint import _form
from parsifl.nn.losses import loss_of
from parsifl.nn.neural import NeuralProblem

WEIGHT = torch.tensor([1.0, 5.0, 0.2])
LABELS = torch.tensor([0, 1, 2, 1, 0, 2])
OUTPUT = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))
REAL = torch.randn(6, 2, generator=torch.Generator().manual_seed(1))
MODULES: dict[str, tuple[nn.Module, Tensor, Tensor]] = {
    "plain": (nn.CrossEntropyLoss(), OUTPUT, LABELS),
    "class weights": (nn.CrossEntropyLoss(weight=WEIGHT), OUTPUT, LABELS),
    "smoothing and weights": (
        nn.CrossEntropyLoss(weight=WEIGHT, label_smoothing=0.1),
        OUTPUT,
        LABELS,
    ),
    "ignored labels": (nn.CrossEntropyLoss(ignore_index=1), OUTPUT, LABELS),
    "log-probabilities": (nn.NLLLoss(weight=WEIGHT), OUTPUT.log_softmax(-1), LABELS),
    "margin": (nn.MultiMarginLoss(), OUTPUT, LABELS),
    "huber, two targets": (nn.HuberLoss(delta=0.3), OUTPUT[:, :2], REAL),
    "binary": (nn.BCEWithLogitsLoss(), OUTPUT[:, 0], (LABELS == 1).float()),
}


def focal(output: Tensor, y: Tensor) -> Tensor:
    losses = functional.cross_entropy(output, y, reduction="none")
    return (1 - torch.exp(-losses)) ** 2 * losses


def mean_focal(output: Tensor, y: Tensor) -> Tensor:
    return focal(output, y).mean()


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


def clients(rows: tuple[int, ...] = (7, 12, 9)) -> list[tuple[Any, Any]]:
    draw = np.random.default_rng(0)
    return [(draw.normal(size=(n, 4)).astype("f4"), np.arange(n) % 3) for n in rows]


@pytest.mark.parametrize(("module", "output", "y"), MODULES.values(), ids=MODULES)
def test_the_mean_of_a_batch_is_that_of_pytorch(
    module: nn.Module, output: Tensor, y: Tensor
) -> None:
    loss = loss_of(module)
    torch.testing.assert_close(loss.mean(output, y, torch.ones(6)), module(output, y))
    padded = torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0, 0.0])
    torch.testing.assert_close(loss.mean(output, y, padded), module(output[:4], y[:4]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_class_weights_take_the_dtype_of_the_model(dtype: torch.dtype) -> None:
    other = {torch.float32: torch.float64, torch.float64: torch.float32}[dtype]
    weight = torch.tensor([1.0, 5.0, 0.25])  # exact in both
    problems = [
        NeuralProblem(network, nn.CrossEntropyLoss(weight=weight.to(each)), dtype=dtype)
        for each in (dtype, other)
    ]
    same, cast = (simulate(FedAvg(), problem, clients(), 1).server for problem in problems)
    assert all(value.dtype == dtype for value in cast.values())
    assert all(torch.equal(value, cast[name]) for name, value in same.items())


def test_class_weights_follow_the_outputs_to_their_device() -> None:
    loss = loss_of(nn.CrossEntropyLoss(weight=WEIGHT, label_smoothing=0.1))
    on_cpu = loss.mean(OUTPUT, LABELS, torch.ones(6))
    device = loss.mean(OUTPUT.to("meta"), LABELS.to("meta"), torch.ones(6, device="meta"))
    assert device.is_meta
    assert torch.equal(loss.mean(OUTPUT, LABELS, torch.ones(6)), on_cpu)


def test_a_mean_is_taken_apart_into_rows() -> None:
    losses = loss_of(mean_focal).rows(OUTPUT, LABELS)
    torch.testing.assert_close(losses, focal(OUTPUT, LABELS))


@pytest.mark.parametrize("loss", [focal, mean_focal], ids=["per row", "mean"])
@pytest.mark.parametrize("executor", ["loop", "vmap"])
def test_training_equals_plain_pytorch(loss: Any, executor: Any) -> None:
    x, y = clients()[0]
    problem = NeuralProblem(network, loss)
    algorithm = FedAvg(lr=0.5, local_steps=3, batch_size=7)
    run = simulate(algorithm, problem, [(x, y)], 1, test=0.0, executor=executor, evaluate_every=0)
    params = {k: v.clone().requires_grad_() for k, v in problem.init(Key(0)).items()}
    for _ in range(3):
        value = focal(
            torch.func.functional_call(network(), params, torch.from_numpy(x)), torch.from_numpy(y)
        ).mean()
        gradients = torch.autograd.grad(value, [*params.values()])
        params = {
            name: (p - 0.5 * g).detach().requires_grad_()
            for (name, p), g in zip(params.items(), gradients, strict=True)
        }
    for name, value in params.items():
        torch.testing.assert_close(run.server[name], value.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("algorithm", [FedRep(), Ditto(), PerFedAvg()], ids=type)
def test_algorithms_that_need_the_head_or_curvature_take_any_loss(algorithm: Any) -> None:
    problem = NeuralProblem(network, nn.CrossEntropyLoss(weight=WEIGHT, label_smoothing=0.1))
    assert problem.primary_metric == "accuracy"
    run = simulate(algorithm, problem, clients(), 2)
    assert run.metrics[-1]["personal"]["test"].keys() >= {"accuracy", "loss"}


def test_a_function_records_its_loss_and_the_metrics_that_are_added() -> None:
    metrics = [Metric("hits", True, lambda output, y: (output.argmax(-1) == y).float())]
    problem = NeuralProblem(network, focal, metrics=metrics)
    assert (problem.primary_metric, problem.higher_is_better) == ("loss", False)
    run = simulate(FedAvg(), problem, clients(), 1)
    assert run.metrics[-1]["global"]["test"].keys() == {"loss", "hits"}


def test_class_weights_are_part_of_the_configuration() -> None:
    forms = [
        _form(NeuralProblem(network, nn.CrossEntropyLoss(weight=weight)))
        for weight in (WEIGHT, 2 * WEIGHT)
    ]
    assert forms[0] != forms[1]
    assert _form(NeuralProblem(network)) == _form(NeuralProblem(network, "mse"))


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (nn.HuberLoss, "got the class HuberLoss"),
        ("huber", "loss must be 'cross-entropy', 'mse', a loss module"),
        (nn.HuberLoss(reduction="sum"), "use reduction='mean'"),
        (nn.AdaptiveLogSoftmaxWithLoss(4, 3, [2]), "has parameters"),
    ],
)
def test_a_loss_that_cannot_be_used_is_named(loss: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        NeuralProblem(network, loss)


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (lambda output, _: output[:1].sum(0), "must return one number per row"),
        (lambda output, y: output - y, r"fails for outputs of shape \[\d+, 3\]"),
        (lambda output, y: output.argmax(-1) == y, "must return real numbers, got torch.bool"),
        (lambda output, y: (output.argmax(-1) != y).float(), "has no gradient"),
        (lambda output, _: output.sum().item(), "must return a tensor, got a float"),
    ],
)
def test_a_loss_that_fails_is_named_before_training(loss: Any, said: str) -> None:
    with pytest.raises(DataError, match=said):
        simulate(FedAvg(), NeuralProblem(network, loss), clients(), 1)


def test_padded_rows_do_not_count() -> None:
    problem = NeuralProblem(network, mean_focal)
    x, y = (torch.from_numpy(part) for part in clients()[0])
    params = problem.init(Key(0))
    key, active = Key(0).tensor(), torch.tensor(True)
    padded = torch.cat([torch.ones(4), torch.zeros(3)])
    first = problem.loss(params, Batch(x[:4], y[:4], torch.ones(4), active, key))
    torch.testing.assert_close(problem.loss(params, Batch(x, y, padded, active, key)), first)
