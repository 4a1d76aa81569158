"""`parsifl flower`: keys, app templates, and trial deployments on this machine."""

from __future__ import annotations

import time
import tomllib
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from parsifl.cli import options
from parsifl.cli.errors import FriendlyGroup
from parsifl.cli.progress import follow as progress_of
from parsifl.core.errors import ConfigError
from parsifl.flower import need_flower

if TYPE_CHECKING:
    from parsifl.engine.experiment import Experiment
    from parsifl.flower.cluster import Cluster, FlowerRun

app = typer.Typer(
    cls=FriendlyGroup,
    help="Run the same algorithms on Flower, across machines.",
    no_args_is_help=True,
)


def execute(
    chosen: Experiment,
    out: Path,
    *,
    resume: bool = False,
    data_dir: Path | None = None,
    quiet: bool = False,
    simulation: bool = False,
) -> FlowerRun:
    """Run an experiment on Flower on this machine, with its progress on standard error."""
    need_flower()
    from parsifl.flower.cluster import run_on_flower

    if not quiet:
        runtime = "Flower's simulation runtime" if simulation else "a SuperLink and its SuperNodes"
        typer.echo(f"starting {runtime} on this machine; logs are in {out / 'flower'}", err=True)
    with progress_of(chosen.algorithm, chosen.rounds, quiet=quiet) as progress:
        return run_on_flower(
            chosen,
            out,
            resume=resume,
            simulation=simulation,
            data_dir=data_dir,
            progress=progress,
        )


execute_simulation = partial(execute, simulation=True)


@app.command()
def keys(
    folder: Path = typer.Argument(
        metavar="DIR", help="The directory for the keys; only its owner can read it (0700)."
    ),
    nodes: int = typer.Option(3, min=1, help="Number of node key pairs."),
    host: list[str] = typer.Option(
        [], help="A name or address of the server, in addition to localhost; repeatable."
    ),
    days: int = typer.Option(30, min=1, help="Validity of the certificates in days."),
) -> None:
    """Create a certificate authority, a server certificate and node keys.

    Examples:

      parsifl flower keys keys --nodes 3 --host server.example.org --days 365
    """
    need_flower()
    from parsifl.flower.tls import make_keys

    key_folder = make_keys(folder, nodes, host, days)
    typer.echo(f"{key_folder.authority}: copy it to every machine (it is public).")
    typer.echo(f"{key_folder.certificate}, {key_folder.key}: keep them on the server.")
    typer.echo(
        f"{key_folder.node(0)} ...: one private key per node; "
        f"register {key_folder.public(0)} ... with the server."
    )


@app.command()
@options.with_run_options
def init(
    context: typer.Context,
    folder: Path = typer.Argument(metavar="DIR", help="The directory for the app."),
    template: str = typer.Option(
        "csv", help="csv, partition, sparse-regression, or one of another package."
    ),
    algorithm: str | None = typer.Option(
        None,
        help="An algorithm. Default: that of the template, fedavg or fedbestsubset.",
    ),
    clients: int = typer.Option(3, min=1, help="Number of clients in the federation."),
    settings: list[str] = options.SET,
) -> None:
    """Write a complete Flower app: pyproject.toml, server, client, README.

    Examples:

      parsifl flower init hospitals --template csv --algorithm fedgradmp --set tau=5

      parsifl flower init study --template sparse-regression --set tau=4

      parsifl flower init trial --template partition --data digits --algorithm ditto
    """
    from parsifl.engine.experiment import Experiment
    from parsifl.flower.app_template import find, write_app
    from parsifl.flower.settings import Deployment, to_config

    kind = find(template)
    chosen = Experiment.read(options.merged(context.params, kind.defaults(algorithm)))
    chosen.build_algorithm()  # errors in the settings are raised here, not on the nodes
    plan = Deployment(out=str((folder / "run").resolve()))
    written = to_config(chosen, plan)
    if not kind.reads_dataset:  # the nodes have their own data
        del written["data"]
    write_app(folder, template, written, "federation")
    typer.echo(f"{folder} is ready; {folder / 'README.md'} explains how to run it.")


