"""A hostile server against a site with a table: it learns sums over enough rows, or a rule."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from tests.flower.inprocess import changed, fields
from tests.sites.deployment.test_regression import (
    EXPERIMENT,
    GUARDS,
    SPEC,
    Sites,
    hospitals,
    in_process,
    study,
)

from parsifl import wire
from parsifl.core.errors import ConfigError, DataError, ParsiflError
from parsifl.data.table_encoding import LevelCounts, NumberSums
from parsifl.data.tables import as_columns
from parsifl.engine.experiment import Experiment
from parsifl.flower.hello import DataSchema
from parsifl.flower.message import Envelope, Kind, answered
from parsifl.sites import load
from parsifl.sites.deployment.agreement import RegressionSpec
from parsifl.sites.deployment.guards import Audit, Guards, Refusal, rare
from parsifl.sites.deployment.regression import MODEL_FILE
from parsifl.sites.deployment.table_site import TableSchema, TableSite, prepare

Columns = dict[str, list[str]]
RUN = "0" * 32
WORK: dict[str, Any] = {
    "client": 0,
    "round": 0,
    "experiment": RUN,
    "accepted": 0,
    "oldest": 0,
    "data_schema": DataSchema((3,), "float64", (2,), "float64", None, sparse=False).to_json(),
    "uploads": True,
}


def ward(rows: int = 40) -> Columns:
    """Return a made-up table of one site: two numbers, words, and a target."""
    draw = np.random.default_rng(7)
    return {
        "age": [f"{value:.1f}" for value in draw.uniform(20, 90, rows)],
        "income": [f"{value:.2f}" for value in draw.uniform(1e4, 9e4, rows)],
        "sex": ["f", "m"] * (rows // 2),
        "days": [f"{value:.3f}" for value in draw.uniform(1, 30, rows)],
    }


def with_patient(name: str = "progeria") -> Columns:
    """Return a table in which one row has a diagnosis of its own."""
    table = ward()
    table["diagnosis"] = ["flu", "asthma", "burn", "flu"] * 10
    table["diagnosis"][17] = name
    return table


@dataclass
class Hostile:
    """A server that sends what it likes to one site, and keeps every reply."""

    table: Mapping[str, list[str]]
    root: Path
    experiment: Experiment = EXPERIMENT
    replies: list[Envelope] = field(default_factory=list)

    def ask(self, kind: Kind, **meta: Any) -> Envelope:
        site = TableSite(self.experiment, 0, self.table, self.root, SPEC, guards=GUARDS)
        request = Envelope(json.dumps(meta))
        reply = answered(lambda: site.answer(kind, request))
        self.replies.append(reply)
        return reply

    def products(self, agreement: Any, support: Any, run: str = RUN) -> Envelope:
        head = {"client": 0, "round": 0, "experiment": run}
        zeros = [0.0] * len(support)
        return self.ask(
            "products", agreement=agreement, support=support, coefficients=zeros, **head
        )

    def everything(self) -> str:
        """Return all texts that arrived."""
        return "\n".join(reply.text for reply in self.replies)


def number(name: str, mean: float = 0.0, scale: float = 1.0) -> dict[str, Any]:
    return {"name": name, "levels": [], "mean": [mean], "scale": [scale]}


def words(name: str, levels: list[str]) -> dict[str, Any]:
    share = 1 / len(levels)
    rest = len(levels) - 1
    return {"name": name, "levels": levels, "mean": [share] * rest, "scale": [0.5] * rest}


def agreement(*columns: dict[str, Any], target: str = "days", rows: int = 400) -> dict[str, Any]:
    return {
        "spec": asdict(RegressionSpec(target)),
        "classes": [],
        "target_mean": 0.0,
        "preprocessing": {"rows": rows, "columns": list(columns)},
        "columns": 10,
        "sites": 3,
    }


def predicting(target: str) -> dict[str, Any]:
    return agreement(*COLUMNS, target=target)


COLUMNS = (number("age", 50, 20), number("income", 5e4, 2e4), words("sex", ["f", "m"]))


def honest() -> dict[str, Any]:
    return agreement(*COLUMNS)


def refused(reply: Envelope, rule: str) -> None:
    assert reply.parts == {}
    assert fields(reply).keys() == {"error", "detail", "rule", "client"}
    assert fields(reply)["rule"] == rule, reply.text
    assert "site 0 refuses" in fields(reply)["detail"]


# ------------------------------------------------------------------ what leaves at first
@pytest.mark.parametrize("code", ["<0.3", "unknown", ".", "4,1"])
def test_one_odd_code_sends_no_value(
    code: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    table = ward()
    table["income"][12] = code
    server = Hostile(table, tmp_path)
    with caplog.at_level(logging.ERROR, "parsifl"):
        reply = server.ask("agree")
    refused(reply, "numbers")
    assert "column 'income': not all values are numbers" in fields(reply)["detail"]
    assert "declare missing codes" in fields(reply)["detail"]
    assert not any(value in server.everything() for value in [*table["income"], *table["age"]])
    assert "income" in caplog.text
    assert "row 13" in caplog.text


def test_a_level_of_one_row_is_in_no_message_and_no_model(tmp_path: Path) -> None:
    tables = hospitals(tmp_path / "app")
    tables[1]["ward"][5] = "leprosy"
    sites = Sites(tables, tmp_path / "state")
    study(sites, tmp_path / "run").run()
    assert all("leprosy" not in request.text for request in sites.sent)
    assert all(b"leprosy" not in part for request in sites.sent for part in request.parts.values())
    assert "leprosy" not in (tmp_path / "run" / MODEL_FILE).read_text()
    texts = [path.read_text() for path in (tmp_path / "run").rglob("*.json*")]
    assert texts
    assert not any("leprosy" in text for text in texts)


def test_no_count_below_the_minimum_leaves(tmp_path: Path) -> None:
    table = with_patient()
    table["diagnosis"][3] = ""
    sent = fields(Hostile(table, tmp_path).ask("agree"))["summary"]["columns"]["diagnosis"]
    assert "progeria" not in sent["levels"]
    assert all(count >= 3 for count in sent["levels"].values())
    assert sent["missing"] == 0
    assert sum(sent["levels"].values()) == 40


def test_names_and_record_numbers_become_one_level(tmp_path: Path) -> None:
    table = {**ward(), "name": [f"P{i:03d}" for i in range(40)]}
    reply = Hostile(table, tmp_path).ask("agree")
    assert fields(reply)["summary"]["columns"]["name"]["levels"] == {"(rare)": 40}


def test_a_site_with_few_rows_sends_nothing(tmp_path: Path) -> None:
    server = Hostile(ward(8), tmp_path)
    refused(server.ask("agree"), "rows")
    refused(server.ask("hello", agreement=honest()), "rows")
    refused(server.products(honest(), [0]), "rows")


def test_a_study_of_two_sites_is_refused(tmp_path: Path) -> None:
    two = Experiment("fedgradmp", {"tau": 4, "batch_size": None}, clients=2, rounds=4)
    refused(Hostile(ward(), tmp_path, two).ask("agree"), "sites")


@pytest.mark.parametrize("values", [["", "81.5", *[""] * 38], [*["0"] * 39, "81.5"]])
def test_a_number_that_one_row_has_is_withheld(values: list[str], tmp_path: Path) -> None:
    reply = Hostile({**ward(), "dose": values}, tmp_path).ask("agree")
    nothing = {"count": 0, "sum": 0.0, "squares": 0.0}
    assert fields(reply)["summary"]["columns"]["dose"] == nothing


@pytest.mark.parametrize("marker", ["(rare)", "(missing)"])
def test_a_value_cannot_pose_as_a_marker(marker: str, tmp_path: Path) -> None:
    refused(Hostile(with_patient(marker), tmp_path).ask("agree"), "marker")


def test_mini_batches_of_one_row_are_refused(tmp_path: Path) -> None:
    one = Experiment("fedgradmp", {"tau": 4, "batch_size": 1}, clients=3, rounds=4)
    refused(Hostile(ward(), tmp_path, one).ask("agree"), "batch")


# ------------------------------------------------------------------ forged requests
AGES = [f"{value / 10:.1f}" for value in range(1300)]


@pytest.mark.parametrize(
    ("forged", "support", "rule"),
    [
        ({**honest(), "sites": 2}, [0], "sites"),
        (agreement(number("income"), words("age", AGES)), list(range(1300)), "columns"),
        (
            agreement(number("income"), words("age", AGES), words("sex", ["f", "m"])),
            [0, 1, 2, 3],
            "kinds",
        ),
        (predicting("income"), [0, 1], "target"),
        (predicting("hiv"), [0, 1], "target"),
        (honest(), [0] * 3000, "support"),
        (honest(), [0, 0], "support"),
        (honest(), [0, 7], "support"),
        (honest(), [0, True], "request"),
        (agreement(*COLUMNS, number("age", 1.0)), [0, 3], "columns"),
        (agreement(number("age", 1e300), *COLUMNS[1:]), [0, 1], "scales"),
        (agreement(number("age", 50, 1e-300), *COLUMNS[1:]), [0, 1], "scales"),
        (agreement(number("age", float("nan")), *COLUMNS[1:]), [0, 1], "request"),
        (agreement(*COLUMNS[:2], words("sex", ["x", "f"])), [0, 1], "levels"),
        (agreement(*COLUMNS[:2], number("sex")), [0, 1], "kinds"),
        (agreement(*COLUMNS, rows=20), [0, 1], "agreement"),
    ],
)
def test_a_forged_request_gets_a_rule(
    forged: Any, support: list[int], rule: str, tmp_path: Path
) -> None:
    server = Hostile(ward(), tmp_path)
    refused(server.products(forged, support), rule)
    if forged != honest():
        refused(server.ask("hello", agreement=forged), rule)
        refused(server.ask("train", agreement=forged, **WORK), rule)


def test_more_columns_than_tau_or_a_third_of_the_rows_are_refused(tmp_path: Path) -> None:
    refused(Hostile(ward(10), tmp_path).ask("agree"), "ratio")  # tau is 4, of 10 rows
    small = Experiment("fedgradmp", {"tau": 1, "batch_size": None}, clients=3, rounds=4)
    refused(Hostile(ward(), tmp_path, small).products(honest(), [0, 1]), "support")


def test_a_hostile_server_reconstructs_no_row(tmp_path: Path) -> None:
    """It declares a number as levels, renames the target, and repeats columns: no value comes."""
    table = ward()
    server = Hostile(table, tmp_path)
    server.products(agreement(number("income"), words("age", AGES)), list(range(1300)))
    server.products(
        agreement(number("income"), words("age", AGES), words("sex", ["f", "m"])), [0, 1, 2]
    )
    for target in ("age", "income"):
        server.products(predicting(target), [0, 1, 2])
    for row in range(40):  # columns that are zero but for one row
        lone = words("sex", ["f", "m", f"row{row}"])
        shifted = number("age", float(table["age"][row]), 1e-200)
        server.products(agreement(shifted, *COLUMNS[1:]), [0])
        server.products(agreement(*COLUMNS[:2], lone), [2, 3])
    answered = [reply for reply in server.replies if reply.parts]
    assert len(answered) <= 1  # a level that nobody has here is absent, once
    assert all(_sums(reply)["curvature"].shape == (3,) for reply in answered)
    sent = server.everything()
    assert not any(value in sent for values in table.values() for value in set(values) - {"f", "m"})


def test_means_cannot_be_varied_to_difference_rows(tmp_path: Path) -> None:
    server = Hostile(ward(), tmp_path)
    assert "sums" in server.products(honest(), [0, 1]).parts
    assert "sums" in server.products(honest(), [0, 1]).parts  # a resumed run asks the same
    moved = agreement(number("age", 51, 20), *COLUMNS[1:])
    refused(server.products(moved, [0, 1]), "agreement")
    refused(server.products(honest(), [0]), "requests")
    answered = 0
    for run in range(50):
        answered += "sums" in server.products(honest(), [0, 1], run=f"{run + 1:032x}").parts
    assert answered == 9
    refused(server.replies[-1], "runs")


def test_a_cell_of_one_row_is_not_released(tmp_path: Path) -> None:
    table = ward()
    table["smoker"] = ["no", "no", "no", "yes"] * 10  # always m ...
    table["smoker"][0] = "yes"  # ... but for one woman
    server = Hostile(table, tmp_path)
    asked = agreement(*COLUMNS, words("smoker", ["no", "yes"]))
    refused(server.products(asked, [2, 3]), "cell")


# ------------------------------------------------------------------ the record, and the honest way
def test_every_answer_is_in_the_audit_file(tmp_path: Path) -> None:
    sites = Sites(hospitals(tmp_path / "app"), tmp_path / "state")
    study(sites, tmp_path / "run").run()
    path = tmp_path / "state" / "client-1" / "audit.jsonl"
    entries = [json.loads(line) for line in path.read_text().splitlines()]
    assert [entry["kind"] for entry in entries] == ["agree", "hello", *["train"] * 4, "products"]
    assert all(entry["time"] for entry in entries)
    products = entries[-1]
    assert len(products["columns"]) == 4
    assert products["bytes"] > 0
    assert path.stat().st_mode & 0o077 == 0
    refusals = Hostile(ward(), tmp_path / "other")
    refusals.products(predicting("hiv"), [0])
    (entry,) = (tmp_path / "other" / "client-0" / "audit.jsonl").read_text().splitlines()
    assert json.loads(entry)["rule"] == "target"


def test_the_server_names_the_site_and_the_rule(tmp_path: Path) -> None:
    tables = hospitals(tmp_path / "app")
    tables[2]["marker4"][7] = "<0.1"
    sites = Sites(tables, tmp_path / "state")
    with pytest.raises(ParsiflError, match=r"site 2 refuses \(rule 'numbers'\): column 'marker4'"):
        study(sites, tmp_path / "run", wait=0.01).run()
    assert "<0.1" not in "".join(sites.log)


def test_the_server_names_a_site_that_refuses_its_products(tmp_path: Path) -> None:
    tables = hospitals(tmp_path / "app")
    sites = Sites(tables, tmp_path / "state")
    link: Any = sites
    answer = link._answer

    def refusing(kind: Kind, client: int, request: Envelope) -> Envelope:
        if kind == "products" and client == 1:
            request = changed(request, support=[0, 0])
        reply: Envelope = answer(kind, client, request)
        return reply

    link._answer = refusing
    with pytest.raises(ParsiflError, match=r"site 1 refuses \(rule 'support'\)"):
        study(sites, tmp_path / "run").run()


def test_a_fit_with_rare_levels_is_the_fit_in_process(tmp_path: Path) -> None:
    tables = hospitals(tmp_path / "app")
    tables[0]["ward"][5] = tables[0]["ward"][9] = "leprosy"
    study(Sites(tables, tmp_path / "state"), tmp_path / "run").run()
    model = load(tmp_path / "run" / MODEL_FILE)
    coef, intercept = in_process(tables)
    assert "ward=(rare)" in model.get_feature_names_out()
    assert np.allclose(model.coef_, coef, rtol=1e-12, atol=1e-14)
    assert model.intercept_ == pytest.approx(intercept, rel=1e-12)
    assert np.isfinite(model.predict(pd.DataFrame(as_columns(tables[0])))).all()


def test_a_cell_that_is_refused_counts_as_a_request(tmp_path: Path) -> None:
    table = {**ward(), "smoker": ["no", "no", "no", "yes"] * 10}
    table["smoker"][0] = "yes"
    server = Hostile(table, tmp_path)
    asked = agreement(*COLUMNS, words("smoker", ["no", "yes"]))
    refused(server.products(asked, [2, 3]), "cell")
    refused(server.products(asked, [0, 1]), "requests")


def test_a_failure_keeps_its_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise DataError("the value 81.5 of row 17")

    monkeypatch.setattr("parsifl.sites.deployment.agreement.Prepared.summary", fail)
    reply = Hostile(ward(), tmp_path).ask("agree")
    refused(reply, "failure")
    assert "81.5" not in reply.text


# ------------------------------------------------------------------ guards and schema
def test_declared_codes_are_missing_values() -> None:
    table = ward()
    table["income"][:3] = ["<0.3", ".", "N/A"]
    schema = TableSchema(missing=("<0.3",)).joined({"missing": ".|N/A"})
    found = prepare(table, SPEC, schema, Guards()).summary()
    income = found.columns["income"]
    assert isinstance(income, NumberSums)
    assert income.count == 37


def test_declared_words_may_look_like_numbers() -> None:
    table = {**ward(), "icd": ["250", "401", "250", "E11"] * 10}
    with pytest.raises(Refusal, match="column 'icd': not all values are numbers"):
        prepare(table, SPEC, TableSchema(), Guards())
    found = prepare(table, SPEC, TableSchema().joined({"words": "icd|sex"}), Guards()).summary()
    assert found.columns["icd"] == LevelCounts({"250": 20, "401": 10, "E11": 10}, 0)
    with pytest.raises(Refusal, match="a declared column is not in its table"):
        prepare(table, SPEC, TableSchema(words=("icd10",)), Guards())


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"days": ["low"] * 40}, "target"),
        ({"days": [*["1"] * 39, ""]}, "target"),
        ({"days": [*["1"] * 39, "2"]}, "target"),
        ({"age": ["30"] * 39}, "rows"),
        ({"age": [*["30"] * 39, "inf"]}, "numbers"),
        ({"note": ["a" * 300] * 40}, "levels"),
    ],
)
def test_a_site_checks_its_own_table(change: Columns, rule: str) -> None:
    with pytest.raises(Refusal) as found:
        prepare({**ward(), **change}, SPEC, TableSchema(), Guards())
    assert found.value.rule == rule


def test_guards_are_set_by_the_node() -> None:
    assert Guards.of({"data": "a.csv"}) == Guards(rows=10, cell=3, sites=3, ratio=1 / 3)
    assert Guards.of({"guard-cell": 5, "guard-ratio": 0.1}).columns(80) == 8
    assert Guards().columns(30) == 10
    with pytest.raises(ConfigError, match="did you mean 'rows'"):
        Guards.of({"guard-row": 20})
    with pytest.raises(ConfigError, match="rows"):
        Guards.of({"guard-rows": 0})


@pytest.mark.parametrize(
    ("counts", "merged"),
    [
        ({"a": 5, "b": 3}, set()),
        ({"a": 9, "b": 2, "c": 2}, {"b", "c"}),
        ({"a": 9, "b": 4, "c": 1}, {"b", "c"}),
        ({"a": 9, "c": 1}, {"a", "c"}),
        ({"a": 1, "b": 1}, {"a", "b"}),
    ],
)
def test_merged_levels_are_never_small(counts: dict[str, int], merged: set[str]) -> None:
    assert rare([counts], 3) == merged


def _sums(reply: Envelope) -> dict[str, Any]:
    sums: dict[str, Any] = wire.decode(reply.parts["sums"], dict[str, torch.Tensor])
    return sums


def test_an_incomplete_last_line_of_the_audit_file_is_kept_as_text(tmp_path: Path) -> None:
    audit = Audit(tmp_path)
    with audit.locked():
        audit.write({"kind": "hello", "request": "a"})
    file = tmp_path / "audit.jsonl"
    with file.open("a") as damaged:
        damaged.write('{"kind": "train", "requ')
    assert [entry["kind"] for entry in audit.entries()] == ["hello"]
    with audit.locked():
        audit.write({"kind": "train", "request": "b"})
    entries = audit.entries()
    assert [entry.get("kind") for entry in entries] == ["hello", None, "train"]
    assert entries[1] == {"incomplete": '{"kind": "train", "requ'}
    assert file.stat().st_mode & 0o777 == 0o600
