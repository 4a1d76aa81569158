"""Self-contained HTML pages about run directories, or about one fit."""

from parsifl.report.fit_page import build_fit
from parsifl.report.page import build

__all__ = ["build", "build_fit"]
