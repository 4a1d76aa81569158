"""One self-contained HTML page about one or many run directories."""

from parsifl.report.page import build

__all__ = ["build"]
