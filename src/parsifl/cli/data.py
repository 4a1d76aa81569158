"""`parsifl data`: download datasets and show their partition."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from parsifl.cli.errors import FriendlyGroup

if TYPE_CHECKING:
    from parsifl.data.clients import ClientData
    from parsifl.data.describe import Bar

app = typer.Typer(
    cls=FriendlyGroup,
    help="Download datasets and show how they are divided among clients.",
    no_args_is_help=True,
)

_NAME = typer.Argument(help="A dataset, e.g. mnist or synthetic:alpha=1,beta=1.")
_FOLDER = typer.Option(
    None,
    "--data-dir",
    help="Directory to search first; falls back to $PARSIFL_DATA, then the cache.",
)
_JSON = typer.Option(False, "--json", help="Print JSON.")
_COLOURS = ("red", "green", "yellow", "blue", "magenta", "cyan", "bright_red", "bright_green")


@app.command()
def fetch(name: str = _NAME, data_dir: Path | None = _FOLDER, as_json: bool = _JSON) -> None:
    """Download a dataset unless it is present, and verify its checksums."""
    from parsifl import data

    paths = data.fetch(name.partition(":")[0], data_dir)
    if as_json:
        typer.echo(json.dumps({"name": name, "files": [str(path) for path in paths]}))
    elif paths:
        for path in paths:
            typer.echo(path)
    else:
        typer.echo(f"{name} needs no files")


@app.command()
def show(
    name: str = _NAME,
    partition: str | None = typer.Option(
        None, help="How rows are divided, e.g. dirichlet:alpha=0.1. Default: that of the dataset."
    ),
    clients: int | None = typer.Option(
        None, help="Number of clients. Default: every group, or 20."
    ),
    seed: int = typer.Option(0, help="Seed of the partition."),
    limit: int = typer.Option(50, min=1, help="Draw at most this many clients."),
    data_dir: Path | None = _FOLDER,
    as_json: bool = _JSON,
) -> None:
    """Describe a dataset and draw the label distribution of its clients."""
    from parsifl import data

    about = data.describe(name.partition(":")[0])
    prepared = data.prepare(
        name, clients=clients, partition=partition, seed=seed, data_dir=data_dir
    )
    if as_json:
        typer.echo(json.dumps({**about, **data.summary(prepared)}))
        return
    _draw(about, prepared, data.bars(prepared, limit=limit), partition or about["partition"])


def _draw(about: dict[str, Any], prepared: ClientData, drawn: list[Bar], partition: str) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    console.print(f"[bold]{about['title']}[/bold]: {about['size']}", highlight=False)
    console.print(f"{about['citation']}. Licence: {about['licence']}", highlight=False)
    table = Table(title=f"{len(prepared)} clients, {partition}", title_justify="left")
    for column in ("client", "train", "valid.", "test"):
        table.add_column(column, justify="right")
    table.add_column("labels" if prepared.classes is not None else "(a number to predict)")
    for bar in drawn:
        text = Text()
        symbols = bar.text()
        position = 0
        for label, width in bar.stretches:
            colour = _COLOURS[label % len(_COLOURS)]
            text.append(symbols[position : position + width], style=colour)
            position += width
        counts = (bar.client, bar.train, bar.validation, bar.test)
        table.add_row(*(str(count) for count in counts), text)
    console.print(table)
    if len(drawn) < len(prepared):
        console.print(f"... and {len(prepared) - len(drawn)} more (increase --limit)")
