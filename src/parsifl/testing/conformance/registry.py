"""The list of checks, and functions that run them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from parsifl.core.algorithm import AnyAlgorithm
from parsifl.core.errors import ConfigError, unknown
from parsifl.core.problem import Problem
from parsifl.data.clients import ClientData
from parsifl.testing.conformance.harness import (
    ConformanceError,
    Harness,
    NotApplicable,
    harness_for,
)

Check = Callable[[Harness], None]
Status = Literal["passed", "failed", "exempt", "not applicable"]
CHECKS: dict[str, Check] = {}
"""Every check by its name, in the order in which they are run."""


@dataclass(frozen=True)
class Result:
    """The result of one check."""

    check: str
    status: Status
    reason: str = ""
    seconds: float = 0.0


def check(name: str) -> Callable[[Check], Check]:
    """Register a check under the property that it tests."""

    def add(function: Check) -> Check:
        CHECKS[name] = function
        return function

    return add


def expect(condition: bool, otherwise: str) -> None:
    """Raise ConformanceError unless the condition holds."""
    if not condition:
        raise ConformanceError(otherwise)


def run_check(name: str, harness: Harness) -> Result:
    """Run one check; any exception is a failure with a reason."""
    if name not in CHECKS:
        raise ConfigError(unknown("check", name, CHECKS))
    exempt = harness.algorithm.conformance.exempt
    if name in exempt:
        return Result(name, "exempt", exempt[name])
    started = time.perf_counter()
    status: Status = "passed"
    reason = ""
    try:
        CHECKS[name](harness)
    except NotApplicable as note:
        status, reason = "not applicable", str(note)
    except ConformanceError as error:
        status, reason = "failed", str(error)
    except Exception as error:  # an algorithm may raise anything; the table shows it
        status, reason = "failed", f"{type(error).__name__}: {error}"
    return Result(name, status, reason, time.perf_counter() - started)


def run_checks(
    algorithm: AnyAlgorithm,
    problem: Problem | None = None,
    data: ClientData | None = None,
    checks: Iterable[str] | None = None,
) -> list[Result]:
    """Run all checks (or those named) on an algorithm."""
    harness = harness_for(algorithm, problem, data)
    return [run_check(name, harness) for name in (CHECKS if checks is None else checks)]


def check_algorithm(
    algorithm: AnyAlgorithm, problem: Problem | None = None, data: ClientData | None = None
) -> None:
    """Raise ConformanceError that lists every check that the algorithm fails.

    Parameters
    ----------
    algorithm
        A configured algorithm; few local steps and small batches keep the checks fast.
    problem, data
        The problem and data to test on. Default: an example with the required capabilities.

    Examples
    --------
    >>> from parsifl.algorithms.fedavg import FedAvg
    >>> check_algorithm(FedAvg(lr=0.1, local_steps=2, batch_size=4))
    """
    results = run_checks(algorithm, problem, data)
    broken = [f"{r.check}: {r.reason}" for r in results if r.status == "failed"]
    if broken:
        raise ConformanceError(
            f"{type(algorithm).__name__} fails {len(broken)} of {len(results)} checks:\n  "
            + "\n  ".join(broken)
        )
