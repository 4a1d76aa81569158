"""Runs jobs in a few threads, each of which computes on one core.

torch would rather split every product over OpenMP's threads, which meet after each of them: where
another program uses one of the cores, all of them wait for it (docs/adr/0004). Jobs never meet.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import copy_context
from typing import Generic, TypeVar

import torch

from parsifl import startup
from parsifl.core.problem import Problem, execution

T = TypeVar("T")
Scope = Callable[[], AbstractContextManager[None]]


def cores() -> int:
    """Return how many cores this process may run on."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1


def workers() -> int:
    """Return how many jobs may run at once.

    A reproducible process computes each product on one core, and jobs have the same bits with any
    number of workers: they may use all cores.
    """
    return cores() if startup.reproducible() else min(cores(), torch.get_num_threads())


@contextmanager
def single_threaded() -> Iterator[None]:
    """Let torch compute on the calling thread alone; its results then have the same bits anywhere.

    torch keeps this setting for each thread, and hands the latest one to threads that are new.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def thread_scope(problem: Problem) -> Scope:
    """Return the scope of work on a problem, at clients and at the server."""
    return single_threaded if execution(problem).single_threaded else nullcontext


def run_jobs(jobs: Sequence[Callable[[], T]]) -> list[T]:
    """Return what the jobs return, in their order."""
    results: list[T] = []
    imap_ordered(jobs, results.append)
    return results


def imap_ordered(jobs: Sequence[Callable[[], T]], take: Callable[[T], None]) -> None:
    """Run jobs, and let `take` have what they return: in their order, never two at a time.

    A free thread begins the next job. A job that is the only one may use all threads of torch.
    """
    if len(jobs) == 1:
        take(jobs[0]())
        return
    helpers = min(workers(), len(jobs)) - 1
    waiting = deque(enumerate(jobs))
    queue = _Queue(take)

    def work() -> None:
        while True:
            try:
                number, job = waiting.popleft()
            except IndexError:
                return
            try:
                queue.put(number, job())
            except BaseException:
                waiting.clear()  # no thread begins another job
                raise

    def help_out() -> None:
        with single_threaded():
            work()

    with single_threaded():
        if helpers < 1:
            work()
        else:
            with ThreadPoolExecutor(helpers) as pool:
                helping = [pool.submit(copy_context().run, help_out) for _ in range(helpers)]
                work()
            for helper in helping:
                helper.result()


class _Queue(Generic[T]):
    """Hands over what has arrived as soon as nothing before it is missing."""

    def __init__(self, take: Callable[[T], None]) -> None:
        self._take, self._lock = take, threading.Lock()
        self._arrived: dict[int, T] = {}
        self._next = 0

    def put(self, number: int, result: T) -> None:
        """Take in a result, and hand over all whose turn it is."""
        with self._lock:
            self._arrived[number] = result
            del result  # else its memory would still be held when it has been handed over
            while self._next in self._arrived:
                self._take(self._arrived.pop(self._next))
                self._next += 1


def _shorten_waits() -> None:
    """Make idle OpenMP threads sleep early in a process that loaded torch before Parsifl.

    GNU OpenMP reads `GOMP_SPINCOUNT` once. By default its threads spin 300,000 times before they
    sleep, but only 100 times while it manages more threads than there are cores. A team that is
    larger than that, owned by a thread that never runs again, therefore shortens all later waits.
    It changes neither the number of threads of any product nor its bits.
    """
    started = threading.Event()

    def own_a_team() -> None:
        before = torch.get_num_threads()
        torch.set_num_threads(cores() + 1)
        torch.zeros(1 << 18).add_(1.0)  # long enough to be split
        torch.set_num_threads(before)  # new threads inherit the latest setting
        started.set()
        threading.Event().wait()

    threading.Thread(target=own_a_team, name="parsifl-openmp", daemon=True).start()
    started.wait()


if startup.spinning() and sys.platform == "linux":
    _shorten_waits()
