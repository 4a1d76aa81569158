"""What leaves a client is on the page: traffic is held against it; mods that protect nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.docs_module import docs_module
from tests.flower.inprocess import Answer, InProcess
from tests.flower.test_server import deep

from parsifl import wire
from parsifl.algorithms.composed import Composed, CoordinateMedian
from parsifl.algorithms.fedamp import FedAMP
from parsifl.algorithms.fedavg import FedAvg
from parsifl.core import registry, tree
from parsifl.core.algorithm import GatherAlgorithm
from parsifl.core.errors import CapabilityError
from parsifl.flower.disclosure import (
    check_additive,
    check_mods,
    covered,
    reply_paths,
    sent_paths,
    upload_paths,
)
from parsifl.flower.message import Envelope
from parsifl.solvers.server_optimizers import Adam
from parsifl.solvers.upload_transforms import TopK

DOCS = Path(__file__).parents[2] / "docs"


def test_the_page_is_up_to_date() -> None:
    assert (DOCS / "reference" / "disclosure.md").read_text() == docs_module("disclosure").page(), (
        "run `python docs/disclosure.py`"
    )


@pytest.mark.parametrize("name", [n for n in registry.algorithms() if n != "fedbestsubset"])
def test_nothing_leaves_that_is_not_on_the_page(name: str, tmp_path: Path) -> None:
    chosen = deep(name, rounds=1, validation=0.1)
    algorithm = chosen.build_algorithm()
    declared, kind_of_upload = reply_paths(), algorithm.tree_types().uplink
    seen = set[str]()

    def record(kind: str, client: int, _request: Envelope, answer: Any) -> Answer:
        reply: Envelope = answer()
        left = [path for path in sent_paths(reply) if not covered(path, declared[kind])]
        assert left == [], (client, left)
        seen.add(kind)
        if "upload" in reply.parts:
            upload = wire.decode(reply.parts["upload"], kind_of_upload)
            assert bool(tree.leaves(upload)) == bool(upload_paths(algorithm))
        return reply

    InProcess(chosen, tmp_path / "state", record).run(tmp_path / "run")
    assert seen == {"hello", "train", "evaluate"}


def test_a_field_that_is_not_declared_is_found() -> None:
    declared = reply_paths()["train"]
    assert covered("metrics.loss", declared)
    assert not covered("metrics.loss.0", declared)
    assert not covered("rows.0", declared)
    assert sent_paths(Envelope('{"a": {"b": [1, 2]}}', {"c": b""})) == {"a.b.*", "part c"}


def fixedclipping_mod() -> None:
    """Stand in for Flower's mod of that name."""


def message_size_mod() -> None:
    """Stand in for Flower's mod of that name."""


def test_mods_that_would_protect_nothing_are_refused() -> None:
    check_mods([message_size_mod])
    with pytest.raises(CapabilityError, match="fixedclipping_mod"):
        check_mods([message_size_mod, fixedclipping_mod])


@pytest.mark.parametrize("name", list(registry.algorithms()))
def test_secure_aggregation_needs_a_sum(name: str) -> None:
    method = registry.get(name)
    if isinstance(method, GatherAlgorithm):
        with pytest.raises(CapabilityError, match="needs every single upload"):
            check_additive(method)
    else:
        check_additive(method)


@pytest.mark.parametrize("changes", [{"aggregation": CoordinateMedian}, {"uploads": (TopK(0.1),)}])
def test_secure_aggregation_rejects_what_reads_single_uploads(changes: dict[str, Any]) -> None:
    with pytest.raises(CapabilityError, match="needs every single upload"):
        check_additive(Composed(FedAvg(), **changes))
    with pytest.raises(CapabilityError, match="needs every single upload"):
        check_additive(Composed(FedAMP()))
    check_additive(Composed(FedAvg(), server_optimizer=Adam()))
