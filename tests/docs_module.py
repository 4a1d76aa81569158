"""Scripts of the folder `docs` as modules."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[1] / "docs"


def docs_module(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"docs_{name}", DOCS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up by name
    spec.loader.exec_module(module)
    return module
