"""Settings as typed fields: checked when an algorithm is built, written to and read from JSON.

The fields of an algorithm and the arguments of a model are annotated with these types. A wrong
value is rejected with an error that names the field before any work is done, wherever it came from
(Python, a TOML file, the command line).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import math
import re
import typing
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Annotated, Any, Literal, TypeVar

from annotated_types import Ge, Gt, Le, Lt

from parsifl.core import renamed
from parsifl.core.errors import ConfigError, did_you_mean, unknown

Positive = Annotated[float, Gt(0.0)]
NonNegative = Annotated[float, Ge(0.0)]
Fraction = Annotated[float, Ge(0.0), Le(1.0)]
Participation = Annotated[float, Gt(0.0), Le(1.0)]
"""The fraction of clients in a round."""
Momentum = Annotated[float, Ge(0.0), Lt(1.0)]
LARGEST = 2**31 - 1
"""The largest count: the maximum of a signed 32-bit integer."""

Count = Annotated[int, Ge(1), Le(LARGEST)]
Size = Annotated[int, Ge(0), Le(LARGEST)]

Precision = Literal["exact", "bfloat16", "float16", "int8"]
"""The precision of values in messages."""

T = TypeVar("T")


@dataclass(frozen=True)
class Help:
    """The description of a setting, as metadata of its annotation.

    Parameters
    ----------
    text
        One or more sentences.
    option
        Its option on the command line, empty if it has none. Default: "--" and its name, unless
        its value is a table.
    """

    text: str
    option: str | None = None


SYNONYMS = {
    "batchsize": ("batch_size",),
    "eta": ("lr",),
    "k": ("tau", "local_steps"),
    "lambda": ("lam", "mu"),
    "lambda_": ("lam", "mu"),
    "lam": ("mu",),
    "learning_rate": ("lr",),
    "local_epochs": ("epochs",),
    "mu": ("lam",),
    "num_epochs": ("epochs",),
    "num_steps": ("local_steps",),
    "server_learning_rate": ("server_lr",),
    "sparsity": ("tau", "density"),
    "wd": ("weight_decay",),
    "step_size": ("lr",),
    "weights": ("weighting",),
}
"""Terms of papers and other libraries, each with our names for it, best match first."""


UNSUPPORTED = {
    "clip_norm": "gradients are not clipped: lower `lr`",
    "max_grad_norm": "gradients are not clipped: lower `lr`",
    "nesterov": "clients take SGD steps with heavy-ball `momentum`",
    "optimizer": "clients take SGD steps: set `lr`, `momentum` and `weight_decay`",
    "scheduler": "set `lr_decay` or `milestones`",
}
"""Settings that users of other libraries expect, with what there is instead."""


_SEVERAL = ("tuple_type", "list_type", "sequence_str")
"""Errors of pydantic for text where several values are expected."""


def check(settings: Any) -> None:
    """Check every field of a dataclass instance against its annotation.

    Numbers of NumPy are replaced by those of Python.
    """
    kind: Any = type(settings)
    for name, adapter in _adapters(kind).items():
        raw = getattr(settings, name)
        value = _plain(raw)
        _validated(_label(kind, name), adapter, value, strict=True)
        if value is not raw:
            object.__setattr__(settings, name, value)  # the instance may be frozen


def _owner(kind: Any) -> str:
    """Return the name of the class that holds settings, as errors show it.

    It is empty for arguments, such as the settings of a run: users do not know their class.
    """
    return "" if getattr(kind, "are_arguments", False) else str(kind.__name__)


def _label(kind: Any, name: str) -> str:
    owner = _owner(kind)
    return f"{owner}.{name}" if owner else name


def check_names(kind: type, names: Iterable[str], others: Iterable[str] = ()) -> None:
    """Reject names that are neither fields of a dataclass nor among `others`."""
    if dataclasses.is_dataclass(kind):
        known = [each.name for each in dataclasses.fields(kind)]
        _check_names(_owner(kind), names, [*known, *others])


def build(kind: Callable[..., T], values: Mapping[str, Any]) -> T:
    """Return an instance from loose values (JSON, TOML, or text from the command line).

    Values are validated against the fields of a dataclass, or the annotated arguments of any other
    class or function. The text "none" means None, and "1+2" means several values.

    >>> from parsifl.algorithms.fedavg import FedAvg
    >>> build(FedAvg, {"lr": "0.5"}).lr
    0.5
    """
    hashable: Any = kind
    adapters = _adapters(hashable)
    _check_names(_owner(hashable), values, adapters)
    validated = {
        name: _validated(_label(hashable, name), adapters[name], _plain(value), strict=False)
        for name, value in values.items()
    }
    return kind(**validated)


def _check_names(owner: str, names: Iterable[str], known: Collection[str]) -> None:
    for name in names:
        if name not in known:
            raise ConfigError(_unknown_setting(owner, name, known))


def _unknown_setting(owner: str, name: str, known: Collection[str]) -> str:
    if renamed.SETTINGS.get(name) in known:
        return f"{owner and f'{owner}: '}`{name}` was renamed to `{renamed.SETTINGS[name]}`"
    kind = f"setting of {owner}" if owner else "setting"
    meant = [ours for ours in SYNONYMS.get(name.lower(), ()) if ours in known]
    if meant:
        return f"unknown {kind} '{name}'; did you mean '{meant[0]}'?"
    if name in UNSUPPORTED and "lr" in known:
        return f"{owner} has no setting `{name}`: {UNSUPPORTED[name]}"
    if not known:
        return f"{owner} has no settings, got '{name}'"
    return unknown(kind, name, known)


def assignments(texts: Iterable[str]) -> dict[str, str]:
    """Read `setting=value` texts.

    >>> assignments(["lr=0.1"])
    {'lr': '0.1'}
    """
    values: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise ConfigError(f"cannot read '{text}'; write setting=value, e.g. lr=0.1")
        values[name.strip()] = value.strip()
    return values


def parse(text: str) -> tuple[str, dict[str, str]]:
    """Split a name from its options, all of them text.

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
    try:
        return name.strip(), assignments(filter(None, rest.split(",")))
    except ConfigError:
        raise ConfigError(
            f"cannot read '{rest}' in '{text}'; write name:option=value,..., and + between "
            "several values of one option"
        ) from None


