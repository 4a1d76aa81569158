"""What travels: uploads fit their template, survive the wire, and hold no personal state."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from parsifl import wire
from parsifl.core import tree
from parsifl.core.leaves import densify
from parsifl.testing.conformance.harness import Harness, NotApplicable
from parsifl.testing.conformance.registry import check, expect


@check("upload foreseen without data")
def upload_foreseen(harness: Harness) -> None:
    """Check that `client_update` on meta tensors gives the schema of the upload."""
    for step in harness.second.client_steps:
        arguments = (step.down, step.client, step.shard)
        if not all(isinstance(leaf, Tensor) for leaf in tree.leaves(arguments)):
            raise NotApplicable("this problem reads data other than tensors")
        template = harness.algorithm.client_update(harness.problem, *tree.to_meta(arguments))
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
    """Check that no tensor that a client keeps is uploaded, unless the server has just sent it.

    Compares, after training, tensors with more than one entry and more than one value.
    """
    kept = False
    for step in harness.second.client_steps:
        public, sent = _informative(step.down), _informative(step.result.upload)
        for when, state in (("old", step.client), ("new", step.result.state)):
            for name, leaf in _informative(state).items():
                kept = True
                if any(_equal(leaf, other) for other in public.values()):
                    continue
                for field, other in sent.items():
                    expect(
                        not _equal(leaf, other),
                        f"the {when} state '{name}' of client {step.info.id} is uploaded as "
                        f"'{field}'",
                    )
    if not kept:
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
