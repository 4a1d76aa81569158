"""Frozen parameters, constant buffers and tied parameters."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from parsifl import simulate
from parsifl.algorithms import Ditto, FedAvg, FedRep, FedSLR, PerFedAvg, Scaffold
from parsifl.core.errors import CapabilityError, ConfigError
from parsifl.core.keys import Key
from parsifl.engine.fingerprint import _form
from parsifl.nn.neural import NeuralProblem


class Frozen(nn.Module):
    """A frozen body, a constant buffer, and a trained head."""

    def __init__(self, seed: int = 3) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(seed)
        self.body = nn.Linear(4, 6)
        with torch.no_grad():
            self.body.weight.copy_(torch.randn(6, 4, generator=draw))
            self.body.bias.zero_()
        self.body.requires_grad_(False)
        self.position: Tensor
        self.register_buffer("position", torch.linspace(0, 1, 6))
        self.register_buffer("index", torch.arange(6).flip(0))
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        features = (self.body(x) + self.position)[..., self.index]
        output: Tensor = self.head(torch.tanh(features))
        return output


class Tied(nn.Module):
    """An embedding whose weight is also that of the output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.mix = nn.Linear(4, 4)
        self.out = nn.Linear(4, 5, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.out(torch.tanh(self.mix(self.embed(x).mean(1))))
        return output


class Assigning(Frozen):
    """Assigns another tensor to its buffer in training."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.position = 0.9 * self.position
        return super().forward(x)


class Counting(Frozen):
    """Writes to its buffer in training."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.position.mul_(0.9)
        return super().forward(x)


def clients(kind: str = "real") -> list[tuple[Any, Any]]:
    draw = np.random.default_rng(0)
    if kind == "tokens":
        return [(draw.integers(0, 5, (n, 3)), draw.integers(0, 5, n)) for n in (9, 12, 7)]
    return [(draw.normal(size=(n, 4)).astype("f4"), np.arange(n) % 3) for n in (9, 12, 7)]


def trained_by_pytorch(module: nn.Module, x: Any, y: Any, steps: int) -> nn.Module:
    module = copy.deepcopy(module)
    optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], 0.5)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(module(torch.from_numpy(x)), torch.from_numpy(y))
        torch.autograd.backward(loss)
        optimizer.step()
    return module


@pytest.mark.parametrize("executor", ["loop", "threads", "vmap"])
@pytest.mark.parametrize(("kind", "module"), [("real", Frozen()), ("tokens", Tied())])
def test_training_equals_plain_pytorch(executor: Any, kind: str, module: nn.Module) -> None:
    x, y = clients(kind)[0]
    problem = NeuralProblem(module)
    algorithm = FedAvg(lr=0.5, local_steps=4, batch_size=len(y))
    data = [(x, y), (x, y)]  # two clients: their mean is that of one
    run = simulate(algorithm, problem, data, 1, test=0.0, executor=executor, evaluate_every=0)
    expected = dict(trained_by_pytorch(module, x, y, 4).named_parameters())
    assert run.server.keys() < expected.keys() or kind == "tokens"
    for name, value in run.server.items():
        torch.testing.assert_close(value, expected[name].detach(), rtol=1e-5, atol=1e-6)


def test_only_trained_leaves_are_parameters_and_are_sent() -> None:
    problem = NeuralProblem(Frozen())
    assert problem.init(Key(0)).keys() == {"head.weight", "head.bias"}
    assert problem.shapes() == {"head.weight": (3, 6), "head.bias": (3,)}
    run = simulate(FedAvg(local_steps=2), problem, clients(), 1)
    assert run.metrics[0]["bytes_up"] < 3 * (4 * 21 + 200)
    tied = NeuralProblem(Tied())
    assert tied.init(Key(0)).keys() == {"embed.weight", "mix.weight", "mix.bias"}


@pytest.mark.parametrize("algorithm", [Ditto(), Scaffold(), PerFedAvg(), FedSLR()], ids=type)
@pytest.mark.parametrize(("kind", "module"), [("real", Frozen), ("tokens", Tied)])
def test_other_algorithms_train_them(algorithm: Any, kind: str, module: Any) -> None:
    run = simulate(algorithm, NeuralProblem(module), clients(kind), 2)
    assert run.records[-1].scores


def test_a_frozen_body_has_a_head() -> None:
    problem = NeuralProblem(Frozen())
    assert problem.head == ("head.weight", "head.bias")
    with pytest.raises(ConfigError, match="tied"):
        simulate(FedRep(), NeuralProblem(Tied()), clients("tokens"), 1)


def test_the_exported_module_is_complete() -> None:
    for kind, module in (("real", Frozen()), ("tokens", Tied())):
        run = simulate(FedAvg(local_steps=2), NeuralProblem(module), clients(kind), 1)
        x = torch.from_numpy(clients(kind)[0][0])
        exported = run.export()
        model = run.model
        torch.testing.assert_close(exported(x), model.problem.predict(model.params, x))
        assert exported.state_dict().keys() == module.state_dict().keys()


def test_constants_are_part_of_the_configuration() -> None:
    assert _form(NeuralProblem(Frozen(1))) != _form(NeuralProblem(Frozen(2)))


def test_a_factory_that_draws_its_frozen_parameters_is_rejected() -> None:
    def draws() -> nn.Module:
        module = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3))
        module[0].requires_grad_(False)
        return module

    with pytest.raises(ConfigError, match=r"draws the frozen parameter '0\.weight' at random"):
        NeuralProblem(draws)
    assert NeuralProblem(Frozen).init(Key(0)).keys() == {"head.weight", "head.bias"}


@pytest.mark.parametrize("kind", [Counting, Assigning])
def test_a_buffer_that_the_forward_pass_writes_to_is_named(kind: Any) -> None:
    with pytest.raises(CapabilityError, match="writes to the buffer 'position'"):
        simulate(FedAvg(), NeuralProblem(kind()), clients(), 1)


def test_clients_on_another_device_get_the_constants_there() -> None:
    problem = NeuralProblem(Frozen())
    params = {name: value.to("meta") for name, value in problem.init(Key(0)).items()}
    assert problem.predict(params, torch.empty(5, 4, device="meta")).shape == (5, 3)
