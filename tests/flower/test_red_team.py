"""A server that chooses its questions to isolate a row: sums over rows must not allow it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.flower.inprocess import fields
from tests.flower.test_families import SPECS, hospitals

from parsifl import wire
from parsifl.algorithms.fedbestsubset import BestSubsetQuestion
from parsifl.core.errors import ConfigError, DataError
from parsifl.core.problem import CurvatureSums
from parsifl.engine.experiment import Experiment
from parsifl.flower.answering import respond
from parsifl.flower.data_schema import DataSchema
from parsifl.flower.guards import Guards, Refusal, check_leverage
from parsifl.flower.message import Envelope
from parsifl.flower.network_schema import AgreeReply
from parsifl.flower.regression import _check_units
from parsifl.flower.table_schema import ColumnSchema, TableSchema, prepare
from parsifl.flower.tables import Agreement
from parsifl.flower.tablesite import TableSite

RUN = "0" * 32
ROWS = 90


class Attacker:
    """A server that asks one site whatever it likes, and keeps what comes back."""

    def __init__(self, family: str, root: Path, **guards: Any) -> None:
        self.table, self.spec = hospitals(family)[1], SPECS[family]
        self.experiment = Experiment("fedbestsubset", {"tau": 7}, clients=3, rounds=100)
        self.root, self.guards = root, Guards(**guards)
        own = prepare(self.table, self.spec, TableSchema(), self.guards)
        self.agreement = Agreement.of([own.summary()] * 3, self.spec, 30)
        self.x = self.agreement.preprocessing.standardised(own.columns)
        self.y = self.agreement.targets(own.columns)
        self.width = self.x.shape[1] + (family in ("logistic", "poisson"))
        self.sums: list[CurvatureSums] = []

    def ask(self, at: Any, run: str = RUN) -> Envelope:
        """Ask for the sums at these coefficients."""
        model = {"coef": torch.zeros(self.width, dtype=torch.float64)}
        point = {"coef": torch.as_tensor(at, dtype=torch.float64)}
        question = BestSubsetQuestion(model, point, torch.arange(self.width))
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
            "uploads": True,
            "agreement": self.agreement.to_json(),
        }
        site = TableSite(self.experiment, 0, self.table, self.root, self.spec, guards=self.guards)
        request = Envelope(json.dumps(head), {"down": wire.encode(question)})
        reply = respond(site, "train", request)
        if reply.parts:
            self.sums.append(wire.decode(reply.parts["upload"], CurvatureSums))
        return reply

    def rule(self, at: Any) -> str:
        return str(fields(self.ask(at)).get("rule", ""))


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


@pytest.mark.parametrize("family", ["logistic", "poisson", "cox", "linear"])
def test_no_combination_of_adaptive_answers_is_a_row(family: str, tmp_path: Path) -> None:
    attacker = Attacker(family, tmp_path)
    draw = np.random.default_rng(0)
    for number in range(60):  # random directions, thresholds, ever steeper slopes, new runs
        at = draw.normal(size=attacker.width) * 10 ** draw.uniform(-1, 3)
        attacker.ask(at, run=f"{number % 12:032x}")
    site = tmp_path / "client-0"
    (path,) = site.glob("released-*.npy")
    assert path.stat().st_mode & 0o077 == 0
    released = np.load(path)
    assert len(released) >= len(attacker.sums) > 0
    for kind in range(2):
        known = np.concatenate([np.ones((1, ROWS)), released[:, kind]])
        known /= np.linalg.norm(known, axis=1, keepdims=True)
        assert np.linalg.matrix_rank(known, rtol=1e-9) <= ROWS // 3
        for row in range(ROWS):  # the server's best: least squares, with knowledge that it lacks
            lone = np.eye(ROWS)[row]
            mix = np.linalg.lstsq(known.T, lone, rcond=1e-9)[0]
            assert np.linalg.norm(mix @ known - lone) ** 2 > 0.09


def test_equal_weights_and_their_multiples_add_nothing() -> None:
    check_leverage(np.ones((5, 30)), 3 * np.ones(30), Guards())
    with pytest.raises(Refusal, match="a row would stand out"):
        check_leverage(np.ones((1, 30)), np.eye(30)[4], Guards())
    with pytest.raises(Refusal, match="a row would stand out"):
        check_leverage(np.ones((1, 30)), 1 - 1e-6 * np.eye(30)[4], Guards())


def test_a_question_about_other_columns_is_refused(tmp_path: Path) -> None:
    attacker = Attacker("logistic", tmp_path, ratio=0.05)
    attacker.experiment = Experiment("fedbestsubset", {"tau": 1}, clients=3, rounds=9)
    assert attacker.rule(np.zeros(attacker.width)) == "ratio"


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
