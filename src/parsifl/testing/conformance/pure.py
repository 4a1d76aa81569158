"""Purity: nothing that comes in is changed, and nothing but the key decides what comes out."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from parsifl.core import tree
from parsifl.core.algorithm import ClientUpload
from parsifl.testing.conformance.harness import Scene, Trial, Turn, snapshot
from parsifl.testing.conformance.registry import expect, promise


@promise("inputs stay as they are")
def inputs_stay(trial: Trial) -> None:
    """Check that every method leaves its arguments and its own fields bit-identical."""
    method: Any = trial.method
    before = repr(vars(method))
    _call_all(trial, _with_arguments_watched)
    expect(repr(vars(method)) == before, "the method changed its own fields")


@promise("global generators untouched")
def global_generators_untouched(trial: Trial) -> None:
    """Check that no method draws from, or seeds, the generators of torch, NumPy or Python."""
    _call_all(trial, _with_generators_watched)


@promise("same key, same bits")
def same_key_same_bits(trial: Trial) -> None:
    """Check that two runs with one seed agree in every bit, whatever the global generators hold."""
    method: Any = trial.method
    with global_seed(1):
        first = snapshot(trial.simulate())
    fresh = replace(method)
    with global_seed(2):
        second = snapshot(Trial(fresh, trial.problem, trial.data).simulate())
    expect(tree.same(first, second), "a second run with the same seed gave other bits")


@contextmanager
def global_seed(seed: int) -> Iterator[None]:
    """Seed all global generators, and put them back afterwards."""
    states = generator_states()
    torch.manual_seed(seed)
    np.random.seed(seed)  # noqa: NPY002 - the global generator is what is being tested
    random.seed(seed)
    try:
        yield
    finally:
        _restore(states)


def generator_states() -> tuple[Any, Any, Any]:
    """Return the states of the generators of torch, NumPy and Python."""
    return torch.get_rng_state(), np.random.get_state(), random.getstate()  # noqa: NPY002


def _restore(states: tuple[Any, Any, Any]) -> None:
    torch.set_rng_state(states[0])
    np.random.set_state(states[1])  # noqa: NPY002 - see above
    random.setstate(states[2])


Watch = Callable[..., Any]
"""watch(name, function, *trees): call the function with the trees as its arguments."""


def _call_all(trial: Trial, watch: Watch) -> None:
    """Call every method of the contract once, through `watch`, from a state that has trained."""
    method, problem = trial.method, trial.problem
    scene, key = trial.first, trial.key.replace(round=1, client=0, purpose="broadcast")
    watch("init_server", lambda: method.init_server(problem, trial.infos, key))
    watch("model", lambda server: method.model(problem, server), scene.server)
    for client in range(2):
        info = trial.infos[client]
        down = watch(
            "broadcast",
            lambda server, info=info: method.broadcast(problem, server, info, key),
            scene.server,
        )
        watch("weight", lambda info=info: method.weight(info))
        watch(
            "init_client",
            lambda down, info=info: method.init_client(problem, info, down, key),
            down,
        )
        work = watch("batches", lambda info=info: method.batches(info, 1))
        shard = trial.shards.draw(client, work, key)
        tuning = trial.shards.draw(
            client,
            watch("personalization_batches", lambda i=info: method.personalization_batches(i)),
            key,
        )
        state = scene.clients[client]
        watch("client_update", lambda *a: method.client_update(problem, *a), down, state, shard)
        watch("personalize", lambda *a: method.personalize(problem, *a), down, state, tuning)
    _call_server(trial, scene, watch)


def _call_server(trial: Trial, scene: Scene, watch: Watch) -> None:
    method: Any = trial.method
    problem, key = trial.problem, trial.key.replace(purpose="aggregate")
    # the state before these uploads, made anew: writing the result into it then shows
    server = method.init_server(problem, trial.infos, trial.key.replace(purpose="server"))
    accumulator = method.accumulator(problem)
    for turn in scene.turns:
        weight = method.weight(turn.info)

        def add(upload: Any, turn: Turn = turn, weight: float = weight) -> None:
            accumulator.add(ClientUpload(turn.info, weight, upload, turn.down))

        watch("contribute", add, turn.result.upload)
    total = accumulator.total()
    if not accumulator.mergeable:

        def gather(server: Any, *values: Any) -> Any:
            pairs = zip(total, values, strict=True)
            uploads = [replace(upload, value=value) for upload, value in pairs]
            return method.aggregate(problem, server, uploads, key)

        watch("aggregate", gather, server, *(upload.value for upload in total))
        return
    watch("aggregate", lambda s, t: method.aggregate(problem, s, t, key), server, total)


def _with_arguments_watched(name: str, function: Callable[..., Any], *trees: Any) -> Any:
    before = [_copy(value) for value in trees]
    result = function(*trees)
    for position, (value, old) in enumerate(zip(trees, before, strict=True)):
        expect(_unchanged(value, old), f"{name} changed its argument {position + 1} in place")
    return result


def _with_generators_watched(name: str, function: Callable[..., Any], *trees: Any) -> Any:
    before = generator_states()
    result = function(*trees)
    after = generator_states()
    expect(torch.equal(before[0], after[0]), f"{name} used torch's global generator")
    expect(repr(before[1]) == repr(after[1]), f"{name} used NumPy's global generator")
    expect(before[2] == after[2], f"{name} used Python's global generator")
    return result


def _copy(value: Any) -> Any:
    return tree.map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, value)


def _unchanged(value: Any, old: Any) -> bool:
    ours, form = tree.flatten(value)
    theirs, other_form = tree.flatten(old)
    return form == other_form and all(
        tree.same(a, b) if isinstance(a, Tensor) else a is b
        for a, b in zip(ours, theirs, strict=True)
    )
