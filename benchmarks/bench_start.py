"""Start-up time: importing the package, and printing the help.

Each runs in its own process and is compared with an interpreter that does nothing. The package is
imported without torch, which alone would take a second.
"""

from __future__ import annotations

import subprocess
import sys
from functools import partial

from timing import at_most, interleaved, marked, report, row

TURNS = 9
NOTHING = "python -c pass"
CODE = {
    NOTHING: "pass",
    "import parsifl": "import sys, parsifl; sys.exit('torch' in sys.modules)",
    "parsifl --help": "import sys; sys.argv = ['parsifl', '--help']\n"
    "from parsifl.cli import main; main()",
}
LONGEST = {"import parsifl": 0.3, "parsifl --help": 0.5}  # seconds that are allowed


def start(code: str) -> None:
    """Run a few lines in a new interpreter."""
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


def main() -> int:
    """Measure all."""
    found = interleaved({name: partial(start, code) for name, code in CODE.items()}, TURNS)
    bare, rows = found[NOTHING].median, []
    for name, most in LONGEST.items():
        item = row("start", found[name], bare, NOTHING, note=f"target: at most {most:g} s")
        rows.append(marked(item, None, at_most(most, found[name].median, "s")))
    return report(rows, __doc__)


if __name__ == "__main__":
    raise SystemExit(main())
