"""`parsifl flower status`, `check`, `forget`, `site`, `backup` and others, for operators."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import time
from pathlib import Path
from typing import Any

import typer

from parsifl.cli.options import finite
from parsifl.core import plugins
from parsifl.core.errors import ConfigError
from parsifl.core.text import visible
from parsifl.flower import need_flower
from parsifl.flower.cli.trial import read_config

_ENDED = ("done", "checked")
_STARTED = re.compile(r"started run (\d+)")


def status(
    out: Path = typer.Argument(Path("run"), help="The run directory, on the server's machine."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Show the status of a server: round, connected and late clients, bytes, last error.

    A server writes its status every five seconds while it is running. The exit code is 0 then, and
    after it has finished, and 1 otherwise.

    Examples:

      parsifl flower status study/run

      parsifl flower status study/run --json
    """
    from parsifl.flower.monitor import ALIVE_SECONDS, read_status

    state = read_status(out)
    state["alive"] = abs(time.time() - state["updated"]) < ALIVE_SECONDS
    if as_json:
        typer.echo(json.dumps(state, indent=1))
    else:
        typer.echo(visible("\n".join(_lines(state))))
    ended = state["state"] in _ENDED
    if state["state"] == "failed" or not (ended or state["alive"]):
        raise typer.Exit(1)


def _lines(status: dict[str, Any]) -> list[str]:
    now, exchange = time.time(), status["exchange"]
    heard = f"{now - status['updated']:,.0f} s ago"
    if status["alive"] or status["state"] in (*_ENDED, "failed"):
        state = f"{status['state']}, round {status['round']} of {status['rounds']}, updated {heard}"
    else:
        state = f"ended, last heard {heard}, round {status['round']} of {status['rounds']}"
    lines = [
        f"{status['algorithm']}: {state}",
        f"{status['bytes_up']:,} bytes up, {status['bytes_down']:,} down, "
        f"results dropped: {status['dropped']}",
    ]
    waiting: list[int] = []
    if exchange:
        waiting = exchange["waiting_for_nodes"]
        lines.append(
            f"{exchange['kind']}: {len(waiting)} of {exchange['asked']} replies are missing after "
            f"{now - exchange['since']:,.0f} s"
        )
    for client in status["clients"]:
        since = client["last_reply"]
        heard = "never replied"
        if since is not None:
            heard = f"replied {now - since:,.0f} s ago after {client['reply_seconds']:,.1f} s"
        here = "connected" if client["connected"] else "not connected"
        late = ", awaited" if client["node"] in waiting else ""
        problem = f"; {client['last_problem']}" if client["last_problem"] else ""
        lines.append(
            f"  client {client['client']} (node {client['node']}): {here}, {heard}{late}{problem}"
        )
    server = status["server"]
    lines.append(f"server: {server['free'] >> 20:,} MiB free{_expiry(server)}")
    if status["last_error"]:
        lines.append(f"last error: {status['last_error']}")
    return lines


def _expiry(server: dict[str, Any]) -> str:
    expires = server["certificate_expires"]
    if expires is None:
        return ""
    return f", certificate expires on {time.strftime('%Y-%m-%d', time.gmtime(expires))}"


def check(
    target: Path = typer.Argument(help="The app, as written by `parsifl flower init`."),
    federation: str = typer.Option("", help="A federation in Flower's configuration."),
) -> None:
    """Check every node before the first round: keys, versions, clock, disk, schema of the data.

    It starts the app with `deployment.check=true`. The server lets every client report, prints
    the results, and stops. A node with a wrong key or a wrong clock does not report.

    Examples:

      parsifl flower check study

      parsifl flower check study --federation hospitals
    """
    need_flower()
    from parsifl.flower.node import program

    read_config(target)
    words = [program("flwr"), "run", str(target.resolve()), *([federation] if federation else [])]
    words += ["--run-config", "deployment.check=true", "--stream"]
    passed, run = False, ""
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                typer.echo(visible(line), nl=False)
                passed = passed or "the check found no problem" in line
                run = match[1] if (match := _STARTED.search(line)) else run
        except KeyboardInterrupt:
            process.terminate()
            if run:  # it would wait for clients on the server
                subprocess.run([words[0], "stop", run, *([federation] if federation else [])])
            raise
    if not passed:
        raise ConfigError("the check failed; see the lines above")


def forget(
    folder: Path = typer.Argument(metavar="DIR", help="The state directory of a node."),
    run: list[str] = typer.Option([], help="The id of a run; repeatable."),
    older: float | None = typer.Option(
        None,
        "--older-than",
        min=0,
        callback=finite,
        help="Only runs that have not changed for this many days.",
    ),
    delete: bool = typer.Option(False, "--delete", help="Delete; without it, list only."),
) -> None:
    """List or delete the client state that a node keeps.

    Examples:

      parsifl flower forget ~/.parsifl/state

      parsifl flower forget ~/.parsifl/state --older-than 90 --delete
    """
    from parsifl.flower.retention import forget as remove
    from parsifl.flower.retention import older_than, stored_runs

    runs = stored_runs(folder)
    unknown = set(run) - {item.run for item in runs}
    if unknown:
        raise ConfigError(f"{folder} has no state of the run {sorted(unknown)[0]}")
    chosen = [item for item in runs if item.run in run] if run else runs
    chosen = chosen if older is None else older_than(chosen, older)
    if delete and not run and older is None:
        raise ConfigError("name what to delete: --run ID or --older-than DAYS")
    for item in chosen:
        age = (time.time() - item.changed) / 86_400
        typer.echo(f"{item.run}  {item.size:,} bytes, changed {age:,.1f} days ago")
    if delete:
        remove(chosen)
    typer.echo(f"{len(chosen)} of {len(runs)} runs {'deleted' if delete else 'listed'}")


