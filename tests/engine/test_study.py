from __future__ import annotations

import os
from functools import partial
from typing import Any

import pytest

from parsifl.core.errors import ConfigError
from parsifl.engine import study
from parsifl.engine.study import GridResult, Point, best, chosen_by


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
