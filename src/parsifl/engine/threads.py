"""Run jobs in a few threads, each of which computes on one core.

By default torch splits every product over OpenMP threads, which synchronize after each product. If
another program uses one of the cores, all threads wait for it (docs/adr/0004). Jobs never wait for
each other.
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

    A reproducible process computes each product on one core, and the results of jobs do not depend
    on the number of workers, so jobs may use all cores.
    """
    return cores() if startup.reproducible() else min(cores(), torch.get_num_threads())


@contextmanager
def single_threaded() -> Iterator[None]:
    """Restrict torch to the calling thread, so that results do not depend on the number of cores.

    torch keeps this setting per thread; new threads inherit the latest one.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def thread_scope(problem: Problem) -> Scope:
    """Return the context for work on a problem, on clients and on the server."""
    return single_threaded if execution(problem).single_threaded else nullcontext


def run_jobs(jobs: Iterable[Callable[[], T]]) -> list[T]:
    """Return the results of jobs, in order."""
    return list(imap_ordered(jobs))


def imap_ordered(jobs: Iterable[Callable[[], T]]) -> Generator[T, None, None]:
    """Run jobs in threads and yield their results in order.

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
    It affects neither the number of threads of a product nor its result.
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
