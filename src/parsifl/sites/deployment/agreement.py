"""The agreement of the sites of a regression: the model, and the encoding of tables."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any, ClassVar, Literal, final

import numpy as np
import numpy.typing as npt
from annotated_types import Ge, Le, MaxLen
from pydantic import ConfigDict, TypeAdapter

from parsifl.core.errors import DataError, WireError
from parsifl.data.table_encoding import (
    MOST_COLUMNS,
    STRICT,
    Array,
    Count,
    LevelCounts,
    NumberSums,
    Preprocessing,
    Summary,
    Text,
    is_words,
    observed,
    pooled,
    summarise_column,
)
from parsifl.data.tables import Columns, read_csv

__all__ = ["Agreement", "Family", "Prepared", "RegressionSpec", "read_csv"]

Family = Literal["linear", "logistic", "poisson", "cox"]


@final
@dataclass(frozen=True)
class RegressionSpec:
    """The target and the model of a regression.

    Parameters
    ----------
    target
        The column that is predicted; for "cox" the time.
    family
        "linear", "logistic" (two classes, as numbers or words), "poisson" (counts) or "cox".
    event
        For "cox": the column with 1 if the event was observed and 0 if the row was censored.
    exposure
        For "poisson": the column that the expected count is proportional to; empty: none.
    keep
        Columns that are always in the model.
    l2
        The ridge strength, in standardised units.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    target: Text
    family: Family = "linear"
    event: Text = ""
    exposure: Text = ""
    keep: Annotated[tuple[Text, ...], MaxLen(MOST_COLUMNS)] = ()
    l2: Annotated[float, Ge(0)] = 0.0

    def __post_init__(self) -> None:
        if bool(self.event) is not (self.family == "cox"):
            raise ValueError("event: required for the family 'cox', and not allowed for others")
        if self.exposure and self.family != "poisson":
            raise ValueError("exposure: only the family 'poisson' has one")

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of the table that belong to the spec."""
        return tuple(name for name in (self.target, self.event, self.exposure) if name)

    def checked(self, columns: Columns) -> str:
        """Return what is wrong with the target columns, without any values."""
        absent = [name for name in self.columns if name not in columns]
        if absent:
            return f"its table has no column '{absent[0]}', which is to be predicted"
        for name in self.columns:
            values = columns[name]
            worded = self.family == "logistic"
            if is_words(values) is not worded or not observed(values).all():
                kind = "a class in every row" if worded else "a number in every row"
                return f"the column '{name}' has missing values or words; it needs {kind}"
        target: Any = columns[self.target]
        if self.family in ("poisson", "cox") and (target < 0).any():
            return f"the column '{self.target}' has negative values"
        if self.event and not np.isin(columns[self.event], (0.0, 1.0)).all():
            return f"the column '{self.event}' must be 0 or 1"
        if self.exposure and not (np.asarray(columns[self.exposure], np.float64) > 0).all():
            return f"the column '{self.exposure}' must be above 0"
        return ""


@final
@dataclass(frozen=True)
class Prepared:
    """A site's table, ready for aggregation: missing and rare values are marked."""

    columns: Columns
    spec: RegressionSpec

    @property
    def rows(self) -> int:
        """The number of rows."""
        return len(self.columns[self.spec.target])

    @property
    def features(self) -> Columns:
        """The columns that predict."""
        mine = self.spec.columns
        return {name: column for name, column in self.columns.items() if name not in mine}

    def summary(self) -> Summary:
        """Return the aggregates of the table."""
        return Summary(self.rows, {n: summarise_column(c) for n, c in self.columns.items()})

    def numbers(self, name: str) -> Array:
        """Return the values of a column of numbers that are not missing."""
        values = np.asarray(self.columns[name], np.float64)
        return values[~np.isnan(values)]