def site(
    folder: Path = typer.Argument(metavar="DIR", help="The state directory of a node."),
    client: int | None = typer.Option(None, min=0, help="The number of a client."),
    table: str | None = typer.Option(None, help="The name of a table (guard-table)."),
    reopen: bool = typer.Option(False, "--open", help="Open a ledger that refusals have closed."),
    new: bool = typer.Option(False, "--new", help="Start a new ledger; the old one is set aside."),
) -> None:
    """Show the owner of a table what was released about it, and what may still leave.

    For each table: rows, answers, the largest leverage of a row and of a pair, what each profile
    still allows, and refusals. An opened or a new ledger is noted in the audit file. After --new
    the old answers no longer count: a server that kept them can combine them with new ones.

    Examples:

      parsifl flower site ~/.parsifl/state

      parsifl flower site ~/.parsifl/state --client 0 --table table --open
    """
    if reopen and new:
        raise ConfigError("--open and --new exclude each other: remove one of them")
    change = "open" if reopen else "new" if new else None
    for line in plugins.load(plugins.OWNERS, "ledgers")(folder, client, table, change):
        typer.echo(line)


def backup(
    run: Path = typer.Argument(help="The run directory, while no server is writing to it."),
    file: Path = typer.Argument(help="The new file, such as study.tar.gz."),
) -> None:
    """Copy a run directory into one file with checksums.

    Client state stays on the nodes. A server that is restored from an old backup requests old
    versions of it; `deployment.lost_state` decides what happens if they are missing.

    Examples:

      parsifl flower backup study/run study.tar.gz
    """
    from parsifl.flower.retention import backup as copy

    typer.echo(f"{copy(run, file)} files are in {file}")


def restore(
    file: Path = typer.Argument(help="A file that `parsifl flower backup` wrote."),
    run: Path = typer.Argument(help="A new or empty directory."),
) -> None:
    """Restore a backup to a new directory; resume the run there with deployment.resume=true.

    Examples:

      parsifl flower restore study.tar.gz study/run
    """
    from parsifl.flower.retention import restore as write

    typer.echo(f"{write(file, run)} files are in {run}")


def rotate(
    folder: Path = typer.Argument(
        metavar="DIR", help="A directory that `parsifl flower keys` created."
    ),
    node: int = typer.Option(..., min=0, help="The number of the node."),
) -> None:
    """Replace the key pair of one node.

    Register the new public key with Flower, unregister the old node, and start the node with its
    new key. It then has a new node id: resume the run with deployment.rebind=true.

    Examples:

      parsifl flower rotate keys --node 1
    """
    need_flower()
    from parsifl.flower.tls import KeyFolder, add_node

    key_folder = KeyFolder(folder)
    if not key_folder.public(node).exists():
        raise ConfigError(f"{folder} has no key of node {node}")
    add_node(key_folder, node)
    typer.echo(f"{key_folder.node(node)} and {key_folder.public(node)} are new")


def units(
    folder: Path = typer.Argument(metavar="DIR", help="A directory for the files."),
    host: str = typer.Option("fl.example.org", help="The name or address of the server."),
    node: int = typer.Option(1, min=0, help="The number of the node."),
) -> None:
    """Write systemd units for the server and for a node, with restricted rights.

    Examples:

      parsifl flower units units --host fl.example.org --node 1
    """
    from parsifl.flower.app_template import write_units

    for path in write_units(folder, host, node):
        typer.echo(path)


def add_node(
    folder: Path = typer.Argument(
        metavar="DIR", help="A directory that `parsifl flower keys` created."
    ),
) -> None:
    """Create the key pair of one more node, with the next number.

    Register the public key with Flower. A new run with one more client includes the node.

    Examples:

      parsifl flower add-node keys
    """
    need_flower()
    from parsifl.flower import tls

    keys = tls.KeyFolder(folder)
    if not keys.authority.exists():
        raise ConfigError(f"{folder} holds no keys; `parsifl flower keys` creates them")
    number = next(number for number in itertools.count() if not keys.public(number).exists())
    tls.add_node(keys, number)
    typer.echo(f"{keys.node(number)} and {keys.public(number)} are new")


def renew(
    folder: Path = typer.Argument(
        metavar="DIR", help="A directory that `parsifl flower keys` created."
    ),
    days: int = typer.Option(30, min=1, help="Validity of the new certificate in days."),
) -> None:
    """Renew the server's certificate with the same authority and key.

    Copy it to the server and restart the SuperLink. Nothing changes on the nodes.

    Examples:

      parsifl flower renew keys --days 365
    """
    need_flower()
    from parsifl.flower import tls

    keys = tls.KeyFolder(folder)
    tls.renew(keys, days)
    typer.echo(f"{keys.certificate} is new")


def mount(group: typer.Typer) -> None:
    """Add the commands to a group."""
    for command in (status, check, units, rotate, renew, add_node, forget, site, backup, restore):
        group.command()(command)
