"""The coverage study runs, and counts as it says."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

PATH = Path(__file__).parents[2] / "tools" / "coverage.py"


@pytest.fixture(scope="module")
def study() -> ModuleType:
    spec = importlib.util.spec_from_file_location("coverage_study", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_design_gives_intervals(study: ModuleType) -> None:
    for name in study.DESIGNS:
        share, error = study.coverage(name, 1)
        assert 0 <= share <= 1
        assert np.isfinite(error)


def test_intervals_are_counted(study: ModuleType) -> None:
    table = SimpleNamespace(
        names=["(intercept)", "a", "b"],
        lower=np.array([0.0, 0.0, 0.5]),
        upper=np.array([1.0, 1.0, 1.0]),
    )
    assert study._inside(table, np.array([0.2, 0.2])) == [True, False]
