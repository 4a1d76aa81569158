"""A multi-layer perceptron."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import final

from torch import Tensor, nn

from parsifl.nn.models.width import scaled


@final
class MLP(nn.Module):
    """Linear layers with ReLU between them; 784-100-10 is the network of pFedMe and FedMac."""

    head_name = "classifier"

    def __init__(
        self,
        inputs: int = 784,
        hidden: Sequence[int] = (100,),
        classes: int = 10,
        *,
        width: float = 1.0,
    ) -> None:
        super().__init__()
        sizes = [inputs, *(scaled(size, width) for size in hidden)]
        self.body = nn.ModuleList(nn.Linear(before, after) for before, after in pairwise(sizes))
        self.classifier = nn.Linear(sizes[-1], classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits [B, classes] for inputs [B, ...]."""
        x = x.flatten(1)
        for layer in self.body:
            x = layer(x).relu()
        logits: Tensor = self.classifier(x)
        return logits
