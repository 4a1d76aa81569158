"""A server that chooses its questions to isolate a row: sums over rows must not allow it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from tests.flower.inprocess import fields
from tests.sites.deployment.test_families import SPECS, hospitals

from parsifl import wire
from parsifl.core.errors import ConfigError, DataError
from parsifl.core.problem import CurvatureSums
from parsifl.engine.experiment import Experiment
from parsifl.engine.settings import Evaluation
from parsifl.flower.hello import DataSchema
from parsifl.flower.message import Envelope, Kind, respond
from parsifl.sites.deployment import table_site
from parsifl.sites.deployment.agreement import Agreement
from parsifl.sites.deployment.guards import (
    Guards,
    Refusal,
)
from parsifl.sites.deployment.ledger import Ledger
from parsifl.sites.deployment.ledger import root as root_of
from parsifl.sites.deployment.messages import AgreeReply
from parsifl.sites.deployment.regression import _check_units
from parsifl.sites.deployment.row_terms import RowTerms
from parsifl.sites.deployment.table_site import (
    ColumnSchema,
    TableSchema,
    TableSite,
    data_of,
    prepare,
    problem_of,
)
from parsifl.sites.search.best_subset import symmetric
from parsifl.sites.search.fedbestsubset import BestSubsetQuestion

RUN = "0" * 32
ROWS = 90


class Attacker:
    """A server that asks one site whatever it likes, and keeps what comes back."""

    def __init__(self, family: str, root: Path, table: Any = None, **guards: Any) -> None:
        self.table = hospitals(family)[1] if table is None else table
        self.spec = SPECS[family]
        self.experiment = Experiment("fedbestsubset", {"tau": 7}, clients=3, rounds=100)
        self.root, self.guards = root, Guards(**guards)
        (root / "client-0").mkdir(parents=True, exist_ok=True)
        (root / "client-0" / "secret").write_bytes(b"7" * 32)  # the same noise in every run
        own = prepare(self.table, self.spec, TableSchema(), self.guards)
        self.agreement = Agreement.of([own.summary()] * 3, self.spec, 30)
        self.x = self.agreement.preprocessing.standardised(own.columns)
        self.y = self.agreement.targets(own.columns)
        self.width = self.x.shape[1] + (family in ("logistic", "poisson"))
        self.data = data_of(self.x, self.y)
        self.problem: Any = problem_of(self.spec, self.agreement.kept)(self.data)
        self.sums: list[CurvatureSums] = []
        self.asked: list[tuple[Any, list[int]]] = []

    def ask(
        self, at: Any, run: str = RUN, candidates: Sequence[int] | None = None, **changes: Any
    ) -> Envelope:
        """Ask for the sums at these coefficients."""
        model = {"coef": torch.zeros(self.width, dtype=torch.float64)}
        point = {"coef": torch.as_tensor(at, dtype=torch.float64)}
        columns = torch.arange(self.width) if candidates is None else torch.tensor(candidates)
        down = wire.encode(BestSubsetQuestion(model, point, columns))
        reply = self.send("train", {"down": down}, run, uploads=True, **changes)
        if reply.parts:
            self.sums.append(wire.decode(reply.parts["upload"], CurvatureSums))
            self.asked.append((at, columns.tolist()))
        return reply

    def send(self, kind: Kind, parts: dict[str, bytes], run: str = RUN, **changes: Any) -> Envelope:
        """Send a request with the agreement."""
        schema = DataSchema(
            (self.x.shape[1],),
            "float64",
            (self.y.shape[1],),
            "float64",
            None,
            sparse=False,
            name="own",
        )
        head = {
            "client": 0,
            "round": len(self.sums),
            "experiment": run,
            "accepted": 0,
            "oldest": 0,
            "data_schema": schema.to_json(),
            "agreement": self.agreement.to_json(),
            **changes,
        }
        site = TableSite(self.experiment, 0, self.table, self.root, self.spec, guards=self.guards)
        return respond(site, kind, Envelope(json.dumps(head), parts))

    def ledger(self) -> Ledger:
        """Return the ledger of the site, which must be private."""
        path = self.root / "client-0" / "ledger-table.npz"
        assert path.stat().st_mode & 0o077 == 0
        return Ledger.read(path)

    def rule(self, at: Any, **changes: Any) -> str:
        return str(fields(self.ask(at, **changes)).get("rule", ""))


def risk_products(log_ratios: Any, time: Any, event: Any) -> Any:
    """Return the matrix K of the curvature of a Cox model, event by event."""
    ratio, found = np.exp(log_ratios), np.zeros((len(time), len(time)))
    for moment in time[event == 1]:
        share = ratio * (time >= moment)
        share = share / share.sum()
        found += np.diag(share) - np.outer(share, share)
    return found


def steep(attacker: Attacker, column: int, below: int, slope: float = 1e4) -> Any:
    """Return coefficients of which the `below` smallest values of a column have no chance."""
    values = np.sort(attacker.x[:, column])
    at = np.zeros(attacker.width)
    at[column], at[-1] = slope, -slope * (values[below - 1] + values[below]) / 2
    return at


def test_a_threshold_that_isolates_one_row_is_refused(tmp_path: Path) -> None:
    attacker = Attacker("logistic", tmp_path)
    column = attacker.agreement.preprocessing.names.index("marker0")
    assert attacker.rule(np.zeros(attacker.width)) == ""
    assert attacker.rule(steep(attacker, column, 1)) == "leverage"


def test_two_thresholds_that_differ_by_one_row_are_refused(tmp_path: Path) -> None:
    attacker = Attacker("logistic", tmp_path)
    column = attacker.agreement.preprocessing.names.index("marker0")
    # by differencing: the sums of 40 and of 41 rows, but for the 41st row, are equal
    replies = [attacker.rule(steep(attacker, column, below, 40.0)) for below in (40, 41)]
    replies += [attacker.rule(steep(attacker, column, below)) for below in (40, 41)]
    assert "leverage" in replies
    assert len(attacker.sums) < 4


def test_one_row_cannot_be_given_all_the_weight(tmp_path: Path) -> None:
    attacker = Attacker("poisson", tmp_path)
    at = np.zeros(attacker.width)
    at[attacker.agreement.preprocessing.names.index("marker0")] = 15.0
    assert attacker.rule(at) == "leverage"


def pair_of_thresholds(attacker: Attacker, slope: float) -> Any:
    """Return coefficients at which the two middle rows of a column have most of the curvature."""
    column = attacker.agreement.preprocessing.names.index("marker0")
    return steep(attacker, column, ROWS // 2, slope)


def test_a_sum_over_two_rows_is_refused(tmp_path: Path) -> None:
    attacker = Attacker("logistic", tmp_path)
    assert attacker.rule(np.zeros(attacker.width)) == ""
    at = pair_of_thresholds(attacker, 300.0)
    weights = RowTerms.of(attacker.problem, attacker.data, torch.as_tensor(at)).products[:, -1]
    assert np.sort(weights)[-2:].sum() > 0.95 * weights.sum()
    assert weights.max() < 0.8 * weights.sum()
    assert attacker.rule(at) == "leverage"


@pytest.mark.parametrize("family", ["logistic", "poisson", "cox", "linear"])
def test_no_combination_of_adaptive_answers_is_a_row_or_a_pair(family: str, tmp_path: Path) -> None:
    """The server's best: least squares over all answers, with knowledge that it lacks."""
    attacker = Attacker(family, tmp_path, refusals=1000)
    draw = np.random.default_rng(0)
    points = [draw.normal(size=attacker.width) * 10 ** draw.uniform(-1, 3) for _ in range(30)]
    for slope in (0.1, 0.5, 3.0, 20.0, 100.0):  # questions that differ where few rows are
        for step in (0.0, 1e-3, 0.05):
            points.append(np.zeros(attacker.width))
            points[-1][position(attacker, "marker0")] = slope * (1 + step)
    for number, at in enumerate(points):
        few = list(range(attacker.width if number % 3 else 3))
        attacker.ask(at, run=f"{number % 9:032x}", candidates=few)
    assert attacker.sums
    sent = [np.ones(ROWS)]
    for at, columns in attacker.asked:
        if family == "linear":
            sent += [attacker.y[:, 0], *attacker.x[:, columns].T]
            continue
        terms = RowTerms.of(attacker.problem, attacker.data, torch.as_tensor(at))
        sent += [terms.residuals, *terms.products[:, columns].T]
    vectors = np.stack([vector / np.abs(vector).max() for vector in sent if vector.any()], axis=1)
    level = 0.0 if family == "linear" else 0.03 / np.sqrt(12)
    gram = vectors.T @ vectors + level**2 * np.diag(np.arange(vectors.shape[1]) > 0)
    share = vectors @ np.linalg.pinv(gram, rcond=1e-13, hermitian=True) @ vectors.T
    assert np.diag(share).max() <= 0.501
    pairs = [np.linalg.eigvalsh(share[np.ix_(p, p)])[-1] for p in combinations(range(ROWS), 2)]
    assert max(pairs) <= 0.701


