"""What is inside a module: its blocks, its head, and what keeps it from running functionally."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from parsifl.errors import CapabilityError, ConfigError

_REMEDY = "parsifl.models.adapt(module) returns a copy without it"
_DROPOUT = (
    nn.Dropout,
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
    nn.AlphaDropout,
    nn.FeatureAlphaDropout,
)


def refuse_unbatchable(module: nn.Module) -> None:
    """Refuse, by the name of the layer, whatever carries state or randomness of its own."""
    for name, layer in module.named_modules():
        place = f"layer '{name}' ({type(layer).__name__})" if name else type(layer).__name__
        if isinstance(layer, nn.modules.lazy.LazyModuleMixin):
            raise CapabilityError(
                f"{place} has lazy parameters; run the module once on a sample before you pass it"
            )
        if isinstance(layer, _DROPOUT) and layer.p > 0:
            raise CapabilityError(f"{place} draws unkeyed random numbers; {_REMEDY}")
        buffers = [buffer for buffer, _ in layer.named_buffers(recurse=False)]
        if buffers:
            raise CapabilityError(f"{place} keeps buffers ({', '.join(buffers)}); {_REMEDY}")
    _refuse_tied(module)


def _refuse_tied(module: nn.Module) -> None:
    owners: dict[int, str] = {}
    for name, value in module.named_parameters(remove_duplicate=False):
        if id(value) in owners:
            raise CapabilityError(
                f"parameter '{name}' is tied to '{owners[id(value)]}'; {_REMEDY} (untied)"
            )
        owners[id(value)] = name


def parameter_blocks(module: nn.Module) -> Mapping[str, tuple[str, ...]]:
    """Group parameters into blocks: a layer with two or more axes opens one, norms join it.

    >>> net = nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3), nn.Linear(3, 2))
    >>> dict(parameter_blocks(net))
    {'0': ('0.weight', '0.bias', '1.weight', '1.bias'), '2': ('2.weight', '2.bias')}
    """
    blocks: dict[str, tuple[str, ...]] = {}
    current = ""
    for name, layer in module.named_modules():
        own = list(layer.named_parameters(recurse=False))
        if not own:
            continue
        if any(value.ndim > 1 for _, value in own) or not blocks:
            current = name
            blocks[current] = ()
        prefix = f"{name}." if name else ""
        blocks[current] += tuple(prefix + parameter for parameter, _ in own)
    return blocks


def find_head(module: nn.Module, name: str | None) -> tuple[str, ...]:
    """Return the parameters of the named head, or of the last layer that has a weight matrix."""
    layers = {
        layer_name: [parameter for parameter, _ in layer.named_parameters(recurse=False)]
        for layer_name, layer in module.named_modules()
        if any(value.ndim > 1 for value in layer.parameters(recurse=False))
    }
    if name is None:
        if not layers:
            raise ConfigError("the module has no layer with a weight matrix, so it has no head")
        name = next(reversed(layers))
    if name not in layers:
        raise ConfigError(f"no layer '{name}' with a weight; known: {', '.join(layers)}")
    prefix = f"{name}." if name else ""
    return tuple(prefix + parameter for parameter in layers[name])
