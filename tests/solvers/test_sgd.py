from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, final

import pytest
import torch
from tests.support.fixtures import classifier, clients
from torch import Tensor, nn
from torch.func import functional_call

from parsifl.core import tree
from parsifl.core.batching import Batch, Batches, BatchSpec, DataRequest
from parsifl.core.keys import Key
from parsifl.core.problem import Params
from parsifl.engine.batch_sampler import BatchSampler
from parsifl.nn.neural import NeuralProblem
from parsifl.solvers.sgd import SgdConfig, gradient, sgd, sgd_pair
from parsifl.solvers.thresholding import SoftThresholdRule
from parsifl.solvers.update_rules import LinearRule, Rule
from parsifl.testing.conformance.harness import difference

PROBLEM = classifier()
START = PROBLEM.init(Key(3))


def batches(client: int = 0, **draw: Any) -> Batches:
    given = BatchSpec(**{"batch_size": 4, "steps": 5, **draw})
    return BatchSampler(clients((6, 11)), PROBLEM).draw(client, DataRequest({"t": given}), Key(2))[
        "t"
    ]


def with_optimizer(start: Params, drawn: Batches, prox: float = 0.0, **options: Any) -> Params:
    """The same with torch's own optimizer, on short batches instead of padded ones."""
    module = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)).double()
    module.load_state_dict(start)
    optimizer = torch.optim.SGD(module.parameters(), **options)
    loss = nn.CrossEntropyLoss()
    for batch in drawn:
        real = batch.weight > 0
        optimizer.zero_grad()
        value = loss(module(batch.x[real]), batch.y[real])
        pull = sum((p - start[n]).square().sum() for n, p in module.named_parameters())
        (value + 0.5 * prox * pull).backward()
        optimizer.step()
    return {name: value.detach() for name, value in module.named_parameters()}


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_it_is_the_sgd_of_torch(momentum: float, decay: float) -> None:
    found = sgd(PROBLEM, START, batches(), SgdConfig(0.3, momentum, decay))
    wanted = with_optimizer(START, batches(), lr=0.3, momentum=momentum, weight_decay=decay)
    assert difference(found, wanted) < 1e-14


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_proximal_rule_is_part_of_the_gradient(momentum: float) -> None:
    aux = (tree.scale(-0.7, START),)
    found = sgd(PROBLEM, START, batches(), SgdConfig(0.3, momentum), rule=LinearRule(0.7), aux=aux)
    wanted = with_optimizer(START, batches(), prox=0.7, lr=0.3, momentum=momentum)
    assert difference(found, wanted) < 1e-13


def test_a_threshold_comes_after_the_step() -> None:
    rule = SoftThresholdRule(0.5)
    one = batches(steps=1)
    stepped = with_optimizer(START, one, lr=0.3)
    wanted = {n: v.sign() * (v.abs() - 0.15).clamp(min=0) for n, v in stepped.items()}
    assert difference(sgd(PROBLEM, START, one, SgdConfig(0.3), rule=rule), wanted) < 1e-14


def test_inputs_are_not_changed() -> None:
    start, drawn = {n: v.clone() for n, v in START.items()}, batches()
    before = tree.map(torch.clone, drawn)
    sgd(PROBLEM, start, drawn, SgdConfig(0.3, 0.5), rule=LinearRule(0.1), aux=(start,))
    assert tree.same(start, START)
    assert tree.same(drawn, before)


def test_no_steps_give_the_same_parameters() -> None:
    found, aux = sgd_pair(PROBLEM, START, batches(steps=0), SgdConfig(0.3), aux=(START,))
    assert tree.same(found, START)
    assert tree.same(aux, (START,))


def test_inactive_steps_change_nothing_even_with_momentum_and_rules() -> None:
    drawn = batches(steps=5)
    active = torch.tensor([True, True, True, False, False])
    ragged = replace(drawn, active=active, ragged=True)
    short = replace(drawn, index=drawn.index[:3], weight=drawn.weight[:3], active=drawn.active[:3])
    options: dict[str, Any] = {"rule": LinearRule(0.3), "aux": (START,)}
    config = SgdConfig(0.3, momentum=0.9, weight_decay=0.1)
    found = sgd(PROBLEM, START, ragged, config, **options)
    assert tree.same(found, sgd(PROBLEM, START, short, config, **options))


