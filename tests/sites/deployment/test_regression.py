from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from tests.flower.inprocess import changed, fields

from parsifl.core.errors import ConfigError, ParsiflError
from parsifl.data.tables import as_columns
from parsifl.engine.experiment import Experiment
from parsifl.flower.app_template import write_app
from parsifl.flower.message import Envelope, Kind, Replies, Requests, respond
from parsifl.flower.settings import Deployment, DeploymentSettings
from parsifl.sites import FederatedSparseRegressor, load
from parsifl.sites.deployment.agreement import Agreement, RegressionSpec, read_csv
from parsifl.sites.deployment.guards import Guards
from parsifl.sites.deployment.regression import MODEL_FILE, Regression
from parsifl.sites.deployment.table_site import TableSchema, TableSite, prepare

EXPERIMENT = Experiment(
    "fedgradmp", {"tau": 4, "batch_size": None}, clients=3, rounds=4, evaluate_every=0
)

SPEC = RegressionSpec("days")
GUARDS = Guards(algorithms=("fedbestsubset", "fedgradmp"))
"""Of owners who allow the algorithm of `EXPERIMENT`."""


def hospitals(folder: Path) -> list[dict[str, list[str]]]:
    write_app(folder, "sparse-regression", {}, "study")
    return [read_csv(folder / "examples" / f"hospital{i}.csv") for i in range(3)]


def in_process(tables: list[dict[str, list[str]]], rounds: int = 4) -> tuple[Any, float]:
    """Fit the estimator to the same columns; return coefficients and intercept."""
    ready = [prepare(table, SPEC, TableSchema(), Guards()) for table in tables]
    agreed = Agreement.of([own.summary() for own in ready], SPEC, 20)
    x = np.concatenate([agreed.preprocessing.standardised(own.columns) for own in ready])
    y = np.concatenate([agreed.targets(own.columns)[:, 0] for own in ready])
    groups = np.repeat(np.arange(len(ready)), [own.rows for own in ready])
    model = FederatedSparseRegressor(
        4, solver="fedgradmp", rounds=rounds, standardize=False, fit_intercept=False
    )
    coef = model.fit(x, y, groups).coef_ / agreed.preprocessing.scale
    return coef, agreed.target_mean - float(coef @ agreed.preprocessing.mean)


@dataclass
class Sites:
    """A `Link` to three sites with tables."""

    tables: list[dict[str, list[str]]]
    root: Path
    asked: list[Kind] = field(default_factory=list)
    sent: list[Envelope] = field(default_factory=list)
    refuse: tuple[Kind, ...] = ()
    log: list[str] = field(default_factory=list)
    meanwhile: Callable[[], None] = lambda: None

    def nodes(self) -> list[int]:
        return [12, 11, 10]

    def ask(
        self,
        requests: Requests,
        timeout: float,  # noqa: ARG002 - a Link
        enough: Callable[[Replies], bool] | None = None,  # noqa: ARG002 - all answer at once
    ) -> Replies:
        self.asked += {kind for kind, _ in requests.values()}
        return {
            node: self._answer(kind, node - 10, request)
            for node, (kind, request) in requests.items()
            if kind not in self.refuse
        }

    def _answer(self, kind: Kind, client: int, request: Envelope) -> Envelope:
        table = self.tables[client]
        site = TableSite(EXPERIMENT, client, table, self.root, SPEC, guards=GUARDS)
        reply = respond(site, kind, request)
        self.sent.append(reply)
        return reply

    def pause(self, seconds: float) -> None:  # noqa: ARG002 - a Link
        """Wait for nothing; somebody may mend a site meanwhile."""
        self.meanwhile()


def study(sites: Sites, out: Path, **deployment: Any) -> Regression:
    plan = Deployment(out=str(out), **deployment)
    return Regression(DeploymentSettings(EXPERIMENT, 3, plan), sites, sites.log.append, SPEC)


def test_the_fit_across_sites_is_the_fit_in_process(tmp_path: Path) -> None:
    tables = hospitals(tmp_path / "app")
    sites = Sites(tables, tmp_path / "state")
    study(sites, tmp_path / "run").run()
    model = load(tmp_path / "run" / MODEL_FILE)
    coef, intercept = in_process(tables)
    assert np.allclose(model.coef_, coef, rtol=1e-12, atol=1e-14)
    assert model.intercept_ == pytest.approx(intercept, rel=1e-12)
    found = dict(zip(model.get_feature_names_out(), model.coef_, strict=True))
    assert np.count_nonzero(model.coef_) == 4
    assert found["age"] == pytest.approx(0.08, abs=0.01)
    assert found["marker3"] == pytest.approx(-0.9, abs=0.05)
    assert sites.asked == ["agree", "hello", *["train"] * 4, "products"]


def test_no_answer_is_as_long_as_the_rows(tmp_path: Path) -> None:
    sites = Sites(hospitals(tmp_path / "app"), tmp_path / "state")
    study(sites, tmp_path / "run").run()
    longest = max(sum(map(len, request.parts.values())) for request in sites.sent)
    assert longest < 400  # the tables have 80 to 200 rows of 16 columns


