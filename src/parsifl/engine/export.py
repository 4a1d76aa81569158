"""What the user ships: a plain `nn.Module`, factorised where that is smaller, and its file."""

from __future__ import annotations

import copy
import math
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn

from parsifl.core.errors import CapabilityError, ConfigError, DataError
from parsifl.core.leaves import LowRank
from parsifl.core.problem import HasModule, Model, Params
from parsifl.engine import compact
from parsifl.engine.compact import StoredTensor
from parsifl.nn.module_checks import restore_counters


@final
@dataclass(frozen=True)
class Export:
    """A trained model, ready to be built, saved and measured.

    Attributes
    ----------
    parts
        The shortest form of every parameter.
    client
        Whose model it is; None: the global one.
    """

    problem: HasModule
    parts: dict[str, StoredTensor]
    client: int | None = None

    @property
    def parameters(self) -> int:
        """How many numbers are stored (positions of sparse parts aside)."""
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
        """Write one safetensors file (no pickle) and return its bytes; `load` reads it."""
        return compact.write(Path(path), self.parts, self.client)

    def report(self, x: Any, path: str | Path | None = None, repeats: int = 7) -> dict[str, Any]:
        """Return parameters, file size and latency, each with that of the dense model.

        `x` is a batch as the model takes it, a tensor or an array of NumPy. The two models run in
        turn, and medians are compared, so that other work on the machine hurts both alike. Without
        a `path` no file is written and its size is left out; `ideal_bytes` is what its numbers and
        positions take at least.
        """
        thin, dense = self.module(), self.dense_module()
        numbers = sum(part.dense().numel() for part in self.parts.values())
        x = _batch(thin, x, repeats)
        ours, theirs = _latencies(thin, dense, x, repeats)
        with torch.no_grad():
            gap = float((thin(x) - dense(x)).abs().max())
        found: dict[str, Any] = {
            "parameters": self.parameters,
            "dense_parameters": numbers,
            "milliseconds": ours,
            "dense_milliseconds": theirs,
            "largest_difference": gap,
            "ideal_bytes": self.ideal_bytes,
        }
        if path is not None:
            found["file_bytes"] = self.save(path)
        return found


def export(model: Model, shared: Model | None = None, client: int | None = None) -> Export:
    """Return the compact form of a model, as a sparse change of `shared` where that is shorter."""
    if not isinstance(model.problem, HasModule):
        raise CapabilityError(
            f"only a problem with a module can be exported; a {type(model.problem).__name__} has "
            "none: its coefficients are in run.model.params"
        )
    base: Params | None = None if shared is None else shared.params
    return Export(model.problem, compact.compress(model.params, base), client)


def load(path: str | Path, problem: HasModule) -> Export:
    """Read a file that `Export.save` wrote; the problem gives the architecture."""
    parts, client = compact.read(Path(path), problem.shapes())
    return Export(problem, parts, client)


def _set_value(module: nn.Module, name: str, value: Tensor) -> None:
    place, _, own = name.rpartition(".")
    layer, copied = module.get_submodule(place), value.detach().clone()
    if own in dict(layer.named_buffers(recurse=False)):
        setattr(layer, own, copied)
    else:
        setattr(layer, own, nn.Parameter(copied))


def _factorise(module: nn.Module, name: str, factors: LowRank) -> nn.Module:
    """Replace the layer that owns a weight by two thin ones, if it is of a known kind."""
    place, _, own = name.rpartition(".")
    layer = module.get_submodule(place)
    if own != "weight":
        return module
    pair = None
    if isinstance(layer, nn.Linear):
        pair = _linear_pair(layer, factors)
    elif isinstance(layer, nn.Conv2d) and _is_separable(layer):
        pair = _convolution_pair(layer, factors)
    if pair is None:
        return module
    if not place:
        return pair
    above, _, last = place.rpartition(".")
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
    """Return a batch that the module can take, in its dtype."""
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
        raise DataError("x is empty; give at least one row, so that there is something to measure")
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