@final
@dataclass(frozen=True)
class Trail(Rule):
    """Let aux[0] run after w at a tenth of its speed."""

    moves_aux: ClassVar[bool] = True

    def after_(self, w: Tensor, aux: tuple[Tensor, ...], lr: float) -> None:  # noqa: ARG002 - the contract
        """Move the auxiliary tensor."""
        aux[0].mul_(0.9).add_(w, alpha=0.1)


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_a_rule_may_move_its_auxiliary_tree(momentum: float) -> None:
    found, (trail,) = sgd_pair(
        PROBLEM, START, batches(steps=3), SgdConfig(0.3, momentum), rule=Trail(), aux=(START,)
    )
    wanted = START
    for steps in (1, 2, 3):
        w = sgd(PROBLEM, START, batches_cut(steps), SgdConfig(0.3, momentum))
        wanted = {n: 0.9 * wanted[n] + 0.1 * w[n] for n in wanted}
    assert difference(trail, wanted) < 1e-14
    assert difference(found, sgd(PROBLEM, START, batches_cut(3), SgdConfig(0.3, momentum))) < 1e-14


def batches_cut(steps: int) -> Batches:
    drawn = batches(steps=3)
    return replace(
        drawn, index=drawn.index[:steps], weight=drawn.weight[:steps], active=drawn.active[:steps]
    )


def test_a_moving_auxiliary_tree_stops_with_its_client() -> None:
    drawn = batches(steps=3)
    ragged = replace(drawn, active=torch.tensor([True, False, False]), ragged=True)
    _, (trail,) = sgd_pair(PROBLEM, START, ragged, SgdConfig(0.3), rule=Trail(), aux=(START,))
    _, (short,) = sgd_pair(
        PROBLEM, START, batches_cut(1), SgdConfig(0.3), rule=Trail(), aux=(START,)
    )
    assert tree.same(trail, short)


def test_frozen_parameters_are_read_and_not_trained() -> None:
    trained = {name: START[name] for name in ("2.weight", "2.bias")}
    frozen = {name: START[name] for name in ("0.weight", "0.bias")}
    found = sgd(PROBLEM, trained, batches(), SgdConfig(0.3), frozen=frozen)
    assert set(found) == set(trained)
    w = {name: value.clone() for name, value in trained.items()}
    for batch in batches():
        g = torch.func.grad(lambda p, b=batch: PROBLEM.loss({**frozen, **p}, b))(w)
        w = {name: w[name] - 0.3 * g[name] for name in w}
    assert difference(found, w) < 1e-14


def test_a_parameter_that_the_loss_does_not_read_has_no_slope() -> None:
    (first, *_) = batches()
    found = gradient(PROBLEM, START, first)
    body = {name: value for name, value in START.items() if name != PROBLEM.head[0]}
    module = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
    module.register_parameter("idle", nn.Parameter(torch.ones(2)))
    problem = NeuralProblem(module, dtype=torch.float64)
    idle = gradient(problem, {**body, "idle": torch.ones(2, dtype=torch.float64)}, first,
                    {PROBLEM.head[0]: START[PROBLEM.head[0]]})  # fmt: skip
    assert torch.equal(idle.pop("idle"), torch.zeros(2, dtype=torch.float64))
    assert all(torch.equal(value, found[name]) for name, value in idle.items())


def test_it_runs_inside_another_transformation() -> None:
    drawn = batches(steps=2)

    def final_loss(params: Params) -> Tensor:
        return sum(v.square().sum() for v in sgd(PROBLEM, params, drawn, SgdConfig(0.1)).values())  # type: ignore[return-value]  # sum of tensors

    values = torch.func.vmap(final_loss)(tree.map(lambda v: torch.stack([v, v]), START))
    assert torch.allclose(values[0], values[1])
    assert torch.allclose(values[0], final_loss(START))


def test_functional_call_reads_the_same_parameters() -> None:
    """A guard for the reference above: names and values of the module are those of the problem."""
    module = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)).double()
    x = torch.ones(2, 4, dtype=torch.float64)
    assert torch.equal(functional_call(module, START, (x,)), PROBLEM.predict(START, x))


@pytest.mark.parametrize(("channels", "last"), [(8, False), (16, True)])
def test_images_have_channels_last_where_onednn_survives_it(channels: int, last: bool) -> None:
    """The gradient of a 1 x 1 convolution with stride crashed for fewer than 16 channels."""
    layer = nn.Conv2d(channels, 16, 1, stride=2)
    seen = []
    layer.register_forward_pre_hook(
        lambda _, images: seen.append(images[0].is_contiguous(memory_format=torch.channels_last))
    )
    problem = NeuralProblem(nn.Sequential(layer, nn.Flatten(), nn.Linear(16 * 64, 3)))
    x = torch.randn(4, channels, 16, 16, generator=torch.Generator().manual_seed(1))
    ones, key = torch.ones(4), torch.zeros(2, dtype=torch.int64)
    batch = Batch(x, torch.tensor([0, 1, 2, 0]), ones, ones[0], key)
    gradient(problem, problem.init(Key(1)), batch)
    assert seen == [last]
