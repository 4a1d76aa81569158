"""Plain torch modules by name, and `adapt` for your own modules.

A module may declare which submodules form one maskable layer (`mask_blocks`) and which is its head
(`head_name`); without these, `parsifl.nn.layer_groups` finds them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

from parsifl.core import config
from parsifl.core.errors import ConfigError
from parsifl.core.registry import Registry
from parsifl.nn.adapt import adapt
from parsifl.nn.dropout import KeyedDropout, dropout_key
from parsifl.nn.models.alexnet import AlexNet
from parsifl.nn.models.mlp import MLP
from parsifl.nn.models.mobilenet import MobileNet
from parsifl.nn.models.preresnet import PreResNet18
from parsifl.nn.models.resnet import ResNet, resnet8, resnet18, resnet18_tiny
from parsifl.nn.models.vgg import VGG

__all__ = [
    "MLP",
    "VGG",
    "AlexNet",
    "KeyedDropout",
    "MobileNet",
    "PreResNet18",
    "ResNet",
    "adapt",
    "build",
    "dropout_key",
    "names",
    "resnet8",
    "resnet18",
    "resnet18_tiny",
    "summary",
]

_MODELS = Registry[Callable[..., nn.Module]](
    "model",
    {
        "alexnet": AlexNet,
        "mlp": MLP,
        "mobilenet": MobileNet,
        "preresnet18": PreResNet18,
        "resnet18": resnet18,
        "resnet18_tiny": resnet18_tiny,
        "resnet8": resnet8,
        "vgg": VGG,
    },
)


def names() -> tuple[str, ...]:
    """Return the names that `build` knows."""
    return tuple(_MODELS.names())


def summary(name: str) -> str:
    """Describe a model in one line.

    >>> summary("mlp").startswith("Linear layers")
    True
    """
    return (inspect.getdoc(_MODELS.find(name)) or "").partition("\n")[0]


def build(name: str, **kwargs: Any) -> nn.Module:
    """Build a model by name.

    >>> sum(p.numel() for p in build("mlp", inputs=4, hidden=(3,), classes=2).parameters())
    23
    """
    factory = _MODELS.find(name)
    try:
        module = config.build(factory, kwargs)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"model '{name}' cannot be built: {error}") from error
    for parameter, value in module.named_parameters():
        if value.numel() == 0:
            shape = " x ".join(map(str, value.shape))
            raise ConfigError(
                f"model '{name}' cannot be built: {parameter} would be {shape}; every layer needs "
                "at least one unit"
            )
    return module
