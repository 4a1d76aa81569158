"""Every promise that a federated algorithm makes, as a check that has a name.

``python -m parsifl.testing.conformance`` runs all checks over all registered algorithms. Another
package calls `check_algorithm(method)` for each of its own methods, or runs the checks one by one
(`CHECKS`, `trial_for`, `run_check`) as parameters of a pytest function.

A class may carry two class variables that are read here and nowhere else:

``exempt``
    ``ClassVar[Mapping[str, str]]``: promises that this method cannot keep, each with the reason.
    They are shown in the table, not hidden.
``trial``
    ``ClassVar[Mapping[str, Any]]``: settings for the trial, where the defaults are too large or a
    field has no default.
"""

from __future__ import annotations

# the modules of checks register themselves when they are imported
from parsifl.testing.conformance import declared, equal, messages, pure
from parsifl.testing.conformance.examples import Example, example_for, register
from parsifl.testing.conformance.harness import ConformanceError, Trial, small, trial_for
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
    "Result",
    "Trial",
    "check_algorithm",
    "declared",
    "equal",
    "example_for",
    "messages",
    "pure",
    "register",
    "run_check",
    "run_checks",
    "small",
    "trial_for",
]
