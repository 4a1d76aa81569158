"""Shared fixtures."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

# tests run in parallel processes, where more threads only compete; `make test-matrix` varies this
torch.set_num_threads(int(os.environ.get("PARSIFL_TEST_THREADS", "1")))


@pytest.fixture(scope="session")
def data_folder() -> Path:
    """Return the folder with real datasets; skip where there is none."""
    folder = os.environ.get("PARSIFL_DATA")
    if not folder or not Path(folder).is_dir():
        pytest.skip("needs real data: set PARSIFL_DATA to a folder that holds them")
    return Path(folder)
