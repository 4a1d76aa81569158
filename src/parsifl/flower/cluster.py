"""A Flower deployment on loopback, and a whole experiment on it: `parsifl run --engine flower`."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any, Self, final

from parsifl.core.errors import ConfigError, ParsiflError
from parsifl.data.download import FOLDER_VARIABLE
from parsifl.engine import checkpoint
from parsifl.engine.experiment import Experiment, problem_for
from parsifl.engine.record import RoundRecord, headline
from parsifl.engine.run_dir import RunData, RunDir, open_run, read_records
from parsifl.engine.safe_files import reject_foreign, reject_links, replace_file
from parsifl.flower import node
from parsifl.flower.app_template import PARTITION, write_app
from parsifl.flower.client import STATE_VARIABLE
from parsifl.flower.server import check_free
from parsifl.flower.settings import (
    DONE_FILE,
    ERROR_FILE,
    TRIAL_DIRECTORY,
    Deployment,
    clear,
    to_config,
)
from parsifl.flower.tls import KeyFolder, make_keys
from parsifl.flower.worker import supports_workers

HOST = "127.0.0.1"
NAME = "loopback"
QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
}
"""Environment that disables Flower's telemetry and installation of packages."""

POLLING = {"FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1"}
"""Seconds between polls for work; Flower's default of 1 would delay every exchange."""

_FIRST_LINE = "# written by parsifl\n"
_START_SECONDS = 90.0
_CLI_SECONDS = 180.0
_POLL = 0.5
_STATUS_SECONDS = 30.0


