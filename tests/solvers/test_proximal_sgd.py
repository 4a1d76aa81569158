from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.algorithms import lowrank
from tests.reference_lowrank import Slr, zeros
from torch import nn

from parsifl.algorithms.fedslr import FedSLR
from parsifl.core.batching import BatchSpec, DataRequest
from parsifl.core.keys import Key
from parsifl.data.clients import ClientData
from parsifl.engine.batch_sampler import BatchSampler
from parsifl.nn.neural import NeuralProblem
from parsifl.solvers import fused
from parsifl.solvers.proximal_sgd import ComponentRule, ProximalRule, fit_component
from parsifl.solvers.sgd import SgdConfig
from parsifl.solvers.update_rules import soft


@given(st.floats(-5, 5), st.floats(0, 5))
def test_soft_thresholding_minimises_its_objective(value: float, threshold: float) -> None:
    found = float(soft(torch.tensor(value, dtype=torch.float64), threshold))
    grid = np.linspace(-6, 6, 2401)
    best = ((grid - value) ** 2 / 2 + threshold * np.abs(grid)).min()
    assert (found - value) ** 2 / 2 + threshold * abs(found) <= best + 1e-9


@pytest.mark.bits
def test_what_the_operator_kills_is_the_offset_bit_for_bit() -> None:
    offset = torch.tensor([[0.1, 0.7, -0.3]])
    p = torch.zeros_like(offset)
    z = torch.tensor([[1e-3, 0.5, -1e-3]])
    ComponentRule(ProximalRule("sparse", 0.1)).after_(z, (offset, p), 0.1)
    assert p[0, [0, 2]].tolist() == [0.0, 0.0]
    assert (z - offset)[0, 0] == 0
    assert (z - offset)[0, 2] == 0
    assert float((z - offset)[0, 1]) == pytest.approx(0.49)


def test_without_an_offset_the_rule_acts_on_the_weights_themselves() -> None:
    w = torch.tensor([[1.9, -0.0475]])
    ProximalRule("sparse", 1.0).after_(w, (), 0.1)
    torch.testing.assert_close(w, torch.tensor([[1.8, 0.0]]))


def test_a_component_shrinks_by_less_than_the_last_digit_of_its_offset() -> None:
    offset, p = torch.full((1, 3), 1000.0), torch.tensor([[5e-3, -2e-3, 0.0]])
    z = torch.zeros_like(p)
    rule = ComponentRule(ProximalRule("sparse", 1e-3))
    for _ in range(600):
        rule.after_(z.zero_(), (offset, p), 0.01)
    assert p.tolist() == [[0.0, 0.0, 0.0]]
    assert torch.equal(z, offset)


@pytest.mark.parametrize("momentum", [0.0, 0.5])
@pytest.mark.parametrize("path", ["fused", "generic"])
def test_steps_below_the_last_digit_of_the_offset_count(
    path: str, momentum: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    if path == "generic":
        monkeypatch.setattr(fused, "network_for", lambda *_: None)
    # the slope is 2 h (p - target), and momentum scales it but not the operator
    offset, target, h, mu, lr = 1000.0, 0.06, 0.05, 1e-3, 0.02
    expected = torch.tensor([target - mu * (1 - momentum) / (2 * h), 0.0], dtype=torch.float64)
    found = {}
    for dtype in (torch.float32, torch.float64):
        problem = NeuralProblem(lambda: nn.Linear(2, 1, bias=False), loss="mse", dtype=dtype)
        x = math.sqrt(2 * h) * torch.tensor([[1.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
        y = x @ torch.tensor([[offset + target], [offset]], dtype=torch.float64)
        data = ClientData.of([(x.to(dtype), y.to(dtype))], test=0.0)
        request = DataRequest({"train": BatchSpec(2, steps=3000)})
        batches = BatchSampler(data, problem).draw(0, request, Key(0))["train"]
        fixed = {name: torch.full_like(v, offset) for name, v in problem.init(Key(0)).items()}
        start = {name: torch.zeros_like(v) for name, v in fixed.items()}
        config = SgdConfig(lr, momentum)
        fitted = fit_component(
            problem, fixed, start, batches, config, penalty="sparse", strength=mu
        )
        found[dtype] = next(iter(fitted.values())).flatten().double()
    torch.testing.assert_close(found[torch.float64], expected, atol=2e-4, rtol=0)
    torch.testing.assert_close(found[torch.float32], expected, atol=2e-3, rtol=0)


@pytest.mark.parametrize("penalty", ["sparse", "low-rank"])
def test_a_component_follows_proximal_gradient_steps(penalty: str) -> None:
    method = FedSLR(batch_size=4, local_steps=6)
    reference = Slr(1.0, 0.0, 0.2, 0.1, weight_decay=0.05, personal_penalty=penalty)
    offset = lowrank.PROBLEM.init(Key(lowrank.SEED))
    rows = lowrank.draws(method)(0, 3, "personal")
    expected = reference._phase_two(lowrank.start(), zeros(lowrank.start()), rows, 0.1)
    shard = BatchSampler(lowrank.DATA, lowrank.PROBLEM).draw(
        3, method.batches(lowrank.INFOS[3], 0), Key(lowrank.SEED)
    )
    found = fit_component(
        lowrank.PROBLEM,
        offset,
        {name: torch.zeros_like(value) for name, value in offset.items()},
        shard["personal"],
        SgdConfig(0.1, weight_decay=0.05),
        penalty="sparse" if penalty == "sparse" else "low-rank",
        strength=0.2,
    )
    lowrank.assert_same(found, expected)
