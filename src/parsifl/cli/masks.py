"""`parsifl masks`: plan which layers each device trains, and show cost curves."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from parsifl.cli.errors import FriendlyGroup
from parsifl.cli.options import finite
from parsifl.core import config

if TYPE_CHECKING:
    from torch import nn

    from parsifl.masks import MaskPlan

app = typer.Typer(
    cls=FriendlyGroup, help="Plan which layers each device trains.", no_args_is_help=False
)

_INPUTS = {"alexnet": (3, 224, 224), "mlp": (784,), "resnet18_tiny": (3, 64, 64)}

ModelOption = Annotated[str, typer.Option(help="A model, such as vgg or mlp:hidden=64+32.")]
ClassesOption = Annotated[int, typer.Option(min=1, help="Number of classes (the head).")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.callback(invoke_without_command=True)
def plan(
    context: typer.Context,
    model: ModelOption = "mobilenet",
    classes: ClassesOption = 10,
    devices: Annotated[int, typer.Option(min=1, help="Number of devices.")] = 100,
    strong: Annotated[
        float,
        typer.Option(
            min=0.0, max=1.0, callback=finite, help="Share of devices that train everything."
        ),
    ] = 0.2,
    budget: Annotated[
        list[float] | None,
        typer.Option(
            min=0.0,
            max=1.0,
            help="Share of the model a weak device may train; repeat for several kinds.",
        ),
    ] = None,
    objective: Annotated[str, typer.Option(help="J (bias + slack), bias, or V.")] = "J",
    seconds: Annotated[float, typer.Option(min=0.0, help="Time limit of the search.")] = 15.0,
    participation: Annotated[
        float,
        typer.Option(min=0.0, max=1.0, callback=finite, help="Share of devices per round."),
    ] = 1.0,
    draws: Annotated[int, typer.Option(min=1, help="Random designs to compare with.")] = 1000,
    sca: Annotated[bool, typer.Option(help="Also run the paper's SCA (needs cvxpy).")] = False,
    as_json: JsonOption = False,
) -> None:
    """Find the best masks, bound the optimum, and compare them with simple designs."""
    if context.invoked_subcommand is not None:
        return
    from parsifl import masks

    blocks = masks.layer_groups(_module(model, classes))
    total = sum(block.size for block in blocks)
    budgets = _budgets(devices, strong, budget or [0.125], total)
    best = masks.optimal(blocks, budgets, objective, seconds=seconds)
    table = masks.compare(best, draws=draws, sca=sca)
    mean = masks.expected_bias(best, participation) if participation < 1.0 else None
    if as_json:
        data = best.to_dict() | {"comparison": table, "model": model, "total": total}
        if mean is not None:
            data["expected_bias"] = {"participation": participation, "mean": mean.mean}
        typer.echo(json.dumps(data))
        return
    console = Console()
    _show_plan(console, best, model, total)
    if mean is not None:
        spread = f" (standard error {mean.error:,.0f})" if mean.error else ""
        console.print(f"expected bias of {mean.cohort} devices per round: {mean.mean:,.0f}{spread}")
    console.print(_table("designs", table))


@app.command()
def curve(
    model: ModelOption = "mobilenet",
    classes: ClassesOption = 10,
    batch: Annotated[int, typer.Option(min=1, help="Rows in a batch.")] = 50,
    steps: Annotated[int, typer.Option(min=1, help="Masking rates between 0 and 1.")] = 20,
    design: Annotated[
        str,
        typer.Option(help="Which layers are trained: fullest, sequential, last or random."),
    ] = "fullest",
    as_json: JsonOption = False,
) -> None:
    """Show parameters and FLOPs against the masking rate (Figure 3 of PerFedMask)."""
    import torch

    from parsifl import masks

    rates = [step / steps for step in range(steps)]
    sample = torch.empty(batch, *_input_shape(model), device="meta")
    rows = masks.curve(_module(model, classes), sample, rates, design=design)
    if as_json:
        typer.echo(json.dumps(rows))
        return
    shown = [{key: value for key, value in row.items() if key != "layers"} for row in rows]
    Console().print(_table(f"{model}, batches of {batch}", shown))


def _module(model: str, classes: int) -> nn.Module:
    import torch

    from parsifl.nn import models

    name, options = config.parse(model)
    with torch.device("meta"):
        return models.build(name, **{"classes": classes, **options})


def _input_shape(model: str) -> tuple[int, ...]:

    name, options = config.parse(model)
    usual = _INPUTS.get(name, (3, 32, 32))
    return (int(options.get("inputs", usual[0])), *usual[1:])


def _budgets(devices: int, strong: float, shares: list[float], total: int) -> list[float]:
    """Return weak devices first, in equal parts for each kind of budget, then the strong ones."""
    full = round(strong * devices)
    weak = devices - full
    kinds = [shares[len(shares) * device // weak] for device in range(weak)]
    return [share * total for share in kinds] + [float(total)] * full


def _show_plan(console: Console, best: MaskPlan, model: str, total: int) -> None:
    from parsifl import masks

    console.print(f"[bold]{model}[/bold]: {len(best.layers)} layers, {total:,} parameters to mask")
    state = "proven optimal" if best.proven else f"the optimum is at most {best.gap:.1%} below"
    console.print(
        f"{best.objective} = {best.value:,.1f}, {state} (lower bound {best.bound:,.1f}), "
        f"by {best.method} in {best.seconds:.2f} s"
    )
    console.print(
        f"bias {best.bias:,.1f}; lower bound for designs that train as much: {best.floor:,.1f}"
    )
    for message in best.messages:
        console.print(f"[yellow]{message}[/yellow]")
    console.print(masks.draw(best), markup=False, highlight=False)
    names = ", ".join(f"{index} {name}" for index, name in enumerate(best.layers))
    console.print(f"layers: {names}", markup=False, highlight=False)


def _table(title: str, rows: list[dict[str, Any]]) -> Table:
    table = Table(title=title, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    columns = list(dict.fromkeys(key for row in rows for key in row))
    columns = [name for name in columns if any(row.get(name) is not None for row in rows)]
    for index, name in enumerate(columns):
        table.add_column(name.replace("_", " "), justify="right" if index else "left")
    for row in rows:
        table.add_row(*(_cell(row.get(name)) for name in columns))
    return table


def _cell(value: Any) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    if abs(value) >= 1_000_000_000:
        return f"{value / 1_000_000_000:,.3f} G"
    if abs(value) >= 1_000_000:
        return f"{value / 1_000_000:,.3f} M"
    return f"{value:,.2f}" if isinstance(value, float) and abs(value) < 1000 else f"{value:,.0f}"
