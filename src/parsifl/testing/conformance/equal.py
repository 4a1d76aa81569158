"""Equality: of engines, of orders, of interrupted and whole runs, of idle clients, of dtypes."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from parsifl.core import tree
from parsifl.core.errors import ConfigError
from parsifl.testing.conformance.examples import example_for
from parsifl.testing.conformance.harness import Harness, NotApplicable, difference, snapshot
from parsifl.testing.conformance.registry import check, expect

TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4}
"""Up to rounding; in float64 a ReLU that flips near zero would show as 1e-4."""


def tolerance(harness: Harness) -> float:
    """Return what counts as equal in the dtype of the problem's parameters."""
    dtype = next(iter(harness.problem.init(harness.key).values())).dtype
    return TOLERANCES.get(dtype, 1e-2)


@check("training moves the models")
def training_moves_the_models(harness: Harness) -> None:
    """Check that some model changes: states are used."""
    before, after = harness.models(harness.start), harness.models(harness.second)
    expect(not tree.same(before, after), "no model changed in two rounds of training")


@check("batched equals one by one")
def batched_equals_loop(harness: Harness) -> None:
    """Check that many clients at once give what one at a time gives, up to rounding."""
    _need_batches(harness)
    wanted = snapshot(harness.sequential)
    for engine, run in harness.batched.items():
        gap = difference(snapshot(run), wanted)
        expect(gap <= tolerance(harness), f"{engine}: states and models differ by {gap:.1e}")


@check("no fallback, no client dropped")
def no_fallback(harness: Harness) -> None:
    """Check that client updates run under vmap, and that no healthy client is dropped."""
    for run in (harness.sequential, *harness.batched.values()):
        for record in run.metrics:
            expect(not record["dropped"], f"healthy clients were dropped: {record['dropped']}")
            expect(not record["notes"], f"a batch had to be run again: {record['notes']}")
    _need_batches(harness)


@check("order of clients irrelevant")
def order_irrelevant(harness: Harness) -> None:
    """Check that clients may run, and uploads may be summed, in any order."""
    round_state = harness.first
    client_steps = {
        i: harness.client_step(round_state, i) for i in reversed(range(len(harness.data)))
    }
    for step in harness.second.client_steps:
        same = tree.same(step.result, client_steps[step.info.id].result)
        expect(same, f"client {step.info.id} differs when clients run in reverse order")
    if harness.algorithm.accumulator(harness.problem).mergeable:
        backwards = harness.combine(
            round_state.server, tuple(client_steps.values()), round_state.round
        )
        gap = difference(backwards, harness.second.server)
        expect(gap <= tolerance(harness), f"adding up in reverse order differs by {gap:.1e}")


@check("resumed equals uninterrupted")
def resumed_equals_uninterrupted(harness: Harness) -> None:
    """Check that a resumed run ends with the same bits as an uninterrupted one."""
    whole = harness.simulate(rounds=4, participation=0.6)
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "run"
        harness.simulate(rounds=2, participation=0.6, run_dir=place)
        resumed = harness.simulate(rounds=4, participation=0.6, run_dir=place, resume=True)
        found = snapshot(resumed)  # states may still be in the directory
    expect(tree.same(snapshot(whole), found), "states or models differ in their bits")
    expect(
        [_timeless(r) for r in whole.metrics] == [_timeless(r) for r in resumed.metrics],
        "the records of the rounds differ",
    )


@check("zero local steps change nothing")
def zero_steps(harness: Harness) -> None:
    """Check that without local steps the first models and every trained client state stay."""
    idle = _idle(harness)
    # both at round 0: what `personalize` draws follows the round
    before, after = idle.models(idle.start), idle.models(dataclasses.replace(idle.first, round=0))
    gap = difference(after, before)
    expect(gap <= tolerance(harness), f"models move by {gap:.1e} in a round without local steps")
    for step in idle.run_round(harness.second).client_steps:
        gap = difference(step.result.state, step.client)
        expect(gap <= tolerance(harness), f"client state moves by {gap:.1e} without local steps")


@check("dtype and device kept")
def dtype_and_device_kept(harness: Harness) -> None:
    """Check that every floating-point leaf has the dtype and the device of `problem.init`."""
    _check_dtype(harness)
    if harness.own_example:
        example = example_for(harness.algorithm, torch.float32)
        _check_dtype(Harness(harness.algorithm, example.problem, example.data))


def _check_dtype(harness: Harness) -> None:
    sample = next(iter(harness.problem.init(harness.key).values()))
    round_state = harness.first
    found: dict[str, Any] = {
        "server state": round_state.server,
        "models": harness.models(round_state),
    }
    for step in round_state.client_steps:
        found[f"client {step.info.id}"] = {
            "client state": step.result.state,
            "downlink": step.down,
            "upload": step.result.upload,
        }
    leaves, structure = tree.flatten(found)
    for name, leaf in zip(tree.names(structure), leaves, strict=True):
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            here, wanted = (leaf.dtype, leaf.device), (sample.dtype, sample.device)
            expect(here == wanted, f"{name} is {here}, the parameters are {wanted}")


def _idle(harness: Harness) -> Harness:
    """Return a harness with no local steps on any device."""
    algorithm: Any = harness.algorithm
    known = {item.name for item in dataclasses.fields(algorithm)}
    if not known & {"local_steps", "epochs"}:
        raise NotApplicable("has neither steps nor epochs")
    settings: dict[str, Any] = (
        {"local_steps": 0, "epochs": None} if "local_steps" in known else {"epochs": 0}
    )
    changes = {name: value for name, value in settings.items() if name in known}
    try:
        idle = dataclasses.replace(algorithm, **changes)
    except ConfigError as error:
        raise NotApplicable(f"rejects zero steps: {error}") from None
    data = dataclasses.replace(harness.data, profiles=({},) * len(harness.data))
    return Harness(idle, harness.problem, data, harness.own_example)


def _need_batches(harness: Harness) -> None:
    if not harness.problem.supports_vmap:
        raise NotApplicable("the problem runs one client at a time")


def _timeless(record: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in record.items() if name != "seconds"}