def test_the_products_of_a_cox_model_are_its_curvature(tmp_path: Path) -> None:
    attacker = Attacker("cox", tmp_path, leverage=1.0, noise=0.0)
    at = 0.1 * np.random.default_rng(0).normal(size=attacker.width)
    attacker.ask(at)
    time, event = attacker.y[:, 0], attacker.y[:, 1]
    products = risk_products(attacker.x @ at, time, event)
    terms = RowTerms.of(attacker.problem, attacker.data, torch.as_tensor(at))
    assert np.allclose(terms.products, products @ attacker.x, rtol=1e-9, atol=1e-12)
    assert np.allclose(attacker.x.T @ products @ attacker.x, matrix(attacker), rtol=1e-9, atol=1e-9)
    gradient = attacker.sums[0].gradient.numpy()
    assert np.allclose(attacker.x.T @ terms.residuals, gradient, atol=1e-9)
    assert terms.losses.sum() == pytest.approx(float(attacker.sums[0].loss))


def test_a_question_about_other_columns_is_refused(tmp_path: Path) -> None:
    attacker = Attacker("logistic", tmp_path, ratio=0.05)
    attacker.experiment = Experiment("fedbestsubset", {"tau": 1}, clients=3, rounds=9)
    assert attacker.rule(np.zeros(attacker.width)) == "ratio"


