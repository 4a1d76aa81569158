"""Registries: values by name, and the algorithms of this and other packages.

A final subclass of `FederatedAlgorithm` in a module of `parsifl.algorithms` is registered under its
class name in lower case. The `__init__` of that package lists the classes a second time, for
imports and editors. Another package adds its own with the entry point group "parsifl.algorithms",
each entry naming a module that holds such classes.

Importing this module does not import torch.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
import warnings
from collections.abc import Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from parsifl.core import config, plugins
from parsifl.core.errors import ConfigError, unknown

if TYPE_CHECKING:
    from parsifl.core.algorithm import AnyAlgorithm

T = TypeVar("T")
_PACKAGE = "parsifl.algorithms"


def plain(name: str) -> str:
    """Return a name in lower case without dashes and underscores."""
    return name.lower().replace("-", "").replace("_", "")


class Registry(Generic[T]):
    """Values by name. Lookup ignores case, dashes and underscores.

    Parameters
    ----------
    kind
        What the values are, for error messages.
    values
        The first entries.
    package
        A package whose modules register entries when they are imported. They are imported when
        the registry is first read.

    >>> Registry("color", {"dark-red": 1}).find("Dark_Red")
    1
    """

    def __init__(
        self, kind: str, values: Mapping[str, T] | None = None, package: str | None = None
    ) -> None:
        self.kind = kind
        self._values = dict(values or {})
        self._package = package

    def add(self, name: str, value: T) -> None:
        """Register a value; a second one of the same name is an error."""
        if name in self._values:
            raise ConfigError(f"two {self.kind}s are called '{name}': rename one of them")
        self._values[name] = value

    def find(self, name: str) -> T:
        """Return the value of a name; an unknown name is an error with the nearest match."""
        self._discover()
        if name in self._values:
            return self._values[name]
        known = {plain(each): value for each, value in self._values.items()}
        if not isinstance(name, str) or plain(name) not in known:
            raise ConfigError(unknown(self.kind, name, self._values))
        return known[plain(name)]

    def names(self) -> list[str]:
        """Return every name, sorted."""
        self._discover()
        return sorted(self._values)

    def _discover(self) -> None:
        package, self._package = self._package, None
        if package is not None:
            for module in pkgutil.iter_modules(importlib.import_module(package).__path__):
                importlib.import_module(f"{package}.{module.name}")


@functools.cache
def algorithms() -> dict[str, type[AnyAlgorithm]]:
    """Return every registered algorithm by name, sorted."""
    by_name: dict[str, type[AnyAlgorithm]] = {}
    for module in _modules():
        for name, kind in _algorithms_in(module).items():
            if by_name.setdefault(name, kind) is not kind:
                raise ConfigError(
                    f"two algorithms are called '{name}': {by_name[name].__module__} and "
                    f"{module.__name__}; rename one of them"
                )
    return dict(sorted(by_name.items()))


def find(name: str) -> type[AnyAlgorithm]:
    """Return an algorithm's class. Lookup ignores case, dashes and underscores.

    Modules of other algorithms are imported only if no module has the name of this algorithm.

    >>> find("Fed-Avg").__name__
    'FedAvg'
    """
    if not isinstance(name, str):
        raise ConfigError(f"an algorithm is named by a string such as 'fedavg', got {name!r}")
    if plain(name) in _module_names():
        module = importlib.import_module(f"{_PACKAGE}.{plain(name)}")
        kind = _algorithms_in(module).get(plain(name))
        if kind is not None:
            return kind
    return Registry("algorithm", algorithms()).find(name)


def get(name: str, *, preset: str | None = None, **settings: Any) -> AnyAlgorithm:
    """Build an algorithm by name; `settings` override those of the preset.

    `local_steps` also replaces the `epochs` of a preset, and the other way round.

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
    chosen = dict(kind.presets[preset].settings)
    for name, other in (("local_steps", "epochs"), ("epochs", "local_steps")):
        if settings.get(name) not in (None, "none"):
            chosen.pop(other, None)
    return config.build(kind, {**chosen, **settings})


def load_object(text: str) -> Any:
    """Return the object that "package.module:name" refers to.

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
    kinds = [kind for kind in vars(module).values() if _is_final_algorithm(kind)]
    return {kind.__name__.lower(): kind for kind in kinds if kind.__module__ == module.__name__}


def _module_names() -> list[str]:
    """Return the modules of `parsifl.algorithms` that define an algorithm, sorted."""
    package = importlib.import_module(_PACKAGE)
    names = (module.name for module in pkgutil.iter_modules(package.__path__))
    return sorted(name for name in names if not name.startswith("_"))


def _modules() -> list[ModuleType]:
    outside = [entry.value for entry in plugins.entries(plugins.ALGORITHMS)]
    modules = [importlib.import_module(f"{_PACKAGE}.{name}") for name in _module_names()]
    for name in sorted(outside):
        try:
            modules.append(importlib.import_module(name))
        except Exception as error:  # another package may fail in any way; the others are there
            warnings.warn(
                f"the entry point '{name}' of the group {plugins.ALGORITHMS} cannot be imported "
                f"({type(error).__name__}: {error}), so its algorithms are missing; repair or "
                "uninstall the package that has it",
                stacklevel=2,
            )
    return modules


def _is_final_algorithm(kind: Any) -> bool:
    from parsifl.core.algorithm import (
        FederatedAlgorithm,  # imports torch; registries of data do not
    )

    # looked up on the class itself: a subclass would inherit the mark
    return (
        isinstance(kind, type)
        and issubclass(kind, FederatedAlgorithm)
        and "__final__" in vars(kind)
    )