@app.command()
def up(
    clients: int = typer.Option(3, min=1, help="Number of nodes."),
    target: Path | None = typer.Option(
        None, "--app", help="Run this app and stop; without it the nodes run until Ctrl-C."
    ),
    folder: Path = typer.Option(Path("flower-trial"), help="Logs, keys and client state."),
    insecure: bool = typer.Option(
        False, "--insecure", help="No TLS and no node keys: unencrypted, on loopback only."
    ),
    workers: bool = typer.Option(
        True,
        "--workers/--no-workers",
        help="Start nodes with a worker, as `parsifl flower node` does (Linux only).",
    ),
    node_config: str = typer.Option(
        "",
        help="Node configuration; {id} is the node's number, {folder} the current directory.",
    ),
    resume: bool = options.RESUME,
    reproducible: bool = options.REPRODUCIBLE,
) -> None:
    """Start a SuperLink and SuperNodes on this machine, for a trial.

    Examples:

      parsifl flower up --clients 3 --app trial

      parsifl flower up --clients 3 --app hospitals --node-config 'data="{folder}/h{id}.csv"'
    """
    need_flower()
    from parsifl.flower.cluster import Cluster

    config = node_config.replace("{folder}", str(Path.cwd()))
    cluster = Cluster(folder, clients, secure=not insecure, workers=workers, node_config=config)
    typer.echo(f"starting a SuperLink and {clients} SuperNodes on {cluster.address}", err=True)
    with cluster:
        if target is None:
            _stay(cluster)
        else:
            _run(cluster, target, resume=resume)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def node(context: typer.Context) -> None:
    """Run a SuperNode with a worker: a process that keeps its imports and data between messages.

    Takes the options of `flower-supernode`, and replaces it. The worker is restarted if it exits.

    Examples:

      parsifl flower node --superlink fl.example.org:9000 --root-certificates ca.crt
      --auth-supernode-private-key node1 --node-config 'partition-id=1 data="h1.csv"'
    """
    need_flower()
    from parsifl.flower.node import run_node

    raise typer.Exit(run_node(context.args))


def _run(cluster: Cluster, target: Path, *, resume: bool) -> None:
    from parsifl.engine.run_dir import read_records
    from parsifl.flower.cluster import follow
    from parsifl.flower.settings import clear

    config = read_config(target)
    out, rounds = Path(config["deployment"]["out"]), int(config["rounds"])
    changes = {"deployment.resume": True} if resume else {}
    clear(out)
    run = cluster.submit(target.resolve(), **changes)
    with progress_of(str(config["algorithm"]), rounds) as progress:
        follow(cluster, run, out, progress)
    for note in dict.fromkeys(note for record in read_records(out) for note in record.notes):
        typer.echo(f"note: {note}", err=True)
    typer.echo(f"the run is in {out}; `parsifl report {out}` shows it")


def _stay(cluster: Cluster) -> None:
    typer.echo(f"ready. Start a run:  . {cluster.variables_file}; flwr run APP", err=True)
    typer.echo("Stop everything with Ctrl-C.", err=True)
    try:
        while cluster.alive():
            time.sleep(1.0)
    except KeyboardInterrupt:
        return
    raise ConfigError(f"the SuperLink has exited:\n{cluster.log_tail('superlink')}")


def read_config(target: Path) -> dict[str, Any]:
    """Return the configuration of a Parsifl app."""
    try:
        project = tomllib.loads((target / "pyproject.toml").read_text())
        config: dict[str, Any] = project["tool"]["flwr"]["app"]["config"]
    except (OSError, KeyError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{target} does not contain a Flower app ({error})") from None
    if "algorithm" not in config or "out" not in config.get("deployment", {}):
        raise ConfigError(f"{target} is not a Parsifl app; `parsifl flower init` writes one")
    return {"rounds": 50, **config}
