"""Runs jobs in a few threads, each of which computes on one core.

torch would rather split every product over OpenMP's threads, which meet after each of them: where
another program uses one of the cores, everybody waits for it (docs/adr/0004). Jobs never meet.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import copy_context
from typing import TypeVar

import torch

T = TypeVar("T")


def cores() -> int:
    """Return how many cores this process may run on."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1


@contextmanager
def one_core() -> Iterator[None]:
    """Let torch compute on the calling thread alone; its results then have the same bits anywhere.

    torch keeps this setting for each thread, and hands the latest one to threads that are new.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def run_jobs(jobs: Sequence[Callable[[], T]]) -> list[T]:
    """Return what the jobs return, in their order; whoever is free takes the next one.

    A job that is the only one may use all threads of torch.
    """
    if len(jobs) == 1:
        return [jobs[0]()]
    helpers = min(cores(), torch.get_num_threads(), len(jobs)) - 1
    waiting = deque(enumerate(jobs))
    results: dict[int, T] = {}

    def work() -> None:
        while True:
            try:
                number, job = waiting.popleft()
            except IndexError:
                return
            results[number] = job()

    def help_out() -> None:
        with one_core():
            work()

    with one_core():
        if helpers < 1:
            work()
        else:
            with ThreadPoolExecutor(helpers) as pool:
                helping = [pool.submit(copy_context().run, help_out) for _ in range(helpers)]
                try:
                    work()
                finally:
                    waiting.clear()  # after Ctrl-C nobody begins another job
            for helper in helping:
                helper.result()
    return [results[number] for number in range(len(jobs))]
