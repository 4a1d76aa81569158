"""A site that refuses by its guards: the fit stops and names it, or continues without it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from tests.records import read_metrics
from tests.sites.deployment.test_families import SIZES, SPECS, Sites, hospitals

from parsifl.core.errors import ParsiflError
from parsifl.engine.experiment import Experiment
from parsifl.flower.message import Envelope, Kind, respond
from parsifl.flower.settings import Deployment, DeploymentSettings
from parsifl.report import build
from parsifl.sites import FederatedSparseClassifier, FederatedSparseRegressor, load
from parsifl.sites.deployment.guards import Guards
from parsifl.sites.deployment.regression import MODEL_FILE, Regression
from parsifl.sites.deployment.table_site import TableSite


@dataclass
class Guarded(Sites):
    """Sites of which some have guards of their own."""

    guards: dict[int, Guards] = field(default_factory=dict)

    def _answer(self, kind: Kind, node: int, request: Envelope) -> Envelope:
        guards = self.guards.get(node)
        table = self.tables[node]
        site = TableSite(self.experiment, node, table, self.root, self.spec, guards=guards)
        reply = respond(site, kind, request)
        self.sent.append(reply)
        return reply


def four_sites(family: str) -> list[pd.DataFrame]:
    first = hospitals(family)
    return [*first, first[0].sample(frac=1, random_state=3).reset_index(drop=True)]


def study(family: str, folder: Path, guards: dict[int, Guards], **deployment: Any) -> Guarded:
    experiment = Experiment("fedbestsubset", {"tau": 3}, clients=4, rounds=60, evaluate_every=0)
    sites = Guarded(experiment, SPECS[family], four_sites(family), folder / "state", guards=guards)
    plan = Deployment(out=str(folder / "run"), wait=0.01, **deployment)
    settings = DeploymentSettings(experiment, 4, plan)
    Regression(settings, sites, sites.log.append, SPECS[family]).run()
    return sites


def expected(family: str, left_out: int) -> Any:
    tables = four_sites(family)
    names = [name for name in tables[0].columns if name not in SPECS[family].columns]
    parts = [table for number, table in enumerate(tables) if number != left_out]
    table = pd.concat(parts, ignore_index=True)
    groups = np.repeat([0, 1, 2], [len(part) for part in parts])
    if family == "linear":
        return FederatedSparseRegressor(3).fit(table[names], table.days, groups)
    return FederatedSparseClassifier(3).fit(table[names], table.outcome, groups)


def test_a_fit_continues_without_a_site_that_refuses_at_once(tmp_path: Path) -> None:
    sites = study("linear", tmp_path, {1: Guards(rows=1000)}, on_refusal="continue")
    model: Any = load(tmp_path / "run" / MODEL_FILE)
    alone = expected("linear", left_out=1)
    assert np.allclose(model.coef_, alone.coef_, rtol=1e-10, atol=1e-12)
    assert model.intercept_ == pytest.approx(alone.intercept_, rel=1e-10)
    assert model.clients_.tolist() == ["0", "2", "3"]
    reason = (
        "site 1 refuses (rule 'rows'): its columns have unequal lengths, or fewer than 1000 rows"
    )
    assert model.left_out_ == {"1": reason}
    assert f"site 1 is excluded from the fit: {reason}" in sites.log
    assert f"left out: {reason}" in read_metrics(tmp_path / "run")[0]["notes"]
    page = build([tmp_path / "run"], tmp_path / "report.html").read_text()
    assert (
        "Not in the fit, by the guards of the sites: site 1 refuses (rule &#x27;rows&#x27;)" in page
    )


@pytest.mark.parametrize(
    ("family", "strict", "rule"),
    [
        ("linear", Guards(leverage=0.01), "leverage"),  # the first sums break it
        ("logistic", Guards(rounds=1), "requests"),
    ],
)
def test_a_site_that_refuses_later_is_left_out_of_all_sums(
    family: str, strict: Guards, rule: str, tmp_path: Path
) -> None:
    others = dict.fromkeys((0, 1, 3), Guards(leverage=0.95))  # 90 rows are few for two fits
    study(family, tmp_path, {2: strict, **others}, on_refusal="continue")
    model: Any = load(tmp_path / "run" / MODEL_FILE)
    alone = expected(family, left_out=2)
    near = 1e-8 if family == "linear" else 0.02  # the sums of a logistic regression have noise
    assert np.allclose(model.coef_, alone.coef_, rtol=near, atol=near / 2)
    assert np.allclose(model.intercept_, alone.intercept_, rtol=near)
    assert list(model.left_out_) == ["2"]
    assert f"rule '{rule}'" in model.left_out_["2"]
    records = read_metrics(tmp_path / "run")
    assert all(record["trained"] == 3 for record in records)
    study(family, tmp_path / "at-once", {2: Guards(rows=1000), **others}, on_refusal="continue")
    straight = read_metrics(tmp_path / "at-once" / "run")
    # the attempt with all sites is in the first record
    assert records[0]["bytes_up"] > straight[0]["bytes_up"]
    if family == "linear":
        assert [r["bytes_up"] for r in records[1:]] == [r["bytes_up"] for r in straight[1:]]


def test_a_site_that_refuses_the_last_sums_is_left_out(tmp_path: Path) -> None:
    @dataclass
    class Late(Guarded):
        def _answer(self, kind: Kind, node: int, request: Envelope) -> Envelope:
            self.guards = {3: Guards(cell=60)} if kind == "products" else {}
            return super()._answer(kind, node, request)

    experiment = Experiment("fedbestsubset", {"tau": 3}, clients=4, rounds=60, evaluate_every=0)
    sites = Late(experiment, SPECS["linear"], four_sites("linear"), tmp_path / "state")
    plan = Deployment(out=str(tmp_path / "run"), wait=0.01, on_refusal="continue")
    settings = DeploymentSettings(experiment, 4, plan)
    Regression(settings, sites, sites.log.append, SPECS["linear"]).run()
    model: Any = load(tmp_path / "run" / MODEL_FILE)
    assert np.allclose(model.coef_, expected("linear", left_out=3).coef_, rtol=1e-10, atol=1e-12)
    assert (tmp_path / "run" / "attempt-1" / "config.toml").exists()


def test_a_refusal_stops_the_fit_by_default(tmp_path: Path) -> None:
    with pytest.raises(ParsiflError, match=r"(?s)site 1 refuses \(rule 'rows'\).*on_refusal="):
        study("linear", tmp_path, {1: Guards(rows=1000)})
    with pytest.raises(ParsiflError, match=r"site 1 refuses \(rule 'leverage'\)"):
        study("linear", tmp_path / "later", {1: Guards(leverage=0.01)})


def test_the_others_refuse_when_too_few_sites_are_left(tmp_path: Path) -> None:
    strict = {number: Guards(sites=4) for number in (0, 2, 3)}
    with pytest.raises(ParsiflError, match=r"no site is left.*rule 'sites'.*rule 'rows'"):
        study("linear", tmp_path, {1: Guards(rows=1000), **strict}, on_refusal="continue")
    assert not (tmp_path / "run" / MODEL_FILE).exists()


def test_a_resumed_run_leaves_the_same_sites_out(tmp_path: Path) -> None:
    @dataclass
    class Silent(Guarded):
        silent: bool = True

        def _answer(self, kind: Kind, node: int, request: Envelope) -> Any:
            if kind == "products" and self.silent:
                return None
            return super()._answer(kind, node, request)

    experiment = Experiment("fedbestsubset", {"tau": 3}, clients=4, rounds=60, evaluate_every=0)
    guards = {1: Guards(rows=1000)}
    tables = four_sites("linear")
    sites = Silent(experiment, SPECS["linear"], tables, tmp_path / "state", guards=guards)

    def run(**deployment: Any) -> None:
        plan = Deployment(out=str(tmp_path / "run"), wait=0.01, on_refusal="continue", **deployment)
        settings = DeploymentSettings(experiment, 4, plan)
        Regression(settings, sites, sites.log.append, SPECS["linear"]).run()

    with pytest.raises(ParsiflError, match="sent no usable sums"):
        run()
    sites.silent = False
    run(resume=True)
    model: Any = load(tmp_path / "run" / MODEL_FILE)
    assert list(model.left_out_) == ["1"]
    assert sum(SIZES) - SIZES[1] + SIZES[0] == model._exact.rows.sum()


def test_a_fit_waits_for_replies_that_a_person_releases(tmp_path: Path) -> None:
    released: list[str] = []

    @dataclass
    class Staffed(Guarded):
        def pause(self, seconds: float) -> None:  # noqa: ARG002 - a Link
            """Release what waits, as a person would in the meantime."""
            for path in (self.root / "client-0").glob("pending-*.json"):
                released.append(json.loads(path.read_text())["kind"])
                path.rename(path.with_name(path.name.replace("pending", "approved")))

    experiment = Experiment("fedbestsubset", {"tau": 3}, clients=4, rounds=60, evaluate_every=0)
    guards, tables = {0: Guards(release="manual")}, four_sites("linear")
    sites = Staffed(experiment, SPECS["linear"], tables, tmp_path / "state", guards=guards)
    plan = Deployment(out=str(tmp_path / "run"), on_refusal="continue")
    settings = DeploymentSettings(experiment, 4, plan)
    Regression(settings, sites, sites.log.append, SPECS["linear"]).run()
    assert released == ["agree", "hello", "train", "products"]
    model: Any = load(tmp_path / "run" / MODEL_FILE)
    assert model.clients_.tolist() == ["0", "1", "2", "3"]
    assert model.left_out_ == {}
