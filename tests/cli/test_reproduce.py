from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from parsifl.cli.app import app
from parsifl.recipes.recipe import recipes


def invoke(*words: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["reproduce", *words])
    return result.exit_code, result.stdout, result.stderr


def test_the_recipes_are_listed_for_people_and_machines() -> None:
    code, out, _ = invoke("--list", "--json")
    assert code == 0
    assert set(json.loads(out)) == set(recipes())
    text = invoke()[1]
    assert all(name in text for name in recipes())


def test_a_recipe_prints_claims_and_keeps_its_results(tmp_path: Path) -> None:
    words = ["perfedmask-table6", "--seeds", "1", "--out", str(tmp_path)]
    code, out, err = invoke(*words, "--json")
    assert code == 0, err
    claims = json.loads(out)
    assert [claim["paper"] for claim in claims] == ["8/3", "10/3", "2", "2", "2", "2", "0"]
    assert {claim["verdict"] for claim in claims} == {"held"}
    assert "[1/1]" in err
    assert json.loads((tmp_path / "claims.json").read_text())["claims"] == claims
    # a second call reads what the first one found
    assert "8/3" in invoke(*words)[1]


def test_mistakes_are_named() -> None:
    code, _, err = invoke("perfedmask-table66")
    assert code == 2
    assert "did you mean 'perfedmask-table6'?" in err
    code, _, err = invoke("perfedmask-table6", "--scale", "huge")
    assert code == 2
    assert "small or full" in err
