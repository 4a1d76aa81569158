"""Records of run directories as JSON values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from parsifl.engine.run_dir import read_records


def read_metrics(path: Path) -> list[dict[str, Any]]:
    return [record.to_json() for record in read_records(path)]