def grid(texts: Iterable[str]) -> dict[str, list[str]]:
    """Read `setting=a,b,c` texts; a value that occurs twice counts once.

    >>> grid(["lr=0.1,0.5"])
    {'lr': ['0.1', '0.5']}
    """
    values: dict[str, list[str]] = {}
    for text in texts:
        for name, several in assignments([text]).items():
            if name in values:
                raise ConfigError(
                    f"the grid has '{name}' twice: write all its values at once, {name}="
                    f"{','.join(values[name])},{several}"
                )
            values[name] = list(dict.fromkeys(several.split(",")))
    return values


def _keywords(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}


def option_defaults(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the keyword-only parameters of a function with their defaults; None if required."""
    empty = inspect.Parameter.empty
    return {
        name: None if each.default is empty else each.default
        for name, each in _keywords(function).items()
    }


def bind(what: str, function: Callable[..., Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Validate loose values against the keyword-only parameters of a function."""
    known = _keywords(function)
    for name in values:
        if name not in known:
            raise ConfigError(
                unknown(f"option of {what}", name, known)
                if known
                else f"{what} takes no options, got '{name}'"
            )
    for name, parameter in known.items():
        if parameter.default is inspect.Parameter.empty and name not in values:
            raise ConfigError(f"{what} needs the option '{name}'")
    options = type("Options", (), {"__annotations__": {n: p.annotation for n, p in known.items()}})
    # those of the other parameters may be imported for type checkers only
    hints = typing.get_type_hints(options, function.__globals__, include_extras=True)
    return {
        name: _validated(
            f"option '{name}' of {what}", _adapter(hints[name]), _plain(value), strict=False
        )
        for name, value in values.items()
    }


def to_json(settings: Any) -> dict[str, Any]:
    """Return the fields of a dataclass instance as JSON values."""
    kind: Any = type(settings)
    adapters = _adapters(kind)
    return {
        name: adapter.dump_python(getattr(settings, name), mode="json")
        for name, adapter in adapters.items()
    }


@functools.cache
def _adapters(kind: Any) -> dict[str, Any]:
    plain = isinstance(kind, type) and not dataclasses.is_dataclass(kind)
    hints = typing.get_type_hints(kind.__init__ if plain else kind, include_extras=True)
    return {name: _adapter(hints[name]) for name in inspect.signature(kind).parameters}


def _adapter(hint: Any) -> Any:
    # pydantic is imported late: it costs a tenth of a second, and `--help` does not need it
    import pydantic

    finite = pydantic.ConfigDict(allow_inf_nan=False, arbitrary_types_allowed=True)
    bare = hint.__origin__ if typing.get_origin(hint) is Annotated else hint
    nested = dataclasses.is_dataclass(bare)  # checks itself, and takes no configuration
    return pydantic.TypeAdapter(hint, config=None if nested else finite)


def _plain(value: Any) -> Any:
    """Return a value with plain Python numbers in place of NumPy's, also in collections."""
    import numpy as np

    if isinstance(value, np.generic):
        return value.item()
    if type(value) in (tuple, list):
        return type(value)(map(_plain, value))
    if type(value) is dict:
        return {name: _plain(item) for name, item in value.items()}
    return value


def _validated(label: str, adapter: Any, value: Any, *, strict: bool) -> Any:
    import pydantic

    strict = strict or isinstance(value, bool)
    if not strict and value == "none":
        with contextlib.suppress(pydantic.ValidationError):
            return adapter.validate_python(None)

    try:
        # an int is accepted for a float, but True is not a number
        lenient = isinstance(value, int) and not isinstance(value, bool)
        return adapter.validate_python(value, strict=strict and not lenient)
    except pydantic.ValidationError as error:
        problem = error.errors()[0]
    if not strict and isinstance(value, str):
        try:
            return adapter.validate_python(value.split("+"))
        except pydantic.ValidationError as error:
            if problem["type"] in _SEVERAL:  # the text was one of several values
                problem = error.errors()[0]
    reason = problem["msg"]
    if problem["type"] == "literal_error":
        values = re.findall("'([^']+)'", problem["ctx"]["expected"])
        reason = f"{reason}; {did_you_mean(value, values)}".removesuffix("; ")
    raise ConfigError(f"{label} = {value!r}: {reason}")


def choices(hint: Any) -> tuple[str, ...]:
    """Return the values of a setting that has a fixed list of them.

    >>> choices(Precision)
    ('exact', 'bfloat16', 'float16', 'int8')
    """
    if typing.get_origin(hint) is Literal:
        return tuple(map(str, typing.get_args(hint)))
    return choices(typing.get_args(hint)[0]) if typing.get_origin(hint) is Annotated else ()


def is_number(thing: Any) -> bool:
    """Return whether something is a real number; bools and NaN are not.

    >>> is_number(2), is_number("2"), is_number(float("nan"))
    (True, False, False)
    """
    numeric = isinstance(thing, Real) and not isinstance(thing, bool)
    return numeric and not math.isnan(float(thing))
