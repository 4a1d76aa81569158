"""Options of datasets and partitions, declared by signatures and written as `name:key=value`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from parsifl.core.errors import ConfigError, unknown

_TRUE, _FALSE = ("true", "yes", "1"), ("false", "no", "0")


def parse(text: str) -> tuple[str, dict[str, str]]:
    """Split a name from its options.

    >>> parse("dirichlet:alpha=0.1,min_size=5")
    ('dirichlet', {'alpha': '0.1', 'min_size': '5'})
    """
    if not isinstance(text, str):
        raise ConfigError(f"expected a name with options, as 'dirichlet:alpha=0.1', got {text!r}")
    name, _, rest = text.partition(":")
    if "=" in name or "(" in name:
        start = name.partition("=")[0].partition("(")[0].strip()
        raise ConfigError(
            f"cannot read '{text}'; write {start}:option=value,..., such as dirichlet:alpha=0.1"
        )
    options: dict[str, str] = {}
    for item in filter(None, rest.split(",")):
        field, equals, value = item.partition("=")
        if not (field and equals):
            raise ConfigError(
                f"cannot read '{item}' in '{text}'; write name:option=value,..., and + between "
                "several values of one option"
            )
        options[field.strip()] = value.strip()
    return name.strip(), options


def declared(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Return the keyword-only parameters of a loader or partition: its options."""
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}


def defaults(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the options with their default values (None for required ones)."""
    return {
        name: None if p.default is inspect.Parameter.empty else p.default
        for name, p in declared(function).items()
    }


def bind(what: str, function: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Check options against the signature, and convert text to the declared type."""
    known = declared(function)
    bound: dict[str, Any] = {}
    for name, value in given.items():
        if name not in known:
            raise ConfigError(
                unknown(f"option of {what}", name, known)
                if known
                else f"{what} takes no options, got '{name}'"
            )
        bound[name] = _converted(f"option '{name}' of {what}", value, str(known[name].annotation))
    for name, parameter in known.items():
        if parameter.default is inspect.Parameter.empty and name not in bound:
            raise ConfigError(f"{what} needs the option '{name}'")
    return bound


def _converted(what: str, value: Any, annotation: str) -> Any:
    """Convert a value to the annotated type; raise ConfigError if that loses information."""
    try:
        if annotation == "bool":
            return _boolean(value)
        if annotation == "int":
            return _integer(value)
        if annotation == "float":
            return float(value)
        if annotation == "tuple[int, ...]":
            items = value.split("+") if isinstance(value, str) else value
            return tuple(_integer(item) for item in items)
    except (TypeError, ValueError):
        kind = "integers such as 10+20+30" if annotation.startswith("tuple") else annotation
        raise ConfigError(f"{what} must be {kind}, got '{value}'") from None
    if not isinstance(value, str):
        raise ConfigError(f"{what} must be text, got {value!r}")
    return value


def _boolean(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    word = str(value).lower()
    if word not in _TRUE + _FALSE:
        raise ValueError(word)
    return word in _TRUE


def _integer(value: Any) -> int:
    if isinstance(value, bool) or (not isinstance(value, str) and int(value) != value):
        raise ValueError(value)
    return int(value)
