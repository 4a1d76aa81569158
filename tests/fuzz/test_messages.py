"""Four thousand mutants in every run of the suite; `tools/fuzz_messages.py` runs more."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.fuzz.mutants import MESSAGES, Direction, Targets, mutate

from parsifl.flower.message import Kind

EXAMPLES = 400
VALUES = st.one_of(
    st.just(...),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
        max_leaves=5,
    ),
)


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Targets]:
    logger = logging.getLogger("parsifl")
    before = logger.level
    logger.setLevel(logging.CRITICAL)  # every mutant would be logged
    yield Targets(tmp_path_factory.mktemp("fuzz"))
    logger.setLevel(before)


@pytest.mark.parametrize(("kind", "direction"), MESSAGES)
def test_the_message_itself_is_accepted(kind: Kind, direction: Direction, targets: Targets) -> None:
    assert targets.outcome(kind, direction, targets.corpus[kind, direction]) == "accepted"


@pytest.mark.parametrize(("kind", "direction"), MESSAGES)
def test_a_mutant_is_accepted_or_rejected_with_a_reason(
    kind: Kind, direction: Direction, targets: Targets
) -> None:
    slowest = 0.0

    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(seed=st.integers(0, 2**32), value=VALUES)
    def attack(seed: int, value: Any) -> None:
        nonlocal slowest
        draw = random.Random(seed)
        other = targets.corpus[draw.choice(MESSAGES)]
        mutant = mutate(targets.corpus[kind, direction], other, draw, value)
        started = time.thread_time()
        targets.outcome(kind, direction, mutant)
        slowest = max(slowest, time.thread_time() - started)

    attack()
    assert slowest < 2.0  # seconds of CPU; other programs do not count
