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
from parsifl.testing.conformance.harness import ClientStep, Harness, RoundState, snapshot
from parsifl.testing.conformance.registry import check, expect


@check("inputs stay as they are")
def inputs_stay(harness: Harness) -> None:
    """Check that every method leaves its arguments and its own fields bit-identical."""
    algorithm: Any = harness.algorithm
    before = repr(vars(algorithm))
    _call_all(harness, _with_arguments_watched)
    expect(repr(vars(algorithm)) == before, "the algorithm changed its own fields")


@check("global generators untouched")
def global_generators_untouched(harness: Harness) -> None:
    """Check that no method draws from, or seeds, the generators of torch, NumPy or Python."""
    _call_all(harness, _with_generators_watched)


@check("same key, same bits")
def same_key_same_bits(harness: Harness) -> None:
    """Check that two runs with one seed agree in every bit, whatever the global generators hold."""
    algorithm: Any = harness.algorithm
    with global_seed(1):
        first = snapshot(harness.simulate())
    fresh = replace(algorithm)
    with global_seed(2):
        second = snapshot(Harness(fresh, harness.problem, harness.data).simulate())
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


def _call_all(harness: Harness, watch: Watch) -> None:
    """Call every method of the contract once, through `watch`, from a state that has trained."""
    algorithm, problem = harness.algorithm, harness.problem
    round_state, key = harness.first, harness.key.replace(round=1, client=0, purpose="broadcast")
    watch("init_server", lambda: algorithm.init_server(problem, harness.infos, key))
    watch("model", lambda server: algorithm.model(problem, server), round_state.server)
    for client in range(2):
        info = harness.infos[client]
        down = watch(
            "broadcast",
            lambda server, info=info: algorithm.broadcast(problem, server, info, key),
            round_state.server,
        )
        watch("weight", lambda info=info: algorithm.weight(info))
        watch(
            "init_client",
            lambda down, info=info: algorithm.init_client(problem, info, down, key),
            down,
        )
        work = watch("batches", lambda info=info: algorithm.batches(info, 1))
        shard = harness.shards.draw(client, work, key)
        tuning = harness.shards.draw(
            client,
            watch("personalization_batches", lambda i=info: algorithm.personalization_batches(i)),
            key,
        )
        state = round_state.clients[client]
        watch("client_update", lambda *a: algorithm.client_update(problem, *a), down, state, shard)
        watch("personalize", lambda *a: algorithm.personalize(problem, *a), down, state, tuning)
    _call_server(harness, round_state, watch)


def _call_server(harness: Harness, round_state: RoundState, watch: Watch) -> None:
    algorithm: Any = harness.algorithm
    problem, key = harness.problem, harness.key.replace(purpose="aggregate")
    # the state before these uploads, rebuilt, so that an in-place result is detected
    server = algorithm.init_server(problem, harness.infos, harness.key.replace(purpose="server"))
    accumulator = algorithm.accumulator(problem)
    for step in round_state.client_steps:
        weight = algorithm.weight(step.info)

        def add(upload: Any, step: ClientStep = step, weight: float = weight) -> None:
            accumulator.add(ClientUpload(step.info, weight, upload, step.down))

        watch("contribute", add, step.result.upload)
    total = accumulator.total()
    if not accumulator.mergeable:

        def gather(server: Any, *values: Any) -> Any:
            pairs = zip(total, values, strict=True)
            uploads = [replace(upload, value=value) for upload, value in pairs]
            return algorithm.aggregate(problem, server, uploads, key)

        watch("aggregate", gather, server, *(upload.value for upload in total))
        return
    watch("aggregate", lambda s, t: algorithm.aggregate(problem, s, t, key), server, total)


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
