from __future__ import annotations

import json
from pathlib import Path

from tests.report.folders import make_run

from parsifl.engine.run_dir import read_runs
from parsifl.report.groups import differences, sections


def test_seeds_of_one_configuration_are_grouped(tmp_path: Path) -> None:
    for seed in (2, 0, 1):
        make_run(tmp_path / f"a{seed}", "fedavg", seed=seed)
        make_run(tmp_path / f"b{seed}", "ditto", seed=seed)
    (section,) = sections(read_runs([tmp_path]))
    assert [group.label for group in section.groups] == ["fedavg", "ditto"]
    assert [[run.seed for run in group.runs] for group in section.groups] == [[0, 1, 2]] * 2
    assert section.notes == ()


def test_scores_and_data_sets_have_sections_of_their_own(tmp_path: Path) -> None:
    make_run(tmp_path / "a")
    make_run(tmp_path / "b", score="mse", maximize=False)
    make_run(tmp_path / "c", data="mnist")
    found = sections(read_runs([tmp_path]))
    assert [(section.data, section.score) for section in found] == [
        ("digits", "accuracy"),
        ("digits", "mse"),
        ("mnist", "accuracy"),
    ]


def test_configurations_of_one_method_are_named_by_what_differs(tmp_path: Path) -> None:
    make_run(tmp_path / "a", "fedprox", settings={"mu": 0.1})
    make_run(tmp_path / "b", "fedprox", settings={"mu": 1.0})
    make_run(tmp_path / "c", "local")
    (section,) = sections(read_runs([tmp_path]))
    assert [group.label for group in section.groups] == [
        "fedprox mu=0.1",
        "fedprox mu=1.0",
        "local",
    ]


def test_labels_are_unique_even_if_many_fields_differ(tmp_path: Path) -> None:
    for at in range(2):
        make_run(tmp_path / f"r{at}", settings={"a": 1, "b": 2, "c": 3, "d": at})
    make_run(tmp_path / "r2", settings={"a": 9, "b": 9, "c": 9, "d": 9})
    (section,) = sections(read_runs([tmp_path]))
    labels = [group.label for group in section.groups]
    assert len(set(labels)) == 3
    assert labels[0] == "fedavg a=1, b=2, c=3 [r0]"


def test_a_repeated_seed_is_left_out_with_a_note(tmp_path: Path) -> None:
    make_run(tmp_path / "a")
    make_run(tmp_path / "b")
    (section,) = sections(read_runs([tmp_path]))
    assert len(section.runs) == 1
    assert section.notes == ("b repeats the configuration and seed of a and is skipped",)


def test_unequal_seeds_and_environments_are_noted(tmp_path: Path) -> None:
    make_run(tmp_path / "a", seed=0, rounds=4)
    make_run(tmp_path / "b", seed=1, rounds=2)
    (tmp_path / "b" / "environment.json").write_text(json.dumps({"torch": "2.6", "python": "3.12"}))
    (section,) = sections(read_runs([tmp_path]))
    assert "the seeds have 4, 2 rounds" in section.notes[0]
    assert section.notes[1] == ("the runs come from different environments: torch (2.13.0, 2.6)")


def test_differences_tell_values_of_different_types_apart() -> None:
    found = differences([{"a": 1, "b": 1, "c": True}, {"a": 1, "b": 1.0}])
    assert found == {"b": [1, 1.0], "c": [True, "not set"]}
