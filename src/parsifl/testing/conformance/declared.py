"""What a class declares: form, documentation, settings, types and capabilities."""

from __future__ import annotations

import dataclasses
import inspect
import json
from typing import Any

from parsifl.core import config, tree, tree_schema
from parsifl.core.errors import CapabilityError
from parsifl.core.leaves import UNITS
from parsifl.testing.conformance.examples import restricted
from parsifl.testing.conformance.harness import NotApplicable, Trial
from parsifl.testing.conformance.registry import expect, promise


@promise("final and frozen")
def final_and_frozen(trial: Trial) -> None:
    """Check that the class is final, a frozen dataclass, and leaves nothing abstract."""
    kind: Any = type(trial.method)
    expect("__final__" in vars(kind), "the class is not marked @final")
    expect(
        dataclasses.is_dataclass(kind) and "__dataclass_params__" in vars(kind),
        "the class is not itself decorated with @dataclass(frozen=True)",
    )
    expect(bool(vars(kind)["__dataclass_params__"].frozen), "the dataclass is not frozen")


@promise("documented")
def documented(trial: Trial) -> None:
    """Check that the class says what it does in words of its own, and cites its source."""
    kind: Any = type(trial.method)
    text = inspect.cleandoc(vars(kind).get("__doc__") or "")
    generated = text.startswith(f"{kind.__name__}(")  # what @dataclass writes if there is none
    expect(bool(text) and not generated, "the class has no docstring")
    first = text.splitlines()[0]
    expect(first.endswith("."), f"the docstring's first line is no sentence: {first!r}")
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


@promise("settings survive JSON")
def settings_survive_json(trial: Trial) -> None:
    """Check that config -> JSON -> config gives an equal method."""
    method: Any = trial.method
    text = json.dumps(config.to_json(method), allow_nan=False)
    again = config.build(type(method), json.loads(text))
    expect(again == method, f"{method} became {again}")
    expect(hash(again) == hash(method), "equal settings have different hashes")


@promise("types are told")
def types_are_told(trial: Trial) -> None:
    """Check that states and messages have the types that the hints name."""
    types, scene = trial.method.tree_types(), trial.second
    found: list[tuple[str, Any, Any]] = [("server state", scene.server, types.server)]
    for turn in scene.turns:
        found.append(("client state", turn.result.state, types.client))
        found.append(("downlink", turn.down, types.downlink))
        found.append(("upload", turn.result.upload, types.uplink))
    for what, value, hint in found:
        structure = tree.flatten(value, units=UNITS)[1]
        try:
            read = tree_schema.from_json(tree_schema.to_json(structure), hint, units=UNITS)
        except ValueError as error:
            read = error.args
        expect(read == structure, f"the {what} does not fit its type hint {hint}: {read}")


@promise("a missing capability is named")
def missing_capability_is_named(trial: Trial) -> None:
    """Check that a problem without a required capability is refused by the capability's name."""
    method = trial.method
    if not method.requires:
        raise NotApplicable("requires nothing beyond Problem")
    for missing in method.requires:
        others = [c for c in method.requires if c is not missing and not issubclass(c, missing)]
        poorer = restricted(trial.problem, others)
        if isinstance(poorer, missing):
            continue  # implied by another capability that it requires
        try:
            method.check_capabilities(poorer)
        except CapabilityError as error:
            expect(missing.__name__ in str(error), f"the error does not name it: {error}")
        else:
            expect(False, f"a problem that is not {missing.__name__} is accepted")


@promise("nothing more is used")
def nothing_more_is_used(trial: Trial) -> None:
    """Check that a problem with the required capabilities and nothing else is enough."""
    problem = restricted(trial.problem, trial.method.requires)
    poorer = Trial(trial.method, problem, trial.data, own_example=False)
    poorer.models(poorer.first)
