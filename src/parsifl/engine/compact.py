"""A trained model in its shortest form: factors, sparse parts, or dense, layer by layer."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from parsifl.core.errors import CheckpointError
from parsifl.core.leaves import LowRank, Sparse, factored, matricize
from parsifl.core.problem import Params
from parsifl.engine.owned import replace_file
from parsifl.engine.segment_store import checksum
from parsifl.solvers.svt import has_rank
from parsifl.wire import range_coder

VERSION = 2
_META = "parsifl"


@dataclass(frozen=True)
class StoredTensor:
    """One parameter: a base (dense, factors, or nothing) and perhaps a sparse part on top of it."""

    base: Tensor | LowRank | None
    extra: Sparse | None = None

    def dense(self) -> Tensor:
        """Return the parameter itself."""
        parts = [part if isinstance(part, Tensor) else part.dense() for part in self._parts()]
        return parts[0] if len(parts) == 1 else parts[0] + parts[1]

    def numbers(self) -> int:
        """Return how many numbers are stored, positions aside."""
        return sum(_numbers(part) for part in self._parts())

    def size(self) -> float:
        """Return the bytes of numbers and positions."""
        return sum(_size(part) for part in self._parts())

    def _parts(self) -> list[Tensor | LowRank | Sparse]:
        return [part for part in (self.base, self.extra) if part is not None]


def _numbers(part: Tensor | LowRank | Sparse) -> int:
    if isinstance(part, LowRank):
        return part.left.numel() + part.right.numel()
    return part.value.numel() if isinstance(part, Sparse) else part.numel()


def _size(part: Tensor | LowRank | Sparse) -> float:
    if isinstance(part, Sparse):
        positions = range_coder.bound(math.prod(part.shape), part.index.numel()) / 8
        return positions + part.value.numel() * part.value.itemsize
    sample = part.left if isinstance(part, LowRank) else part
    return float(_numbers(part) * sample.itemsize)


def compress(params: Params, shared: Params | None = None) -> dict[str, StoredTensor]:
    """Return the shortest form of every parameter.

    Parameters
    ----------
    params
        The model.
    shared
        A global model of which it may be a sparse modification; None: there is none.
    """
    return {
        name: _shortest(value, None if shared is None else shared.get(name))
        for name, value in params.items()
    }


def _shortest(value: Tensor, shared: Tensor | None) -> StoredTensor:
    forms = [
        StoredTensor(value),
        StoredTensor(_factored(value)),
        StoredTensor(None, _sparse(value)),
    ]
    if shared is not None and shared.shape == value.shape:
        difference = value - shared
        base = _factored(shared)
        forms.append(
            StoredTensor(base, _sparse(difference)) if difference.any() else StoredTensor(base)
        )
    return min(forms, key=StoredTensor.size)


def _factored(value: Tensor) -> Tensor | LowRank:
    """Return factors of the numerical rank where they are shorter."""
    shape = tuple(value.shape)
    if not has_rank(shape):
        return value
    left, sizes, right = torch.linalg.svd(matricize(value), full_matrices=False)
    noise = sizes[0] * max(left.shape[0], right.shape[1]) * torch.finfo(value.dtype).eps
    rank = max(1, int((sizes > noise).sum()))
    short = factored(left[:, :rank] * sizes[:rank], right[:rank], shape)
    return short if isinstance(short, LowRank) else value


def _sparse(value: Tensor) -> Sparse:
    flat = value.reshape(-1)
    index = flat.nonzero().squeeze(1)
    return Sparse(index, flat[index], tuple(value.shape))


# ------------------------------------------------------------------------------------- the file
def write(path: Path, parts: Mapping[str, StoredTensor], client: int | None) -> int:
    """Write a safetensors file whose metadata say how the parts fit; return its bytes."""
    tensors: dict[str, Tensor] = {}
    layers: dict[str, Any] = {}
    for name, part in parts.items():
        layers[name] = _put(name, part, tensors)
    owned = {name: tensor.detach().contiguous().clone() for name, tensor in tensors.items()}
    meta = {
        "version": VERSION,
        "client": client,
        "layers": layers,
        "checksum": _checksum(owned),
    }
    content = save(owned, {_META: json.dumps(meta, separators=(",", ":"))})
    replace_file(path, content)
    return len(content)


def _put(name: str, part: StoredTensor, tensors: dict[str, Tensor]) -> dict[str, Any]:
    entry: dict[str, Any] = {"shape": list(part.dense().shape)}
    if isinstance(part.base, LowRank):
        tensors[f"{name}/left"], tensors[f"{name}/right"] = part.base.left, part.base.right
        entry["rank"] = part.base.left.shape[1]
    elif part.base is not None:
        tensors[name] = part.base
    if part.extra is not None:
        mask = np.zeros(math.prod(part.extra.shape), np.bool_)
        mask[part.extra.index.numpy()] = True
        code = range_coder.encode(mask, part.extra.index.numel())
        tensors[f"{name}/support"] = torch.from_numpy(np.frombuffer(code, np.uint8).copy())
        tensors[f"{name}/values"] = part.extra.value
        entry["nonzeros"] = part.extra.index.numel()
    return entry


def read(
    path: Path, shapes: Mapping[str, tuple[int, ...]]
) -> tuple[dict[str, StoredTensor], int | None]:
    """Read what `write` wrote; every parameter must have the shape that the model expects."""
    try:
        with safe_open(path, "pt") as file:
            meta = json.loads((file.metadata() or {}).get(_META, "null"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        if meta is None or meta["version"] != VERSION:
            raise CheckpointError(f"{path} is not an export of version {VERSION}")
        # exports of 0.1 have none
        if meta.get("checksum") not in (None, _checksum(tensors)):
            raise ValueError("its checksum does not match")
        if meta["layers"].keys() != shapes.keys():
            differing = sorted(meta["layers"].keys() ^ shapes.keys())
            raise CheckpointError(f"{path} belongs to another model: {differing[0]} differs")
        parts = {n: _take(n, meta["layers"][n], tensors, shape) for n, shape in shapes.items()}
        client = meta.get("client")
        if client is not None and (type(client) is not int or client < 0):
            raise ValueError("client is not a number")
    except (
        ArithmeticError, AttributeError, LookupError, OSError, RecursionError, RuntimeError,
        SafetensorError, TypeError, ValueError,
    ) as error:  # fmt: skip
        raise CheckpointError(f"{path} cannot be read as an export ({error!r:.200})") from error
    return parts, client


def _checksum(tensors: Mapping[str, Tensor]) -> str:
    contents = (tensors[name].reshape(-1).view(torch.uint8) for name in sorted(tensors))
    return checksum(*(content.numpy().tobytes() for content in contents))


def _take(
    name: str, entry: dict[str, Any], tensors: dict[str, Tensor], shape: tuple[int, ...]
) -> StoredTensor:
    if tuple(entry["shape"]) != shape:
        raise ValueError(f"{name} has shape {entry['shape']}, the model {list(shape)}")
    base: Tensor | LowRank | None = tensors.get(name)
    if "rank" in entry:
        base = LowRank(tensors[f"{name}/left"], tensors[f"{name}/right"], shape)
    extra = None
    if "nonzeros" in entry:
        code = memoryview(tensors[f"{name}/support"].numpy().tobytes())
        found = list(range_coder.decode(code, math.prod(shape), entry["nonzeros"]))
        index = np.concatenate([np.zeros(0, np.int64), *found]).astype(np.int64)
        extra = Sparse(torch.from_numpy(index), tensors[f"{name}/values"], shape)
    part = StoredTensor(base, extra)
    value = part.dense()
    if tuple(value.shape) != shape:
        raise ValueError(f"the parts of {name} do not make up {list(shape)}")
    if not torch.isfinite(value).all():
        raise ValueError(f"{name} holds NaN or infinity")
    return part
