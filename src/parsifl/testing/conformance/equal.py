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
from parsifl.testing.conformance.harness import NotApplicable, Trial, difference, snapshot
from parsifl.testing.conformance.registry import expect, promise

TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4}
"""Up to rounding; in float64 a ReLU that flips near zero would show as 1e-4."""


def tolerance(trial: Trial) -> float:
    """Return what counts as equal in the dtype of the problem's parameters."""
    dtype = next(iter(trial.problem.init(trial.key).values())).dtype
    return TOLERANCES.get(dtype, 1e-2)


@promise("training moves the models")
def training_moves_the_models(trial: Trial) -> None:
    """Check that some model changes: no state is made, carried and never used."""
    before, after = trial.models(trial.start), trial.models(trial.second)
    expect(not tree.same(before, after), "no model changed in two rounds of training")


@promise("batched equals one by one")
def batched_equals_loop(trial: Trial) -> None:
    """Check that many clients at once give what one at a time gives, up to rounding."""
    _need_batches(trial)
    wanted = snapshot(trial.sequential)
    for engine, run in trial.batched.items():
        gap = difference(snapshot(run), wanted)
        expect(gap <= tolerance(trial), f"{engine}: states and models differ by {gap:.1e}")


@promise("no fallback, nobody dropped")
def no_fallback(trial: Trial) -> None:
    """Check that the work runs under vmap as it is, and that healthy clients stay in."""
    for run in (trial.sequential, *trial.batched.values()):
        for record in run.metrics:
            expect(not record["dropped"], f"healthy clients were dropped: {record['dropped']}")
            expect(not record["notes"], f"a batch had to be run again: {record['notes']}")
    _need_batches(trial)


@promise("order of clients irrelevant")
def order_irrelevant(trial: Trial) -> None:
    """Check that clients may work, and uploads may be added up, in any order."""
    scene = trial.first
    turns = {i: trial.turn(scene, i) for i in reversed(range(len(trial.data)))}
    for turn in trial.second.turns:
        same = tree.same(turn.result, turns[turn.info.id].result)
        expect(same, f"client {turn.info.id} got other bits when clients ran in reverse order")
    if trial.method.accumulator(trial.problem).mergeable:
        backwards = trial.combine(scene.server, tuple(turns.values()), scene.round)
        gap = difference(backwards, trial.second.server)
        expect(gap <= tolerance(trial), f"adding up in reverse order differs by {gap:.1e}")


@promise("resumed equals uninterrupted")
def resumed_equals_uninterrupted(trial: Trial) -> None:
    """Check that a resumed run ends with the same bits as an uninterrupted one."""
    whole = trial.simulate(rounds=4, participation=0.6)
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "run"
        trial.simulate(rounds=2, participation=0.6, run_dir=place)
        resumed = trial.simulate(rounds=4, participation=0.6, run_dir=place, resume=True)
        found = snapshot(resumed)  # states may still be in the directory
    expect(tree.same(snapshot(whole), found), "states or models differ in their bits")
    expect(
        [_timeless(r) for r in whole.metrics] == [_timeless(r) for r in resumed.metrics],
        "the records of the rounds differ",
    )


@promise("zero local steps change nothing")
def zero_steps(trial: Trial) -> None:
    """Check that without local steps the first models and every trained client state stay."""
    idle = _idle(trial)
    # both at round 0: what `personalize` draws follows the round
    before, after = idle.models(idle.start), idle.models(dataclasses.replace(idle.first, round=0))
    gap = difference(after, before)
    expect(gap <= tolerance(trial), f"models move by {gap:.1e} in a round without local steps")
    for turn in idle.step(trial.second).turns:
        gap = difference(turn.result.state, turn.client)
        expect(gap <= tolerance(trial), f"client state moves by {gap:.1e} without local steps")


@promise("dtype and device kept")
def dtype_and_device_kept(trial: Trial) -> None:
    """Check that every floating-point leaf has the dtype and the device of `problem.init`."""
    _check_dtype(trial)
    if trial.own_example:
        example = example_for(trial.method, torch.float32)
        _check_dtype(Trial(trial.method, example.problem, example.data))


def _check_dtype(trial: Trial) -> None:
    sample = next(iter(trial.problem.init(trial.key).values()))
    scene = trial.first
    found: dict[str, Any] = {"server state": scene.server, "models": trial.models(scene)}
    for turn in scene.turns:
        found[f"client {turn.info.id}"] = {
            "client state": turn.result.state,
            "downlink": turn.down,
            "upload": turn.result.upload,
        }
    leaves, structure = tree.flatten(found)
    for name, leaf in zip(tree.names(structure), leaves, strict=True):
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            here, wanted = (leaf.dtype, leaf.device), (sample.dtype, sample.device)
            expect(here == wanted, f"{name} is {here}, the parameters are {wanted}")


def _idle(trial: Trial) -> Trial:
    """Return the trial with no local steps on any device."""
    method: Any = trial.method
    known = {item.name for item in dataclasses.fields(method)}
    if not known & {"local_steps", "epochs"}:
        raise NotApplicable("has neither steps nor epochs")
    settings: dict[str, Any] = (
        {"local_steps": 0, "epochs": None} if "local_steps" in known else {"epochs": 0}
    )
    changes = {name: value for name, value in settings.items() if name in known}
    try:
        lazy = dataclasses.replace(method, **changes)
    except ConfigError as error:
        raise NotApplicable(f"refuses zero steps: {error}") from None
    data = dataclasses.replace(trial.data, profiles=({},) * len(trial.data))
    return Trial(lazy, trial.problem, data, trial.own_example)


def _need_batches(trial: Trial) -> None:
    if not trial.problem.supports_vmap:
        raise NotApplicable("the problem runs one client at a time")


def _timeless(record: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in record.items() if name != "seconds"}
