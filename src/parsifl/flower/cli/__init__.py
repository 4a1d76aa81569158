"""`parsifl flower`: keys, apps and trials (`trial`), and commands for operators (`operations`)."""

from parsifl.flower.cli import operations
from parsifl.flower.cli.trial import app

__all__ = ["app"]

operations.mount(app)
