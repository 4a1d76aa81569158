"""Export trained models as a plain `nn.Module`, factorised where that is smaller, or a file."""

from __future__ import annotations

import copy
import json
import math
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from parsifl.core.errors import CapabilityError, CheckpointError, ConfigError, DataError
from parsifl.core.leaves import LowRank, Sparse, factored, matricize
from parsifl.core.problem import HasModule, Model, Params
from parsifl.engine.safe_files import replace_file
from parsifl.engine.state_store import checksum
from parsifl.nn.module_checks import restore_counters
from parsifl.solvers.svt import has_rank
from parsifl.wire import range_coder

VERSION = 2
_META = "parsifl"


@dataclass(frozen=True)
class StoredTensor:
    """One parameter: a base (dense, factors, or nothing) plus an optional sparse part."""

    base: Tensor | LowRank | None
    extra: Sparse | None = None

    def dense(self) -> Tensor:
        """Return the dense parameter."""
        parts = [part if isinstance(part, Tensor) else part.dense() for part in self._parts()]
        return parts[0] if len(parts) == 1 else parts[0] + parts[1]

    def numbers(self) -> int:
        """Return how many numbers are stored, without positions."""
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
        A global model that it may be a sparse modification of; None if there is none.
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
    """Return factors of the numerical rank if they are shorter."""
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
def write_parts(path: Path, parts: Mapping[str, StoredTensor], client: int | None) -> int:
    """Write a safetensors file whose metadata describe the parts; return its size in bytes."""
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


def read_parts(
    path: Path, shapes: Mapping[str, tuple[int, ...]]
) -> tuple[dict[str, StoredTensor], int | None]:
    """Read a file of `write`; every parameter must have the shape that the model expects."""
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
        positions = list(range_coder.decode(code, math.prod(shape), entry["nonzeros"]))
        index = np.concatenate([np.zeros(0, np.int64), *positions]).astype(np.int64)
        extra = Sparse(torch.from_numpy(index), tensors[f"{name}/values"], shape)
    part = StoredTensor(base, extra)
    value = part.dense()
    if tuple(value.shape) != shape:
        raise ValueError(f"the parts of {name} do not make up {list(shape)}")
    if not torch.isfinite(value).all():
        raise ValueError(f"{name} holds NaN or infinity")
    return part


@final
@dataclass(frozen=True)
class Export:
    """A trained model in compact form, which can be built, saved and measured.

    Attributes
    ----------
    parts
        The shortest form of every parameter.
    client
        The client that the model belongs to; None for the global model.
    """

    problem: HasModule
    parts: dict[str, StoredTensor]
    client: int | None = None

    @property
    def parameters(self) -> int:
        """How many numbers are stored (without the positions of sparse parts)."""
        return sum(part.numbers() for part in self.parts.values())

    @property
    def ideal_bytes(self) -> int:
        """The bytes of all numbers and of an optimal code of the positions: a bound for files."""
        return math.ceil(sum(part.size() for part in self.parts.values()))

    def module(self) -> nn.Module:
        """Build the module, in evaluation mode: factors become two thin layers.

        A layer with a sparse part is built dense: two thin products and a sparse one would be
        slower than one dense product.
        """
        module = copy.deepcopy(self.problem.module)
        for name, part in self.parts.items():
            _set_value(module, name, part.dense())
        complete(module, self.problem)
        for name, part in self.parts.items():
            if isinstance(part.base, LowRank) and part.extra is None:
                module = _factorise(module, name, part.base)
        restore_counters(module)
        return module.eval().requires_grad_(False)

    def dense_module(self) -> nn.Module:
        """Build the same model with every layer dense."""
        parts = {name: StoredTensor(part.dense()) for name, part in self.parts.items()}
        return Export(self.problem, parts, self.client).module()

    def save(self, path: str | Path) -> int:
        """Write one safetensors file (no pickle) and return its size; `load` reads it."""
        return write_parts(Path(path), self.parts, self.client)

    def report(self, x: Any, path: str | Path | None = None, repeats: int = 7) -> dict[str, Any]:
        """Return parameters, file size and latency, each with that of the dense model.

        `x` is a batch of inputs, a tensor or a NumPy array. The two models run alternately and
        medians are compared, so that other load on the machine affects both equally. Without
        a `path` no file is written and its size is omitted; `ideal_bytes` is a lower bound on the
        bytes of its numbers and positions.
        """
        thin, dense = self.module(), self.dense_module()
        numbers = sum(part.dense().numel() for part in self.parts.values())
        x = _batch(thin, x, repeats)
        ours, theirs = _latencies(thin, dense, x, repeats)
        with torch.no_grad():
            gap = float((thin(x) - dense(x)).abs().max())
        numbers_by_name: dict[str, Any] = {
            "parameters": self.parameters,
            "dense_parameters": numbers,
            "milliseconds": ours,
            "dense_milliseconds": theirs,
            "largest_difference": gap,
            "ideal_bytes": self.ideal_bytes,
        }
        if path is not None:
            numbers_by_name["file_bytes"] = self.save(path)
        return numbers_by_name


