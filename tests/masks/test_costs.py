from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tests.masks.test_local_search import brute_force
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from parsifl.core.errors import ConfigError
from parsifl.masks import (
    MaskPlan,
    curve,
    from_bytes,
    from_flops,
    from_memory,
    layer_groups,
    optimal,
)
from parsifl.masks.costs import Probe, flops_costs, memory_costs
from parsifl.nn import models
from parsifl.nn.flops import OperationCounter


def real_backward(module: nn.Module, sample: Tensor, trained: set[str]) -> int:
    """Count a real backward pass with torch's own counter."""
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name in trained)
    loss = module(sample).sum()
    with FlopCounterMode(display=False) as counter:
        loss.backward()
    return int(counter.get_total_flops())


@pytest.mark.slow
def test_costs_equal_a_real_backward_for_any_mask() -> None:
    module = models.build("preresnet18", width=0.0625)
    sample = torch.zeros(2, 3, 32, 32)
    costs = flops_costs(module, sample)
    for chosen in ([0], [3], [9], [0, 9], [2, 5, 7], [4, 8], list(range(10))):
        names = {name for index in chosen for name in costs.blocks[index].parameters}
        counted = costs.add[chosen].sum() + costs.tail[chosen[0]]
        assert counted == real_backward(module, sample, names)


def test_mlp_flops_are_the_textbook_ones() -> None:
    module = models.build("mlp", inputs=7, hidden=(5, 4), classes=3)
    costs = flops_costs(module, torch.zeros(6, 7))
    first, second, head = 2 * 6 * 7 * 5, 2 * 6 * 5 * 4, 2 * 6 * 4 * 3
    assert costs.add.tolist() == [first, second]
    # the head passes its input gradient; the second layer does so only if the first is trained
    assert costs.tail.tolist() == [second + head, head]


def test_depthwise_weight_gradients_are_not_overcounted() -> None:
    conv = nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False, device="meta")
    out = conv(torch.empty(2, 8, 5, 5, device="meta")).sum()
    with OperationCounter() as counter:
        out.backward()
    assert counter.total == 2 * 2 * 8 * 9 * 25


@pytest.mark.parametrize(("name", "saved"), [("preresnet18", 0.242), ("mobilenet", 0.304)])
def test_weak_devices_save_backward_flops_with_the_best_masks(name: str, saved: float) -> None:
    with torch.device("meta"):
        module = models.build(name)
    found = layer_groups(module)
    total = sum(block.size for block in found)
    plan = optimal(found, [total / 8] * 5 + [total] * 5)
    probe = Probe.of(module, torch.empty(4, 3, 32, 32), found)
    weak = probe.backward_flops(np.flatnonzero(plan.masks[0]).tolist())
    full = probe.backward_flops(range(len(found)))
    assert 1 - weak / full == pytest.approx(saved, abs=0.001)
    assert probe.backward_flops([]) == 0


def test_flops_plan_keeps_every_budget_when_counted_again() -> None:
    module = models.build("vgg", width=0.5)
    sample = torch.zeros(2, 3, 32, 32)
    costs = flops_costs(module, sample)
    full = costs.add.sum() + costs.tail[0]
    shares = [1.0, 0.8, 0.6, 0.3, 0.2]
    plan = from_flops(module, sample, [share * full for share in shares], seconds=3.0)
    assert plan.instance.broken(plan.masks) is None
    for mask, share in zip(plan.masks, shares, strict=True):
        names = {
            name
            for block, on in zip(costs.blocks, mask, strict=True)
            if on
            for name in block.parameters
        }
        assert real_backward(module, sample, names) <= share * full
    assert plan.slack >= 0.0


def test_flops_plan_is_the_best_by_enumeration() -> None:
    from parsifl.masks.instance import value

    module = models.build("mlp", inputs=9, hidden=(6, 5, 4), classes=3)
    sample = torch.zeros(4, 9)
    costs = flops_costs(module, sample)
    full = costs.add.sum() + costs.tail[0]
    plan = from_flops(module, sample, [full, 0.7 * full, 0.5 * full])
    subsets = np.array(list(itertools.product([False, True], repeat=3)))
    designs = (subsets[list(rows)] for rows in itertools.product(range(8), repeat=3))
    values = [value(plan.instance, m, "J") for m in designs if plan.instance.broken(m) is None]
    assert plan.proven
    assert plan.value == pytest.approx(min(values))


