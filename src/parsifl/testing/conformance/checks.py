"""The checks: declarations of the class, purity, equality of runs, and messages.

Purity: arguments are not changed, and results depend only on arguments and keys. Equality: of
engines, orders, interrupted and uninterrupted runs, idle clients and dtypes. Messages: uploads
match their template, can be encoded and decoded, and contain no personal state.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import random
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from parsifl import wire
from parsifl.core import config, tree, tree_schema
from parsifl.core.algorithm import ClientUpload
from parsifl.core.errors import CapabilityError, ConfigError
from parsifl.core.leaves import UNITS, densify
from parsifl.testing.conformance.examples import example_for, restricted
from parsifl.testing.conformance.harness import (
    ClientStep,
    Harness,
    NotApplicable,
    RoundState,
    difference,
    snapshot,
)
from parsifl.testing.conformance.registry import check, expect

TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4}
"""Up to rounding; in float64 a ReLU that flips near zero would show as 1e-4."""
_ANOTHER_SEED = 1_789_432_611  # not what a user would seed the generators with


@check("final and frozen")
def final_and_frozen(harness: Harness) -> None:
    """Check that the class is final, a frozen dataclass, and leaves nothing abstract."""
    kind: Any = type(harness.algorithm)
    expect("__final__" in vars(kind), "the class is not marked @final")
    expect(
        dataclasses.is_dataclass(kind) and "__dataclass_params__" in vars(kind),
        "the class is not itself decorated with @dataclass(frozen=True)",
    )
    expect(bool(vars(kind)["__dataclass_params__"].frozen), "the dataclass is not frozen")


@check("documented")
def documented(harness: Harness) -> None:
    """Check that the class has its own docstring, and cites its source."""
    kind: Any = type(harness.algorithm)
    text = inspect.cleandoc(vars(kind).get("__doc__") or "")
    generated = text.startswith(f"{kind.__name__}(")  # what @dataclass writes if there is none
    expect(bool(text) and not generated, "the class has no docstring")
    first = text.splitlines()[0]
    expect(first.endswith("."), f"the docstring's first line is not a sentence: {first!r}")
    expect(bool(kind.cites.strip()), "`cites` is empty: name the paper")
    silent = [
        name
        for name, member in vars(kind).items()
        if inspect.isfunction(member)
        and member.__module__ == kind.__module__
        and not name.startswith("_")
        and not member.__doc__
    ]
    expect(not silent, f"methods without a docstring: {', '.join(silent)}")


@check("settings survive JSON")
def settings_survive_json(harness: Harness) -> None:
    """Check that config -> JSON -> config gives an equal algorithm."""
    algorithm: Any = harness.algorithm
    text = json.dumps(config.to_json(algorithm), allow_nan=False)
    again = config.build(type(algorithm), json.loads(text))
    expect(again == algorithm, f"{algorithm} became {again}")
    expect(hash(again) == hash(algorithm), "equal settings have different hashes")


@check("types match the annotations")
def types_match(harness: Harness) -> None:
    """Check that states and messages have the annotated types."""
    types, round_state = harness.algorithm.tree_types(), harness.second
    values: list[tuple[str, Any, Any]] = [("server state", round_state.server, types.server)]
    for step in round_state.client_steps:
        values.append(("client state", step.result.state, types.client))
        values.append(("downlink", step.down, types.downlink))
        values.append(("upload", step.result.upload, types.uplink))
    for what, value, hint in values:
        structure = tree.flatten(value, units=UNITS)[1]
        try:
            read = tree_schema.from_json(tree_schema.to_json(structure), hint, units=UNITS)
        except ValueError as error:
            read = error.args
        expect(read == structure, f"the {what} does not fit its type hint {hint}: {read}")


@check("a missing capability is named")
def missing_capability_is_named(harness: Harness) -> None:
    """Check that the error names the capability that a problem lacks."""
    algorithm = harness.algorithm
    if not algorithm.requires:
        raise NotApplicable("requires nothing beyond Problem")
    for missing in algorithm.requires:
        others = [c for c in algorithm.requires if c is not missing and not issubclass(c, missing)]
        poorer = restricted(harness.problem, others)
        if isinstance(poorer, missing):
            continue  # implied by another capability that it requires
        try:
            algorithm.check_capabilities(poorer)
        except CapabilityError as error:
            expect(missing.__name__ in str(error), f"the error does not name it: {error}")
        else:
            expect(False, f"a problem that is not {missing.__name__} is accepted")


@check("nothing more is used")
def nothing_more_is_used(harness: Harness) -> None:
    """Check that a problem with only the required capabilities is sufficient."""
    problem = restricted(harness.problem, harness.algorithm.requires)
    poorer = Harness(harness.algorithm, problem, harness.data, own_example=False)
    poorer.models(poorer.first)


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
    """Check that two runs with one seed are bit-identical, whatever the global generators hold."""
    algorithm: Any = harness.algorithm
    fresh = replace(algorithm)
    with global_seed(_ANOTHER_SEED):
        second = snapshot(Harness(fresh, harness.problem, harness.data).simulate())
    same = tree.same(snapshot(harness.sequential), second)
    expect(same, "a second run with the same seed gave different bits")


@contextmanager
def global_seed(seed: int) -> Iterator[None]:
    """Seed all global generators, and restore them afterwards."""
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
    same = _flat(before[1]) == _flat(after[1])
    expect(same, f"{name} used NumPy's global generator")
    expect(before[2] == after[2], f"{name} used Python's global generator")
    return result


def _flat(state: tuple[Any, ...]) -> list[Any]:
    return [part.tobytes() if isinstance(part, np.ndarray) else part for part in state]


def _copy(value: Any) -> Any:
    return tree.map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, value)


def _unchanged(value: Any, old: Any) -> bool:
    ours, form = tree.flatten(value)
    theirs, other_form = tree.flatten(old)
    return form == other_form and all(
        tree.same(a, b) if isinstance(a, Tensor) else a is b
        for a, b in zip(ours, theirs, strict=True)
    )


def tolerance(harness: Harness) -> float:
    """Return the tolerance for the dtype of the problem's parameters."""
    dtype = next(iter(harness.problem.init(harness.key).values())).dtype
    return TOLERANCES.get(dtype, 1e-2)


