"""Every statement counts for the client of the node that makes it, and for no other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from tests.flower.inprocess import Answer, InProcess, changed, fields
from tests.flower.test_server import experiment
from tests.records import read_metrics
from tests.sites.deployment.test_families import SPECS
from tests.sites.deployment.test_refusals import Guarded, four_sites
from tests.sites.deployment.test_regression import EXPERIMENT, Sites, hospitals, study

from parsifl.core.errors import ParsiflError
from parsifl.engine.experiment import Experiment
from parsifl.flower.message import Envelope, Kind, Replies, Requests
from parsifl.flower.network_schema import FailureReply, SitesRefused
from parsifl.flower.settings import Deployment, DeploymentSettings
from parsifl.sites import load
from parsifl.sites.deployment.guards import Guards
from parsifl.sites.deployment.regression import MODEL_FILE, Regression
from parsifl.sites.deployment.table_site import TableSite

NODES = {"100": 0, "101": 1, "102": 2, "103": 3}
TABLES: list[dict[str, int]] = [{}, NODES]
"""Of `deployment.nodes`: none, and all clients."""
RULES = ["rows", "release", "leverage"]


def refusal(client: int, rule: str = "rows") -> Envelope:
    detail = f"site {client} refuses (rule '{rule}')"
    return FailureReply(error="Refusal", rule=rule, detail=detail, client=client).envelope()


def slanderer(at: Kind, rule: str = "rows", own: int = 3, named: int = 2) -> Any:
    """Return a fault: the node of client `own` refuses in the name of another client."""

    def fault(kind: Kind, client: int, _: Envelope, answer: Callable[[], Envelope]) -> Answer:
        return refusal(named, rule) if kind == at and client == own else answer()

    return fault


# ------------------------------------------------------------------ without guards
@pytest.mark.parametrize("nodes", TABLES)
@pytest.mark.parametrize("rule", RULES)
def test_a_strange_node_cannot_end_a_run_at_the_start(
    rule: str, nodes: dict[str, int], tmp_path: Path
) -> None:
    clients = {**{100 + number: number for number in range(4)}, 200: 9}
    link = InProcess(experiment("fedavg", rounds=1), tmp_path / "state", clients=clients)
    link.fault = slanderer("hello", rule, own=9)
    (record,) = link.run(tmp_path / "run", nodes=nodes)
    assert record["trained"] == 4


@pytest.mark.parametrize("nodes", TABLES)
def test_a_client_that_refuses_for_another_is_the_one_that_is_missing(
    nodes: dict[str, int], tmp_path: Path
) -> None:
    link = InProcess(experiment("fedavg", rounds=1), tmp_path / "state", slanderer("hello"))
    with pytest.raises(ParsiflError, match="the clients 3 of 4 have not reported") as error:
        link.run(tmp_path / "run", nodes=nodes, wait=0.01)
    assert not isinstance(error.value, SitesRefused)
    assert any(line.startswith("node 103 is rejected") for line in link.log)


@pytest.mark.parametrize("nodes", TABLES)
def test_a_refusal_in_hello_ends_no_resume_that_has_its_quorum(
    nodes: dict[str, int], tmp_path: Path
) -> None:
    chosen = experiment("fedavg", rounds=1, evaluate_every=0)
    InProcess(chosen, tmp_path / "state").run(tmp_path / "run")
    link = InProcess(replace(chosen, rounds=3), tmp_path / "state", slanderer("hello"))
    records = link.run(tmp_path / "run", resume=True, nodes=nodes)
    assert [record["trained"] for record in records] == [4, 3, 3]
    assert any("it claims to be client 2, which" in line for line in link.log)


@pytest.mark.parametrize("kind", ["train", "evaluate"])
def test_a_refusal_of_work_for_another_client_is_no_refusal(kind: Kind, tmp_path: Path) -> None:
    link = InProcess(experiment("fedavg", rounds=1), tmp_path / "state", slanderer(kind))
    (record,) = link.run(tmp_path / "run")
    reasons = record["dropped" if kind == "train" else "unevaluated"]
    assert reasons == {3: "client: a failure of 2, not 3"}


def test_a_node_is_one_client_even_if_the_other_is_free(tmp_path: Path) -> None:
    chosen = experiment("fedavg", rounds=1, evaluate_every=0)
    InProcess(chosen, tmp_path / "state").run(tmp_path / "run")
    nodes = {100: 0, 101: 2, 103: 3}  # node 102 is gone, and node 101 takes its number
    again = InProcess(replace(chosen, rounds=2), tmp_path / "state", clients=nodes)
    records = again.run(tmp_path / "run", resume=True, rebind=True)
    assert any("to be client 2, but was client 1 before" in line for line in again.log)
    assert sorted(records[1]["dropped"]) == [1, 2]


# ------------------------------------------------------------------ a regression
@dataclass
class Slandering(Guarded):
    """Four sites; the node of client 3 refuses in the name of client 2, `times` times."""

    at: Kind = "hello"
    times: int = 1
    strange: bool = False  # a node without a client does it instead

    def nodes(self) -> list[int]:
        return [*([9] if self.strange else []), *range(103, 99, -1)]

    def ask(
        self,
        requests: Requests,
        timeout: float,  # noqa: ARG002 - a Link
        enough: Callable[[Replies], bool] | None = None,  # noqa: ARG002 - all answer at once
    ) -> Replies:
        return {node: self._reply(kind, node, sent) for node, (kind, sent) in requests.items()}

    def _reply(self, kind: Kind, node: int, request: Envelope) -> Envelope:
        hostile = node == (9 if self.strange else 103)
        if hostile and kind == self.at and self.times:
            self.times -= 1
            return refusal(2)
        return refusal(2) if node == 9 else self._answer(kind, node - 100, request)


def fit(folder: Path, nodes: dict[str, int], wait: float = 60.0, **changes: Any) -> Slandering:
    chosen = Experiment("fedbestsubset", {"tau": 3}, clients=4, rounds=60, evaluate_every=0)
    spec = SPECS["linear"]
    sites = Slandering(chosen, spec, four_sites("linear"), folder / "state", **changes)
    plan = Deployment(out=str(folder / "run"), wait=wait, on_refusal="continue", nodes=nodes)
    Regression(DeploymentSettings(chosen, 4, plan), sites, sites.log.append, spec).run()
    return sites


@pytest.mark.parametrize("nodes", TABLES)
@pytest.mark.parametrize("strange", [False, True])
@pytest.mark.parametrize("at", ["agree", "hello"])
def test_no_node_excludes_another_site(
    at: Kind, strange: bool, nodes: dict[str, int], tmp_path: Path
) -> None:
    sites = fit(tmp_path, nodes, at=at, strange=strange)
    model: Any = load(tmp_path / "run" / MODEL_FILE)
    assert model.clients_.tolist() == ["0", "1", "2", "3"]
    assert model.left_out_ == {}
    assert any(f"node {9 if strange else 103} " in line for line in sites.log)


@pytest.mark.parametrize("nodes", TABLES)
@pytest.mark.parametrize("at", ["agree", "hello", "train", "products"])
def test_a_site_that_keeps_refusing_for_another_ends_the_run_in_its_own_name(
    at: Kind, nodes: dict[str, int], tmp_path: Path
) -> None:
    with pytest.raises(ParsiflError) as error:
        fit(tmp_path, nodes, wait=0.01, at=at, times=10**9)
    assert not isinstance(error.value, SitesRefused)
    assert not (tmp_path / "run" / MODEL_FILE).exists()
    if at in ("train", "products"):
        assert "client 3" in str(error.value)
        assert "a failure of 2, not 3" in str(error.value)


def test_an_excluded_site_does_not_come_back_as_another(tmp_path: Path) -> None:
    @dataclass
    class Returning(Guarded):
        """Site 0 refuses; its node then describes its table in the name of site 2."""

        def _answer(self, kind: Kind, node: int, request: Envelope) -> Envelope:
            if node == 0 and kind == "agree" and self.log:
                table, root = self.tables[0], self.root
                site = TableSite(self.experiment, 0, table, root / "again", self.spec)
                return changed(site.answer(kind, request), client=2)
            return super()._answer(kind, node, request)

    chosen = Experiment("fedbestsubset", {"tau": 3}, clients=4, rounds=60, evaluate_every=0)
    spec = SPECS["linear"]
    sites = Returning(chosen, spec, four_sites("linear"), tmp_path / "state")
    sites.guards = {0: Guards(leverage=0.01)}
    plan = Deployment(out=str(tmp_path / "run"), wait=0.01, on_refusal="continue")
    Regression(DeploymentSettings(chosen, 4, plan), sites, sites.log.append, spec).run()
    model: Any = load(tmp_path / "run" / MODEL_FILE)
    assert list(model.left_out_) == ["0"]
    assert model._exact.rows.tolist() == [len(table) for table in sites.tables[1:]]


def test_a_site_that_refuses_a_resume_is_one_missing_client(tmp_path: Path) -> None:
    @dataclass
    class Partly(Sites):
        closed: bool = False

        def _answer(self, kind: Kind, client: int, request: Envelope) -> Envelope:
            if self.closed and client == 1:
                return refusal(1)
            if not self.closed and kind == "train" and fields(request)["round"] == 2:
                return Envelope('{"error": "MemoryError"}')
            return super()._answer(kind, client, request)

    sites = Partly(hospitals(tmp_path / "app"), tmp_path / "state")
    with pytest.raises(ParsiflError, match="round 3: 0 uploads arrived"):
        study(sites, tmp_path / "run", retries=0).run()
    sites.closed = True
    with pytest.raises(ParsiflError, match="client 1 is not connected for the last step"):
        study(sites, tmp_path / "run", resume=True).run()
    trained = [record["trained"] for record in read_metrics(tmp_path / "run")]
    assert trained == [3, 3, *[2] * (EXPERIMENT.rounds - 2)]
    with pytest.raises(SitesRefused, match="site 1 refuses"):
        study(sites, tmp_path / "run", resume=True, quorum=1.0).run()
