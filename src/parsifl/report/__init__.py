"""Self-contained HTML pages about run directories.

Read `groups` (runs of one configuration), `summary` (headline numbers), `table` and `html_tables`,
`figures` (the numbers that assets/*.js draws), `state_sparsity`, `page` (assembly), `live` (a page
that follows runs), `cli`. Other folders add sections to the page (`core.plugins`). The folder
imports the simulator only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from parsifl.core import renamed

if TYPE_CHECKING:
    from parsifl.report.page import build

__all__ = ["build"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise renamed.missing(__name__, name)
    from parsifl.report import page  # imports NumPy, which the command line does without

    return getattr(page, name)
