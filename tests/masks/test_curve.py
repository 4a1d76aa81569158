from __future__ import annotations

import pytest
import torch

from parsifl.core.errors import ConfigError
from parsifl.masks import curve
from parsifl.nn import models


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
