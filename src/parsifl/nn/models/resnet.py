"""Residual networks with group normalisation (no running statistics to federate)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, final

from torch import Tensor, nn

from parsifl.nn.models.width import scaled


def _norm(channels: int) -> nn.GroupNorm:
    # two groups as in FedSLR's code; an odd number of channels (a narrow width) allows only one
    return nn.GroupNorm(2 if channels % 2 == 0 else 1, channels)


@final
class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = _norm(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = _norm(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            project = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.shortcut = nn.Sequential(project, _norm(outputs))

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output."""
        out = self.norm1(self.conv1(x)).relu()
        out = self.norm2(self.conv2(out)) + self.shortcut(x)
        activated: Tensor = out.relu()
        return activated


@final
class ResNet(nn.Module):
    """A residual network; `stem="cifar"` is 3x3, `"imagenet"` 7x7 with pooling.

    The CIFAR variant has no bias in its head, as in FedSLR's code.
    """

    head_name = "classifier"

    def __init__(
        self,
        classes: int = 10,
        *,
        inputs: int = 3,
        stem: Literal["cifar", "imagenet"] = "cifar",
        channels: Sequence[int] = (64, 128, 256, 512),
        depth: int = 2,
        width: float = 1.0,
    ) -> None:
        super().__init__()
        sizes = [scaled(size, width) for size in channels]
        large = stem == "imagenet"
        kernel, stride, padding = (7, 2, 3) if large else (3, 1, 1)
        self.conv = nn.Conv2d(inputs, sizes[0], kernel, stride, padding, bias=False)
        self.norm = _norm(sizes[0])
        self.pool = nn.MaxPool2d(3, 2, 1) if large else nn.Identity()
        self.blocks = nn.Sequential()
        before = sizes[0]
        for stage, size in enumerate(sizes):
            for index in range(depth):
                step = 2 if stage > 0 and index == 0 else 1
                self.blocks.append(BasicBlock(before, size, step))
                before = size
        self.classifier = nn.Linear(before, classes, bias=large)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits [B, classes] for images [B, C, H, W]."""
        x = self.pool(self.norm(self.conv(x)).relu())
        x = self.blocks(x).mean((2, 3))
        logits: Tensor = self.classifier(x)
        return logits


def resnet18(classes: int = 10, *, inputs: int = 3, width: float = 1.0) -> ResNet:
    """Return ResNet18 for CIFAR: 3x3 stem, GroupNorm(2), head without bias (11,173,952)."""
    return ResNet(classes, inputs=inputs, width=width)


def resnet18_tiny(classes: int = 200, *, inputs: int = 3, width: float = 1.0) -> ResNet:
    """Return ResNet18 with the 7x7 stem, for Tiny ImageNet."""
    return ResNet(classes, inputs=inputs, stem="imagenet", width=width)


def resnet8(classes: int = 10, *, inputs: int = 3, width: float = 1.0) -> ResNet:
    """Return a residual network of 78 thousand parameters, for runs on two cores."""
    return ResNet(classes, inputs=inputs, channels=(16, 32, 64), depth=1, width=width)
