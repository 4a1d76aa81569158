"""`python -m parsifl` is the `parsifl` command."""

from __future__ import annotations

from parsifl.cli import main

if __name__ == "__main__":
    main()
