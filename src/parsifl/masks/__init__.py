"""Plans of which layers each device trains: optimal masks with a certificate, and baselines."""

from __future__ import annotations

from parsifl.core.layer_group import LayerGroup
from parsifl.masks.costs import curve, from_bytes, from_flops, from_memory
from parsifl.masks.plan import ExpectedBias, MaskPlan, expected_bias
from parsifl.masks.render import compare, draw, rows_of
from parsifl.masks.solve import optimal, replan
from parsifl.nn.layer_groups import layer_groups

__all__ = [
    "ExpectedBias",
    "LayerGroup",
    "MaskPlan",
    "compare",
    "curve",
    "draw",
    "expected_bias",
    "from_bytes",
    "from_flops",
    "from_memory",
    "layer_groups",
    "optimal",
    "replan",
    "rows_of",
]
