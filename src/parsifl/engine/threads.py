"""Runs jobs in a few threads, each of which computes on one core.

torch would rather split every product over OpenMP's threads, which meet after each of them: where
another program uses one of the cores, all of them wait for it (docs/adr/0004). Jobs never meet.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import copy_context
from itertools import chain, islice
from typing import TypeVar

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


def run_jobs(jobs: Iterable[Callable[[], T]]) -> list[T]:
    """Return what the jobs return, in their order."""
    return list(imap_ordered(jobs))


def imap_ordered(jobs: Iterable[Callable[[], T]]) -> Generator[T, None, None]:
    """Run jobs in threads and yield what they return, in their order.

    Only the consumer's thread reads `jobs`, a few ahead. A single job runs in the consumer's
    thread and may use all torch threads. If the consumer stops early, running jobs finish and the
    others are cancelled.
    """
    waiting = iter(jobs)
    first = list(islice(waiting, 2))
    if len(first) == 1:
        yield first[0]()
        return
    count = workers()
    if count == 1:
        for job in chain(first, waiting):
            yield _single_threaded(job)
        return
    with ThreadPoolExecutor(count) as pool:
        running: deque[Future[T]] = deque()
        try:
            for job in chain(first, waiting):
                running.append(pool.submit(copy_context().run, _single_threaded, job))
                if len(running) > count:
                    yield running.popleft().result()
            while running:
                yield running.popleft().result()
        finally:
            for future in running:
                future.cancel()
    # workers that overlap restore each other's setting, which new threads would inherit
    torch.set_num_threads(torch.get_num_threads())


def _single_threaded(job: Callable[[], T]) -> T:
    with single_threaded():
        return job()


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
