from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from parsifl.core.errors import ConfigError, ParsiflError
from parsifl.engine import study
from parsifl.engine.study import GridResult, Point, best, chosen_by, points


def outcome(label: str, test: float, validation: float | None) -> GridResult:
    summary: dict[str, Any] = {"personal": {"mean": test}, "global": None}
    scores = {} if validation is None else {"personal": validation}
    return GridResult(Point({"lr": label}), (summary,), (scores,))


def test_validation_rows_decide_where_there_are_any() -> None:
    lucky, sound = outcome("a", test=0.9, validation=0.6), outcome("b", test=0.8, validation=0.7)
    assert chosen_by([lucky, sound], "personal") == "validation"
    assert best([lucky, sound], "personal", maximize=True) is sound
    assert best([lucky, sound], "personal", maximize=False) is lucky


def test_test_rows_decide_only_where_validation_is_missing() -> None:
    first, second = outcome("a", test=0.9, validation=None), outcome("b", test=0.8, validation=0.7)
    assert chosen_by([first, second], "personal") == "test"
    assert best([first, second], "personal", maximize=True) is first


def test_a_model_that_no_run_has_cannot_be_chosen() -> None:
    with pytest.raises(ConfigError, match="no run of this sweep has a global model"):
        best([outcome("a", 0.9, 0.9)], "global", maximize=True)
    with pytest.raises(ConfigError, match="must be one of"):
        best([outcome("a", 0.9, 0.9)], "local", maximize=True)


def test_jobs_run_in_other_processes_and_keep_their_numbers() -> None:
    jobs = [partial(pow, number, 2) for number in range(4)]
    squares = {number: number**2 for number in range(4)}
    assert dict(study.run_jobs(jobs)) == dict(study.run_jobs(jobs, 2)) == squares
    alone, apart = (dict(study.run_jobs([os.getpid] * 2, count)) for count in (1, 2))
    assert set(alone.values()) == {os.getpid()}
    assert os.getpid() not in apart.values()


def test_a_number_of_processes_that_is_none_is_rejected() -> None:
    with pytest.raises(ConfigError, match="jobs must be at least 1, got 0"):
        list(study.run_jobs([], 0))


def test_jobs_end_with_the_loop_that_reads_them() -> None:
    jobs: list[Any] = [partial(pow, 2, 2), *[partial(time.sleep, 5)] * 4]
    results: Iterator[tuple[int, Any]] = study.run_jobs(jobs, 2)
    assert next(results) == (0, 4)
    results.close()  # type: ignore[attr-defined]  # an iterator to the caller
    assert not multiprocessing.active_children()


def test_an_error_ends_the_jobs_that_wait(tmp_path: Path) -> None:
    jobs: list[Any] = [partial(int, "x"), *(partial(_slow, tmp_path / str(n)) for n in range(20))]
    with pytest.raises(ValueError, match="invalid literal"):
        dict(study.run_jobs(jobs, 2))
    assert not multiprocessing.active_children()
    assert len(list(tmp_path.iterdir())) < 20


def _slow(folder: Path) -> None:
    time.sleep(0.5)
    folder.mkdir()


def test_a_worker_that_is_killed_is_reported() -> None:
    jobs: list[Any] = [partial(pow, 2, 2), _kill_this_process]
    with pytest.raises(ParsiflError, match=r"worker process was killed.*fewer than 2 processes"):
        dict(study.run_jobs(jobs, 2))
    assert not multiprocessing.active_children()


def _kill_this_process() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


_STUDY = """
import os, sys, time
from functools import partial
from pathlib import Path
from parsifl.engine import study

def name_process(folder):
    (folder / str(os.getpid())).touch()
    time.sleep(600)

if __name__ == "__main__":
    dict(study.run_jobs([partial(name_process, Path(sys.argv[1]))] * 2, 2))
"""


def test_workers_end_with_a_study_that_is_killed(tmp_path: Path) -> None:
    script, folder = tmp_path / "script.py", tmp_path / "processes"
    script.write_text(_STUDY)
    folder.mkdir()
    with subprocess.Popen([sys.executable, script, folder]) as started:
        while len(names := list(folder.iterdir())) < 2:
            assert started.poll() is None
            time.sleep(0.05)
        workers = [psutil.Process(int(name.name)) for name in names]
        started.kill()
    assert not psutil.wait_procs(workers, timeout=60)[1]


def test_a_label_is_one_directory_whatever_the_values(tmp_path: Path) -> None:
    values: list[Any] = ["../../x", ["../x"], "a/b", "a%2Fb", "a\\b", "..", "a\0b"]
    labels = [point.label for point in points({"head": values})]
    assert len(set(labels)) == len(values)
    for label in labels:
        assert (tmp_path / label).resolve().parent == tmp_path
