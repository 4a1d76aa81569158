"""The dry run of a site: a fit that cannot be answered is refused before it starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.flower.inprocess import fields
from tests.sites.deployment.test_families import SPECS, hospitals

from parsifl.data.tables import as_columns
from parsifl.engine.experiment import Experiment
from parsifl.flower.message import Envelope, respond
from parsifl.sites.deployment.forecast import forecast
from parsifl.sites.deployment.guards import Guards
from parsifl.sites.deployment.ledger import Ledger
from parsifl.sites.deployment.table_site import TableSchema, TableSite, prepare
from parsifl.sites.search.fedbestsubset import FedBestSubset


def agree(family: str, rows: int, root: Path, tau: int = 3, **guards: Any) -> dict[str, Any]:
    table = hospitals(family)[2].head(rows)
    experiment = Experiment("fedbestsubset", {"tau": tau}, clients=3, rounds=9)
    site = TableSite(experiment, 0, table, root, SPECS[family], guards=Guards(**guards))
    found: dict[str, Any] = fields(respond(site, "agree", Envelope("{}")))
    return found


def test_a_site_with_few_rows_refuses_at_once_and_says_why(tmp_path: Path) -> None:
    found = agree("logistic", 40, tmp_path)
    assert found["rule"] == "forecast"
    assert "a fit with 3 terms" in found["detail"]
    assert "fewer terms" in found["detail"]
    assert "summary" not in found
    (line,) = (tmp_path / "client-0" / "audit.jsonl").read_text().splitlines()
    assert json.loads(line)["forecast"]["row"] > 0.6
    assert {agree("logistic", 40, tmp_path)["rule"] for _ in range(5)} == {"forecast"}


@pytest.mark.parametrize("family", ["logistic", "linear"])
def test_a_site_with_enough_rows_answers(family: str, tmp_path: Path) -> None:
    assert "summary" in agree(family, 200, tmp_path)
    line = json.loads((tmp_path / "client-0" / "audit.jsonl").read_text())
    if family == "logistic":
        assert 1 <= line["forecast"]["strict"] <= line["forecast"]["standard"]
    else:
        assert "forecast" not in line


def test_a_ledger_that_is_used_up_allows_fewer_fits() -> None:
    table, spec, guards = hospitals("logistic")[2], SPECS["logistic"], Guards()
    own = prepare(table, spec, TableSchema(), guards)
    text = {name: [str(value) for value in table[name]] for name in as_columns(table)}
    ledger, rows = Ledger().with_rows(text, b"0" * 32)
    new = forecast(own, FedBestSubset(3), ledger, rows, guards)
    draw = np.random.default_rng(0)
    used = ledger.with_block("a", draw.normal(size=(200, 60)), rows, 0.0)
    later = forecast(own, FedBestSubset(3), used, rows, guards)
    assert new is not None
    assert later is not None
    assert later.further["strict"] < new.further["strict"] <= new.further["standard"]
    assert later.alone == new.alone


def test_a_site_with_one_class_has_no_forecast() -> None:
    table = hospitals("logistic")[2].assign(outcome="alive")
    own = prepare(table, SPECS["logistic"], TableSchema(), Guards())
    ledger, rows = Ledger().with_rows({"x": [str(i) for i in range(200)]}, b"0" * 32)
    assert forecast(own, FedBestSubset(3), ledger, rows, Guards()) is None
