"""Values by name, with an error that names the nearest match."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from typing import Generic, TypeVar

from parsifl.core.errors import ConfigError, unknown

T = TypeVar("T")


def plain(name: str) -> str:
    """Return a name without what does not matter: case, dashes and underscores."""
    return name.lower().replace("-", "").replace("_", "")


class Registry(Generic[T]):
    """Values by name; case, dashes and underscores of a name do not matter.

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