class Branches(nn.Module):
    """Two layers side by side: no earliest block exists."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.left = nn.Linear(4, 4), nn.Linear(4, 64)
        self.middle, self.right = nn.Linear(4, 64), nn.Linear(64, 64)
        self.head = nn.Linear(64, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        logits: Tensor = self.head(self.left(x) + self.right(self.middle(x)))
        return logits


def test_blocks_are_sorted_by_the_order_in_which_they_run() -> None:
    class Backwards(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.second, self.first = nn.Linear(3, 3), nn.Linear(2, 3)
            self.head = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            logits: Tensor = self.head(self.second(self.first(x)))
            return logits

    costs = flops_costs(Backwards(), torch.zeros(1, 2))
    assert [block.name for block in costs.blocks] == ["first", "second"]


def spent(module: nn.Module, sample: Tensor, plan: MaskPlan) -> list[int]:
    """Count on the module what each mask of a plan takes."""
    probe = Probe.of(module, sample, layer_groups(module))
    order = [block.name for block in probe.blocks]
    assert order == list(plan.layers)
    return [probe.backward_flops(np.flatnonzero(mask).tolist()) for mask in plan.masks]


def test_parallel_branches_never_cost_more_than_planned() -> None:
    module, sample = Branches(), torch.zeros(2, 4)
    costs = flops_costs(module, sample)
    full = real_backward(module, sample, {n for b in costs.blocks for n in b.parameters})
    assert costs.add.sum() + costs.tail[0] == full
    for chosen in itertools.product([False, True], repeat=len(costs.blocks)):
        kept = [index for index, on in enumerate(chosen) if on]
        names = {name for index in kept for name in costs.blocks[index].parameters}
        if kept:
            planned = costs.add[kept].sum() + costs.tail[kept[0]]
            assert real_backward(module, sample, names) <= planned
    budgets = np.array([1.0, 0.7, 0.4]) * full
    plan = from_flops(module, sample, budgets)
    assert (np.array(spent(module, sample, plan)) <= budgets).all()


class Reader(nn.Module):
    """Tokens, torch's own transformer layers, and a head that is declared first."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.head, self.embed = nn.Linear(8, 3), nn.Embedding(20, 8)
        self.place = nn.Parameter(torch.zeros(1, 5, 8))
        self.layers = nn.ModuleList([layer])

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.place
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(x.mean(1))
        return logits


class Attention(nn.Module):
    """Queries, keys and values side by side, without biases."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(8, 8, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        mixed: Tensor = (self.q(x) @ self.k(x).transpose(1, 2)).softmax(-1) @ self.v(x)
        return x + mixed


@pytest.mark.parametrize(
    "layer", [nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), Attention()]
)
def test_transformers_on_tokens_are_planned(layer: nn.Module) -> None:
    module, sample = Reader(layer), torch.zeros(2, 5, dtype=torch.int64)
    costs = flops_costs(module, sample)
    assert "head" not in [block.name for block in costs.blocks]
    names = {name for block in costs.blocks for name in block.parameters}
    full = real_backward(module, sample, names)
    assert costs.add.sum() + costs.tail[0] == full
    budgets = np.array([1.0, 0.8, 0.5, 0.3]) * full
    plan = from_flops(module, sample, budgets, seconds=2.0)
    assert plan.masks[0].all()
    assert plan.masks.any(axis=1).all()
    assert (np.array(spent(module, sample, plan)) <= budgets).all()
    assert from_memory(module, sample, [1e9, 1e9]).masks.all()


class Pair(nn.Module):
    """A module that returns two things."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.layers(x), x


@pytest.mark.parametrize(
    ("net", "sample", "words"),
    [
        (nn.Sequential, [[0.0] * 4], "sample is a list"),
        (nn.Sequential, torch.zeros(2, 5), "does not run on a sample of 2 x 5"),
        (Pair, torch.zeros(2, 4), "returns a tuple"),
    ],
)
def test_samples_that_cannot_be_measured_are_told(net: Any, sample: Any, words: str) -> None:
    module = net(nn.Linear(4, 3), nn.Linear(3, 2))
    with pytest.raises(ConfigError, match=words):
        from_flops(module, sample, [1e6], head="1" if net is nn.Sequential else "layers.1")


@pytest.mark.parametrize("slots", [-1, 0.5, True, "2"])
def test_slots_are_a_whole_number(slots: Any) -> None:
    module = models.build("mlp", inputs=4, hidden=(3,), classes=2)
    with pytest.raises(ConfigError, match="slots must be an integer"):
        from_memory(module, torch.zeros(1, 4), [1e6], slots=slots)


def test_bytes_are_parameters_times_their_width() -> None:
    module = models.build("vgg", width=0.25)
    found = layer_groups(module)
    total = sum(block.size for block in found)
    budgets = [total, total / 2, total / 2]
    plan = from_bytes(module, [4 * budget for budget in budgets])
    direct = optimal(found, budgets)
    assert (plan.masks == direct.masks).all()
    assert plan.bias == pytest.approx(direct.bias)
    double = from_bytes(module.double(), [8 * budget for budget in budgets])
    assert (double.masks == plan.masks).all()


