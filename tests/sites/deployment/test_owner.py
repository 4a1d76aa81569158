"""What the owner of a table sees of its ledger, and changes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from tests.sites.deployment.test_red_team import ROWS, Attacker, predicting, ward, yes
from typer.testing import CliRunner

from parsifl.cli.app import app


def used_up(root: Path) -> Attacker:
    """Return a server that asked once honestly, and three times for a row."""
    table = predicting("linear", ward())
    table["surgery"], table["hip"] = yes(range(9)), yes(range(4))
    table["knee"] = yes(range(4, 8))
    attacker = Attacker("linear", root, table)
    zero, every = np.zeros(attacker.width), range(attacker.width)
    assert attacker.rule(zero, candidates=[0]) == ""
    for left_out in range(3):
        columns = [place for place in every if place != left_out]
        assert attacker.rule(zero, candidates=columns) == "leverage"
    assert attacker.rule(zero, candidates=[0]) == "closed"
    return attacker


def run(*words: str) -> str:
    return " ".join(CliRunner().invoke(app, ["flower", "site", *words]).output.split())


def test_the_owner_sees_the_ledger_and_opens_it(tmp_path: Path) -> None:
    attacker = used_up(tmp_path)
    shown = run(str(tmp_path))
    assert "client 0, table 'table'" in shown
    assert f"rows ever seen: {ROWS}, answers: 1" in shown
    assert "refusals since the owner last acted: 3" in shown
    assert "strict (0.5, 0.7): left 0." in shown
    assert "opened the ledger 'table' of client 0: 3 refusals" in run(str(tmp_path), "--open")
    assert attacker.rule(np.zeros(attacker.width), candidates=[0]) == ""
    last = (tmp_path / "client-0" / "audit.jsonl").read_text().splitlines()[-2]
    assert json.loads(last)["kind"] == "owner"
    assert "refusals since the owner last acted: 0" in run(str(tmp_path))


def test_the_owner_starts_a_new_ledger_and_keeps_the_old_one(tmp_path: Path) -> None:
    attacker = used_up(tmp_path)
    assert "is now ledger-table.npz.until-" in run(str(tmp_path), "--new", "--table", "table")
    assert attacker.rule(np.zeros(attacker.width), candidates=[1]) == ""
    assert len(list((tmp_path / "client-0").glob("ledger-*.until-*"))) == 1
    assert "answers: 1" in run(str(tmp_path), "--client", "0")


def test_a_ledger_that_does_not_exist_is_named(tmp_path: Path) -> None:
    used_up(tmp_path)
    assert "it has: client 0: table" in run(str(tmp_path), "--table", "lab")
    assert "no such ledger; it has: none" in run(str(tmp_path / "elsewhere"))
    assert "exclude each other" in run(str(tmp_path), "--open", "--new")
