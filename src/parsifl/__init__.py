"""Parsimonious federated learning.

Public names are imported on first use, so that `import parsifl` is fast.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from parsifl import startup
from parsifl.core import renamed

if TYPE_CHECKING:
    from parsifl import algorithms as algorithms
    from parsifl import base as base
    from parsifl import data as data
    from parsifl import masks as masks
    from parsifl import report as report
    from parsifl import sites as sites
    from parsifl import testing as testing
    from parsifl import wire as wire
    from parsifl.core import errors as errors
    from parsifl.core import keys as keys
    from parsifl.core.metrics import Metric
    from parsifl.core.registry import get
    from parsifl.data.clients import ClientData
    from parsifl.engine.run import Run
    from parsifl.engine.run_dir import open_run
    from parsifl.engine.settings import Evaluation, NetworkModel
    from parsifl.engine.simulate import simulate
    from parsifl.linear.glm import GLM
    from parsifl.nn import models as models
    from parsifl.nn.neural import NeuralProblem

_HOMES = {
    "ClientData": "parsifl.data.clients",
    "Evaluation": "parsifl.engine.settings",
    "GLM": "parsifl.linear.glm",
    "Metric": "parsifl.core.metrics",
    "NetworkModel": "parsifl.engine.settings",
    "NeuralProblem": "parsifl.nn.neural",
    "Run": "parsifl.engine.run",
    "get": "parsifl.core.registry",
    "open_run": "parsifl.engine.run_dir",
    "simulate": "parsifl.engine.simulate",
}

PACKAGES = {
    "algorithms": "parsifl.algorithms",
    "base": "parsifl.base",
    "data": "parsifl.data",
    "errors": "parsifl.core.errors",
    "keys": "parsifl.core.keys",
    "masks": "parsifl.masks",
    "models": "parsifl.nn.models",
    "report": "parsifl.report",
    "sites": "parsifl.sites",
    "testing": "parsifl.testing",
    "wire": "parsifl.wire",
}
"""Packages that are attributes after a bare `import parsifl`."""

__all__ = [
    "GLM",
    "ClientData",
    "Evaluation",
    "Metric",
    "NetworkModel",
    "NeuralProblem",
    "Run",
    "get",
    "open_run",
    "simulate",
]
__version__ = "0.3.0"

startup.prepare()
renamed.install()


def __getattr__(name: str) -> Any:
    if name in PACKAGES:
        return importlib.import_module(PACKAGES[name])
    if name not in _HOMES:
        raise renamed.missing("parsifl", name)
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*__all__, *PACKAGES, "__version__"])
