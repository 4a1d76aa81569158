"""Named checks of the contract of a federated algorithm.

``python -m parsifl.testing.conformance`` runs all checks over all registered algorithms. Another
package calls `check_algorithm(algorithm)` for each of its own, or runs single checks
(`CHECKS`, `harness_for`, `run_check`) as parameters of a pytest function.

A class may declare `conformance = Conformance(settings=..., exempt=...)`: settings to test with
if the defaults are too large, and checks that it cannot pass. The table shows the reasons.
"""

from __future__ import annotations

# the checks register themselves when they are imported
from parsifl.testing.conformance import checks
from parsifl.testing.conformance.examples import Example, example_for, register
from parsifl.testing.conformance.harness import ConformanceError, Harness, harness_for, small
from parsifl.testing.conformance.registry import (
    CHECKS,
    Result,
    check_algorithm,
    run_check,
    run_checks,
)

__all__ = [
    "CHECKS",
    "ConformanceError",
    "Example",
    "Harness",
    "Result",
    "check_algorithm",
    "checks",
    "example_for",
    "harness_for",
    "register",
    "run_check",
    "run_checks",
    "small",
]
