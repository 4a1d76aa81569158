"""A small VGG for images of 32 x 32."""

from __future__ import annotations

from itertools import pairwise
from typing import Literal, final

from torch import Tensor, nn

from parsifl.nn.models.width import scaled

_CHANNELS = (16, 32, 64, 128, 128)  # a maximum pooling follows each


@final
class VGG(nn.Module):
    """Five 3x3 convolutions, each with ReLU and pooling, and a linear head."""

    head_name = "classifier"

    def __init__(
        self,
        classes: int = 10,
        *,
        inputs: int = 3,
        norm: Literal["none", "batch"] = "none",
        width: float = 1.0,
    ) -> None:
        super().__init__()
        sizes = [inputs, *(scaled(size, width) for size in _CHANNELS)]
        pairs = list(pairwise(sizes))
        self.convs = nn.ModuleList(
            nn.Conv2d(before, after, 3, padding=1, bias=norm == "none") for before, after in pairs
        )
        self.norms = nn.ModuleList(
            nn.Identity() if norm == "none" else nn.BatchNorm2d(after, track_running_stats=False)
            for _, after in pairs
        )
        self.classifier = nn.Linear(sizes[-1], classes)

    def mask_blocks(self) -> tuple[tuple[str, ...], ...]:
        """Return the submodules of each layer that is frozen or trained as one."""
        return tuple((f"convs.{index}", f"norms.{index}") for index in range(len(_CHANNELS)))

    def forward(self, x: Tensor) -> Tensor:
        """Return logits [B, classes] for images [B, C, 32, 32]."""
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = nn.functional.max_pool2d(norm(conv(x)).relu(), 2)
        logits: Tensor = self.classifier(x.flatten(1))
        return logits
