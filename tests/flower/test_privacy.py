from __future__ import annotations

import pytest

from parsifl.core import registry
from parsifl.core.algorithm import GatherAlgorithm
from parsifl.core.errors import CapabilityError
from parsifl.flower.privacy import check_additive, check_mods


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
        with pytest.raises(CapabilityError, match="needs every upload"):
            check_additive(method)
    else:
        check_additive(method)
