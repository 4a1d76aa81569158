"""Print every algorithm with every check: ``python -m parsifl.testing.conformance``."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict

from rich import box
from rich.console import Console
from rich.table import Table

from parsifl.core import config, registry
from parsifl.core.errors import ParsiflError
from parsifl.testing.conformance import CHECKS, Result, run_checks, small

_MARKS = {
    "passed": "[green]+[/]",
    "failed": "[bold red]X[/]",
    "exempt": "[yellow]e[/]",
    "not applicable": "[dim]-[/]",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the checks and return the exit code: 0 if all checks pass, else 1."""
    parser = argparse.ArgumentParser(prog="python -m parsifl.testing.conformance")
    parser.add_argument("names", nargs="*", metavar="NAME", help="algorithms; default: all")
    parser.add_argument(
        "--problem",
        metavar="MODULE:FUNCTION",
        help="a function that returns your own (problem, data) to test on",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="SETTING=VALUE",
        help="a setting of the algorithms, e.g. last_batch=wrap for batch normalization",
    )
    parser.add_argument("--json", action="store_true", help="print JSON for machines")
    options = parser.parse_args(arguments)
    console = Console(soft_wrap=True)
    try:
        kinds = [registry.find(name) for name in options.names or registry.algorithms()]
        example = registry.load_object(options.problem)() if options.problem else (None, None)
        settings = config.assignments(options.set)
        table = {kind.__name__: run_checks(small(kind, settings), *example) for kind in kinds}
    except ParsiflError as error:
        Console(stderr=True).print(str(error), style="red", markup=False, highlight=False)
        return 2
    if options.json:
        plain = {name: [asdict(result) for result in results] for name, results in table.items()}
        console.print_json(json.dumps(plain))
    else:
        _show(console, table)
    broken = any(result.status == "failed" for results in table.values() for result in results)
    return 1 if broken else 0


def _show(console: Console, table: dict[str, list[Result]]) -> None:
    numbers = (str(number) for number in range(1, len(CHECKS) + 1))
    grid = Table("algorithm", *numbers, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name, results in table.items():
        grid.add_row(name, *(_MARKS[result.status] for result in results))
    console.print(grid)
    for number, check in enumerate(CHECKS, 1):
        console.print(f"{number:3} {check}", highlight=False)
    for name, results in table.items():
        for result in results:
            if result.status in ("failed", "exempt"):
                note = f"{name}, {result.check} ({result.status}): {result.reason}"
                console.print(note, markup=False, highlight=False)
    counts = Counter(result.status for results in table.values() for result in results)
    totals = ", ".join(f"{count} {status}" for status, count in counts.items())
    console.print(f"{len(table)} algorithms: {totals}", highlight=False)


if __name__ == "__main__":
    sys.exit(main())
