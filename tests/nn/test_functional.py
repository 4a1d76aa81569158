from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn

from parsifl.nn.functional import GATE, Functional
from parsifl.nn.layer_chain import find_chain


def module() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).to("meta")


def values(seed: int, net: nn.Module) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {n: torch.randn(p.shape, generator=draw) for n, p in net.named_parameters()}


def test_it_is_torchs_functional_call() -> None:
    net = module()
    call, x = Functional(net), torch.randn(5, 3, generator=torch.Generator().manual_seed(9))
    for seed in range(3):
        params = values(seed, net)
        assert torch.equal(call(params, x), torch.func.functional_call(net, params, (x,)))


def test_gradients_flow_to_the_parameters_under_transforms() -> None:
    net = module()
    call, x, params = Functional(net), torch.ones(5, 3), values(0, net)
    ours = torch.func.grad(lambda p: call(p, x).square().sum())(params)
    theirs = torch.func.grad(lambda p: torch.func.functional_call(net, p, (x,)).square().sum())(
        params
    )
    assert all(torch.equal(ours[name], theirs[name]) for name in params)


def test_a_call_leaves_nothing_behind_even_if_it_fails() -> None:
    net = module()
    call, params = Functional(net), values(0, net)
    with pytest.raises(RuntimeError):
        call(params, torch.ones(5, 7))
    with pytest.raises(KeyError, match="nobody"):
        call({"nobody": torch.ones(1)}, torch.ones(5, 3))
    assert all(parameter.is_meta for parameter in net.parameters())
    assert call({}, torch.ones(5, 3, device="meta")).is_meta


def test_threads_do_not_disturb_each_other() -> None:
    class Slow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros((), device="meta"))

        def forward(self, x: Tensor) -> Tensor:
            first: Tensor = x * self.weight
            for _ in range(20):
                first = first + torch.ones(100, 100).sum() * 0  # lets other threads in
            return first - x * self.weight

    call = Functional(Slow())

    def use(value: int) -> float:
        return float(call({"weight": torch.tensor(float(value))}, torch.tensor(1.0)))

    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(use, range(200))) == {0.0}


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
