"""The networks of the faithful scale: the paper's kind of layers at a size that a CPU can train."""

from __future__ import annotations

from itertools import pairwise
from typing import final

from torch import Tensor, nn

from parsifl.nn.models.width import scaled

COMPONENTS = 60
_HIDDEN = (64, 64, 64, 64, 128, 128)
_CHANNELS = (16, 32, 32, 32, 32, 64, 64)
_STRIDES = (1, 2, 1, 1, 1, 2, 1)


@final
class SmallMlp(nn.Module):
    """Six linear layers with layer norm on principal components; 42,240 parameters to mask."""

    head_name = "head"

    def __init__(self, classes: int = 10, *, width: float = 1.0) -> None:
        super().__init__()
        sizes = [COMPONENTS, *(scaled(size, width) for size in _HIDDEN)]
        self.body = nn.Sequential()
        for before, after in pairwise(sizes):
            self.body.extend((nn.Linear(before, after), nn.LayerNorm(after), nn.ReLU()))
        self.head = nn.Linear(sizes[-1], classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits [B, classes] for components [B, 60]."""
        logits: Tensor = self.head(self.body(x))
        return logits


@final
class SmallCnn(nn.Module):
    """Seven convolutions with batch norm on images of 16 x 16; 88,528 parameters to mask.

    Batch statistics normalise at test time too, as in `parsifl.nn.models.PreResNet18`.
    """

    head_name = "head"

    def __init__(self, classes: int = 10, *, width: float = 1.0) -> None:
        super().__init__()
        sizes = [3, *(scaled(size, width) for size in _CHANNELS)]
        self.body = nn.Sequential()
        for (before, after), stride in zip(pairwise(sizes), _STRIDES, strict=True):
            conv = nn.Conv2d(before, after, 3, stride, padding=1, bias=False)
            norm = nn.BatchNorm2d(after, track_running_stats=False)
            self.body.extend((conv, norm, nn.ReLU()))
        self.head = nn.Linear(sizes[-1], classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits [B, classes] for images [B, 3, 16, 16]."""
        logits: Tensor = self.head(self.body(x).mean((2, 3)))
        return logits