class Cluster:
    """SuperLink and SuperNodes for a trial; it stops only its own child processes.

    Parameters
    ----------
    folder
        The directory of logs, keys, client state and Flower's own files.
    clients
        The number of nodes.
    secure
        TLS and authenticated nodes; False sends everything unencrypted, over loopback only.
    simulation
        Flower's simulation runtime (Ray) instead of nodes.
    workers
        Whether each node has a long-lived process that answers its messages (`flower.node`);
        Linux only.
    node_config
        Additional entries of every node's configuration; {id} is replaced by its number.
    variables
        Environment variables for every process.
    """

    def __init__(
        self,
        folder: Path,
        clients: int,
        *,
        secure: bool = True,
        simulation: bool = False,
        workers: bool = True,
        node_config: str = "",
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self.folder, self.clients = folder.resolve(), clients
        self._secure, self._simulation = secure and not simulation, simulation
        workers = workers and supports_workers()
        self._command = ("parsifl", "flower", "node") if workers else ("flower-supernode",)
        self._port, self._node_config = free_port(), node_config
        self._link: subprocess.Popen[bytes] | None = None
        self._before: Any = None
        self._nodes: dict[int, subprocess.Popen[bytes]] = {}
        self._home = self.folder / "flwr"
        self._database = self.folder / "superlink.db"
        self._check_own()
        self.folder.chmod(0o700)  # the SuperLink's database holds uploads
        self._home.mkdir(exist_ok=True)
        self.keys: KeyFolder | None = None
        if self._secure:
            key_folder = KeyFolder(self.folder / "keys")
            self.keys = (
                key_folder if key_folder.authority.exists() else make_keys(key_folder.path, clients)
            )
        self.environment = {
            **os.environ,
            **QUIET,
            **POLLING,
            "FLWR_HOME": str(self._home),
            STATE_VARIABLE: str(self.folder / "state"),
            "PYTHONUNBUFFERED": "1",
            "NO_COLOR": "1",
            "COLUMNS": "200",
            # nodes share this machine: more threads would only compete
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
            **(variables or {}),
        }
        self._write_connection()

    @property
    def address(self) -> str:
        """The address of the SuperLink."""
        return f"{HOST}:{self._port}"

    @property
    def node_address(self) -> str:
        """The address of the SuperLink for nodes."""
        return self.address

    @property
    def variables_file(self) -> Path:
        """A script with the environment that the `flwr` command needs for this SuperLink."""
        return self.folder / "variables.sh"

    def _check_own(self) -> None:
        """Reject a directory that has files with our names that no earlier trial wrote."""
        names = [self._home.name, self._database.name, "keys", "state", self.variables_file.name]
        reject_links(*(self.folder / name for name in names), self._home / "config.toml")
        try:
            ours = self.variables_file.read_text(errors="replace").startswith(_FIRST_LINE)
        except FileNotFoundError:
            ours = False
        if not ours:
            reject_foreign(self.folder, names, self.variables_file.name)
            self.folder.mkdir(parents=True, exist_ok=True)
            replace_file(self.variables_file, _FIRST_LINE.encode())

    def _write_connection(self) -> None:
        security = "insecure = true"
        if self.keys is not None:
            security = f"root-certificates = {json.dumps(str(self.keys.authority))}"
        text = (
            f'[superlink]\ndefault = "{NAME}"\n\n[superlink.{NAME}]\n'
            f'address = "{self.address}"\n{security}\n'
        )
        replace_file(self._home / "config.toml", text.encode())
        variables = {**QUIET, "FLWR_HOME": shlex.quote(str(self._home))}
        lines = [f"export {name}={value}\n" for name, value in variables.items()]
        replace_file(self.variables_file, "".join([_FIRST_LINE, *lines]).encode())

    # ------------------------------------------------------------------ processes
    def start(self) -> None:
        """Start everything; authenticated nodes are registered first."""
        self._database.unlink(missing_ok=True)  # of an earlier trial; client state is elsewhere
        self.start_link()
        if self._simulation:
            return
        if self.keys is not None:
            self.register(range(self.clients))
        for number in range(self.clients):
            self.start_node(number)

    def start_link(self) -> None:
        """Start the SuperLink and wait until it listens."""
        options = ["--insecure"]
        if self.keys is not None:
            options = [
                *("--ssl-ca-certfile", str(self.keys.authority)),
                *("--ssl-certfile", str(self.keys.certificate)),
                *("--ssl-keyfile", str(self.keys.key)),
                "--enable-supernode-auth",
            ]
        if self._simulation:
            options.append("--simulation")
        self._link = self._popen(
            "superlink",
            "flower-superlink",
            *(*options, "--host", HOST, "--port", str(self._port)),
            *("--database", str(self._database)),
        )
        end = time.monotonic() + _START_SECONDS
        while time.monotonic() < end:
            if self._link.poll() is not None:
                raise ParsiflError(f"the SuperLink exited at once:\n{self.log_tail('superlink')}")
            try:
                with socket.create_connection((HOST, self._port), 0.5):
                    return
            except OSError:
                time.sleep(0.2)
        raise ParsiflError(f"the SuperLink is not listening after {_START_SECONDS:g} s")

    def register(self, numbers: Sequence[int]) -> None:
        """Register the public keys of nodes with the SuperLink."""
        keys = self._need_keys()
        pending = [
            (n, self._cli_process("supernode", "register", str(keys.public(n)), NAME))
            for n in numbers
        ]
        for number, process in pending:
            out = _output(process)
            if process.returncode:
                raise ParsiflError(f"node {number} could not be registered:\n{out[-2000:]}")

    def start_node(self, number: int, key: Path | None = None, *, plain: bool = False) -> None:
        """Start a SuperNode; tests pass a wrong key or none."""
        options = ["--insecure"]
        if self.keys is not None:
            options = ["--root-certificates", str(self.keys.authority)]
            if not plain:
                private = key or self.keys.node(number)
                options += ["--auth-supernode-private-key", str(private)]
        self.spawn_node(number, options)

    def spawn_node(self, number: int, options: Sequence[str]) -> None:
        """Start a SuperNode with these security options."""
        extra = self._node_config.replace("{id}", str(number))
        config = f"partition-id={number} num-partitions={self.clients} {extra}".strip()
        self._nodes[number] = self._popen(
            f"node{number}",
            *self._command,
            *(*options, "--superlink", self.node_address),
            *("--host", HOST, "--port", str(free_port()), "--node-config", config),
        )

    def kill_node(self, number: int) -> None:
        """Kill a SuperNode and the ClientApp that it runs."""
        process = self._nodes.pop(number)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def kill_link(self) -> None:
        """Kill the SuperLink; the server that it runs notices and stops."""
        if self._link is not None:
            self._link.kill()
            self._link.wait()

    def node_pid(self, number: int) -> int:
        """Return the process id of a SuperNode."""
        return self._nodes[number].pid

    def node_exit(self, number: int) -> int | None:
        """Return the exit code of a SuperNode; None while it runs."""
        return self._nodes[number].poll()

    def alive(self) -> bool:
        """Return whether the SuperLink is running."""
        return self._link is not None and self._link.poll() is None

    def log_tail(self, name: str, characters: int = 3000) -> str:
        """Return the end of a process's log: "superlink", "node0", ..."""
        path = self.folder / f"{name}.log"
        return path.read_text(errors="replace")[-characters:] if path.exists() else ""

    def stop(self) -> None:
        """Terminate the child processes; kill those that do not exit."""
        node.end([*self._nodes.values(), *([self._link] if self._link else [])])
        self._nodes, self._link = {}, None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            # a normal exit of this process stops the children too
            self._before = signal.signal(signal.SIGTERM, _leave)
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)

    def nodes(self) -> list[dict[str, Any]]:
        """Return the nodes that the SuperLink knows, each with its status."""
        return list(self._cli("supernode", "list", NAME, "--format", "json")["nodes"])

    # ------------------------------------------------------------------ runs
    def submit(self, app: Path, **changes: Any) -> str:
        """Start a run of an app and return its number."""
        arguments = ["run", str(app), NAME, "--format", "json"]
        if changes:
            texts = (f"{name}={json.dumps(value)}" for name, value in changes.items())
            arguments += ["--run-config", " ".join(texts)]
        if self._simulation:
            amount = f"num-supernodes={self.clients} client-resources-num-cpus=1"
            arguments += ["--federation-config", amount]
        return str(self._cli(*arguments)["run-id"])

    def status(self, run: str) -> str:
        """Return "running", "finished:completed", "finished:failed" ..."""
        return str(
            self._cli("list", NAME, "--run-id", run, "--format", "json")["runs"][0]["status"]
        )

    def wait(self, run: str, seconds: float) -> str:
        """Wait until a run is finished and return its status."""
        end = time.monotonic() + seconds
        while not (status := self.status(run)).startswith("finished"):
            if time.monotonic() > end:
                raise ParsiflError(f"the run is still {status} after {seconds:g} s")
            time.sleep(0.5)
        return status

    def _cli(self, *arguments: str) -> Any:
        return parsed(arguments[0], _output(self._cli_process(*arguments)))

    def _cli_process(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [node.program("flwr"), *arguments],
            env=self.environment,
            cwd=self.folder,
            text=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    def _popen(self, log: str, name: str, *arguments: str) -> subprocess.Popen[bytes]:
        command = [node.program(name), *arguments]
        return node.start(command, self.folder / f"{log}.log", self.environment, self.folder)

    def _need_keys(self) -> KeyFolder:
        if self.keys is None:
            raise ConfigError("this cluster has no keys: it was made with secure=False")
        return self.keys


def _leave(number: int, _: object) -> None:
    raise SystemExit(128 + number)


def _output(process: subprocess.Popen[str]) -> str:
    try:
        return process.communicate(timeout=_CLI_SECONDS)[0]
    except subprocess.TimeoutExpired:
        raise ParsiflError(f"the flwr command has not finished in {_CLI_SECONDS:g} s") from None
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def parsed(command: str, output: str) -> dict[str, Any]:
    """Return the JSON that a `flwr` command printed; raise ParsiflError with its own message."""
    try:
        answer: dict[str, Any] = json.loads(output[output.index("{") :])
    except ValueError:
        raise ParsiflError(f"flwr {command} failed:\n{output[-3000:]}") from None
    if not answer.get("success", True):
        raise ParsiflError(f"flwr {command} failed: {answer.get('error-message', output)}")
    return answer


def free_port() -> int:
    """Return a port on loopback that is free at this moment."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


@final
@dataclass(frozen=True)
class FlowerRun:
    """A finished run on Flower.

    Attributes
    ----------
    records
        One record per round.
    server
        The server's last state.
    """

    experiment: Experiment
    run_dir: Path
    records: Sequence[RoundRecord]
    server: Any
    score: str
    maximize: bool

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The records as JSON values, as in metrics.jsonl."""
        return [record.to_json() for record in self.records]

    def recorded(self) -> RunData:
        """Return the run as its directory records it."""
        return open_run(self.run_dir)

    def summary(self) -> dict[str, Any]:
        """Return the headline numbers, from the round that the evaluation selects."""
        return headline(self.records, self.score, self.maximize, self.experiment.evaluation.select)


def run_on_flower(
    experiment: Experiment,
    folder: str | Path,
    *,
    resume: bool = False,
    secure: bool = True,
    simulation: bool = False,
    workers: bool = True,
    deployment: Deployment | None = None,
    data_dir: str | Path | None = None,
    progress: Callable[[RoundRecord], None] | None = None,
) -> FlowerRun:
    """Run an experiment on Flower with every process on this machine, over loopback.

    Parameters
    ----------
    folder
        The run directory; logs, keys and client state are in its subdirectory `flower`.
    secure
        TLS and authenticated nodes.
    simulation
        Flower's simulation runtime (Ray) instead of a SuperLink with SuperNodes.
    workers
        Whether each node has a long-lived process that answers its messages, for shorter rounds;
        Linux only.
    deployment
        Quorum and time limits; `out` and `resume` are set here.
    data_dir
        The directory of the dataset, for this process and for the nodes.
    """
    out = Path(folder).resolve()
    check_free(out, resume=resume)
    RunDir(out).check()
    if simulation and find_spec("ray") is None:
        raise ConfigError(
            "Flower's simulation runtime needs Ray, which is not installed; install the extra: "
            "parsifl[flower-sim]"
        )
    data = experiment.load(data_dir)
    chosen = replace(experiment, clients=len(data))
    # errors are raised here, before anything is started
    problem = problem_for(chosen.model, data)
    chosen.build_algorithm().check_capabilities(problem)
    # all nodes are started here, and have new ids after every start
    plan = replace(deployment or Deployment(), out=str(out), resume=resume, rebind=True)
    trial = out / TRIAL_DIRECTORY
    app = trial / "app"
    clear(out)
    reject_links(trial)
    write_app(app, PARTITION, to_config(chosen, plan), "trial", replace=True)
    variables = {} if data_dir is None else {FOLDER_VARIABLE: str(Path(data_dir).resolve())}
    with Cluster(
        trial,
        len(data),
        secure=secure,
        simulation=simulation,
        workers=workers,
        variables=variables,
    ) as cluster:
        run = cluster.submit(app)
        follow(cluster, run, out, progress)
    loaded = checkpoint.load(out / "checkpoint", chosen.build_algorithm().tree_types())
    server = None if loaded is None else loaded.server
    records = read_records(out)
    return FlowerRun(chosen, out, records, server, problem.primary_metric, problem.higher_is_better)


def follow(
    cluster: Cluster,
    run: str,
    out: Path,
    progress: Callable[[RoundRecord], None] | None = None,
) -> None:
    """Wait for a run, reporting its rounds; raise ParsiflError if it fails.

    It reads the run directory, not Flower: a query to Flower costs seconds of CPU time.
    """
    shown, asked = 0, time.monotonic()
    while True:
        finished = (out / DONE_FILE).exists()  # checked first: if it exists, all records are there
        records = read_records(out)
        if progress is not None:
            for record in records[shown:]:
                progress(record)
        shown = len(records)
        if (out / ERROR_FILE).exists():
            raise ParsiflError((out / ERROR_FILE).read_text().strip())
        if finished:
            return
        if time.monotonic() - asked > _STATUS_SECONDS:
            status, asked = cluster.status(run), time.monotonic()
            ended = any((out / name).exists() for name in (DONE_FILE, ERROR_FILE))
            if status.startswith("finished") and not ended:  # it may have ended meanwhile
                tail = cluster.log_tail("superlink")
                raise ParsiflError(f"the run is {status}; it can be resumed. The log:\n{tail}")
        time.sleep(_POLL)
