"""Shared fixtures."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

# Tests run in parallel processes, where more threads only compete; `make test-matrix` varies this.
# OpenBLAS reads its number as NumPy is loaded. Its threads spin while they wait.
THREADS = os.environ.get("PARSIFL_TEST_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", THREADS)

import torch  # noqa: E402 - see above
from tests.programs import Programs  # noqa: E402 - see above

torch.set_num_threads(int(THREADS))


@pytest.fixture(scope="session")
def data_folder() -> Path:
    """Return the folder with real datasets; skip where there is none."""
    folder = os.environ.get("PARSIFL_DATA")
    if not folder or not Path(folder).is_dir():
        pytest.skip("needs real data: set PARSIFL_DATA to a folder that holds them")
    return Path(folder)


@pytest.fixture(scope="session")
def programs() -> Iterator[Programs]:
    """Run programs without importing torch for each of them."""
    with Programs() as found:
        yield found
