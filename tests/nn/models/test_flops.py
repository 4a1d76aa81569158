from __future__ import annotations

import torch
from torch import nn

from parsifl.nn.flops import flop_counter, named, note_trained, noting_trained


def test_depthwise_weight_gradients_are_counted_by_their_groups() -> None:
    conv = nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False, device="meta")
    x = torch.empty(2, 8, 5, 5, device="meta", requires_grad=True)
    out = conv(x).sum()
    with flop_counter() as counter:
        out.backward()
    once = 2 * 2 * 25 * 8 * 9
    assert counter.get_total_flops() == 2 * once


def test_trained_parameters_are_noted_by_name_and_prefix() -> None:
    params = {"w": torch.zeros(3, requires_grad=True), "frozen": torch.zeros(5)}
    note_trained(params)  # nobody listens
    with noting_trained() as noted:
        note_trained(params)
        note_trained(params)
        with named("1/"):
            note_trained(params)
    assert noted == {"w": 3, "1/w": 3}
