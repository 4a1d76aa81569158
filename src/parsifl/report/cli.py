"""`parsifl report`: an HTML page about run directories."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(
    dirs: Annotated[
        list[Path],
        typer.Argument(
            help="Run directories, or directories that contain some.", show_default=False
        ),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="The HTML file to write.")] = Path(
        "report.html"
    ),
    watch: Annotated[
        bool,
        typer.Option("--watch", help="Serve the page on this machine while the runs continue."),
    ] = False,
    port: Annotated[
        int,
        typer.Option(help="With --watch: the port; 0 selects a free one.", min=0, max=65535),
    ] = 0,
) -> None:
    """Compare runs on one HTML page that works offline.

    Seeds of a configuration are grouped; differences between algorithms are paired by seed.

    Directories that cannot be read are reported and skipped.

    Examples:

      parsifl report runs/demo -o demo.html

      parsifl report --watch runs/long
    """
    from rich.console import Console

    from parsifl.core.text import visible
    from parsifl.engine.run_dir import read_runs
    from parsifl.report import build
    from parsifl.report.groups import sections
    from parsifl.report.live import serve
    from parsifl.report.summary import headline, render

    console = Console()
    if watch:
        serve(dirs, lambda url: console.print(f"Watching at {url} (stop with Ctrl-C)"), port)
        return
    left_out: list[str] = []
    runs = read_runs(dirs, left_out)
    console.print(render(headline(runs)))
    for note in (*left_out, *(note for section in sections(runs) for note in section.notes)):
        typer.echo(visible(f"note: {note}"), err=True)
    path = build(dirs, output)
    console.print(f"Wrote {path}", soft_wrap=True, markup=False, highlight=False)
