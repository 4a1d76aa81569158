from __future__ import annotations

import math
from pathlib import Path

import pytest
from tests.report.folders import make_run

from parsifl.engine.run_dir import read_runs
from parsifl.report import build
from parsifl.report.groups import sections
from parsifl.report.paired_gains import baselines, gains, undecided


def test_gains_are_paired_by_seed_and_by_client(tmp_path: Path) -> None:
    for seed, level in ((0, 0.7), (1, 0.8), (2, 0.6)):
        make_run(tmp_path / f"l{seed}", "local", seed=seed, level=level)
        make_run(tmp_path / f"d{seed}", "ditto", seed=seed, level=level + 0.1 + 0.01 * seed)
    make_run(tmp_path / "d3", "ditto", seed=3, level=0.1)  # has no partner: does not count
    (section,) = sections(read_runs([tmp_path]))
    (local,) = baselines(section)
    (gain,) = gains(section, local)
    assert gain.by_seed == pytest.approx((0.10, 0.11, 0.12))
    assert gain.mean == pytest.approx(0.11)
    # 4.3027 is the 97.5 % point of Student's t with 2 degrees of freedom
    assert gain.margin == pytest.approx(4.3027 * 0.01 / math.sqrt(3), rel=1e-4)
    assert len(gain.by_client) == 30
    assert gain.share(1) == 1.0
    assert gain.share(-1) == 0.0
    assert gain.median_client == pytest.approx(0.11)


def test_for_a_loss_smaller_is_a_gain(tmp_path: Path) -> None:
    make_run(tmp_path / "a", "local", level=0.5, score="mse", maximize=False)
    make_run(tmp_path / "b", "ditto", level=0.3, score="mse", maximize=False)
    (section,) = sections(read_runs([tmp_path]))
    (gain,) = gains(section, baselines(section)[0])
    assert gain.mean == pytest.approx(0.2)
    assert gain.share(1) == 1.0
    assert gain.margin is None


def test_clients_on_other_rows_are_not_paired(tmp_path: Path) -> None:
    make_run(tmp_path / "a", "local")
    config = make_run(tmp_path / "b", "ditto") / "config.toml"
    config.write_text(config.read_text().replace("data0", "other"))
    (section,) = sections(read_runs([tmp_path]))
    (gain,) = gains(section, baselines(section)[0])
    assert gain.by_client == ()
    assert gain.share(1) is None
    assert gain.median_client is None


def test_validation_rows_choose_the_baseline(tmp_path: Path) -> None:
    # the validation score of `make_run` is best at level 0.44 * rounds / round
    make_run(tmp_path / "a", "fedavg", level=0.4, settings={"lr": 0.01}, validation=True)
    make_run(tmp_path / "b", "fedavg", level=0.9, settings={"lr": 1.0}, validation=True)
    make_run(tmp_path / "c", "local", evaluate=False)
    (section,) = sections(read_runs([tmp_path]))
    assert [group.label for group in baselines(section)] == ["fedavg lr=0.01"]
    assert [gain.group.label for gain in gains(section, baselines(section)[0])] == ["fedavg lr=1.0"]
    assert not undecided(section)


def test_test_scores_choose_no_baseline(tmp_path: Path) -> None:
    make_run(tmp_path / "a", "fedavg", level=0.5, settings={"lr": 0.01}, validation=True)
    make_run(tmp_path / "b", "fedavg", level=0.9, settings={"lr": 1.0})
    make_run(tmp_path / "c", "local")
    (section,) = sections(read_runs([tmp_path]))
    assert [group.label for group in baselines(section)] == ["local"]
    (note,) = undecided(section)
    assert "Gains over fedavg are left out: there are 2 configurations" in note
    assert "Gains over fedavg are left out" in build([tmp_path], tmp_path / "r.html").read_text()
