"""A run on Flower as plain values: those of an `Experiment`, and a table `deployment`.

They are in the app's pyproject.toml under [tool.flwr.app.config]. Flower flattens tables, so
`--run-config "deployment.resume=true settings.lr=0.5"` changes single values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal, final

from annotated_types import Ge, Lt

from parsifl.core import config
from parsifl.core.config import Count, Fraction, Positive, Size
from parsifl.core.errors import CheckpointError, ConfigError
from parsifl.engine.experiment import Experiment
from parsifl.engine.safe_files import reject_foreign, reject_links

ERROR_FILE = "error.txt"
"""In the run directory: why the last attempt ended."""
DONE_FILE = "done"
"""In the run directory: the server has finished everything."""
STATUS_FILE = "status.json"
"""In the run directory: what the server is doing."""
PROCESS_FILE = "server.pid"
"""In the run directory: the number of the server's process."""
TRIAL_DIRECTORY = "flower"
"""In the run directory: logs, private keys and client state of a deployment on one machine."""
DEPLOYMENT_FILES = (ERROR_FILE, DONE_FILE, STATUS_FILE, PROCESS_FILE, TRIAL_DIRECTORY)
"""What a deployment writes to the run directory, besides the files of every run."""

LOG_FILE = "server.log"
"""In the run directory: the log of its servers."""

NONE = "none"
"""Means None in `settings`, because TOML has no null value."""

_TABLE = "deployment"


@final
@dataclass(frozen=True)
class Deployment:
    """Settings of a deployment on Flower.

    Parameters
    ----------
    out
        The run directory, on the server's machine.
    resume
        Resume the run in `out`.
    wait
        Seconds for all clients to report at the start.
    timeout
        Seconds for the clients to answer in a round; the round continues without later ones.
    quorum
        The fraction of the cohort whose uploads must arrive for a round to count.
    retries
        How often clients without an answer are asked again while the quorum is not reached.
    lost_state
        What happens to a client whose state is missing or damaged: it starts again from its first
        state ("reinitialize"), is dropped ("drop"), or stops the run ("stop").
    nodes
        Client numbers by node id. A node that is not listed is rejected; empty: any node may
        report as a client, and a client belongs to the node that reported first.
    rebind
        Whether another node may take over a client whose node is not connected. For deployments
        without node keys, where a node has a new id after every start.
    largest_share
        The fraction of a round's weight, or of the evaluated rows, above which a client is noted in
        the record.
    classes
        The largest number of classes that a client may report; None: 1,000,000.
    on_refusal
        For regressions: what happens when the guards of a site refuse. The fit stops with the site
        and its rule ("stop"), or starts again without the site ("continue"), as long as the guards
        of the others allow that few sites.
    check
        Check versions, clocks, disks and data schemas on every node, and stop before the first
        round.
    metrics_port
        The port of a Prometheus endpoint on the server's loopback address; 0: none.
    certificate
        The SuperLink's certificate, to report when it expires; empty: it is not reported.
    """

    out: str = "run"
    resume: bool = False
    wait: Positive = 300.0
    timeout: Positive = 600.0
    quorum: Fraction = 0.5
    retries: Size = 3
    lost_state: Literal["reinitialize", "drop", "stop"] = "reinitialize"
    nodes: dict[str, Size] = field(default_factory=dict)
    rebind: bool = False
    largest_share: Fraction = 0.5
    classes: Count | None = None
    on_refusal: Literal["stop", "continue"] = "stop"
    check: bool = False
    metrics_port: Annotated[int, Ge(0), Lt(65536)] = 0
    certificate: str = ""

    def __post_init__(self) -> None:
        config.check(self)


@final
@dataclass(frozen=True)
class DeploymentSettings:
    """Everything that server and clients read from the app's configuration."""

    experiment: Experiment
    clients: Count
    deployment: Deployment = field(default_factory=Deployment)


def clear(out: Path) -> None:
    """Remove the end markers of an earlier attempt at a run.

    Raises
    ------
    CheckpointError
        If `out` has files of these names that no server wrote.
    """
    marks = (DONE_FILE, ERROR_FILE, STATUS_FILE)
    process = out / PROCESS_FILE
    reject_links(process, out / LOG_FILE, *(out / mark for mark in marks))
    if not process.exists():  # every server writes it before anything else
        reject_foreign(out, (*marks, LOG_FILE), PROCESS_FILE)
    elif not process.read_text(errors="replace").isdecimal():
        raise CheckpointError(
            f"{process} was not written by Parsifl; move it, or choose another directory"
        )
    for mark in marks:
        (out / mark).unlink(missing_ok=True)


def read(values: Mapping[str, Any]) -> DeploymentSettings:
    """Read the flat configuration that Flower passes to an app.

    >>> read({"algorithm": "fedavg", "clients": 3, "settings.lr": 0.5}).experiment.settings
    {'lr': 0.5}
    """
    tree: dict[str, Any] = {}
    for name, value in values.items():
        table_values = tree
        *tables, last = name.split(".")
        for table in tables:
            table_values = table_values.setdefault(table, {})
        table_values[last] = value
    deployment = config.build(Deployment, tree.pop(_TABLE, {}))
    settings = tree.get("settings", {})
    tree["settings"] = {name: None if value == NONE else value for name, value in settings.items()}
    experiment = Experiment.read(tree)
    if experiment.clients is None:
        raise ConfigError("clients is not set; set it to the number of clients of the federation")
    return DeploymentSettings(experiment, experiment.clients, deployment)


def to_config(experiment: Experiment, deployment: Deployment) -> dict[str, Any]:
    """Return the tables for [tool.flwr.app.config] without values that are None."""
    described: dict[str, Any] = {}
    for item in fields(experiment):
        value = getattr(experiment, item.name)
        if item.name in ("evaluation", "network"):
            value = config.to_json(value)
        if item.name == "settings":  # None is a choice here, not an omission
            value = {name: NONE if chosen is None else chosen for name, chosen in value.items()}
        described[item.name] = value
    described[_TABLE] = config.to_json(deployment)
    plain: dict[str, Any] = _without_none(described)
    return plain


def _without_none(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {k: _without_none(v) for k, v in value.items() if v is not None}
    return value
