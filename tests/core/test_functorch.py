"""Every private function of torch agrees with its public fallback."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import grad, vmap

import parsifl
from parsifl.core import _functorch
from parsifl.core._functorch import PRIVATE, PUBLIC, aligned, choose, eager
from parsifl.core.problem import Params

ROOT = Path(__file__).parents[2]
both = pytest.mark.parametrize("kind", [PRIVATE, PUBLIC], ids=["private", "public"])


def loss(params: Params) -> tuple[Tensor, Params]:
    hidden = (params["w"] @ torch.linspace(-1, 1, 3, dtype=torch.float64) + params["b"]).tanh()
    return (hidden**2).sum(), {"hidden": hidden.detach() * 2}


def block(seed: int) -> Params:
    draw = torch.Generator().manual_seed(seed)
    shapes = {"w": (4, 2, 3), "b": (4, 2), "unused": (4, 5)}
    return {n: torch.randn(s, generator=draw, dtype=torch.float64) for n, s in shapes.items()}


def columns(function: Callable[[Params], tuple[Tensor, ...]], kind: dict[str, Any]) -> list[Tensor]:
    params = block(0)

    def flat(*leaves: Tensor) -> tuple[Tensor, ...]:
        return function(dict(zip(params, leaves, strict=True)))

    found: list[Tensor] = kind["vmap_columns"](flat, [(v, True) for v in params.values()], 4)
    return found


@both
def test_it_is_the_gradient_that_torch_finds(kind: dict[str, Any]) -> None:
    def both_parts(one: Params) -> tuple[Tensor, ...]:
        slopes, extra = kind["grad_once"](loss, one)
        assert not any(slope.requires_grad for slope in slopes.values())
        return (*slopes.values(), *extra.values())

    slopes, extra = vmap(grad(loss, has_aux=True))(block(0))
    expected = [*slopes.values(), *extra.values()]
    for ours, theirs in zip(columns(both_parts, kind), expected, strict=True):
        assert torch.equal(ours, theirs)


@both
def test_a_loss_that_raises_leaves_no_transformation_behind(kind: dict[str, Any]) -> None:
    def broken(params: Params) -> tuple[Tensor, Params]:
        raise ArithmeticError(len(params))

    with pytest.raises(ArithmeticError):
        columns(lambda one: tuple(kind["grad_once"](broken, one)[0].values()), kind)
    assert not kind["inside_vmap"]()
    assert not kind["is_transformed"]()
    assert torch.equal(vmap(torch.neg)(torch.ones(3)), -torch.ones(3))


def test_only_the_one_vmap_over_clients_counts() -> None:
    seen: list[bool] = []

    def look(x: Tensor) -> Tensor:
        seen.append(_functorch.inside_vmap())
        return x.sum()

    look(torch.ones(2))
    vmap(look)(torch.ones(2, 2))
    vmap(grad(look))(torch.ones(2, 2))
    vmap(vmap(look))(torch.ones(2, 2, 2))
    assert seen == [False, True, False, False]


@both
def test_a_loss_of_nothing_has_no_slope(kind: dict[str, Any]) -> None:
    def nothing(_: Params) -> tuple[Tensor, Params]:
        return torch.ones(()), {}

    found = columns(lambda one: tuple(kind["grad_once"](nothing, one)[0].values()), kind)
    assert all(not slope.any() for slope in found)
    (count,) = columns(lambda one: (one["b"] + len(kind["grad_once"](nothing, {})[0]),), kind)
    assert torch.equal(count, block(0)["b"])


@both
def test_vmap_over_columns_shares_what_has_no_client_axis(kind: dict[str, Any]) -> None:
    x, shared = torch.arange(6.0).reshape(3, 2), torch.tensor([2.0, 3.0])

    def work(own: Tensor, common: Tensor) -> tuple[Tensor, ...]:
        assert kind["inside_vmap"]()
        assert kind["is_transformed"]()
        return own * common, own.sum()

    product, total = kind["vmap_columns"](work, [(x, True), (shared, False)], 3)
    assert torch.equal(product, x * shared)
    assert torch.equal(total, x.sum(1))


@both
def test_outside_of_vmap_the_tensors_of_all_clients_are_there(kind: dict[str, Any]) -> None:
    x, shared = torch.arange(6.0).reshape(3, 2), torch.tensor([2.0, 3.0])

    def outside(count: int, leaves: list[_functorch.Leaf]) -> list[Tensor]:
        assert count == 3
        assert not kind["inside_vmap"]()
        own, common = (aligned(leaf, count) for leaf in leaves)
        assert own.tolist() == x.tolist()  # values may be read
        return [own * common + own.max()]

    def work(own: Tensor, common: Tensor) -> tuple[Tensor, ...]:
        (found,) = kind["leave_vmap"](outside, [own, common])
        return (found + 1,)

    (found,) = kind["vmap_columns"](work, [(x, True), (shared, False)], 3)
    assert torch.equal(found, x * shared + 6)


@both
def test_a_module_is_called_with_values_for_parameters_and_buffers(kind: dict[str, Any]) -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).eval()
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(5, 3, generator=draw)
    values = {n: torch.rand(v.shape, generator=draw) for n, v in module.named_parameters()}
    values |= {f"1.running_{n}": torch.rand(4, generator=draw) + 1 for n in ("mean", "var")}
    call = kind["ModuleSlots"](module)
    assert torch.equal(call(values, x), torch.func.functional_call(module, values, (x,)))
    assert not any(value is values[name] for name, value in module.named_parameters())
    with pytest.raises(KeyError, match="nobody"):
        call({"nobody": x}, x)


@both
def test_a_backward_pass_is_recognised(kind: dict[str, Any]) -> None:
    seen: list[bool] = []

    class Look(_functorch.TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch
        def __torch_dispatch__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if "mm" in str(function):
                seen.append(kind["inside_backward"]())
            return function(*args, **(kwargs or {}))

    w, look = torch.ones(2, 2, requires_grad=True), Look()  # type: ignore[no-untyped-call]  # torch
    with look, torch.enable_grad():
        torch.autograd.grad((torch.ones(3, 2) @ w).sum(), w)
    assert seen
    assert seen[0] is False
    assert seen[-1] is True


def test_a_run_without_private_functions_has_the_same_results(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    draw = np.random.default_rng(0)
    clients = [(draw.normal(size=(12, 4)), np.arange(12) % 3) for _ in range(4)]

    def server() -> Params:
        problem = parsifl.NeuralProblem(
            lambda: nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)), dtype=torch.float64
        )
        run = parsifl.simulate(
            parsifl.get("fedprox", local_steps=3, batch_size=4), problem, clients, 2
        )
        assert run.metrics[0]["executor"] == "fused"
        assert not run.metrics[0]["notes"]
        found: Params = run.server
        return found

    before = server()
    for place in (
        "engine.executors",
        "nn.functional",
        "nn.losses",
        "solvers.fused.vmap_bridge",
        "solvers.sgd",
        "solvers.update_rules",
    ):
        module = import_module(f"parsifl.{place}")
        for name, fallback in PUBLIC.items():
            if hasattr(module, name):
                monkeypatch.setattr(module, name, fallback)
    after = server()
    for name, value in before.items():
        torch.testing.assert_close(after[name], value, rtol=0, atol=1e-12)


def test_a_missing_private_function_is_replaced_with_one_warning() -> None:
    without = SimpleNamespace(__version__="9.0", nn=nn, _functorch=torch._functorch)
    without._C = SimpleNamespace(_functorch=torch._C._functorch)
    with pytest.warns(RuntimeWarning, match=r"torch 9\.0 lacks _C\._current_graph_task_id") as told:
        chosen = choose(without)
    assert len(told) == 1
    assert chosen["inside_backward"] is PUBLIC["inside_backward"]
    assert chosen["vmap_columns"] is PRIVATE["vmap_columns"]
    without._C = SimpleNamespace()
    with pytest.warns(RuntimeWarning, match="Install the version of torch"):
        assert choose(without) == {**PUBLIC, "ModuleSlots": PRIVATE["ModuleSlots"]}
    assert choose() == PRIVATE


def test_no_other_file_calls_private_functions_of_torch() -> None:
    private = re.compile(r"^torch\.(_|.*\._)")
    culprits = []
    for path in sorted((ROOT / "src").rglob("*.py")):
        if path.name == "_functorch.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute):
                used = [ast.unparse(node)]
            elif isinstance(node, ast.ImportFrom):
                used = [f"{node.module}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Import):
                used = [alias.name for alias in node.names]
            else:
                continue
            culprits += [f"{path.name}: {name}" for name in used if private.match(name)]
            culprits += [f"{path.name}: {name}" for name in used if re.match(r"nn\.(.*\.)?_", name)]
    assert not culprits


def test_a_block_comes_whole_and_a_single_client_as_a_block_of_one() -> None:
    seen: list[tuple[int, ...]] = []

    def look(values: Tensor, shared: Tensor) -> tuple[Tensor, Tensor]:
        seen.append(tuple(values.shape))
        assert bool((values == values).all())  # looking is allowed
        return values * shared, values.sum(1)

    batch, shared = torch.arange(6.0).reshape(3, 2), torch.tensor([2.0, 3.0])
    together = torch.func.vmap(lambda v: eager(look, v, shared))(batch)
    alone = zip(*(eager(look, v, shared) for v in batch), strict=True)
    for whole, parts in zip(together, alone, strict=True):
        assert torch.equal(whole, torch.stack(parts))
    assert seen == [(3, 2), (1, 2), (1, 2), (1, 2)]
