from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from parsifl.nn import models
from parsifl.nn.flops import OperationCounter, named, note_trained, noting_trained


def test_depthwise_weight_gradients_are_counted_by_their_groups() -> None:
    conv = nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False, device="meta")
    x = torch.empty(2, 8, 5, 5, device="meta", requires_grad=True)
    out = conv(x).sum()
    with OperationCounter() as counter:
        out.backward()
    once = 2 * 2 * 25 * 8 * 9
    assert counter.total == 2 * once


@pytest.mark.parametrize("name", ["mlp", "vgg", "resnet8"])
@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_the_counts_are_those_of_torch(name: str, device: str) -> None:
    with torch.device(device):
        module = models.build(name, **({"inputs": 192} if name == "mlp" else {}))
        x = torch.ones(2, 192) if name == "mlp" else torch.ones(2, 3, 32, 32)
    with OperationCounter() as counter:
        module(x).sum().backward()
    with FlopCounterMode(display=False) as forward:
        loss = module(x).sum()
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    assert counter.forward == forward.get_total_flops() > 0
    assert counter.backward == backward.get_total_flops() > 0


def test_trained_parameters_are_noted_by_name_and_prefix() -> None:
    params = {"w": torch.zeros(3, requires_grad=True), "frozen": torch.zeros(5)}
    note_trained(params)  # nobody listens
    with noting_trained() as noted:
        note_trained(params)
        note_trained(params)
        with named("1/"):
            note_trained(params)
    assert noted == {"w": 3, "1/w": 3}
