"""What travels: uploads fit their template, survive the wire, and hold no personal state."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from parsifl import wire
from parsifl.core import tree
from parsifl.core.leaves import densify
from parsifl.testing.conformance.harness import NotApplicable, Trial
from parsifl.testing.conformance.registry import expect, promise


@promise("upload foreseen without data")
def upload_foreseen(trial: Trial) -> None:
    """Check that `local` on meta tensors gives names, shapes, dtypes and statics of the upload."""
    for turn in trial.second.turns:
        arguments = (turn.down, turn.client, turn.shard)
        if not all(isinstance(leaf, Tensor) for leaf in tree.leaves(arguments)):
            raise NotApplicable("this problem reads data that are no tensors")
        template = trial.method.client_update(trial.problem, *tree.to_meta(arguments))
        wire.check(turn.result.upload, template.upload)
        wire.check(turn.result.state, template.state)


@promise("messages survive the wire")
def messages_survive_the_wire(trial: Trial) -> None:
    """Check that decode(encode(m)) = m bit for bit, and that the booked size is the length."""
    types = trial.method.tree_types()
    for turn in trial.second.turns:
        for what, message, hint in (
            ("downlink", turn.down, types.downlink),
            ("upload", turn.result.upload, types.uplink),
        ):
            data = wire.encode(message)
            expect(tree.same(wire.decode(data, hint), message), f"the {what} came back changed")
            booked = wire.size(message)
            expect(booked == len(data), f"the {what} is booked as {booked}, but is {len(data)}")


@promise("personal state stays at home")
def personal_state_stays(trial: Trial) -> None:
    """Check that no tensor that a client keeps is uploaded, unless the server has just sent it.

    Looked at after training, and only at tensors that say something: more than one entry, not
    all equal.
    """
    kept = False
    for turn in trial.second.turns:
        public, sent = _telling(turn.down), _telling(turn.result.upload)
        for when, state in (("old", turn.client), ("new", turn.result.state)):
            for name, leaf in _telling(state).items():
                kept = True
                if any(_equal(leaf, other) for other in public.values()):
                    continue
                for field, other in sent.items():
                    expect(
                        not _equal(leaf, other),
                        f"the {when} state '{name}' of client {turn.info.id} is uploaded as "
                        f"'{field}'",
                    )
    if not kept:
        raise NotApplicable("clients keep nothing")


def _telling(value: Any) -> dict[str, Tensor]:
    leaves, structure = tree.flatten(densify(value))
    return {
        name: leaf
        for name, leaf in zip(tree.names(structure), leaves, strict=True)
        if isinstance(leaf, Tensor) and leaf.numel() > 1 and bool((leaf != leaf.flatten()[0]).any())
    }


def _equal(left: Tensor, right: Tensor) -> bool:
    return tree.same(left, right)
