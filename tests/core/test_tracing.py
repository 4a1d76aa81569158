from __future__ import annotations

import threading
import time

import torch
from torch import nn

from parsifl.nn.functional import GATE, Functional
from parsifl.nn.layer_chain import find_chain


def test_calls_in_other_threads_are_not_traced() -> None:
    """While fx traces, a module that somebody else calls would be a stranger to the tracer."""
    module, other = nn.Sequential(nn.Linear(3, 3), nn.ReLU()), nn.Sequential(nn.Linear(2, 2))
    call, params = Functional(other), dict(other.named_parameters())
    ended, errors = threading.Event(), []

    def keep_calling() -> None:
        while not ended.is_set():
            try:
                call(params, torch.ones(1, 2))
            except Exception as error:
                errors.append(error)

    thread = threading.Thread(target=keep_calling)
    thread.start()
    try:
        chains = [find_chain(module) for _ in range(100)]
    finally:
        ended.set()
        thread.join()
    assert errors == []
    assert all(chain is not None and len(chain) == 2 for chain in chains)


def test_a_trace_waits_for_the_calls_under_way() -> None:
    seen = []

    def trace() -> None:
        with GATE.tracing():
            seen.append("traced")

    GATE.enter()
    thread = threading.Thread(target=trace)
    thread.start()
    time.sleep(0.05)
    seen.append("called")
    GATE.leave()
    thread.join()
    assert seen == ["called", "traced"]
