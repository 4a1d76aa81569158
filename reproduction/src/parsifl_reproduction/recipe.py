"""What a recipe is: jobs to run, and the claims that follow from their results."""

from __future__ import annotations

import hashlib
import importlib
import json
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

from parsifl.core.errors import ConfigError, unknown

Scale = Literal["smoke", "faithful", "full"]
SCALES: tuple[Scale, ...] = ("smoke", "faithful", "full")
Verdict = Literal["held", "tie", "undecided", "did not hold", "not run", "none"]
Values = dict[str, Any]
SKIPPED = "skipped"
"""The key under which a job that could not run (missing data, for example) gives the reason."""


TUNING = 3
"""Seeds that choose the settings of tuned methods; seeds beyond them compare the chosen ones."""


OURS = "our own list, beyond the paper"
"""`Claim.counted` of a claim that the paper does not make."""


@dataclass(frozen=True)
class Context:
    """How to run a recipe.

    Attributes
    ----------
    scale
        "smoke" runs every code path within minutes and gives no verdicts. "faithful" follows the
        paper's protocol at a size that a CPU can run; verdicts come from it. "full" has the
        paper's own datasets, models and rounds.
    seeds
        Number of repetitions.
    data_dir
        Directory with datasets, searched first; None: the default places.
    max_seeds
        Undecided comparisons get further seeds up to this number; None: they stay undecided.
    """

    scale: Scale = "faithful"
    seeds: int = 3
    data_dir: str | None = None
    max_seeds: int | None = None

    @property
    def smoke(self) -> bool:
        """Whether this run only checks that everything runs."""
        return self.scale == "smoke"


@dataclass(frozen=True)
class Job:
    """One unit of work. `run` takes a directory of its own (or None) and returns JSON values.

    `run` is a function of a module, or a `functools.partial` of one with frozen values. The
    function and its values are the identity of the job: recipes that plan the same work share it.
    """

    label: str
    seed: int
    run: Callable[[Path | None], Values]

    @property
    def fingerprint(self) -> str:
        """The identity of the work as 16 hexadecimal digits; the label is not part of it."""
        text = json.dumps(_described(self.run), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def _described(value: Any) -> Any:
    """Return JSON that identifies a function and its values."""
    if isinstance(value, partial):
        return [_described(part) for part in (value.func, value.args, value.keywords)]
    if isinstance(value, Context):
        return value.scale  # neither the number of seeds nor the place of the data changes a job
    if is_dataclass(value) and not isinstance(value, type):
        members = {field.name: _described(getattr(value, field.name)) for field in fields(value)}
        return {type(value).__qualname__: members}
    if isinstance(value, Mapping):
        return {str(key): _described(member) for key, member in value.items()}
    if isinstance(value, tuple | list):
        return [_described(member) for member in value]
    if callable(value) and "<locals>" not in value.__qualname__:
        return f"{value.__module__}.{value.__qualname__}"
    if value is None or isinstance(value, str | int | float):
        return value
    raise TypeError(f"a job cannot be identified by {value!r}: pass a value or a module's function")


@dataclass(frozen=True)
class Result:
    """The values that a job returned, and when, where and how long it ran (`made`)."""

    label: str
    seed: int
    values: Values
    made: Values | None = None


@dataclass(frozen=True)
class Claim:
    """One statement of a paper, its number, ours with its spread, and the verdict.

    `counted` names the recipe that already counts the same claim; "" if it is counted here.
    `left` and `right` are the two sides of a comparison, one value per seed. `runs` are the labels
    of the jobs whose further seeds could decide the claim; None: all jobs of the recipe.
    """

    statement: str
    paper: str
    ours: str
    verdict: Verdict
    note: str = ""
    counted: str = ""
    left: tuple[float, ...] = ()
    right: tuple[float, ...] = ()
    runs: tuple[str, ...] | None = None


def _no_deviations(_context: Context) -> Sequence[str]:
    return ()


def _nothing(_context: Context, _results: Sequence[Result]) -> Sequence[Job]:
    return ()


@dataclass(frozen=True)
class Recipe:
    """A table or figure of a paper.

    Attributes
    ----------
    plan
        The jobs at a scale.
    conclude
        The claims that follow from results.
    deviations
        Where the protocol at a scale is not the paper's, one sentence each.
    follow
        Jobs that depend on the results so far, such as further seeds of the settings that these
        chose. It is asked again when its jobs have finished, until it returns no other ones.
    """

    name: str
    title: str
    paper: str
    plan: Callable[[Context], Sequence[Job]]
    conclude: Callable[[Context, Sequence[Result]], Sequence[Claim]]
    deviations: Callable[[Context], Sequence[str]] = _no_deviations
    follow: Callable[[Context, Sequence[Result]], Sequence[Job]] = _nothing


@cache
def recipes() -> dict[str, Recipe]:
    """Return every recipe by name, from the modules of this package."""
    package = importlib.import_module("parsifl_reproduction")
    found: dict[str, Recipe] = {}
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        for recipe in getattr(importlib.import_module(module.name), "RECIPES", ()):
            found[recipe.name] = recipe
    return dict(sorted(found.items()))


def find(name: str) -> Recipe:
    """Return a recipe by name."""
    known = recipes()
    if name not in known:
        raise ConfigError(unknown("recipe", name, known))
    return known[name]


def by_label(results: Sequence[Result]) -> dict[str, list[Values]]:
    """Group the values of the jobs that ran by label, seeds in order."""
    grouped: dict[str, list[Values]] = {}
    for result in sorted(results, key=lambda found: found.seed):
        if SKIPPED not in result.values:
            grouped.setdefault(result.label, []).append(result.values)
    return grouped


def choosing(results: Sequence[Result], seeds: int = TUNING) -> list[Result]:
    """Return the results of the first seeds, which choose the settings of tuned methods."""
    return [result for result in results if result.seed < seeds]


def comparing(results: Sequence[Result], seeds: int = TUNING) -> list[Result]:
    """Return the results of the seeds that compare the chosen settings.

    They are the seeds that chose nothing; without any, the same ones, as in the papers.
    """
    return [result for result in results if result.seed >= seeds] or list(results)


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Return a mean with its standard deviation over seeds.

    >>> spread([1.0, 3.0])
    '2.00 ± 1.41'
    """
    mean = sum(values) / len(values)
    if len(values) == 1:
        return f"{mean:.{digits}f}"
    deviation = (sum((v - mean) ** 2 for v in values) / (len(values) - 1)) ** 0.5
    return f"{mean:.{digits}f} ± {deviation:.{digits}f}"
