"""The table of coefficients: text, frames, LaTeX and CSV, ratios, and adjusted p-values."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import numpy as np

from parsifl.core.errors import ConfigError, unknown
from parsifl.sites.estimators.moments import Array

Adjust = Literal["holm", "bh"]
RATIOS = {"binomial": "odds ratio", "poisson": "rate ratio", "cox": "hazard ratio"}
_SPECIAL = {"&": r"\&", "%": r"\%", "_": r"\_", "#": r"\#", "$": r"\$"}


@dataclass(frozen=True)
class SiteEffects:
    """A test of whether sites need their own intercepts.

    Attributes
    ----------
    statistic
        F for a linear regression, else the chi-squared statistic of a score test.
    freedom
        The degrees of freedom: of F two, else one.
    pvalue
        The p-value of a common intercept.
    """

    statistic: float
    freedom: tuple[float, ...]
    pvalue: float

    def __str__(self) -> str:
        kind = "F" if len(self.freedom) == 2 else "chi2"
        freedom = ", ".join(f"{value:g}" for value in self.freedom)
        return f"{kind}({freedom}) = {self.statistic:.3g}, p = {self.pvalue:.2g}"


@dataclass(frozen=True, eq=False)
class Inference:
    """A table of coefficients in the units of X; NaN where no valid value exists.

    Attributes
    ----------
    names, estimate, se, lower, upper, statistic, pvalue
        One entry for each coefficient; the intercept, if there is a common one, comes first.
    sites, site_estimates, site_se
        Names, estimates [sites, coefficients] and their standard errors: the fit to the rows of
        the site alone, with its own intercept and residual variance. A deployment of a model that
        is not linear takes one Newton step from the common coefficients instead.
    q, q_pvalue, i2
        Cochran's Q of the sites' estimates, its p-value, and the fraction I^2 of their variation
        that is not due to chance.
    tau2
        The variance between sites, by DerSimonian and Laird.
    random_estimate, random_se, random_lower, random_upper
        The mean over sites in a random-effects model with this variance, with the standard error
        and the interval of Hartung and Knapp.
    site_effects
        A test of site intercepts, for a model with a common one; else None.
    guarantee
        When the intervals hold.
    notes
        Further sentences: the modelled class and the number of events, imputed columns, site
        effects.
    level
        The level of the intervals.
    family
        "gaussian", "binomial", "poisson" or "cox".
    frequency
        How often each column was selected, for several splits; else None.
    """

    names: list[str]
    estimate: Array
    se: Array
    lower: Array
    upper: Array
    statistic: Array
    pvalue: Array
    sites: list[str]
    site_estimates: Array
    site_se: Array
    q: Array
    q_pvalue: Array
    i2: Array
    tau2: Array
    random_estimate: Array
    random_se: Array
    random_lower: Array
    random_upper: Array
    site_effects: SiteEffects | None
    guarantee: str
    notes: tuple[str, ...]
    level: float
    family: str
    frequency: Array | None = None

    def of(self, rows: Sequence[int]) -> Inference:
        """Return the table of some of the coefficients."""
        values: dict[str, Any] = {"names": [self.names[row] for row in rows]}
        for item in fields(self):
            column = getattr(self, item.name)
            if isinstance(column, np.ndarray):  # the last axis is that of the coefficients
                values[item.name] = column[..., rows]
        return replace(self, **values)

    def cells(self) -> list[list[str]]:
        """Return the table as text, its heading first."""
        rows = [["", "estimate", "SE", f"{self.level:.0%} CI", "statistic", "p", "Q", "I2"]]
        rows[0] += [f"site {site}" for site in self.sites]
        rows[0] += ["selected"] * (self.frequency is not None)
        for i, name in enumerate(self.names):
            interval = "" if np.isnan(self.se[i]) else f"[{self.lower[i]:.4g}, {self.upper[i]:.4g}]"
            row = [name, _text(self.estimate[i]), _text(self.se[i]), interval]
            row += [_text(self.statistic[i], 3), _text(self.pvalue[i], 2), _text(self.q[i], 3)]
            row.append("" if np.isnan(self.i2[i]) else f"{self.i2[i]:.0%}")
            row += [_text(value) for value in self.site_estimates[:, i]]
            row += [] if self.frequency is None else [f"{self.frequency[i]:.0%}"]
            rows.append(row)
        return rows

    def __str__(self) -> str:
        rows = self.cells()
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = [
            "  ".join(
                cell.ljust(width) if i == 0 else cell.rjust(width)
                for i, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in rows
        ]
        return "\n".join([*lines, "", self.guarantee, *self.notes])

    def adjusted(self, method: Adjust) -> Array:
        """Return p-values adjusted for the number of coefficients, without the intercept.

        "holm" controls the chance of any false rejection, "bh" (Benjamini and Hochberg) the
        expected fraction of false rejections. Both are NaN for the intercept.
        """
        if method not in ("holm", "bh"):
            raise ConfigError(unknown("adjust", str(method), ("holm", "bh")))
        tested = np.isfinite(self.pvalue) & (np.array(self.names) != "(intercept)")
        values = self.pvalue[tested]
        order, count = np.argsort(values, kind="stable"), len(values)
        sorted_values = values[order]
        if method == "holm":
            steps = np.maximum.accumulate(sorted_values * (count - np.arange(count)))
        else:
            scaled = sorted_values * count / np.arange(1, count + 1)
            steps = np.minimum.accumulate(scaled[::-1])[::-1]
        adjusted = np.empty(count)
        adjusted[order] = np.minimum(steps, 1.0)
        full = np.full(len(self.names), np.nan)
        full[tested] = adjusted
        return full

    def to_frame(self, *, exponentiate: bool = False, adjust: Adjust | None = None) -> Any:
        """Return the table as a pandas frame, with one row for each coefficient.

        Parameters
        ----------
        exponentiate
            Whether the estimates and intervals are odds, rate or hazard ratios. The standard
            error stays that of the coefficient.
        adjust
            Adds a column of adjusted p-values: see `adjusted`.

        Examples
        --------
        >>> from parsifl.sites import FederatedSparsePoisson
        >>> x = np.arange(8.0)[:, None]
        >>> model = FederatedSparsePoisson(0, keep=[0]).fit(x, 2 ** np.arange(8))
        >>> model.summary().to_frame(exponentiate=True).loc["x0", "rate ratio"].round(6)
        np.float64(2.0)
        """
        try:
            import pandas as pd
        except ImportError:
            raise ConfigError("to_frame() needs pandas; install it, or use to_csv()") from None
        columns = self._columns(exponentiate=exponentiate, adjust=adjust)
        return pd.DataFrame(columns, index=pd.Index(self.names, name="term"))

    def to_csv(self, *, exponentiate: bool = False, adjust: Adjust | None = None) -> str:
        """Return the table as CSV, in full precision; arguments as in `to_frame`."""
        columns = self._columns(exponentiate=exponentiate, adjust=adjust)
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(["term", *columns])
        for i, name in enumerate(self.names):
            values = [float(column[i]) for column in columns.values()]
            writer.writerow([name, *("" if np.isnan(value) else repr(value) for value in values)])
        return out.getvalue()

    def to_latex(self, *, exponentiate: bool = False, adjust: Adjust | None = None) -> str:
        """Return the estimates, intervals and p-values as a LaTeX tabular (`booktabs`)."""
        columns = self._columns(exponentiate=exponentiate, adjust=adjust)
        first = next(iter(columns))
        head = ["", first, rf"{self.level:.0%} CI".replace("%", r"\%"), "p"]
        head += ["adjusted p"] * (adjust is not None)
        lines = [rf"\begin{{tabular}}{{l{'r' * (len(head) - 1)}}}", r"\toprule"]
        lines += [" & ".join(head) + r" \\", r"\midrule"]
        for i, name in enumerate(self.names):
            low, high = columns["lower"][i], columns["upper"][i]
            cells = [_escaped(name), _text(columns[first][i], 3)]
            cells.append("" if np.isnan(low) else f"{_text(low, 3)} to {_text(high, 3)}")
            cells.append(_probability(columns["p"][i]))
            if adjust is not None:
                cells.append(_probability(columns["adjusted p"][i]))
            lines.append(" & ".join(cells) + r" \\")
        return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", ""])

    def _columns(self, *, exponentiate: bool, adjust: Adjust | None) -> dict[str, Array]:
        label: str = "estimate"
        change: Callable[[Array], Array] = np.asarray
        if exponentiate:
            if self.family not in RATIOS:
                raise ConfigError(
                    "exponentiate=True needs a logistic, Poisson or Cox regression: the "
                    "coefficients of a linear regression are not logarithms of ratios"
                )
            label, change = RATIOS[self.family], np.exp
        columns = {
            label: change(self.estimate),
            "SE": self.se,
            "lower": change(self.lower),
            "upper": change(self.upper),
            "statistic": self.statistic,
            "p": self.pvalue,
        }
        if adjust is not None:
            columns["adjusted p"] = self.adjusted(adjust)
        if self.frequency is not None:
            columns["selected"] = self.frequency
        return {
            **columns,
            "Q": self.q,
            "Q p": self.q_pvalue,
            "I2": self.i2,
            "tau2": self.tau2,
            "random effects": change(self.random_estimate),
            "random effects lower": change(self.random_lower),
            "random effects upper": change(self.random_upper),
        }


def _text(value: float, digits: int = 4) -> str:
    return "" if np.isnan(value) else f"{value:.{digits}g}"


def _probability(value: float) -> str:
    if np.isnan(value):
        return ""
    return "$<$0.001" if value < 0.001 else f"{value:.3f}"


def _escaped(text: str) -> str:
    return "".join(_SPECIAL.get(letter, letter) for letter in text)
