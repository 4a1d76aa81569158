from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture
def real() -> Path:
    """The folder with real data; tests that need it are skipped without one."""
    folder = os.environ.get("PARSIFL_DATA")
    if not folder or not Path(folder).is_dir():
        pytest.skip("set PARSIFL_DATA to a folder with the real datasets")
    return Path(folder)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty data folder, and neither a cache nor an environment variable behind it."""
    monkeypatch.delenv("PARSIFL_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "data"
    folder.mkdir()
    return folder
