"""AlexNet with batch normalisation for DomainNet: 7 layers to mask, 57,022,528 parameters."""

from __future__ import annotations

from typing import final

from torch import Tensor, nn

from parsifl.nn.models.width import scaled

# output channels, kernel, stride, padding, and whether a pooling follows
_CONVS = (
    (64, 11, 4, 2, True),
    (192, 5, 1, 2, True),
    (384, 3, 1, 1, False),
    (256, 3, 1, 1, False),
    (256, 3, 1, 1, True),
)
_HIDDEN = 4096
_GRID = 6


@final
class AlexNet(nn.Module):
    """Five convolutions and two hidden linear layers, each with bias and batch norm."""

    head_name = "fc3"

    def __init__(self, classes: int = 10, *, inputs: int = 3, width: float = 1.0) -> None:
        super().__init__()
        self.convs, self.norms = nn.ModuleList(), nn.ModuleList()
        before = inputs
        for channels, kernel, stride, padding, _ in _CONVS:
            after = scaled(channels, width)
            self.convs.append(nn.Conv2d(before, after, kernel, stride, padding))
            self.norms.append(nn.BatchNorm2d(after, track_running_stats=False))
            before = after
        hidden = scaled(_HIDDEN, width)
        self.pool = nn.AdaptiveAvgPool2d(_GRID)
        self.fc1 = nn.Linear(before * _GRID * _GRID, hidden)
        self.bn6 = nn.BatchNorm1d(hidden, track_running_stats=False)
        self.fc2 = nn.Linear(hidden, hidden)
        self.bn7 = nn.BatchNorm1d(hidden, track_running_stats=False)
        self.fc3 = nn.Linear(hidden, classes)

    def mask_blocks(self) -> tuple[tuple[str, ...], ...]:
        """Return the submodules of each layer that is frozen or trained as one."""
        convs = tuple((f"convs.{index}", f"norms.{index}") for index in range(len(_CONVS)))
        return (*convs, ("fc1", "bn6"), ("fc2", "bn7"))

    def forward(self, x: Tensor) -> Tensor:
        """Return logits [B, classes] for images [B, C, 224, 224] or larger."""
        for conv, norm, (*_, pooled) in zip(self.convs, self.norms, _CONVS, strict=True):
            x = norm(conv(x)).relu()
            x = nn.functional.max_pool2d(x, 3, 2) if pooled else x
        x = self.pool(x).flatten(1)
        x = self.bn6(self.fc1(x)).relu()
        x = self.bn7(self.fc2(x)).relu()
        logits: Tensor = self.fc3(x)
        return logits
