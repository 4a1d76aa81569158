from __future__ import annotations

import re
from pathlib import Path

import pytest

from parsifl.core.errors import DataError
from parsifl_reproduction.pages import pages, write_pages
from parsifl_reproduction.papers import PAPERS
from parsifl_reproduction.recipe import SKIPPED, Claim, Context, Result, find, recipes
from parsifl_reproduction.record import Record, asked, not_run, read_all, record, write

DOCS = Path(__file__).parents[2] / "docs/reproduction"
MADE = {
    "finished": "2026-01-02T03:04:05+00:00",
    "seconds": 70.0,
    "processor": "a processor",
    "cores": 2,
    "python": "3.11",
    "torch": "2.13",
}
CLAIMS = [
    Claim("a | b is best", "98.95", "98.70 ± 0.10", "held"),
    Claim("c is worse", "97", "99", "did not hold", "by two points"),
]


def finished() -> Record:
    results = [
        Result("MNIST", 0, {"value": 1}, MADE),
        Result("CIFAR", 0, {SKIPPED: "CIFAR-10 is not here"}, MADE),
    ]
    recipe, context = find("fedmac-figure3"), Context("full", 1)
    return record(recipe, context, recipe.plan(context), results, CLAIMS)


def test_every_recipe_of_a_paper_has_its_place_and_every_place_its_recipe() -> None:
    for paper in PAPERS:
        named = {name for item in paper.items for name in item.recipes}
        assert named == {name for name, recipe in recipes().items() if recipe.paper == paper.title}
        assert all(item.recipes or item.note for item in paper.items)


def test_a_record_tells_command_date_seeds_and_machine() -> None:
    found = finished()
    assert found["command"] == "parsifl reproduce fedmac-figure3 --scale full --seeds 1"
    assert (found["first"], found["seeds"], found["seconds"]) == (MADE["finished"], [0], 140.0)
    assert found["finished"] == 1
    assert found["skipped"] == {"CIFAR": "CIFAR-10 is not here"}
    assert found["machine"] == {k: MADE[k] for k in ("processor", "cores", "python", "torch")}
    assert found["claims"][1]["verdict"] == "did not hold"


def test_pages_show_claims_and_reasons(tmp_path: Path) -> None:
    write(tmp_path, finished())
    write(tmp_path, not_run(find("perfedmask-table7"), Context(), "DomainNet is too large"))
    texts = pages(read_all(tmp_path))
    mac = texts["fedmac.md"]
    assert r"| a \| b is best | 98.95 | 98.70 ± 0.10 | held |  |" in mac
    assert "| **did not hold** | by two points |" in mac
    missing = len(find("fedmac-figure3").plan(Context("full", 1))) - 2
    assert f"**Unfinished, {missing} jobs are missing**; last job 2026-01-02; scale full;" in mac
    assert "Skipped: CIFAR (CIFAR-10 is not here)." in mac
    assert "Not run here: DomainNet is too large." in texts["perfedmask.md"]
    index = texts["index.md"]
    assert "[fedmac-figure3](fedmac.md#fedmac-figure3) | 1 held, 1 did not hold |" in index
    assert "not run: DomainNet is too large" in index
    assert "| Table 2 | none |  | settings; the recipes use them |" in index
    assert all(name in index for name in recipes())


def test_the_findings_come_before_the_recipes() -> None:
    for paper in PAPERS:
        assert (
            f"\n\n{paper.findings.strip()}\n\n## {paper.recipes[0]}" in pages({})[f"{paper.key}.md"]
        )


def test_pages_list_deviations_and_count_a_claim_once() -> None:
    found = finished()
    found["deviations"] = ["100 rounds instead of 800"]
    found["claims"][0]["counted"] = "fedmac-table1"
    texts = pages({"fedmac-figure3": found})
    assert "Deviations from the paper:\n\n- 100 rounds instead of 800\n" in texts["fedmac.md"]
    assert "| held | counted in fedmac-table1 |" in texts["fedmac.md"]
    assert "(fedmac.md#fedmac-figure3) | 1 did not hold |" in texts["index.md"]
    found["claims"] = found["claims"][:1]
    index = pages({"fedmac-figure3": found})["index.md"]
    assert "(fedmac.md#fedmac-figure3) | counted in fedmac-table1 |" in index


def test_pages_are_written_beside_the_records(tmp_path: Path) -> None:
    write(tmp_path, finished())
    written = {path.name for path in write_pages(tmp_path)}
    assert written == {"index.md", "other.md", *(f"{paper.key}.md" for paper in PAPERS)}
    (tmp_path / "stray.json").write_text("[]")
    with pytest.raises(DataError, match=r"stray\.json is not a record"):
        write_pages(tmp_path)


def test_the_pages_of_the_documentation_are_those_of_its_records() -> None:
    for name, text in pages(read_all(DOCS)).items():
        assert (DOCS / name).read_text() == text, (
            "run `parsifl reproduce --record docs/reproduction`"
        )


def test_records_of_the_documentation_describe_the_recipes_as_they_are() -> None:
    for name, found in read_all(DOCS).items():
        recipe, context = find(name), Context(found["scale"], asked(found)[0])
        assert found["title"] == recipe.title, name
        assert found["deviations"] == list(recipe.deviations(context)), name
        assert found["jobs"] >= len(recipe.plan(context)), name


def test_records_of_the_documentation_name_no_folder_of_this_machine() -> None:
    for file in DOCS.glob("*"):
        assert not re.search(r"/(?:home|root|tmp|work)/", file.read_text()), file.name


def test_a_record_keeps_the_values_of_each_seed_on_one_line(tmp_path: Path) -> None:
    claim = Claim("a leads b", "", "", "held", left=(1.0, -2.5e-07), right=(3.0, 4.0))
    recipe, context = find("fedmac-figure3"), Context("full", 1)
    file = write(tmp_path, record(recipe, context, recipe.plan(context), [], [claim]))
    assert '"left": [1.0, -2.5e-07],\n' in file.read_text()
    assert read_all(tmp_path)["fedmac-figure3"]["claims"][0]["right"] == [3.0, 4.0]