def export(model: Model, shared: Model | None = None, client: int | None = None) -> Export:
    """Return the compact form of a model, as a sparse change of `shared` if that is shorter."""
    if not isinstance(model.problem, HasModule):
        raise CapabilityError(
            f"only a problem with a module can be exported; a {type(model.problem).__name__} has "
            "none: its coefficients are in run.model.params"
        )
    base: Params | None = None if shared is None else shared.params
    return Export(model.problem, compress(model.params, base), client)


def load(path: str | Path, problem: HasModule) -> Export:
    """Read a file that `Export.save` wrote; the problem defines the architecture."""
    parts, client = read_parts(Path(path), problem.shapes())
    return Export(problem, parts, client)


def _set_value(module: nn.Module, name: str, value: Tensor) -> None:
    path, _, leaf = name.rpartition(".")
    layer, copied = module.get_submodule(path), value.detach().clone()
    if leaf in dict(layer.named_buffers(recurse=False)):
        setattr(layer, leaf, copied)
    else:
        setattr(layer, leaf, nn.Parameter(copied))


def complete(module: nn.Module, problem: HasModule) -> None:
    """Set the constants and the tied parameters of a module, which are not in the parts."""
    fixed = getattr(problem, "fixed", None)
    if not fixed:
        return
    for name, value in fixed.constants.items():
        _set_value(module, name, value)
    for name, first in fixed.ties.items():
        path, _, leaf = name.rpartition(".")
        setattr(module.get_submodule(path), leaf, module.get_parameter(first))


def _factorise(module: nn.Module, name: str, factors: LowRank) -> nn.Module:
    """Replace the layer that owns a weight by two thin ones, if its type is supported."""
    path, _, leaf = name.rpartition(".")
    layer = module.get_submodule(path)
    if leaf != "weight":
        return module
    pair = None
    if isinstance(layer, nn.Linear):
        pair = _linear_pair(layer, factors)
    elif isinstance(layer, nn.Conv2d) and _is_separable(layer):
        pair = _convolution_pair(layer, factors)
    if pair is None:
        return module
    if not path:
        return pair
    above, _, last = path.rpartition(".")
    setattr(module.get_submodule(above), last, pair)
    return module


def _linear_pair(layer: nn.Linear, factors: LowRank) -> nn.Sequential:
    rank = factors.left.shape[1]
    first = nn.Linear(layer.in_features, rank, bias=False, device="meta")
    second = nn.Linear(rank, layer.out_features, bias=layer.bias is not None, device="meta")
    return _filled(first, second, factors.right, factors.left, layer.bias)


def _is_separable(layer: nn.Conv2d) -> bool:
    plain = layer.groups == 1 and layer.padding_mode == "zeros"
    return plain and not isinstance(layer.padding, str)


def _convolution_pair(layer: nn.Conv2d, factors: LowRank) -> nn.Sequential:
    """Turn k1 x k2 into 1 x k2, then k1 x 1: the sum over r of left[o a, r] right[r, i b]."""
    rank = factors.left.shape[1]
    height, width = layer.kernel_size
    pads: Any = layer.padding
    first = nn.Conv2d(
        layer.in_channels, rank, (1, width), (1, layer.stride[1]), (0, pads[1]),
        (1, layer.dilation[1]), bias=False, device="meta",
    )  # fmt: skip
    second = nn.Conv2d(
        rank, layer.out_channels, (height, 1), (layer.stride[0], 1), (pads[0], 0),
        (layer.dilation[0], 1), bias=layer.bias is not None, device="meta",
    )  # fmt: skip
    right = factors.right.reshape(rank, layer.in_channels, 1, width)
    left = factors.left.reshape(layer.out_channels, height, rank).swapaxes(1, 2)
    return _filled(first, second, right, left[..., None], layer.bias)


def _filled(
    first: nn.Module, second: nn.Module, right: Tensor, left: Tensor, bias: Tensor | None
) -> nn.Sequential:
    values: Mapping[str, Tensor] = {"weight": left} if bias is None else {
        "weight": left, "bias": bias,
    }  # fmt: skip
    _set_value(first, "weight", right.contiguous())
    for name, value in values.items():
        _set_value(second, name, value.contiguous())
    return nn.Sequential(first, second)


def _batch(module: nn.Module, x: Any, repeats: int) -> Tensor:
    """Return a batch in the dtype of the module."""
    if repeats < 1:
        raise ConfigError(f"repeats must be at least 1, got {repeats}")
    try:
        rows = torch.as_tensor(x)
        if rows.is_floating_point():
            rows = rows.to(next(module.parameters()).dtype)
        with torch.no_grad():
            module(rows)
    except (TypeError, ValueError, RuntimeError, IndexError) as error:
        shape = getattr(x, "shape", type(x).__name__)
        raise DataError(f"the model cannot take x ({shape}): {error}") from error
    if not rows.numel():
        raise DataError("x is empty; pass at least one row to measure")
    return rows


def _latencies(thin: nn.Module, dense: nn.Module, x: Tensor, repeats: int) -> tuple[float, float]:
    with torch.no_grad():
        thin(x), dense(x)  # the first call plans and allocates
        pairs = [(_milliseconds(thin, x), _milliseconds(dense, x)) for _ in range(repeats)]
    ours, theirs = zip(*pairs, strict=True)
    return statistics.median(ours), statistics.median(theirs)


def _milliseconds(module: nn.Module, x: Tensor) -> float:
    started = time.perf_counter()
    module(x)
    return (time.perf_counter() - started) * 1e3
