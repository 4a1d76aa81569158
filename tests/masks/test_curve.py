from __future__ import annotations

import pytest
import torch

from parsifl import models
from parsifl.errors import ConfigError
from parsifl.masks import curve


def test_curve_of_figure_3_starts_at_zero_and_keeps_psi() -> None:
    with torch.device("meta"):
        module = models.build("mobilenet", classes=100)
    sample = torch.empty(2, 3, 32, 32)
    rows = curve(module, sample, [0.0, 0.5, 0.875])
    assert rows[0]["parameters"] == 3_206_976
    assert rows[0]["parameters_saved"] == rows[0]["flops_saved"] == 0.0
    assert rows[2]["parameters"] == 400_480
    assert all(row["parameters"] <= row["psi"] for row in rows)
    last = curve(module, sample, [0.0, 0.25, 0.5], design="last")
    saved = [row["flops_saved"] for row in last]
    assert saved == sorted(saved)
    assert last[1]["flops_saved"] > curve(module, sample, [0.25])[0]["flops_saved"]


def test_a_device_without_room_trains_nothing() -> None:
    module = models.build("mlp", inputs=4, hidden=(3,), classes=2)
    (row,) = curve(module, torch.zeros(1, 4), [0.9])
    assert row["layers"] == []
    assert row["backward_flops"] == 0


def test_bad_rate_and_design_are_refused() -> None:
    module = models.build("mlp")
    with pytest.raises(ConfigError, match="masking rate is 1"):
        curve(module, torch.zeros(1, 784), [1.0])
    with pytest.raises(ConfigError, match="unknown design"):
        curve(module, torch.zeros(1, 784), design="best")
