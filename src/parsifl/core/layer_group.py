"""Parameters that belong together; importing this does not import torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LayerGroup:
    """Parameters that are frozen or trained together: a weight with its bias and norm."""

    name: str
    parameters: tuple[str, ...]
    size: int
