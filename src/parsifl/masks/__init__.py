"""Which layers each device trains: the best masks with a proof, and what they compare with."""

from __future__ import annotations

from parsifl.blocks import Block, blocks
from parsifl.masks.costs import from_bytes, from_flops, from_memory
from parsifl.masks.curve import curve
from parsifl.masks.participation import ExpectedBias, expected_bias
from parsifl.masks.picture import compare, picture, rows_of
from parsifl.masks.plan import MaskPlan
from parsifl.masks.solve import optimal, replan

__all__ = [
    "Block",
    "ExpectedBias",
    "MaskPlan",
    "blocks",
    "compare",
    "curve",
    "expected_bias",
    "from_bytes",
    "from_flops",
    "from_memory",
    "optimal",
    "picture",
    "replan",
    "rows_of",
]