def test_a_run_goes_on_with_the_columns_that_it_began_with(tmp_path: Path) -> None:
    tables = hospitals(tmp_path / "app")
    sites = Sites(tables, tmp_path / "state", refuse=("products",))
    with pytest.raises(ParsiflError, match="sent no usable sums: no reply"):
        study(sites, tmp_path / "run").run()
    sites.refuse, sites.asked = (), []
    study(sites, tmp_path / "run", resume=True).run()
    assert sites.asked == ["hello", "products"]
    model = load(tmp_path / "run" / MODEL_FILE)
    assert np.allclose(model.coef_, in_process(tables)[0], rtol=1e-12, atol=1e-14)


def test_predictions_are_in_the_units_of_the_tables(tmp_path: Path) -> None:
    tables = hospitals(tmp_path / "app")
    study(Sites(tables, tmp_path / "state"), tmp_path / "run").run()
    model = load(tmp_path / "run" / MODEL_FILE)
    days = np.array([float(value) for value in tables[2]["days"]])
    frame = pd.DataFrame(as_columns(tables[2])).drop(columns="days")
    assert np.sqrt(np.mean((model.predict(frame.iloc[:, ::-1]) - days) ** 2)) < 0.5


def test_sites_that_cannot_tell_are_named(tmp_path: Path) -> None:
    tables = hospitals(tmp_path / "app")
    del tables[1]["days"]
    with pytest.raises(ParsiflError, match=r"2 of 3 clients have described.*no column 'days'"):
        study(Sites(tables, tmp_path / "state"), tmp_path / "run", wait=0.01).run()


def test_a_site_that_is_mended_while_the_server_waits_takes_part(tmp_path: Path) -> None:
    tables = hospitals(tmp_path / "app")
    whole = tables[1]
    tables[1] = {name: values for name, values in whole.items() if name != "days"}
    sites = Sites(tables, tmp_path / "state", meanwhile=lambda: tables.__setitem__(1, whole))
    study(sites, tmp_path / "run").run()
    complaints = [line for line in sites.log if "cannot take part yet" in line]
    assert len(complaints) == 1
    assert "node 11" in complaints[0]
    assert "no column 'days'" in complaints[0]
    model = load(tmp_path / "run" / MODEL_FILE)
    assert np.allclose(model.coef_, in_process(tables)[0], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    "text", ["", "5", "{}", "[" * 10**5, '{"format": 1}', '{"format": 1, "estimator": "x"}']
)
def test_a_damaged_model_is_an_error_of_the_file(text: str, tmp_path: Path) -> None:
    path = tmp_path / MODEL_FILE
    path.write_text(text)
    with pytest.raises(ParsiflError, match=r"model\.json"):
        load(path)


@pytest.mark.parametrize("kind", ["agree", "hello", "products"])
def test_a_site_cannot_change_its_number_on_the_way(kind: Kind, tmp_path: Path) -> None:
    sites = Sites(hospitals(tmp_path / "app"), tmp_path / "state")
    link: Any = sites
    answer = link._answer

    def lying(asked: Kind, client: int, request: Envelope) -> Envelope:
        reply: Envelope = answer(asked, client, request)
        return changed(reply, client=2) if (asked, client) == (kind, 1) else reply

    link._answer = lying
    with pytest.raises(
        ParsiflError, match=r"2 of 3|the clients 1 of 3|client 1 sent no usable sums"
    ):
        study(sites, tmp_path / "run", wait=0.01).run()
    if kind != "products":
        assert any("node 11" in line for line in sites.log)


@pytest.mark.parametrize("rows", [10**400, -1, 2**62, 1.5, None, [400]])
def test_a_hostile_summary_does_not_end_the_study(rows: Any, tmp_path: Path) -> None:
    sites = Sites(hospitals(tmp_path / "app"), tmp_path / "state")
    link: Any = sites
    answer = link._answer
    lies = iter([True])

    def lying(asked: Kind, client: int, request: Envelope) -> Envelope:
        reply: Envelope = answer(asked, client, request)
        if asked == "agree" and client == 1 and next(lies, False):
            return changed(reply, summary={**fields(reply)["summary"], "rows": rows})
        return reply

    link._answer = lying
    study(sites, tmp_path / "run").run()
    assert any("node 11 cannot take part yet: summary" in line for line in sites.log)


@pytest.mark.parametrize(
    ("name", "text"), [("aggregation", "median"), ("server_optimizer", "adam"), ("uploads", "topk")]
)
def test_a_regression_rejects_changes_to_its_algorithm(
    name: str, text: str, tmp_path: Path
) -> None:
    chosen = replace(EXPERIMENT, **{name: text})  # type: ignore[arg-type]
    settings = DeploymentSettings(chosen, 3, Deployment(out=str(tmp_path)))
    with pytest.raises(ConfigError, match=f"messages of plain algorithms: remove {name}"):
        Regression(settings, None, print, SPEC)  # type: ignore[arg-type]  # not reached
