"""Linear, logistic, Poisson and Cox regression across sites with tables."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from sklearn.model_selection import LeaveOneGroupOut
from tests.records import read_metrics

from parsifl import report
from parsifl.core.errors import ConfigError, ParsiflError
from parsifl.data.tables import as_columns
from parsifl.engine.experiment import Experiment
from parsifl.flower.message import Envelope, Kind, Replies, Requests, respond
from parsifl.flower.settings import Deployment, DeploymentSettings
from parsifl.sites import (
    FederatedSparseClassifier,
    FederatedSparseCox,
    FederatedSparsePoisson,
    FederatedSparseRegressor,
    FederatedSparseRegressorCV,
    load,
    pages,
    plots,
)
from parsifl.sites.deployment.agreement import RegressionSpec
from parsifl.sites.deployment.guards import Guards
from parsifl.sites.deployment.ledger import Ledger
from parsifl.sites.deployment.regression import MODEL_FILE, Regression
from parsifl.sites.deployment.table_site import TableSite

SIZES = (150, 90, 200)
SPECS = {
    "linear": RegressionSpec("days"),
    "logistic": RegressionSpec("outcome", "logistic"),
    "poisson": RegressionSpec("visits", "poisson", exposure="years"),
    "cox": RegressionSpec("days", "cox", event="died"),
}
LIMITS = {"poisson": Guards(leverage=0.99), "cox": Guards(leverage=0.99)}
"""Few rows with large counts, or late times, have most of the weight."""


def hospitals(family: str) -> list[pd.DataFrame]:
    """Return tables with words, missing values, unequal orders of columns, and one target."""
    tables = []
    for site, rows in enumerate(SIZES):
        draw = np.random.default_rng(site)
        table = pd.DataFrame(
            {
                "age": draw.normal(50, 10, rows),
                "ward": draw.choice(["general", "heart", "surgery"], rows, p=[0.5, 0.2, 0.3]),
                **{f"marker{i}": draw.normal(size=rows) for i in range(4)},
            }
        )
        risk = 0.05 * (table.age - 50) + 0.8 * (table.ward == "surgery") - 0.6 * table.marker2
        if family == "linear":
            table["days"] = 5 + risk + 0.5 * draw.normal(size=rows)
        elif family == "logistic":
            dead = draw.random(rows) < 1 / (1 + np.exp(-risk))
            table["outcome"] = np.where(dead, "dead", "alive")
        elif family == "poisson":
            table["years"] = draw.uniform(0.5, 2.0, rows)
            table["visits"] = draw.poisson(table.years * np.exp(risk))
        else:
            time = draw.exponential(np.exp(-risk))
            table["days"], table["died"] = np.minimum(time, 1.5), (time < 1.5).astype(int)
        table.loc[table.index[::20], "age"] = np.nan
        tables.append(table.sample(frac=1, axis=1, random_state=site))
    return tables


@dataclass
class Sites:
    """A `Link` to sites with tables."""

    experiment: Experiment
    spec: RegressionSpec
    tables: list[pd.DataFrame]
    root: Path
    log: list[str] = field(default_factory=list)
    sent: list[Envelope] = field(default_factory=list)
    limits: Guards | None = None

    def __post_init__(self) -> None:
        """Give each site a secret, so that the noise is the same in every run of the tests."""
        for node in range(len(self.tables)):
            path = self.root / f"client-{node}" / "secret"
            path.parent.mkdir(parents=True, exist_ok=True)
            if not path.exists():
                path.write_bytes(bytes([node]) * 32)

    def nodes(self) -> list[int]:
        return list(range(len(self.tables)))

    def ask(
        self,
        requests: Requests,
        timeout: float,  # noqa: ARG002 - a Link
        enough: Callable[[Replies], bool] | None = None,  # noqa: ARG002 - all answer at once
    ) -> Replies:
        return {node: self._answer(kind, node, sent) for node, (kind, sent) in requests.items()}

    def _answer(self, kind: Kind, node: int, request: Envelope) -> Envelope:
        table = self.tables[node]
        site = TableSite(self.experiment, node, table, self.root, self.spec, guards=self.limits)
        reply = respond(site, kind, request)
        self.sent.append(reply)
        return reply

    def pause(self, seconds: float) -> None:
        """Wait for nothing."""


def deployed(family: str, folder: Path, tau: int = 3, **settings: Any) -> tuple[Any, Sites]:
    settings = {"tau": tau, **settings}
    experiment = Experiment("fedbestsubset", settings, clients=3, rounds=60, evaluate_every=0)
    sites = Sites(experiment, SPECS[family], hospitals(family), folder / "state")
    sites.limits = LIMITS.get(family)
    plan = DeploymentSettings(experiment, 3, Deployment(out=str(folder / "run"), wait=0.01))
    Regression(plan, sites, sites.log.append, SPECS[family]).run()
    return load(folder / "run" / MODEL_FILE), sites


def in_process(family: str, tau: int = 3) -> tuple[Any, pd.DataFrame]:
    table = pd.concat(hospitals(family), ignore_index=True)
    groups, spec = np.repeat([0, 1, 2], SIZES), SPECS[family]
    first = list(hospitals(family)[0].columns)  # the order of the first site
    x = table[[name for name in first if name not in spec.columns]]
    if family == "linear":
        return FederatedSparseRegressor(tau).fit(x, table.days, groups), x
    if family == "logistic":
        return FederatedSparseClassifier(tau).fit(x, table.outcome, groups), x
    if family == "poisson":
        offset = np.log(table.years)
        return FederatedSparsePoisson(tau).fit(x, table.visits, groups, offset=offset), x
    y = table[["days", "died"]].to_numpy(dtype=np.float64)
    return FederatedSparseCox(tau).fit(x, y, groups), x


def test_one_round_of_a_linear_regression_tells_the_number_of_terms(tmp_path: Path) -> None:
    model, sites = deployed("linear", tmp_path)
    table = pd.concat(sites.tables, ignore_index=True)
    groups, found = np.repeat([0, 1, 2], SIZES), model.preprocessing_
    fitted = FederatedSparseRegressor(column_groups=found.units)
    expected = FederatedSparseRegressorCV(model.path_, cv=LeaveOneGroupOut(), estimator=fitted)
    expected.fit(found.design(as_columns(table)), table.days, groups)
    assert model.path_.tolist() == [1, 2, 3, 4, 5, 6]
    assert np.allclose(model.error_path_, expected.error_path_, rtol=1e-10)
    assert np.allclose(model.mean_error_, expected.mean_error_, rtol=1e-10)
    assert np.allclose(model.standard_error_, expected.standard_error_, rtol=1e-10)
    curve = plots.cv_curve(model)
    assert curve.get_legend().get_texts()[1].get_text() == "chosen: 3 (as asked)"
    page = pages.build_fit(model, tmp_path / "fit.html").read_text()
    assert page.count("Cross-validation over sites") == 2  # a caption, and its label
    for path in (tmp_path / "state").glob("client-*/ledger-*.npz"):
        used = Ledger.read(path)
        columns = len(model.get_feature_names_out())
        assert used.vectors.shape[1] == columns + 2  # a constant, the columns and the target: once


@pytest.mark.parametrize("family", SPECS)
def test_the_report_draws_what_the_aggregates_allow(family: str, tmp_path: Path) -> None:
    deployed(family, tmp_path)
    text = report.build([tmp_path / "run"], tmp_path / "report.html").read_text()
    shown = re.findall(r"<figure><figcaption>(.*?)[:.].*?</figcaption><svg", text)
    linear = ["Coefficient path", "Cross-validation over sites"] * (family == "linear")
    shares = ["observed minus predicted"] * (family in ("logistic", "poisson"))
    assert shown[: len(shown) - 4] == linear + shares
    assert {"age", "marker2", "ward=surgery", "ward=heart"} == set(shown[-4:])
    assert "Fit by site" in text
    assert ("Number of terms" in text) is (family == "linear")
    assert ">nan<" not in text


def test_a_resumed_regression_asks_for_the_sums_of_tables_again(tmp_path: Path) -> None:
    model, sites = deployed("linear", tmp_path)
    plan = DeploymentSettings(
        sites.experiment, 3, Deployment(out=str(tmp_path / "run"), wait=0.01, resume=True)
    )
    Regression(plan, sites, sites.log.append, SPECS["linear"]).run()
    again = load(tmp_path / "run" / MODEL_FILE)
    assert again.mean_error_.tolist() == model.mean_error_.tolist()


@pytest.mark.parametrize("family", SPECS)
def test_the_estimator_of_a_deployment_is_that_of_the_process(family: str, tmp_path: Path) -> None:
    model, sites = deployed(family, tmp_path)
    expected, x = in_process(family)
    assert type(model) is type(expected)
    assert list(model.get_feature_names_out()) == list(expected.get_feature_names_out())
    assert {"age", "ward=surgery", "marker2"} <= set(model.get_feature_names_out()[model.support_])
    mine, theirs = model.summary(), expected.summary()
    assert mine.names == theirs.names
    if family == "linear":
        assert np.allclose(model.coef_, expected.coef_, rtol=1e-10, atol=1e-12)
        assert np.allclose(model.predict(x), expected.predict(x), rtol=1e-9)
        assert np.allclose(mine.estimate, theirs.estimate, rtol=1e-10, atol=1e-12)
        assert np.allclose(mine.site_estimates, theirs.site_estimates, rtol=1e-7, equal_nan=True)
        assert np.allclose(mine.site_se, theirs.site_se, rtol=1e-7, equal_nan=True)
        assert np.allclose(mine.q, theirs.q, rtol=1e-6)
        assert model.certificate_.proven is expected.certificate_.proven
    else:  # the sums have noise
        errors = 1 / np.sqrt(np.nansum(theirs.site_se**-2, axis=0))
        assert (np.abs(mine.estimate - theirs.estimate) < 0.05 * errors).all()
        # sites take one step of Newton's method in a deployment, and fit themselves in process
        far = np.abs(mine.site_estimates - theirs.site_estimates) / theirs.site_se
        assert np.nanmax(far) < 1
        assert not model.certificate_.proven
    criteria, exact = model.information_criteria(), expected.information_criteria()
    assert criteria == pytest.approx(exact, rel=1e-9 if family == "linear" else 5e-3)
    agreement = sum(len(r.text) for r in sites.sent if '"summary"' in r.text)
    assert read_metrics(tmp_path / "run")[0]["bytes_up"] > agreement > 1000


@pytest.mark.parametrize("family", ["logistic", "cox"])
def test_a_site_without_noise_needs_no_tolerance(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(LIMITS, family, Guards(leverage=1.0, noise=0.0))
    model, _ = deployed(family, tmp_path)
    expected, _ = in_process(family)
    assert np.allclose(model.coef_, expected.coef_, rtol=1e-3, atol=1e-5)


def test_the_same_question_has_the_same_answer(tmp_path: Path) -> None:
    """A repeated fit repeats every number, and uses up nothing."""
    first, _ = deployed("logistic", tmp_path)
    path = tmp_path / "state" / "client-0" / "ledger-table.npz"
    used = Ledger.read(path)
    (tmp_path / "run").rename(tmp_path / "earlier")
    again, _ = deployed("logistic", tmp_path)
    assert again.coef_.tolist() == first.coef_.tolist()
    assert Ledger.read(path).requests == used.requests
    secret = tmp_path / "other" / "state" / "client-0" / "secret"
    secret.parent.mkdir(parents=True)
    secret.write_bytes(b"9" * 32)
    other, _ = deployed("logistic", tmp_path / "other")  # other noise
    assert other.coef_.tolist() != first.coef_.tolist()


def test_a_model_fixed_in_advance_has_standard_errors(tmp_path: Path) -> None:
    SPECS["kept"] = RegressionSpec("days", keep=("age", "ward"))
    try:
        experiment = Experiment("fedbestsubset", {"tau": 0}, clients=3, rounds=3, evaluate_every=0)
        sites = Sites(experiment, SPECS["kept"], hospitals("linear"), tmp_path / "state")
        plan = DeploymentSettings(experiment, 3, Deployment(out=str(tmp_path / "run")))
        Regression(plan, sites, sites.log.append, SPECS["kept"]).run()
    finally:
        del SPECS["kept"]
    found = load(tmp_path / "run" / MODEL_FILE).summary()
    table = pd.concat(hospitals("linear"), ignore_index=True)
    x = table[[name for name in hospitals("linear")[0].columns if name != "days"]]
    fixed = FederatedSparseRegressor(0, keep=["age", "ward"])
    expected = fixed.fit(x, table.days, np.repeat([0, 1, 2], SIZES)).summary()
    assert np.allclose(found.se, expected.se, rtol=1e-9)
    assert np.isfinite(found.pvalue).all()


def test_the_guards_limit_the_candidates_and_the_log_says_so(tmp_path: Path) -> None:
    tables = hospitals("linear")
    tables[1] = tables[1].iloc[:27]
    for i in range(8):
        for table in tables:
            table[f"noise{i}"] = np.random.default_rng(100 + i).normal(size=len(table))
    experiment = Experiment("fedbestsubset", {"tau": 3}, clients=3, rounds=60, evaluate_every=0)
    sites = Sites(experiment, SPECS["linear"], tables, tmp_path / "state")
    sites.limits = Guards(leverage=1.0)  # 27 rows stand out in 15 columns
    plan = DeploymentSettings(experiment, 3, Deployment(out=str(tmp_path / "run")))
    Regression(plan, sites, sites.log.append, SPECS["linear"]).run()
    assert any("allow 9 of 15 columns in one message" in line for line in sites.log)
    model = load(tmp_path / "run" / MODEL_FILE)
    assert {"age", "marker2"} <= set(model.get_feature_names_out()[model.support_])


def test_units_that_differ_are_in_the_log(tmp_path: Path) -> None:
    experiment = Experiment("fedbestsubset", {"tau": 3}, clients=3, rounds=9, evaluate_every=0)
    tables = hospitals("linear")
    tables[2]["age"] *= 12
    sites = Sites(experiment, SPECS["linear"], tables, tmp_path / "state")
    plan = DeploymentSettings(experiment, 3, Deployment(out=str(tmp_path / "run")))
    Regression(plan, sites, sites.log.append, SPECS["linear"]).run()
    assert any("warning: column 'age': client 2 has mean" in line for line in sites.log)


def test_a_solver_that_averages_fits_linear_regressions_only(tmp_path: Path) -> None:
    experiment = Experiment("fedgradmp", {"tau": 3, "batch_size": None}, clients=3, rounds=2)
    plan = DeploymentSettings(experiment, 3, Deployment(out=str(tmp_path / "run")))
    sites = Sites(experiment, SPECS["cox"], [], tmp_path)
    with pytest.raises(ConfigError, match="use 'fedbestsubset' for family='cox'"):
        Regression(plan, sites, sites.log.append, SPECS["cox"])


@pytest.mark.parametrize(
    ("column", "value", "reason"),
    [("outcome", "", "has missing values or words"), ("outcome", "lost", "all but a few rows")],
)
def test_a_target_that_gives_rows_away_is_refused(
    column: str, value: str, reason: str, tmp_path: Path
) -> None:
    experiment = Experiment("fedbestsubset", {"tau": 3}, clients=3, rounds=9, evaluate_every=0)
    tables = hospitals("logistic")
    tables[0].loc[3, column] = value
    sites = Sites(experiment, SPECS["logistic"], tables, tmp_path / "state")
    plan = DeploymentSettings(experiment, 3, Deployment(out=str(tmp_path / "run"), wait=0.01))
    with pytest.raises(ParsiflError, match=rf"site 0 refuses \(rule 'target'\).*{reason}"):
        Regression(plan, sites, sites.log.append, SPECS["logistic"]).run()


def test_columns_of_a_csv_file_and_of_a_frame_are_the_same(tmp_path: Path) -> None:
    (table, *_) = hospitals("linear")
    text = {name: ["" if v != v else str(v) for v in table[name]] for name in table}
    for name, column in as_columns(text).items():
        assert np.array_equal(column, as_columns(table)[name], equal_nan=column.dtype.kind == "f")
    del tmp_path


def run(family: str, tables: list[pd.DataFrame], folder: Path, **settings: Any) -> tuple[Any, Any]:
    settings = {"tau": 3, **settings}
    experiment = Experiment("fedbestsubset", settings, clients=3, rounds=60, evaluate_every=0)
    sites = Sites(experiment, SPECS[family], tables, folder / "state")
    sites.limits = Guards(profile="standard")
    plan = DeploymentSettings(experiment, 3, Deployment(out=str(folder / "run"), wait=0.01))
    Regression(plan, sites, sites.log.append, SPECS[family]).run()
    return load(folder / "run" / MODEL_FILE), sites


def test_sites_may_have_one_class_own_levels_and_constant_columns(tmp_path: Path) -> None:
    tables = hospitals("logistic")
    tables[0]["outcome"] = "alive"
    tables[1].loc[tables[1].index % 4 == 0, "ward"] = "isolation"
    for number, table in enumerate(tables):
        table["constant"], table["site"] = 7.0, float(number)
    model, sites = run("logistic", tables, tmp_path)
    assert "ward=isolation" in model.get_feature_names_out()
    assert model.coef_[0, model.get_feature_names_out().tolist().index("constant")] == 0
    assert np.isfinite(model.predict_proba(tables[0])).all()
    assert not any("warning" in line for line in sites.log)


def test_separation_would_single_out_rows_and_ridge_cures_it(tmp_path: Path) -> None:
    tables = hospitals("logistic")
    for table in tables:
        table["outcome"] = np.where(table.marker2 > 0, "dead", "alive")
    with pytest.raises(ParsiflError, match=r"rule 'leverage'.*set l2 if columns separate"):
        run("logistic", tables, tmp_path / "plain", tau=1)
    SPECS["ridge"] = RegressionSpec("outcome", "logistic", l2=0.1)
    try:
        model, sites = run("ridge", tables, tmp_path / "ridge", tau=1)
    finally:
        del SPECS["ridge"]
    assert model.selected() == ["marker2"]
    assert model.l2 == 0.1
    assert not any("warning" in line for line in sites.log)