# ------------------------------------------------------------------ rows from one or two requests
def ward(rows: int = ROWS, numbers: int = 3) -> pd.DataFrame:
    """Return numbers, a target of each family but Cox, and no rare level."""
    draw = np.random.default_rng(11)
    table = pd.DataFrame({f"lab{i}": draw.normal(size=rows) for i in range(numbers)})
    table["days"] = 5 + table.lab0 + draw.normal(size=rows)
    table["outcome"] = np.where(draw.random(rows) < 0.5, "dead", "alive")
    return table


def yes(rows: Sequence[int]) -> Any:
    return np.where(np.isin(np.arange(ROWS), rows), "yes", "no")


def predicting(family: str, table: pd.DataFrame) -> pd.DataFrame:
    return table.drop(columns={"linear": "outcome", "logistic": "days"}[family])


def raw(attacker: Attacker, **coefficients: float) -> Any:
    """Return coefficients in the units of the table, of columns by name."""
    names, scales = attacker.agreement.preprocessing.names, attacker.agreement.preprocessing.scale
    means, found = attacker.agreement.preprocessing.mean, np.zeros(attacker.width)
    for name, value in coefficients.items():
        if name == "intercept":
            found[-1] += value
        else:
            column = names.index(name)
            found[column] = value * scales[column]
            found[-1] += value * means[column] if attacker.width > len(names) else 0.0
    return found


def matrix(attacker: Attacker, request: int = 0) -> Any:
    """Return X'WX of a request."""
    packed = attacker.sums[request].curvature.numpy()
    if attacker.spec.family != "linear":
        return packed.reshape(attacker.width, attacker.width)
    return symmetric(packed, np.zeros(attacker.width))


def position(attacker: Attacker, name: str) -> int:
    return attacker.agreement.preprocessing.names.index(name)


Attack = Callable[[Path, dict[str, Any]], tuple[float, Attacker]]
"""Returns the largest error of the rows that it finds (infinite: refused), with these guards."""


def nested_levels(root: Path, guards: dict[str, Any]) -> tuple[float, Attacker]:
    """Nine had surgery: four on the hip, four on the knee, and one patient."""
    table = predicting("linear", ward())
    table["surgery"], table["hip"] = yes(range(9)), yes(range(4))
    table["knee"] = yes(range(4, 8))
    attacker = Attacker("linear", root, table, **guards)
    attacker.ask(np.zeros(attacker.width))
    if not attacker.sums:
        return np.inf, attacker
    sign = {"surgery=yes": 1.0, "hip=yes": -1.0, "knee=yes": -1.0}
    row = matrix(attacker) @ raw(attacker, **sign)
    return float(np.abs(row - attacker.x[8]).max()), attacker


def nested_levels_at_risk(root: Path, guards: dict[str, Any]) -> tuple[float, Attacker]:
    """The same in a Cox regression: the values of that patient, less the mean of those at risk."""
    table = ward().drop(columns=["days", "outcome"])
    draw = np.random.default_rng(3)
    table["days"], table["died"] = draw.exponential(1.0, ROWS), draw.integers(0, 2, ROWS)
    table.loc[8, "days"] = table.days.max() / 2
    table.loc[:8, "died"] = 1  # no cell of a level and an event is small
    table["surgery"], table["hip"] = yes(range(9)), yes(range(4))
    table["knee"] = yes(range(4, 8))
    attacker = Attacker("cox", root, table, **guards)
    attacker.ask(np.zeros(attacker.width))
    if not attacker.sums:
        return np.inf, attacker
    names = attacker.agreement.preprocessing.names
    sign = dict.fromkeys((name for name in names if "=" in name), -1.0)
    sign[next(name for name in names if name.startswith("surgery"))] = 1.0
    direction = raw(attacker, **sign)
    row = matrix(attacker) @ direction
    labs = [position(attacker, f"lab{i}") for i in range(3)]
    later = attacker.x[table.days >= table.days[8]].mean(axis=0)
    error = row / (direction @ row) - (attacker.x[8] - later)
    return float(np.abs(error[labs]).max()), attacker