def test_plans_for_other_units_take_the_weights_of_the_mean() -> None:
    widths = (5, 7, 6, 5, 3)
    module = nn.Sequential()
    for inputs, outputs in itertools.pairwise(widths):
        module.extend([nn.Linear(inputs, outputs), nn.Tanh()])
    del module[-1]
    budgets, rows = [90.0, 88.0, 102.0, 90.0], [374, 101, 392, 265]
    found = layer_groups(module)
    options: dict[str, Any] = {"objective": "bias", "weights": rows}
    direct = optimal(found, budgets, "bias", weights=rows)
    assert direct.proven
    assert direct.bias == pytest.approx(64.64, abs=0.01)
    plan = from_bytes(module, [4 * budget for budget in budgets], **options)
    assert plan.proven
    assert plan.bias == pytest.approx(direct.bias)
    sample = torch.zeros(20, 5)
    for costs, make in ((flops_costs, from_flops), (memory_costs, from_memory)):
        instance = costs(module, sample).instance(
            share * (costs(module, sample).add.sum() + costs(module, sample).tail[0])
            for share in (0.8, 0.75, 0.9, 0.8)
        )
        plan = make(module, sample, instance.limits, **options)
        expected = brute_force(replace(instance, weights=np.array(rows, float)), "bias")
        assert plan.proven
        assert plan.bias == pytest.approx(expected)
        equal = make(module, sample, instance.limits, objective="bias", weights=[3, 3, 3, 3])
        assert equal.instance.weights is None
    with pytest.raises(ConfigError, match="weights must be 4 positive numbers"):
        from_bytes(module, budgets, weights=[1.0, 2.0])


def test_kept_activations_are_those_that_autograd_saves() -> None:
    module = nn.Sequential(nn.Linear(4, 8), nn.Sigmoid(), nn.Linear(8, 8), nn.Sigmoid())
    module.append(nn.Linear(8, 2))
    probe = Probe.of(module, torch.zeros(3, 4), layer_groups(module))
    # training all: the input (3x4) and both sigmoids' outputs (3x8), in float32
    assert probe.kept_bytes([0, 1]) == 4 * (12 + 24 + 24)
    # training the second alone: its input, which is the first sigmoid's output, and its own
    assert probe.kept_bytes([1]) == 4 * (24 + 24)


def test_memory_plan_freezes_early_layers_first() -> None:
    module = models.build("vgg", width=0.5)
    sample = torch.zeros(16, 3, 32, 32)
    costs = memory_costs(module, sample, slots=1)
    assert (np.diff(costs.tail) <= 0).all()
    full = costs.add.sum() + costs.tail[0]
    plan = from_memory(module, sample, [full, 0.5 * full], seconds=3.0)
    assert plan.instance.broken(plan.masks) is None
    assert plan.masks[0].all()
    assert not plan.masks[1, 0]
    assert plan.masks[1, -1]


@pytest.mark.slow
def test_curve_of_figure_3_starts_at_zero_and_keeps_psi() -> None:
    with torch.device("meta"):
        module = models.build("mobilenet", classes=100)
    sample = torch.empty(2, 3, 32, 32)
    rows = curve(module, sample, [0.0, 0.5, 0.875])
    assert rows[0]["parameters"] == 3_206_976
    assert rows[0]["parameters_saved"] == rows[0]["flops_saved"] == 0.0
    assert rows[2]["parameters"] == 400_480
    assert all(row["parameters"] <= row["psi"] for row in rows)


def test_training_the_last_layers_saves_more_flops_the_more_is_masked() -> None:
    module = models.build("mlp", inputs=8, hidden=(8, 6, 4), classes=2)
    rates = [0.0, 0.25, 0.5, 0.8]
    last = curve(module, torch.zeros(2, 8), rates, design="last")
    assert [row["layers"] for row in last] == [
        ["body.0", "body.1", "body.2"],
        ["body.1", "body.2"],
        ["body.2"],
        ["body.2"],
    ]
    (tight,) = curve(module, torch.zeros(2, 8), [0.85], design="last")
    assert tight["layers"] == []  # the last layer does not fit, so nothing behind it is trained
    saved = [row["flops_saved"] for row in last]
    assert saved == sorted(saved)
    full = curve(module, torch.zeros(2, 8), rates)
    assert last[2]["flops_saved"] > full[2]["flops_saved"]


def test_designs_of_the_paper_take_layers_from_the_front_or_at_random() -> None:
    module = models.build("mlp", inputs=8, hidden=(8, 6, 4), classes=2)
    rates = [0.0, 0.4]
    front = curve(module, torch.zeros(2, 8), rates, design="sequential")
    assert [row["layers"] for row in front] == [["body.0", "body.1", "body.2"], ["body.0"]]
    draws = {
        tuple(row["layers"])
        for seed in range(8)
        for row in curve(module, torch.zeros(2, 8), [0.4], design="random", seed=seed)
    }
    assert len(draws) > 1


def test_a_device_without_room_trains_nothing() -> None:
    module = models.build("mlp", inputs=4, hidden=(3,), classes=2)
    (row,) = curve(module, torch.zeros(1, 4), [0.9])
    assert row["layers"] == []
    assert row["backward_flops"] == 0


def test_bad_rate_and_design_are_refused() -> None:
    module = models.build("mlp")
    with pytest.raises(ConfigError, match=r"masking rate must be .* got 1"):
        curve(module, torch.zeros(1, 784), [1.0])
    with pytest.raises(ConfigError, match="unknown design"):
        curve(module, torch.zeros(1, 784), design="best")
