"""Adapt a module to federated training: no running statistics, keyed dropout, no ties."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import nn

from parsifl.core.errors import ConfigError
from parsifl.nn.dropout import KeyedDropout
from parsifl.nn.module_checks import BATCH_NORMS, DROPOUTS, INSTANCE_NORMS


def adapt(
    module: nn.Module, norm: Literal["batch", "group"] = "batch", *, groups: int = 2
) -> nn.Module:
    """Return a copy of `module` that Parsifl can train.

    BatchNorm uses the statistics of its batch (`norm="batch"`) or becomes GroupNorm; Dropout
    becomes KeyedDropout; parameters and modules that were shared become separate copies.

    >>> adapted = adapt(nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Dropout(0.1)))
    >>> list(adapted.buffers())
    []
    """
    if norm not in ("batch", "group"):
        raise ConfigError(f"unknown norm {norm!r}; use 'batch' or 'group'")
    _check(module)
    adapted = copy.deepcopy(module)
    _untie_modules(adapted)
    _untie_parameters(adapted)
    salts = iter(range(1, 2**31))

    def swap(child: nn.Module) -> nn.Module:
        if isinstance(child, BATCH_NORMS):
            return _group_norm(child, groups) if norm == "group" else _batch_statistics(child)
        if isinstance(child, INSTANCE_NORMS):
            return _batch_statistics(child)
        if isinstance(child, DROPOUTS):
            channels = not isinstance(child, nn.Dropout)
            return KeyedDropout(child.p, next(salts), channels=channels).train(child.training)
        return child

    return _replace(adapted, swap)


def _check(module: nn.Module) -> None:
    for name, parameter in module.named_parameters():
        if nn.parameter.is_lazy(parameter):
            raise ConfigError(
                f"parameter '{name}' is lazy: its shape is not known yet; "
                "run the module once on a sample before adapting it"
            )
    for name, child in module.named_modules():
        if isinstance(child, nn.AlphaDropout | nn.FeatureAlphaDropout):
            raise ConfigError(
                f"'{name}' is {type(child).__name__}, which has no keyed form; use Dropout"
            )
        inner = getattr(child, "dropout", 0.0)
        if isinstance(inner, float) and inner > 0.0:
            raise ConfigError(
                f"'{name}' ({type(child).__name__}) drops out inside its kernel (dropout={inner}), "
                "which cannot be keyed; set it to 0 and put nn.Dropout after it"
            )


def _replace(module: nn.Module, swap: Callable[[nn.Module], nn.Module]) -> nn.Module:
    swapped = swap(module)
    if swapped is module:
        for name, child in list(module.named_children()):
            setattr(module, name, _replace(child, swap))
    return swapped


def _untie_modules(module: nn.Module) -> None:
    seen: set[int] = set()
    for name, child in list(module.named_modules(remove_duplicate=False)):
        if id(child) in seen and name:
            module.set_submodule(name, copy.deepcopy(child))
        seen.add(id(child))


def _untie_parameters(module: nn.Module) -> None:
    seen: set[int] = set()
    for name, parameter in list(module.named_parameters(remove_duplicate=False)):
        if id(parameter) in seen:
            owner, _, leaf = name.rpartition(".")
            fresh = nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
            setattr(module.get_submodule(owner), leaf, fresh)
        seen.add(id(parameter))


def _batch_statistics(child: nn.Module) -> nn.Module:
    cleared = dict.fromkeys(("running_mean", "running_var", "num_batches_tracked"))
    for name, value in {**cleared, "track_running_stats": False}.items():
        setattr(child, name, value)
    return child


def _group_norm(child: Any, groups: int) -> nn.Module:
    count = math.gcd(child.num_features, groups)
    normed = nn.GroupNorm(count, child.num_features, child.eps, child.affine)
    if child.affine:
        with torch.no_grad():
            normed.weight, normed.bias = child.weight, child.bias
    return normed.train(child.training)