def one_missing_value(root: Path, guards: dict[str, Any]) -> tuple[float, Attacker]:
    """Far means turn a number into an indicator of the rows in which it is known."""
    table = predicting("linear", ward())
    table["crp"] = np.random.default_rng(0).normal(100, 10, ROWS)
    table.loc[17, "crp"] = np.nan
    attacker = Attacker("linear", root, table, **guards)
    preprocessing = attacker.agreement.preprocessing
    column, columns = position(attacker, "crp"), []
    for number, mean in enumerate((-4e7, -8e7)):
        moved = [
            replace(one, mean=(mean,)) if one.name == "crp" else one
            for one in preprocessing.columns
        ]
        far = replace(preprocessing, columns=tuple(moved))
        attacker.agreement = replace(attacker.agreement, preprocessing=far)
        attacker.ask(np.zeros(attacker.width), run=f"{number:032x}")
        columns.append(preprocessing.scale[column])
    if len(attacker.sums) < 2:
        return np.inf, attacker
    known = (matrix(attacker, 1) - matrix(attacker, 0))[:, column] * columns[0] / 4e7
    others = np.arange(attacker.width) != column
    return float(np.abs(-known - attacker.x[17])[others].max()), attacker


def tiny_weights(root: Path, guards: dict[str, Any]) -> tuple[float, Attacker]:
    """A row next to a frequent value has the weight exp(-22), below any coarse tolerance."""
    table = predicting("logistic", ward())
    table["admissions"] = np.where(np.arange(ROWS) < 60, 0, np.arange(ROWS) // 4)
    table.loc[17, "admissions"] = 1
    attacker = Attacker("logistic", root, table, **guards)
    for slope in (-22.0, -23.0):
        attacker.ask(raw(attacker, admissions=slope))
    if len(attacker.sums) < 2:
        return np.inf, attacker
    step = (attacker.sums[0].gradient - attacker.sums[1].gradient).numpy()
    return float(np.abs(step[:-1] / step[-1] - attacker.x[17]).max()), attacker


def two_models(root: Path, guards: dict[str, Any]) -> tuple[float, Attacker]:
    """Two questions that differ by one row, each about a model of its own."""
    attacker = Attacker("logistic", root, **guards)
    column = position(attacker, "marker0")
    order = np.argsort(attacker.x[:, column])
    for number, below in enumerate((44, 45)):
        attacker.spec = replace(attacker.spec, l2=1e-9 * number)
        attacker.agreement = replace(attacker.agreement, spec=attacker.spec)
        # so steep that every weight of the curvature is zero
        attacker.ask(steep(attacker, column, below, 1e8), run=f"{number:032x}")
    if len(attacker.sums) < 2:
        return np.inf, attacker
    step = (attacker.sums[0].gradient - attacker.sums[1].gradient).numpy()
    return float(np.abs(step[:-1] / step[-1] - attacker.x[order[44]]).max()), attacker


def one_dominant_value(root: Path, guards: dict[str, Any]) -> tuple[float, Attacker]:
    """The products with a column are those of one row, whose cost is 300 times the others'."""
    table = predicting("linear", ward())
    table["cost"] = np.random.default_rng(0).normal(1e4, 1e3, ROWS)
    table.loc[17, "cost"] = 3e6
    attacker = Attacker("linear", root, table, **guards)
    attacker.ask(np.zeros(attacker.width))
    if not attacker.sums:
        return np.inf, attacker
    column = position(attacker, "cost")
    row = matrix(attacker)[column] / np.sqrt(matrix(attacker)[column, column])
    others = np.arange(attacker.width) != column
    return float(np.abs(row - attacker.x[17])[others].max()), attacker


def window_times_level(root: Path, guards: dict[str, Any]) -> tuple[float, Attacker]:
    """One of the twenty patients aged 81 is one of the seven with HIV."""
    table = predicting("logistic", ward())
    table["age"] = np.where(np.arange(ROWS) < 20, 81, 20 + np.arange(ROWS) // 3)
    dead, alive = (np.flatnonzero(table.outcome == name)[-3:] for name in ("dead", "alive"))
    table["hiv"] = yes([7, *dead, *alive])
    attacker = Attacker("logistic", root, table, **guards)
    attacker.ask(raw(attacker, age=2.0, intercept=-162.0))
    if not attacker.sums:
        return np.inf, attacker
    column, known = position(attacker, "hiv=yes"), attacker.agreement.preprocessing
    sums = matrix(attacker)
    row = sums[column] * known.scale[column] + sums[-1] * known.mean[column]
    return float(np.abs(row[:-1] / row[-1] - attacker.x[7]).max()), attacker


def joint_diagonalization(root: Path, guards: dict[str, Any]) -> tuple[float, Attacker]:
    """Two matrices with weight on the twelve patients aged 55 have their rows as factors."""
    table = predicting("logistic", ward(numbers=15))
    table["age"] = np.where(np.arange(ROWS) < 12, 55, 60 + np.arange(ROWS) // 3)
    attacker = Attacker("logistic", root, table, **guards)
    for lab in ("lab1", "lab2"):
        attacker.ask(raw(attacker, age=10.0, intercept=-550.0, **{lab: 1.0}))
    if len(attacker.sums) < 2:
        return np.inf, attacker
    first, second = matrix(attacker), matrix(attacker, 1)
    base = np.linalg.eigh(first)[1][:, -12:]
    ratio = np.linalg.solve(base.T @ first @ base, base.T @ second @ base)
    rows = (base @ np.linalg.inv(np.linalg.eig(ratio)[1]).T).T.real
    rows = rows / rows[:, -1:]
    errors = [np.abs(rows[:, :-1] - row).max(axis=1).min() for row in attacker.x[:12]]
    return float(max(errors)), attacker


ATTACKS: dict[str, tuple[Attack, float]] = {
    "nested levels": (nested_levels, 1e-9),
    "nested levels at risk": (nested_levels_at_risk, 0.3),
    "one missing value": (one_missing_value, 1e-4),
    "tiny weights": (tiny_weights, 1e-2),
    "two models": (two_models, 1e-6),
    "one dominant value": (one_dominant_value, 0.05),
    "window times level": (window_times_level, 1e-6),
    "joint diagonalization": (joint_diagonalization, 1e-4),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_sums_that_isolate_a_row_are_refused(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    attack, limit = ATTACKS[name]
    error, _ = attack(tmp_path / "open", {"leverage": 1.0, "noise": 0.0})
    assert error < limit  # an owner who allows everything shows that the attack works
    error, attacker = attack(tmp_path / "guarded", {})
    assert error > 0.5  # refused, or hidden by noise
    audit = (tmp_path / "guarded" / "client-0" / "audit.jsonl").read_text().splitlines()
    assert {json.loads(line).get("rule", "") for line in audit} <= {"", "leverage"}
    if np.isfinite(error):
        return
    assert "leverage of" in caplog.text  # the row is in the site's own log
    assert "row" not in re.sub("a row or a pair", "", audit[-1])
    assert len(attacker.sums) < 2


def digits(root: Path, guards: dict[str, Any]) -> tuple[int, float]:
    """Weights B^age are digits: read the flags of the one patient aged 88, who is the third digit.

    Return how many of eight flags are right, and the leverage of the patient.
    """
    draw = np.random.default_rng(5)
    table = pd.DataFrame(
        {f"flag{i}": yes(np.flatnonzero(draw.random(ROWS) < 0.4).tolist()) for i in range(8)}
    )
    table["age"] = np.repeat([90, 89, 88, 70], [35, 6, 1, 48])
    table["years"], table["visits"] = 1 + np.arange(ROWS) % 2, draw.poisson(2, ROWS)
    attacker = Attacker("poisson", root, table, **guards)
    base = np.log(1000)
    at = raw(attacker, age=base, intercept=-90 * base)
    names, known = attacker.agreement.preprocessing.names, attacker.agreement.preprocessing
    attacker.ask(at, candidates=[names.index("age"), attacker.width - 1])
    assert attacker.sums
    products = attacker.sums[0].curvature.numpy().reshape(2, -1)[1]
    right = 0
    for place, name in enumerate(names):
        if name.startswith("flag"):
            total = products[place] * known.scale[place] + known.mean[place] * products[-1]
            third = round(total * 1e6) % 1000 / table.years[41]
            level = name.split("=")[1]
            right += int((third == 1) == (table[name.split("=")[0]][41] == level))
    ledger = attacker.ledger()
    share = (root_of(ledger.vectors, ledger.noise) ** 2).sum(axis=1)
    return right, float(share[41])


def test_noise_hides_the_digits_of_positional_numbers(tmp_path: Path) -> None:
    right, leverage = digits(tmp_path / "open", {"noise": 0.0, "leverage": 0.9})
    assert right == 8  # the leverage alone does not refuse this
    assert leverage < 0.3
    right, leverage = digits(tmp_path / "guarded", {})
    assert right < 8
    assert leverage < 0.1


def test_a_count_of_one_is_not_a_difference_of_gradients(tmp_path: Path) -> None:
    """One of six patients with HIV is male; HIV is not among the candidates."""
    table = predicting("linear", ward())
    table["sex"] = np.where(np.isin(np.arange(ROWS), [7, *range(40, ROWS)]), "male", "other")
    table["hiv"] = yes([7, 30, 31, 32, 33, 34])

    def count(root: Path, **guards: Any) -> float:
        attacker = Attacker("linear", root, table, **guards)
        first, (hiv,) = attacker.agreement.preprocessing, [position(attacker, "hiv=yes")]
        sex = next(i for i, name in enumerate(first.names) if name.startswith("sex="))
        others = [place for place in range(attacker.width) if place != hiv]
        point = np.zeros(attacker.width)
        for value in (0.0, 1.0):
            point[sex] = value
            reply = attacker.ask(point, candidates=others)
            assert fields(reply).get("rule", "cell") == "cell"
        if len(attacker.sums) < 2:
            return np.nan
        step = (attacker.sums[1].gradient - attacker.sums[0].gradient).numpy()[hiv]
        share = first.scale[sex] * first.scale[hiv]
        both = step * share + ROWS * first.mean[sex] * first.mean[hiv]
        return float(both if first.names[sex] == "sex=male" else 6 - both)

    assert count(tmp_path / "open", cell=1) == pytest.approx(1.0)
    assert np.isnan(count(tmp_path / "guarded"))


def test_the_history_belongs_to_the_table_and_not_to_the_model(tmp_path: Path) -> None:
    def answered(root: Path, models: int) -> int:
        attacker = Attacker("logistic", root, ratio=0.08, runs=99)
        attacker.experiment = Experiment("fedbestsubset", {"tau": 2}, clients=3, rounds=100)
        draw = np.random.default_rng(0)
        for number in range(24):
            spec = replace(attacker.spec, l2=1e-9 * (number % models))
            attacker.spec, agreement = spec, attacker.agreement
            attacker.agreement = replace(agreement, spec=spec)
            point = np.zeros(attacker.width)
            point[:2] = 0.3 * draw.normal(size=2)
            attacker.ask(point, run=f"{number % models:032x}", candidates=[0, 1])
        return len(attacker.sums)

    assert answered(tmp_path / "one", 1) == answered(tmp_path / "six", 6) > 0


def grown(table: pd.DataFrame, rows: int) -> pd.DataFrame:
    more = ward(ROWS + rows).tail(rows).assign(lab0=lambda new: new.lab0 + 0.5)
    return pd.concat([table, predicting("linear", more)], ignore_index=True)


@pytest.mark.parametrize(("rows", "rule"), [(1, "leverage"), (2, "leverage"), (60, "")])
def test_versions_of_a_table_share_a_ledger(rows: int, rule: str, tmp_path: Path) -> None:
    """Sums before and after few rows were added are sums over these rows."""
    table = predicting("linear", ward())
    first = Attacker("linear", tmp_path, table)
    assert first.rule(np.zeros(first.width)) == ""
    assert first.rule(np.zeros(first.width), run="1" * 32) == ""  # the same question is free
    again = Attacker("linear", tmp_path, grown(table, rows))
    assert again.rule(np.zeros(again.width), run="2" * 32) == rule
    agree = respond(
        TableSite(again.experiment, 0, again.table, tmp_path, again.spec, guards=again.guards),
        "agree",
        Envelope("{}"),
    )
    assert fields(agree).get("rule", "") == rule  # counts and means are sums, too


def test_a_ledger_closes_after_three_different_refusals(tmp_path: Path) -> None:
    table = predicting("linear", ward())
    table["surgery"], table["hip"] = yes(range(9)), yes(range(4))
    table["knee"] = yes(range(4, 8))
    attacker = Attacker("linear", tmp_path, table)
    asked = [list(range(attacker.width)), [*range(1, attacker.width)]]
    asked.append([0, *range(2, attacker.width)])
    zero = np.zeros(attacker.width)
    for columns in [*asked, *asked[:1]]:
        rules = {attacker.rule(zero, candidates=columns) for _ in range(4)}
        assert rules <= {"leverage", "closed"}
    assert attacker.rule(zero, candidates=[0]) == "closed"
    other = Attacker("linear", tmp_path / "open", table)
    assert other.rule(zero, candidates=[0]) == ""
    assert {other.rule(zero, candidates=asked[0]) for _ in range(9)} == {"leverage"}
    assert other.rule(zero, candidates=[1]) == ""  # one question that is repeated does not close it


def test_the_runs_of_a_table_count_for_all_models(tmp_path: Path) -> None:
    attacker = Attacker("logistic", tmp_path, runs=1)
    assert attacker.rule(np.zeros(attacker.width)) == ""
    attacker.spec = replace(attacker.spec, l2=0.5)
    attacker.agreement = replace(attacker.agreement, spec=attacker.spec)
    assert attacker.rule(np.zeros(attacker.width), run="1" * 32) == "runs"


def test_the_last_sums_are_checked_like_those_of_a_round(tmp_path: Path) -> None:
    attacker = Attacker("logistic", tmp_path)
    column = position(attacker, "marker0")
    point = steep(attacker, column, 1, 40.0)
    head = {"client": 0, "round": 0, "experiment": RUN}
    request = Envelope(
        json.dumps(
            {
                **head,
                "agreement": attacker.agreement.to_json(),
                "support": [column, attacker.width - 1],
                "coefficients": [point[column], point[-1]],
            }
        )
    )
    site = TableSite(attacker.experiment, 0, attacker.table, tmp_path, attacker.spec)
    assert fields(respond(site, "products", request))["rule"] == "leverage"


# ------------------------------------------------------------------ what a site answers at all
def by_averaging(attacker: Attacker, column: int, below: int) -> Any:
    """Return a row from the uploads of two steep steps, which differ by that row; None: refused."""
    uploads = []
    for count in (below, below + 1):
        down = {"coef": torch.as_tensor(steep(attacker, column, count))}
        reply = attacker.send("train", {"down": wire.encode(down)}, uploads=True)
        assert fields(reply).get("rule", "algorithm") == "algorithm"
        if reply.parts:
            upload = wire.decode(reply.parts["upload"], dict[str, torch.Tensor])
            uploads.append((upload["coef"] - down["coef"]).numpy())
    if len(uploads) < 2:
        return None
    step = uploads[0] - uploads[1]
    return step[:-1] / step[-1]


@pytest.mark.parametrize("algorithm", ["fedavg", "fedprox"])
def test_differences_of_steep_steps_of_another_algorithm_isolate_no_row(
    algorithm: str, tmp_path: Path
) -> None:
    attacker = Attacker("logistic", tmp_path)
    settings = {"batch_size": ROWS, "local_steps": 1, "lr": 1.0}
    attacker.experiment = Experiment(algorithm, settings, clients=3, rounds=100)
    column = attacker.agreement.preprocessing.names.index("marker0")
    order = np.argsort(attacker.x[:, column])
    for below in (30, 45):
        row = by_averaging(attacker, column, below)
        assert row is None or np.abs(row - attacker.x[order[below]]).max() > 0.5


def test_scores_of_thresholds_locate_no_value(tmp_path: Path) -> None:
    attacker = Attacker("logistic", tmp_path)
    evaluation = Evaluation(train=True)
    attacker.experiment = replace(attacker.experiment, evaluation=evaluation)
    column = attacker.agreement.preprocessing.names.index("marker0")

    def right(threshold: float) -> float | None:
        """Return how many rows a threshold classifies correctly; None: refused."""
        at = torch.zeros(attacker.width, dtype=torch.float64)
        at[column], at[-1] = 1.0, -threshold
        model = wire.encode({"coef": at})
        question = BestSubsetQuestion({"coef": at}, {"coef": at}, torch.arange(attacker.width))
        reply = attacker.send("evaluate", {"model": model, "down": wire.encode(question)})
        if fields(reply).get("rule") == "evaluate":
            return None
        return float(fields(reply)["scores"]["global"]["train"]["accuracy"]) * ROWS

    low, high = -1.0, 1.0
    first, last = right(low), right(high)
    while first is not None and last is not None and first != last and high - low > 1e-6:
        middle = (low + high) / 2
        if (count := right(middle)) is not None and round(count) == round(first):
            low = middle
        else:
            high = middle
    assert np.abs(attacker.x[:, column] - low).min() > 1e-5


@pytest.mark.parametrize(
    "settings", [{"evaluation": Evaluation(train=True)}, {"evaluation": Evaluation()}]
)
def test_a_request_to_evaluate_is_refused_and_in_the_audit(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    attacker = Attacker("linear", tmp_path)
    attacker.experiment = replace(attacker.experiment, **settings)
    assert fields(attacker.send("evaluate", {}))["rule"] == "evaluate"
    (line,) = (tmp_path / "client-0" / "audit.jsonl").read_text().splitlines()
    assert json.loads(line)["kind"] == "evaluate"
    assert json.loads(line)["rule"] == "evaluate"


@pytest.mark.parametrize(
    ("family", "algorithm", "settings", "allowed"),
    [
        ("linear", "fedgradmp", {"tau": 3, "batch_size": None}, ("fedbestsubset",)),
        ("logistic", "fedgradmp", {"tau": 3, "batch_size": None}, ("fedgradmp",)),
        ("cox", "fedavg", {"batch_size": ROWS}, ("fedbestsubset", "fedavg")),
        ("linear", "fedbestsubset", {"tau": 3}, ("fedgradmp",)),
        ("logistic", "fedbestsubset", {"tau": 3, "intercepts": "own"}, ("fedbestsubset",)),
    ],
)
def test_an_algorithm_that_the_owner_did_not_allow_is_refused_at_once(
    family: str,
    algorithm: str,
    settings: dict[str, Any],
    allowed: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    attacker = Attacker(family, tmp_path, algorithms=allowed)
    attacker.experiment = Experiment(algorithm, settings, clients=3, rounds=9)
    monkeypatch.setattr(table_site, "prepare", lambda *_: pytest.fail("computed"))
    assert attacker.rule(np.zeros(attacker.width)) == "algorithm"
    (line,) = (tmp_path / "client-0" / "audit.jsonl").read_text().splitlines()
    assert json.loads(line)["rule"] == "algorithm"


def test_an_algorithm_that_the_owner_allows_sends_few_coefficients(tmp_path: Path) -> None:
    attacker = Attacker("linear", tmp_path, algorithms=("fedavg",), ratio=0.05)
    attacker.experiment = Experiment("fedavg", {"batch_size": ROWS}, clients=3, rounds=9)
    down = {"coef": torch.zeros(attacker.width, dtype=torch.float64)}
    reply = attacker.send("train", {"down": wire.encode(down)}, uploads=True)
    assert fields(reply)["rule"] == "ratio"
    attacker.guards = Guards(algorithms=("fedavg",))
    reply = attacker.send("train", {"down": wire.encode(down)}, uploads=True)
    assert "upload" in reply.parts


@pytest.mark.parametrize(("leverage", "rule"), [(0.9, "leverage"), (1.0, "")])
def test_an_algorithm_that_the_owner_allows_passes_the_rules_for_all_columns(
    leverage: float, rule: str, tmp_path: Path
) -> None:
    table = predicting("linear", ward())
    table["surgery"], table["hip"] = yes(range(9)), yes(range(4))
    table["knee"] = yes(range(4, 8))
    attacker = Attacker("linear", tmp_path, table, algorithms=("fedavg",), leverage=leverage)
    attacker.experiment = Experiment("fedavg", {"batch_size": ROWS}, clients=3, rounds=9)
    down = {"coef": torch.zeros(attacker.width, dtype=torch.float64)}
    reply = attacker.send("train", {"down": wire.encode(down)}, uploads=True)
    assert fields(reply).get("rule", "") == rule


def test_a_request_for_another_client_is_not_answered(tmp_path: Path) -> None:
    attacker = Attacker("linear", tmp_path)
    assert attacker.rule(np.zeros(attacker.width), client=1) == "request"
    head = {"client": 1, "round": 0, "experiment": RUN, "support": [0], "coefficients": [0.0]}
    site = TableSite(attacker.experiment, 0, attacker.table, tmp_path, attacker.spec)
    request = Envelope(json.dumps({**head, "agreement": attacker.agreement.to_json()}))
    assert fields(respond(site, "products", request))["rule"] == "request"
    mine = Envelope(json.dumps({**json.loads(request.text), "client": 0}))
    assert "sums" in respond(site, "products", mine).parts


def test_an_unknown_algorithm_in_the_configuration_of_a_node_is_named() -> None:
    with pytest.raises(ConfigError, match="did you mean 'fedavg'"):
        Guards.of({"guard-algorithms": "fedbestsubset|fedavgg"})


# ------------------------------------------------------------------ what a site declares
SCHEMA = """
targets = ["days"]
[columns.days]
kind = "number"
unit = "d"
[columns.age]
kind = "number"
range = [0, 120]
missing = ["999"]
[columns.ward]
kind = "words"
levels = ["general", "heart", "surgery"]
"""


def declared(tmp_path: Path, text: str = SCHEMA) -> TableSchema:
    (tmp_path / "schema.toml").write_text(text)
    return TableSchema().joined({"schema": str(tmp_path / "schema.toml")})


def text_of(rows: int = 60) -> dict[str, list[str]]:
    table = hospitals("linear")[0].head(rows)
    return {name: ["999" if v != v else str(v) for v in table[name]] for name in table}


def test_undeclared_columns_are_not_read(tmp_path: Path) -> None:
    found = prepare(text_of(), SPECS["linear"], declared(tmp_path), Guards())
    assert sorted(found.columns) == ["age", "days", "ward"]
    assert np.isnan(found.columns["age"]).sum() == 3
    assert declared(tmp_path).units == {"days": "d"}


@pytest.mark.parametrize(
    ("column", "value", "rule"),
    [("age", "130", "schema"), ("ward", "attic", "schema"), ("age", "old", "numbers")],
)
def test_what_is_not_as_declared_is_refused(
    column: str, value: str, rule: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    table = text_of()
    table[column][6] = value
    with pytest.raises(Refusal, match=f"column '{column}'") as error:
        prepare(table, SPECS["linear"], declared(tmp_path), Guards())
    assert error.value.rule == rule
    assert value not in str(error.value)
    assert "7" in caplog.text  # the row is in the node's log


def test_a_target_that_is_not_allowed_is_refused(tmp_path: Path) -> None:
    text = SCHEMA.replace('targets = ["days"]', 'targets = ["age"]')
    with pytest.raises(Refusal, match="does not allow 'days' to be predicted"):
        prepare(text_of(), SPECS["linear"], declared(tmp_path, text), Guards())


@pytest.mark.parametrize("text", ["[columns.age]\nkind = 'date'", "colums = 3", "=", "targets = 3"])
def test_a_schema_with_a_mistake_is_named(text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"schema\.toml"):
        declared(tmp_path, text)
    with pytest.raises(ConfigError, match="is not a schema"):
        TableSchema().joined({"schema": str(tmp_path / "absent.toml")})


def test_units_that_differ_are_not_combined(tmp_path: Path) -> None:
    own = prepare(text_of(), SPECS["linear"], declared(tmp_path), Guards())
    replies = {
        i: AgreeReply(client=i, columns=9, units={"days": unit}, summary=own.summary())
        for i, unit in enumerate(["d", "d", "h"])
    }
    with pytest.raises(DataError, match="client 0 declares the unit 'd', client 2 'h'"):
        _check_units(replies)
    _check_units({i: replies[i] for i in (0, 1)})
    assert ColumnSchema("number").missing == ()


def test_a_person_releases_each_reply(tmp_path: Path) -> None:
    attacker = Attacker("linear", tmp_path, release="manual")
    zero = np.zeros(attacker.width)
    assert attacker.rule(zero) == "release"
    (pending,) = (tmp_path / "client-0").glob("pending-*.json")
    assert json.loads(pending.read_text())["kind"] == "train"
    pending.rename(pending.with_name(pending.name.replace("pending", "approved")))
    assert attacker.rule(zero) == ""
    assert len(attacker.sums) == 1
