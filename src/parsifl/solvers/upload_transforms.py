"""Stages of an upload: the client encodes it, the server decodes it.

Stages work only on tensors, because they run under vmap. They receive the client's downlink.
To add one, write it here and list it in `UPLOADS`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from parsifl.core import config, tree
from parsifl.core.config import Fraction
from parsifl.core.errors import ConfigError
from parsifl.core.leaves import Sparse, densify
from parsifl.core.problem import Params
from parsifl.core.registry import Registry


class UploadTransform(Protocol):
    """One stage."""

    def init(self, received: Any) -> Any:
        """Return a client's first state of this stage; None if it has no state."""
        ...

    def encode(self, upload: Any, received: Any, state: Any, key: Tensor) -> tuple[Any, Any]:
        """Client: return the message and the next state."""
        ...

    def decode(self, message: Any, received: Any) -> Any:
        """Server: return the upload, as far as the message determines it."""
        ...

    def types(self, uplink: Any) -> tuple[Any, Any]:
        """Return the types of the message and of the state for uploads of type `uplink`."""
        ...


@dataclass(frozen=True)
class Delta:
    """Send the change with respect to the received model, for algorithms that upload models."""

    def init(self, received: Any) -> None:
        """Keep nothing."""

    def encode(
        self, upload: Params, received: Any, state: None, key: Tensor
    ) -> tuple[Params, None]:
        """Subtract the received model."""
        return tree.subtract(upload, densify(received)), None

    def decode(self, message: Params, received: Any) -> Params:
        """Add the received model."""
        return tree.axpy(1.0, message, densify(received))

    def types(self, uplink: Any) -> tuple[Any, Any]:
        """Return the type of the upload, and no state."""
        return uplink, type(None)


@dataclass(frozen=True)
class TopK:
    """Send the largest entries of every leaf; the residual is added to the next upload.

    Parameters
    ----------
    fraction
        The fraction of entries that is sent.

    References
    ----------
    Stich et al., Sparsified SGD with Memory, NeurIPS 2018.
    """

    fraction: Fraction = 0.1

    def __post_init__(self) -> None:
        config.check(self)
        if not self.fraction:
            raise ConfigError("TopK.fraction must be above 0: nothing would be sent")

    def init(self, received: Any) -> Params:
        """Start without a residual."""
        return tree.zeros_like(densify(received))

    def encode(
        self, upload: Params, received: Any, state: Params, key: Tensor
    ) -> tuple[dict[str, Any], Params]:
        """Split upload plus residual into the message and the next residual."""
        sent: dict[str, Any] = {}
        rest: Params = {}
        for name, value in tree.axpy(1.0, state, upload).items():
            flat = value.reshape(-1)
            count = max(1, int(self.fraction * flat.numel()))
            chosen = flat.abs().topk(count).indices.sort().values
            sent[name] = Sparse(chosen, flat.gather(0, chosen), tuple(value.shape))
            rest[name] = flat.scatter(0, chosen, 0.0).reshape(value.shape)
        return sent, rest

    def decode(self, message: Any, received: Any) -> Params:
        """Fill in zeros."""
        dense: Params = densify(message)
        return dense

    def types(self, uplink: Any) -> tuple[Any, Any]:
        """Return sparse leaves, and a residual."""
        return dict[str, Tensor | Sparse], Params


UPLOADS: Registry[type[UploadTransform]] = Registry(
    "upload transform", {"delta": Delta, "topk": TopK}
)
"""Upload transforms by the name that describes a run, as in "topk:fraction=0.01"."""


def upload_transforms(text: str) -> tuple[UploadTransform, ...]:
    """Return the stages that a text describes, joined by +.

    Large entries of a model do not show what a client has learned, so `TopK` selects entries of
    the change: it follows `Delta`.

    >>> upload_transforms("topk:fraction=0.01")
    (Delta(), TopK(fraction=0.01))
    """
    stages: list[UploadTransform] = []
    for each in text.split("+"):
        name, options = config.parse(each)
        stage = config.build(UPLOADS.find(name), options)
        if isinstance(stage, TopK) and not any(isinstance(before, Delta) for before in stages):
            stages.append(Delta())
        stages.append(stage)
    return tuple(stages)
