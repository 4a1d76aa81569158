"""Which methods may be combined with secure aggregation, and which Flower mods may not be used."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from parsifl.core.algorithm import AnyAlgorithm, GatherAlgorithm
from parsifl.core.errors import CapabilityError

_SAFE_MODS = ("message_size_mod",)


def check_mods(mods: Sequence[Any]) -> None:
    """Refuse Flower mods that would have to look into our payload.

    Flower's clipping, noise and secure-aggregation mods read dense NumPy arrays; our uploads are
    entropy-coded bytes, which they cannot read. Ignoring one in silence would promise a privacy
    that is not there.
    """
    for mod in mods:
        name = getattr(mod, "__name__", type(mod).__name__)
        if name not in _SAFE_MODS:
            raise CapabilityError(
                f"the Flower mod {name} works on dense arrays and cannot read parsifl's messages; "
                f"it would protect nothing. Mods that may be used: {', '.join(_SAFE_MODS)}"
            )


def check_additive(method: AnyAlgorithm) -> None:
    """Raise CapabilityError unless the server needs nothing but a sum over uploads.

    That is what secure aggregation can give: then `contribute` may run on the client, and the
    sum alone is revealed.
    """
    if isinstance(method, GatherAlgorithm):
        raise CapabilityError(
            f"{type(method).__name__} needs every upload by itself (it compares clients); under "
            "secure aggregation the server sees only their sum"
        )
