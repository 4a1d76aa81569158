"""PreResNet18 for CIFAR, as in PerFedMask: 10 layers to mask with 11,167,040 parameters."""

from __future__ import annotations

from typing import final

from torch import Tensor, nn

from parsifl.nn.models.width import scaled

_CHANNELS = (64, 128, 256, 512)
_DEPTH = 2


def _norm(channels: int) -> nn.BatchNorm2d:
    # batch statistics also at test time: there are no buffers to federate
    return nn.BatchNorm2d(channels, track_running_stats=False)


@final
class PreActBlock(nn.Module):
    """Normalise, activate, convolve, twice; the shortcut starts after the first activation."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.n1 = _norm(inputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.n2 = _norm(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.shortcut: nn.Conv2d | None = None
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output."""
        active = self.n1(x).relu()
        short = x if self.shortcut is None else self.shortcut(active)
        out: Tensor = self.conv2(self.n2(self.conv1(active)).relu())
        return out + short


@final
class PreResNet18(nn.Module):
    """A pre-activation ResNet18 with a 3x3 stem without norm, and a final norm `n4`."""

    head_name = "linear"

    def __init__(self, classes: int = 10, *, inputs: int = 3, width: float = 1.0) -> None:
        super().__init__()
        sizes = [scaled(size, width) for size in _CHANNELS]
        self.conv1 = nn.Conv2d(inputs, sizes[0], 3, padding=1, bias=False)
        self.blocks = nn.Sequential()
        before = sizes[0]
        for stage, size in enumerate(sizes):
            for index in range(_DEPTH):
                step = 2 if stage > 0 and index == 0 else 1
                self.blocks.append(PreActBlock(before, size, step))
                before = size
        self.n4 = _norm(before)
        self.linear = nn.Linear(before, classes)

    def mask_blocks(self) -> tuple[tuple[str, ...], ...]:
        """Return the submodules of each layer that is frozen or trained as one."""
        residual = tuple((f"blocks.{index}",) for index in range(len(self.blocks)))
        return (("conv1",), *residual, ("n4",))

    def forward(self, x: Tensor) -> Tensor:
        """Return logits [B, classes] for images [B, C, H, W]."""
        x = self.n4(self.blocks(self.conv1(x))).relu()
        logits: Tensor = self.linear(x.mean((2, 3)))
        return logits
