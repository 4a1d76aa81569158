"""Runs clients one by one in several single-threaded processes.

For models whose layers are large, two processes with one thread each beat two threads in one
process, and unlike threads they do not collapse when another program uses a core. The processes
are forked for each batch of tasks: they see all data without a copy and nothing but results is
sent back.
"""

from __future__ import annotations

import os
import pickle
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from parsifl import tree
from parsifl.engine.tasks import Outcome, Task, run_alone
from parsifl.engine.threads import cores, one_core

CAN_FORK = hasattr(os, "fork")


def workers() -> int:
    """Return how many processes to use: the cores that this process may run on."""
    return cores() if CAN_FORK else 1


def run_forked(function: Callable[..., Any], tasks: Sequence[Task], count: int) -> Outcome:
    """Apply the function to every task; each process takes every `count`-th of them.

    The result of a task does not depend on the number of processes.
    """
    shares = [tasks[at::count] for at in range(min(count, len(tasks)))]
    children = [_start(function, share) for share in shares[1:]]
    outcome = Outcome(blocks=[[task.client] for task in tasks])
    with one_core():
        for task in shares[0] if shares else ():
            run_alone(function, task, outcome)
        for share, (child, pipe) in zip(shares[1:], children, strict=True):
            found = _collect(child, pipe)
            if found is None:  # killed from outside, say for its memory: its share is run here
                outcome.fallbacks.append(f"a worker process ended early with {len(share)} clients")
                for task in share:
                    run_alone(function, task, outcome)
            else:
                _merge(outcome, *found)
    return outcome


def _start(function: Callable[..., Any], share: Sequence[Task]) -> tuple[int, int]:
    """Fork a child that runs its share and writes the results into a pipe."""
    receive, send = os.pipe()
    with warnings.catch_warnings():
        # the child computes on one thread and leaves: other threads' locks do not matter to it
        warnings.filterwarnings("ignore", message=".*multi-threaded.*", category=DeprecationWarning)
        child = os.fork()
    if child:
        os.close(send)
        return child, receive
    try:  # pragma: no cover - runs in the child, which coverage does not see
        os.close(receive)
        torch.set_num_threads(1)
        outcome = Outcome()
        for task in share:
            run_alone(function, task, outcome)
        with os.fdopen(send, "wb") as pipe:
            pickle.dump((_packed(outcome.results), outcome.failures), pipe)
    finally:  # whatever happened: never return into the parent's code
        os._exit(0)


def _packed(results: dict[int, Any]) -> dict[int, Any]:  # pragma: no cover - in the child
    packed = {}
    for client, result in results.items():
        leaves, structure = tree.flatten(result)
        packed[client] = ([leaf.detach().contiguous().numpy() for leaf in leaves], structure)
    return packed


def _collect(child: int, pipe: int) -> tuple[dict[int, Any], dict[int, str]] | None:
    try:
        with os.fdopen(pipe, "rb") as stream:
            results, failures = pickle.load(stream)  # written by our own child
    except (EOFError, pickle.UnpicklingError):
        return None
    finally:
        os.waitpid(child, 0)
    return results, failures


def _merge(outcome: Outcome, results: dict[int, Any], failures: dict[int, str]) -> None:
    outcome.failures.update(failures)
    for client, (arrays, structure) in results.items():
        leaves = [torch.from_numpy(array) for array in arrays]
        outcome.results[client] = tree.unflatten(leaves, structure)
