"""The report about a regression: a section of the page about runs, and a page about one fit."""

from parsifl.sites.pages.fit_page import build_fit

__all__ = ["build_fit"]
