"""A whole experiment on Flower on this machine: what `parsifl run --engine flower` does."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, final

from parsifl.core.errors import ConfigError, ParsiflError
from parsifl.data.download import FOLDER_VARIABLE
from parsifl.engine import checkpoint
from parsifl.engine.experiment import Experiment, problem_for
from parsifl.engine.record import RoundRecord, headline
from parsifl.engine.run_dir import RunData, RunDir, open_run, read_records
from parsifl.engine.safe_files import reject_links
from parsifl.flower.app_template import PARTITION, write_app
from parsifl.flower.cluster import Cluster
from parsifl.flower.server import check_free
from parsifl.flower.settings import DONE_FILE, ERROR_FILE, Deployment, clear, to_config

_POLL = 0.5
_STATUS_SECONDS = 30.0


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
    workers: bool = False,
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
        Each node has a process that stays and answers its messages, so that a round is shorter.
    deployment
        Quorum and time limits; `out` and `resume` are set here.
    data_dir
        Where the dataset is, for this process and for the nodes.
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
    # mistakes show here, before anything is started
    problem = problem_for(chosen.model, data)
    chosen.build_algorithm().check_capabilities(problem)
    # all nodes are started here, and have new ids after every start
    plan = replace(deployment or Deployment(), out=str(out), resume=resume, rebind=True)
    place = out / "flower"
    app = place / "app"
    clear(out)
    reject_links(place)
    write_app(app, PARTITION, to_config(chosen, plan), "trial", replace=True)
    variables = {} if data_dir is None else {FOLDER_VARIABLE: str(Path(data_dir).resolve())}
    with Cluster(
        place,
        len(data),
        secure=secure,
        simulation=simulation,
        workers=workers,
        variables=variables,
    ) as cluster:
        run = cluster.submit(app)
        follow(cluster, run, out, progress)
    found = checkpoint.load(out / "checkpoint", chosen.build_algorithm().tree_types())
    server = None if found is None else found.server
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
        finished = (out / DONE_FILE).exists()  # looked for first: then all records are there
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
            if status.startswith("finished") and not (out / DONE_FILE).exists():
                tail = cluster.log_tail("superlink")
                raise ParsiflError(f"the run is {status}; it can be resumed. The log:\n{tail}")
        time.sleep(_POLL)