@final
@dataclass(frozen=True)
class Agreement:
    """The agreement: the model, and the preprocessing of the other columns.

    Attributes
    ----------
    classes
        The two classes of a logistic regression; the second one is predicted.
    target_mean
        The mean of the target: the share of the second class, for "logistic".
    columns
        Maximum number of columns in one message that the guards of every site allow.
    sites
        How many sites take part.
    noise
        The largest width of the noise that a site adds to its sums.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    spec: RegressionSpec
    classes: Annotated[tuple[Text, ...], MaxLen(2)]
    target_mean: float
    preprocessing: Preprocessing
    columns: Count
    sites: Count
    noise: Annotated[float, Ge(0), Le(1)] = 0.0

    @classmethod
    def of(
        cls, summaries: Sequence[Summary], spec: RegressionSpec, columns: int, noise: float = 0.0
    ) -> Agreement:
        """Build the agreement from the summaries of the sites, ordered by client number."""
        absent = [n for n in spec.columns if any(n not in s.columns for s in summaries)]
        if absent:
            raise DataError(f"the column '{absent[0]}' is not in the table of every site")
        inner = [
            Summary(s.rows, {n: c for n, c in s.columns.items() if n not in spec.columns})
            for s in summaries
        ]
        parts = [summary.columns[spec.target] for summary in summaries]
        classes, middle = _middle(spec, parts)
        return cls(spec, classes, middle, Preprocessing.of(inner), columns, len(summaries), noise)

    @classmethod
    def read(cls, values: Any) -> Agreement:
        """Read what `to_json` wrote; raise WireError for anything else."""
        try:
            return TypeAdapter(cls).validate_json(json.dumps(values))
        except (TypeError, ValueError, RecursionError) as error:
            raise WireError(f"agreement: {type(error).__name__}") from None

    def to_json(self) -> dict[str, Any]:
        """Return JSON values."""
        values: dict[str, Any] = json.loads(json.dumps(asdict(self)))  # lists instead of tuples
        return values

    @property
    def kept(self) -> tuple[int, ...]:
        """The columns of the design matrix that are always in the model."""
        names = [column.name for column in self.preprocessing.columns]
        absent = sorted(set(self.spec.keep) - set(names))
        if absent:
            raise DataError(f"keep names the column '{absent[0]}', which no table has")
        units = self.preprocessing.units
        return tuple(i for i, unit in enumerate(units) if names[unit] in self.spec.keep)

    def targets(self, columns: Columns) -> Array:
        """Return the target columns of the problem, including a weight of 1 for each row.

        The target of a linear regression is centred.
        """
        y: npt.NDArray[Any] = columns[self.spec.target]
        one = np.ones(len(y))
        if self.spec.family == "linear":
            return np.stack([np.asarray(y, np.float64) - self.target_mean, one], axis=1)
        if self.spec.family == "logistic":
            return np.stack([(y == self.classes[1]).astype(np.float64), one], axis=1)
        if self.spec.family == "cox":
            return np.stack([y, np.asarray(columns[self.spec.event], np.float64), one], axis=1)
        name = self.spec.exposure
        shift = np.log(np.asarray(columns[name], np.float64)) if name else np.zeros(len(y))
        return np.stack([y, one, shift], axis=1)


def _middle(spec: RegressionSpec, parts: Sequence[Any]) -> tuple[tuple[str, ...], float]:
    """Return the classes and the mean of the target."""
    if spec.family == "logistic":
        worded = [part for part in parts if isinstance(part, LevelCounts)]
        classes = tuple(sorted({level for part in worded for level in part.levels}))
        if len(worded) < len(parts) or len(classes) != 2:
            raise DataError(
                f"the column '{spec.target}' must have two classes, but it has {len(classes)}"
            )
        cases = sum(part.levels.get(classes[1], 0) for part in worded)
        return classes, cases / sum(part.rows for part in worded)
    sums = [part for part in parts if isinstance(part, NumberSums)]
    if len(sums) < len(parts):
        raise DataError(f"the column '{spec.target}' must hold numbers at every site")
    return (), pooled(sums)[1]
