"""The maskable layers of a module: a weight with its bias and norm, without the head."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from parsifl.core.errors import ConfigError, unknown
from parsifl.core.layer_group import LayerGroup

if TYPE_CHECKING:
    from torch import nn


@runtime_checkable
class Grouped(Protocol):
    """A module that declares which of its submodules form one maskable layer."""

    def mask_blocks(self) -> Sequence[Sequence[str]]:
        """Return the names of the submodules of each block."""
        ...


def layer_groups(
    module: nn.Module, head: str | None = None, groups: Sequence[Sequence[str]] | None = None
) -> tuple[LayerGroup, ...]:
    """List the blocks of a module, without its head, in the order of registration.

    Parameters
    ----------
    module
        Any module; it may be on the `meta` device.
    head
        Name of the submodule that is the head. Default: the module's `head_name`, else the layer
        that produces the output, which must then be linear (see `find_head`).
    groups
        Names of the submodules that form each block. Default: the module's `mask_blocks()`, else
        one block per weight, with its bias and the norm that follows it.

    Examples
    --------
    >>> from torch import nn
    >>> net = nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3), nn.Linear(3, 2))
    >>> [(block.name, block.size) for block in layer_groups(net)]
    [('0', 21)]
    """
    _check_module(module)
    own_head = head_parameters(module, head)
    if groups is None and isinstance(module, Grouped):
        groups = module.mask_blocks()
    if groups is None:
        named = _by_weight(module, set(own_head))
    else:
        named = [(group[0], _below(module, group)) for group in groups]
    sizes = {name: parameter.numel() for name, parameter in module.named_parameters()}
    _check_untied([name for _, names in named for name in names], sizes)
    blocks = [
        LayerGroup(name, names, sum(sizes[one] for one in names)) for name, names in named if names
    ]
    _check_partition(blocks, own_head, set(sizes))
    return tuple(blocks)


def find_head(module: nn.Module, head: str | None = None) -> str:
    """Return the name of the head: given, declared by the module, or found by tracing.

    The layer that produces the output is found by tracing `forward` symbolically (`torch.fx`). If
    that fails, the head is the last declared layer with weights; pass `head` if it is another one.
    """
    from torch import nn

    from parsifl.nn.output_layers import output_layers

    _check_module(module)
    named = head if head is not None else getattr(module, "head_name", None)
    weighted = {
        name: child
        for name, child in module.named_modules()
        if any(parameter.ndim > 1 for parameter in child.parameters(recurse=False))
    }
    if named is not None:
        modules = dict(module.named_modules())
        if named not in modules or not named:
            raise ConfigError(unknown("head", named, weighted))
        return str(named)
    seen = "it has no layers with weights"
    if weighted:
        traced = output_layers(module)
        last = (next(reversed(weighted)),) if traced is None else traced
        modules = dict(module.named_modules())
        if len(last) == 1 and last[0] and isinstance(modules[last[0]], nn.Linear):
            return last[0]
        described = "its last layer with weights is" if traced is None else "its output comes from"
        seen = f"{described} {' and '.join(_describe(name, modules[name]) for name in last)}"
    raise ConfigError(
        f"cannot find the head of the model: {seen}; "
        "a head is a linear layer after the others, or name it with head=..."
    )


def head_parameters(module: nn.Module, head: str | None = None) -> tuple[str, ...]:
    """Return the names of the parameters of the head."""
    names = _below(module, [find_head(module, head)])
    _check_untied(names, dict(module.named_parameters()))
    return names


def _check_untied(names: Sequence[str], leaves: Collection[str]) -> None:
    """Reject layers that share a parameter: an algorithm treats layers differently."""
    if tied := [name for name in names if name not in leaves]:
        raise ConfigError(
            f"parameter '{tied[0]}' is tied to another one, so it belongs to two layers; untie it: "
            "parsifl.models.adapt(module) returns a copy without ties"
        )


def _describe(name: str, child: nn.Module) -> str:
    if not name:
        return f"the whole model, which is one layer ({type(child).__name__})"
    return f"'{name}' ({type(child).__name__})"


def _check_module(module: object) -> None:
    from torch import nn

    if not isinstance(module, nn.Module):
        raise ConfigError(f"expected an nn.Module, got {type(module).__name__}")


def _by_weight(module: nn.Module, head: set[str]) -> list[tuple[str, tuple[str, ...]]]:
    """Start a block at each layer with a weight matrix; a norm joins the weight before it.

    A norm that comes before any weight joins the first.
    """
    blocks: list[tuple[str, tuple[str, ...]]] = []
    waiting: tuple[str, ...] = ()
    for name, child in module.named_modules():
        prefix = f"{name}." if name else ""
        named = {prefix + leaf: value for leaf, value in child.named_parameters(recurse=False)}
        leaves = tuple(leaf for leaf in named if leaf not in head)
        if any(named[leaf].ndim > 1 for leaf in leaves):
            blocks.append((name or leaves[0], waiting + leaves))
            waiting = ()
        elif blocks:
            blocks[-1] = (blocks[-1][0], blocks[-1][1] + leaves)
        else:
            waiting += leaves
    return blocks if blocks or not waiting else [(waiting[0], waiting)]


def _below(module: nn.Module, names: Sequence[str]) -> tuple[str, ...]:
    modules = dict(module.named_modules())
    for name in names:
        if name not in modules:
            raise ConfigError(unknown("submodule", name, modules))
    below = [f"{name}.{leaf}" for name in names for leaf, _ in modules[name].named_parameters()]
    return tuple(below)


def _check_partition(blocks: Sequence[LayerGroup], head: Sequence[str], known: set[str]) -> None:
    if not blocks:
        raise ConfigError("the model has no layer besides its head; there is nothing to mask")
    listed = [name for block in blocks for name in block.parameters]
    listed += list(head)
    if twice := {name for name in listed if listed.count(name) > 1}:
        raise ConfigError(f"parameter '{min(twice)}' is in two blocks; each belongs to one")
    if left := known - set(listed):
        raise ConfigError(f"parameter '{min(left)}' is not in a block; add its submodule to one")
