"""Encoding and decoding of messages, compared with `torch.save` and `torch.load` of dense tensors.

Messages of the size of an MLP and of 3.7 million numbers: dense, with 90 % zeros, as positions and
values of 5 %, and as factors of low rank. "encode" produces the bytes, "decode" reads them, "size"
only computes their number, as a simulation does. The bound is the time of reading the message and
writing its code once, or vice versa; small messages stay in the caches and may be faster. Each line
also shows megabytes of dense tensors per second.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import torch
from timing import Row, interleaved, moved, report, row
from torch import Tensor

from parsifl import wire
from parsifl.core import tree
from parsifl.core.keys import Key
from parsifl.core.leaves import LowRank, Sparse

SHAPES = {
    "an MLP, 79,510 numbers": ((100, 784), (100,), (10, 100), (10,)),
    "3.7 million numbers": ((1920, 1920),),
}
TURNS = 15


def dense(shapes: tuple[tuple[int, ...], ...]) -> dict[str, Tensor]:
    """Return random tensors."""
    generator = Key(0, purpose="bench").torch_generator()
    return {str(i): torch.randn(shape, generator=generator) for i, shape in enumerate(shapes)}


def thinned(params: dict[str, Tensor], density: float) -> dict[str, Tensor]:
    """Return the tensors with zeros in most places."""
    generator = Key(1, purpose="bench").torch_generator()
    return {
        # a product with the mask would leave -0.0, which is an entry on the wire
        name: torch.where(torch.rand(value.shape, generator=generator) < density, value, 0.0)
        for name, value in params.items()
    }


def as_sparse(value: Tensor) -> Sparse:
    """Return positions and values."""
    flat = value.reshape(-1)
    index = flat.nonzero().squeeze(1)
    return Sparse(index, flat[index], tuple(value.shape))


def as_factors(value: Tensor) -> Any:
    """Return factors of a twentieth of the full rank for matrices; vectors are unchanged."""
    if value.ndim < 2:
        return value
    rank = max(1, min(value.shape) // 20)
    generator = Key(2, purpose="bench").torch_generator()
    left = torch.randn(value.shape[0], rank, generator=generator)
    return LowRank(left, torch.randn(rank, value.shape[1], generator=generator), tuple(value.shape))


def messages(params: dict[str, Tensor]) -> dict[str, tuple[Any, Any]]:
    """Return messages and their types by name."""
    sparse = thinned(params, 0.05)
    return {
        "dense": (params, dict[str, Tensor]),
        "10 % as tensors": (thinned(params, 0.1), dict[str, Tensor]),
        "5 % as Sparse": ({n: as_sparse(v) for n, v in sparse.items()}, dict[str, Sparse]),
        "low rank": ({n: as_factors(v) for n, v in params.items()}, dict[str, LowRank | Tensor]),
    }


def saver(params: dict[str, Tensor]) -> Callable[[], bytes]:
    """Return a function that writes dense tensors with torch."""

    def save() -> bytes:
        buffer = io.BytesIO()
        torch.save(params, buffer)
        return buffer.getvalue()

    return save


def measure(name: str, shapes: tuple[tuple[int, ...], ...]) -> list[Row]:
    """Compare every kind of message with torch."""
    params = dense(shapes)
    size = sum(value.nbytes for value in params.values())
    save = saver(params)
    saved = save()
    candidates: dict[str, Callable[[], object]] = {
        "save": save,
        "load": lambda: torch.load(io.BytesIO(saved), weights_only=True),
    }
    touched = {"save": 2 * size, "load": 2 * size}
    for kind, (message, hint) in messages(params).items():
        data = wire.encode(message)
        held = sum(leaf.nbytes for leaf in tree.leaves(message))
        touched |= {f"encode {kind}": held + len(data), f"decode {kind}": held + len(data)}
        touched[f"size {kind}"] = held
        candidates[f"encode {kind}"] = lambda message=message: wire.encode(message)
        candidates[f"size {kind}"] = lambda message=message: wire.size(message)
        candidates[f"decode {kind}"] = lambda data=data, hint=hint: wire.decode(data, hint)
    found = interleaved(candidates, TURNS)
    unit, rows = moved(1.0), []
    for label, timing in found.items():
        against = "load" if label.split()[0] in ("decode", "load") else "save"
        note = f"{size / timing.median / 1e6:.0f} MB/s"
        reference = found[against].median
        rows.append(
            row(
                name,
                timing,
                reference,
                f"torch.{against} of dense",
                unit.times(touched[label]),
                note,
            )
        )
    return rows


if __name__ == "__main__":
    torch.set_num_threads(1)
    found = [item for name, shapes in SHAPES.items() for item in measure(name, shapes)]
    raise SystemExit(report(found, __doc__))
