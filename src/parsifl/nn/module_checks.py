"""What keeps a module from running functionally."""

from __future__ import annotations

from torch import nn

from parsifl.core.errors import CapabilityError

_CONSTANT = "keep what is constant as a plain attribute of the module"
_REMEDY = "parsifl.nn.adapt(module) returns a copy without it"
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
        inner = getattr(layer, "dropout", 0.0)  # of attention and recurrent layers, a number
        if isinstance(layer, nn.RReLU) or (isinstance(inner, float) and inner > 0):
            raise CapabilityError(
                f"{place} draws unkeyed random numbers; set its dropout to 0, or replace it"
            )
        buffers = [buffer for buffer, _ in layer.named_buffers(recurse=False)]
        if buffers:
            statistics = isinstance(layer, nn.modules.batchnorm._NormBase)
            remedy = f"{_REMEDY} (norm='group' suits every batch)" if statistics else _CONSTANT
            raise CapabilityError(f"{place} keeps buffers ({', '.join(buffers)}); {remedy}")
    for name, value in module.named_parameters():
        if not value.requires_grad:
            raise CapabilityError(
                f"parameter '{name}' is frozen (requires_grad=False), but methods train all "
                "parameters: make it a constant of the module, or choose a method that freezes "
                "layers (perfedmask, fedbabu)"
            )
    _refuse_tied(module)


def _refuse_tied(module: nn.Module) -> None:
    owners: dict[int, str] = {}
    for name, value in module.named_parameters(remove_duplicate=False):
        if id(value) in owners:
            raise CapabilityError(
                f"parameter '{name}' is tied to '{owners[id(value)]}'; {_REMEDY} (untied)"
            )
        owners[id(value)] = name
