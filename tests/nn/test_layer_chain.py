from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from parsifl.nn.dropout import KeyedDropout
from parsifl.nn.layer_chain import Activate, Conv, Dropout, Flatten, Linear, Pool, find_chain


def test_a_chain_is_read_in_the_order_of_the_forward_pass() -> None:
    module = nn.Sequential(
        nn.Conv2d(1, 2, 3, padding=1, bias=False), nn.ReLU(inplace=True), nn.MaxPool2d(2),
        nn.Identity(), KeyedDropout(0.5, salt=3), nn.Flatten(), nn.Linear(8, 2),
    )  # fmt: skip
    assert find_chain(module) == (
        Conv("0.weight", None, (1, 1), (1, 1), (1, 1)),
        Activate("relu"),
        Pool("max", (2, 2), (2, 2), (0, 0)),
        Dropout(0.5, 3, False),
        Flatten(),
        Linear("6.weight", "6.bias"),
    )


class Residual(nn.Module):
    """Adds its input."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Return x + f(x)."""
        value: Tensor = x + self.layer(x)
        return value


class Twice(Residual):
    """Uses a layer twice."""

    def forward(self, x: Tensor) -> Tensor:
        """Return f(f(x))."""
        value: Tensor = self.layer(self.layer(x))
        return value


class Unused(Residual):
    """Has a layer that nobody reads."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Return f(x)."""
        value: Tensor = self.layer(x)
        return value


class Sized(nn.Module):
    """Pools by a size that it reads off its input."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the mean of each channel."""
        return nn.functional.avg_pool2d(x, x.size(-1))


class Deciding(nn.Module):
    """Looks at values."""

    def forward(self, x: Tensor) -> Tensor:
        """Return |x|."""
        return x if x.sum() > 0 else -x


@pytest.mark.parametrize(
    "module",
    [
        Residual(),
        Twice(),
        Unused(),
        Sized(),
        Deciding(),
        nn.GELU(),
        nn.Flatten(0),
        nn.Conv2d(2, 2, 3, groups=2),
        nn.Conv2d(2, 2, 3, padding="same"),
        nn.Conv2d(2, 2, 3, padding=1, padding_mode="circular"),
        nn.MaxPool2d(2, ceil_mode=True),
        nn.AvgPool2d(2, padding=1, count_include_pad=False),
        nn.AdaptiveAvgPool2d((None, 1)),
        nn.Embedding(3, 2, max_norm=1.0),
        nn.BatchNorm2d(2, track_running_stats=False),
    ],
    ids=lambda module: type(module).__name__,
)
def test_anything_else_is_no_chain(module: nn.Module) -> None:
    assert find_chain(nn.Sequential(module)) is None


def test_functions_and_methods_are_layers_too() -> None:
    class Net(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            x = torch.tanh(nn.functional.max_pool2d(x, kernel_size=3, stride=2, padding=1))
            return torch.flatten(x.sigmoid().relu_(), start_dim=1)

    assert find_chain(Net()) == (
        Pool("max", (3, 3), (2, 2), (1, 1)),
        Activate("tanh"),
        Activate("sigmoid"),
        Activate("relu"),
        Flatten(),
    )
