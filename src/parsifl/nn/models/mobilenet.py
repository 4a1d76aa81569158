"""MobileNet for CIFAR, as in PerFedMask: 14 layers to mask with 3,206,976 parameters."""

from __future__ import annotations

from typing import final

from torch import Tensor, nn

from parsifl.nn.models.width import scaled

_STEM = 32
# output channels and stride of each depthwise-separable block
_BLOCKS = (
    (64, 1),
    (128, 2),
    (128, 1),
    (256, 2),
    (256, 1),
    (512, 2),
    *((512, 1),) * 5,
    (1024, 2),
    (1024, 1),
)


def _norm(channels: int) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(channels, track_running_stats=False)


@final
class SeparableBlock(nn.Module):
    """A depthwise 3x3 and a pointwise convolution, each with norm and ReLU."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, inputs, 3, stride, padding=1, groups=inputs, bias=False)
        self.bn1 = _norm(inputs)
        self.conv2 = nn.Conv2d(inputs, outputs, 1, bias=False)
        self.bn2 = _norm(outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output."""
        x = self.bn1(self.conv1(x)).relu()
        out: Tensor = self.bn2(self.conv2(x)).relu()
        return out


@final
class MobileNet(nn.Module):
    """A 3x3 stem, 13 depthwise-separable blocks and a linear head."""

    head_name = "linear"

    def __init__(self, classes: int = 100, *, inputs: int = 3, width: float = 1.0) -> None:
        super().__init__()
        before = scaled(_STEM, width)
        self.conv1 = nn.Conv2d(inputs, before, 3, padding=1, bias=False)
        self.bn1 = _norm(before)
        self.blocks = nn.Sequential()
        for channels, stride in _BLOCKS:
            after = scaled(channels, width)
            self.blocks.append(SeparableBlock(before, after, stride))
            before = after
        self.linear = nn.Linear(before, classes)

    def mask_blocks(self) -> tuple[tuple[str, ...], ...]:
        """Return the submodules of each layer that is frozen or trained as one."""
        separable = tuple((f"blocks.{index}",) for index in range(len(self.blocks)))
        return (("conv1", "bn1"), *separable)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits [B, classes] for images [B, C, H, W]."""
        x = self.blocks(self.bn1(self.conv1(x)).relu())
        logits: Tensor = self.linear(x.mean((2, 3)))
        return logits
