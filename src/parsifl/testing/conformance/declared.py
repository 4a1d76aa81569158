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
from parsifl.testing.conformance.harness import Harness, NotApplicable
from parsifl.testing.conformance.registry import check, expect


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
    """Check that the class says what it does in its own docstring, and cites its source."""
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
    """Check that states and messages have the types that the hints name."""
    types, round_state = harness.algorithm.tree_types(), harness.second
    found: list[tuple[str, Any, Any]] = [("server state", round_state.server, types.server)]
    for step in round_state.client_steps:
        found.append(("client state", step.result.state, types.client))
        found.append(("downlink", step.down, types.downlink))
        found.append(("upload", step.result.upload, types.uplink))
    for what, value, hint in found:
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
    """Check that a problem with the required capabilities and nothing else is enough."""
    problem = restricted(harness.problem, harness.algorithm.requires)
    poorer = Harness(harness.algorithm, problem, harness.data, own_example=False)
    poorer.models(poorer.first)