@check("training moves the models")
def training_moves_the_models(harness: Harness) -> None:
    """Check that some model changes, so states are used."""
    before, after = harness.models(harness.start), harness.models(harness.second)
    expect(not tree.same(before, after), "no model changed in two rounds of training")


@check("batched equals one by one")
def batched_equals_loop(harness: Harness) -> None:
    """Check that batched and sequential execution agree up to rounding."""
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
    """Check that a resumed run is bit-identical to an uninterrupted one."""
    uninterrupted = harness.simulate(rounds=3, participation=0.6)
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        harness.simulate(rounds=2, participation=0.6, run_dir=run_dir)
        resumed = harness.simulate(rounds=3, participation=0.6, run_dir=run_dir, resume=True)
        restored = snapshot(resumed)  # states may still be in the directory
    expect(tree.same(snapshot(uninterrupted), restored), "states or models differ in their bits")
    expect(
        [_timeless(r) for r in uninterrupted.metrics] == [_timeless(r) for r in resumed.metrics],
        "the records of the rounds differ",
    )


@check("zero local steps change nothing")
def zero_steps(harness: Harness) -> None:
    """Check that without local steps initial models and trained client states do not change."""
    idle = _idle(harness)
    # both at round 0: the random numbers of `personalize` depend on the round
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
    trees: dict[str, Any] = {
        "server state": round_state.server,
        "models": harness.models(round_state),
    }
    for step in round_state.client_steps:
        trees[f"client {step.info.id}"] = {
            "client state": step.result.state,
            "downlink": step.down,
            "upload": step.result.upload,
        }
    leaves, structure = tree.flatten(trees)
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


@check("upload foreseen without data")
def upload_foreseen(harness: Harness) -> None:
    """Check that `client_update` on meta tensors gives the schema of the upload."""
    templates: dict[Any, Any] = {}
    for step in harness.second.client_steps:
        arguments = (step.down, step.client, step.shard)
        leaves, structure = tree.flatten(arguments)
        if not all(isinstance(leaf, Tensor) for leaf in leaves):
            raise NotApplicable("this problem reads data other than tensors")
        form = (structure, tuple((leaf.shape, leaf.dtype) for leaf in leaves))
        if form not in templates:  # all that `client_update` can see
            meta = tree.to_meta(arguments)
            templates[form] = harness.algorithm.client_update(harness.problem, *meta)
        template = templates[form]
        wire.check(step.result.upload, template.upload)
        wire.check(step.result.state, template.state)


@check("messages survive the wire")
def messages_survive_the_wire(harness: Harness) -> None:
    """Check that decode(encode(m)) = m bit for bit, and that the recorded size is the length."""
    types = harness.algorithm.tree_types()
    for step in harness.second.client_steps:
        for what, message, hint in (
            ("downlink", step.down, types.downlink),
            ("upload", step.result.upload, types.uplink),
        ):
            data = wire.encode(message)
            expect(tree.same(wire.decode(data, hint), message), f"the {what} came back changed")
            booked = wire.size(message)
            expect(booked == len(data), f"the {what} is recorded as {booked}, but is {len(data)}")


@check("personal state stays at home")
def personal_state_stays(harness: Harness) -> None:
    """Check that no tensor of a client's state is uploaded, unless the server has just sent it.

    Compares, after training, tensors with more than one entry and more than one value.
    """
    has_state = False
    for step in harness.second.client_steps:
        public, sent = _informative(step.down), _informative(step.result.upload)
        for when, state in (("old", step.client), ("new", step.result.state)):
            for name, leaf in _informative(state).items():
                has_state = True
                if any(_equal(leaf, other) for other in public.values()):
                    continue
                for field, other in sent.items():
                    expect(
                        not _equal(leaf, other),
                        f"the {when} state '{name}' of client {step.info.id} is uploaded as "
                        f"'{field}'",
                    )
    if not has_state:
        raise NotApplicable("clients keep nothing")


def _informative(value: Any) -> dict[str, Tensor]:
    leaves, structure = tree.flatten(densify(value))
    return {
        name: leaf
        for name, leaf in zip(tree.names(structure), leaves, strict=True)
        if isinstance(leaf, Tensor) and leaf.numel() > 1 and bool((leaf != leaf.flatten()[0]).any())
    }


def _equal(left: Tensor, right: Tensor) -> bool:
    return tree.same(left, right)
