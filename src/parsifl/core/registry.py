"""Algorithms by name: found in `parsifl.algorithms` and in the entry points of other packages.

Nothing is listed by hand. A final subclass of `FederatedAlgorithm` is registered under its
class name in lower case. Another package adds its own with the entry point group
"parsifl.algorithms", each entry naming a module that holds such classes.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import pkgutil
from importlib.metadata import entry_points
from types import ModuleType
from typing import Any

from parsifl.core import config
from parsifl.core.algorithm import AnyAlgorithm, FederatedAlgorithm
from parsifl.core.errors import ConfigError, unknown
from parsifl.core.named import Registry, plain

ENTRY_POINT_GROUP = "parsifl.algorithms"
_PACKAGE = "parsifl.algorithms"


@functools.cache
def algorithms() -> dict[str, type[AnyAlgorithm]]:
    """Return every registered algorithm by name, sorted."""
    found: dict[str, type[AnyAlgorithm]] = {}
    for module in _modules():
        for name, kind in _algorithms_in(module).items():
            if found.setdefault(name, kind) is not kind:
                raise ConfigError(
                    f"two algorithms are called '{name}': {found[name].__module__} and "
                    f"{module.__name__}; rename one of them"
                )
    return dict(sorted(found.items()))


def find(name: str) -> type[AnyAlgorithm]:
    """Return an algorithm's class; case, dashes and underscores do not matter.

    Modules of other algorithms are imported only if this one is not in a module of its own name.

    >>> find("Fed-Avg").__name__
    'FedAvg'
    """
    if not isinstance(name, str):
        raise ConfigError(f"an algorithm is named by a string such as 'fedavg', got {name!r}")
    own = f"{_PACKAGE}.{plain(name)}"
    if plain(name).isidentifier() and importlib.util.find_spec(own) is not None:
        found = _algorithms_in(importlib.import_module(own)).get(plain(name))
        if found is not None:
            return found
    return Registry("algorithm", algorithms()).find(name)


def get(name: str, *, preset: str | None = None, **settings: Any) -> AnyAlgorithm:
    """Build an algorithm by name; `settings` override those of the preset.

    >>> get("fedavg", lr=0.5).lr
    0.5
    >>> get("fedslr", preset="paper:cifar10", lam=1e-3).lr_decay
    0.998
    """
    kind = find(name)
    if preset is None:
        return config.build(kind, settings)
    if preset not in kind.presets:
        if not kind.presets:
            raise ConfigError(f"{kind.__name__} has no presets; remove preset={preset!r}")
        raise ConfigError(unknown(f"preset of {kind.__name__}", str(preset), kind.presets))
    return config.build(kind, {**kind.presets[preset].settings, **settings})


def load_object(text: str) -> Any:
    """Return what "package.module:name" names.

    >>> load_object("parsifl.core.registry:find").__name__
    'find'
    """
    module, colon, name = text.partition(":")
    if not colon or not module or not name:
        raise ConfigError(f"write 'package.module:name', got {text!r}")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{text!r} cannot be loaded: {error}") from error


def _algorithms_in(module: ModuleType) -> dict[str, type[AnyAlgorithm]]:
    kinds = [kind for kind in vars(module).values() if _is_final_method(kind)]
    return {kind.__name__.lower(): kind for kind in kinds if kind.__module__ == module.__name__}


def _modules() -> list[ModuleType]:
    package = importlib.import_module(_PACKAGE)
    names = [module.name for module in pkgutil.iter_modules(package.__path__)]
    own = [f"{package.__name__}.{name}" for name in names if not name.startswith("_")]
    outside = [entry.value for entry in entry_points(group=ENTRY_POINT_GROUP)]
    return [
        *(importlib.import_module(name) for name in sorted(own)),
        *(_outside(name) for name in sorted(outside)),
    ]


def _outside(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except Exception as error:  # another package may fail in any way; say which one it was
        raise ConfigError(
            f"the entry point '{name}' of the group {ENTRY_POINT_GROUP} cannot be imported "
            f"({type(error).__name__}: {error}); repair or uninstall the package that has it"
        ) from error


def _is_final_method(kind: Any) -> bool:
    # looked up on the class itself: a subclass would inherit the mark
    return (
        isinstance(kind, type)
        and issubclass(kind, FederatedAlgorithm)
        and "__final__" in vars(kind)
    )
