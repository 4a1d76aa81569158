from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from functools import partial

import pytest
import torch
from tests.support.fixtures import classifier
from torch import nn

from parsifl.core.problem import Problem
from parsifl.engine import threads
from parsifl.linear.glm import GLM
from parsifl.nn.neural import NeuralProblem

PLACE: ContextVar[str] = ContextVar("place", default="nowhere")


@pytest.fixture(autouse=True)
def four_cores(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(threads, "cores", lambda: 4)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def test_results_come_in_the_order_of_the_jobs() -> None:
    def job(number: int) -> int:
        time.sleep(0.002 * (number % 3))
        return number

    assert threads.run_jobs([lambda n=n: job(n) for n in range(10)]) == list(range(10))  # type: ignore[misc]  # mypy does not type lambdas with defaults
    assert threads.run_jobs([]) == []


class Result:
    """Something that can be seen to vanish."""

    def __init__(self, number: int) -> None:
        self.number = number


@pytest.mark.parametrize("count", [1, 12])
def test_results_are_yielded_in_order_and_not_kept(count: int) -> None:
    alive: weakref.WeakSet[Result] = weakref.WeakSet()
    taken: list[int] = []

    def job(number: int) -> Result:
        time.sleep(0.002 * (number % 3))
        result = Result(number)
        alive.add(result)
        return result

    for result in threads.imap_ordered(partial(job, number) for number in range(count)):
        assert all(one.number >= result.number for one in alive)
        taken.append(result.number)
        del result
    assert taken == list(range(count))
    assert not alive


def test_jobs_run_in_as_many_threads_as_torch_may_use_with_one_core_each() -> None:
    meeting = threading.Barrier(3)

    def job() -> tuple[int, int]:
        meeting.wait(timeout=20)  # passes only if three jobs run at the same time
        return threading.get_ident(), torch.get_num_threads()

    found = threads.run_jobs([job] * 3)
    assert len({thread for thread, _ in found}) == 3
    assert {count for _, count in found} == {1}
    assert torch.get_num_threads() == 3
    later: list[int] = []
    thread = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert later == [3]  # what new threads get is as before too


def test_one_thread_of_torch_starts_none() -> None:
    torch.set_num_threads(1)
    assert set(threads.run_jobs([threading.get_ident] * 5)) == {threading.get_ident()}


def test_a_single_job_may_use_all_threads_of_torch() -> None:
    assert threads.run_jobs([torch.get_num_threads]) == [3]


def test_jobs_see_the_context_of_the_caller() -> None:
    token = PLACE.set("here")
    try:
        assert threads.run_jobs([PLACE.get] * 6) == ["here"] * 6
    finally:
        PLACE.reset(token)


def test_after_an_interrupt_no_other_job_begins() -> None:
    begun: list[int] = []

    def job() -> None:
        begun.append(1)
        time.sleep(0.01)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        threads.run_jobs([job] * 100)
    assert len(begun) < 20
    assert torch.get_num_threads() == 3


def test_a_consumer_that_stops_ends_the_jobs_that_have_not_begun() -> None:
    begun: list[int] = []

    def job(number: int) -> int:
        begun.append(number)
        time.sleep(0.01)
        return number

    results = threads.imap_ordered(partial(job, number) for number in range(100))
    assert next(results) == 0
    results.close()
    assert len(begun) < 20


def test_jobs_are_read_a_few_ahead_by_the_consumers_thread_alone() -> None:
    read: list[int] = []

    def jobs() -> Iterator[Callable[[], int]]:
        for number in range(50):
            read.append(threading.get_ident())
            yield partial(int, number)

    results = threads.imap_ordered(jobs())
    assert next(results) == 0
    assert len(read) <= 6
    assert list(results) == list(range(1, 50))
    assert set(read) == {threading.get_ident()}


def test_what_a_worker_raises_is_raised() -> None:
    def job() -> None:
        raise SystemExit("from a worker")

    with pytest.raises(SystemExit, match="from a worker"):
        threads.run_jobs([job] * 4)


def test_linear_and_tiny_models_keep_to_one_core() -> None:
    def network(*layers: nn.Module) -> NeuralProblem:
        return NeuralProblem(lambda: nn.Sequential(*layers))

    cases: list[tuple[Problem, int]] = [
        (GLM(3), 1),
        (classifier(), 1),
        (network(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 2)), 1),
        (network(nn.Linear(784, 100), nn.ReLU(), nn.Linear(100, 10)), 3),
        (network(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 2)), 3),
    ]
    for problem, count in cases:
        with threads.thread_scope(problem)():
            assert torch.get_num_threads() == count
    assert torch.get_num_threads() == 3
