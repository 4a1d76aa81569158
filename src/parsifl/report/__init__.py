"""One self-contained HTML page about one or many run folders."""

from parsifl.report.page import build

__all__ = ["build"]
