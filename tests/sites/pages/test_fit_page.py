"""The page about a fit: tables, and figures for what the estimator and the rows can show."""

from __future__ import annotations

import re
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
from tests.sites.estimators.test_cv import data

from parsifl.core.errors import ConfigError
from parsifl.sites import (
    FederatedSparseClassifier,
    FederatedSparseClassifierCV,
    FederatedSparseCox,
    FederatedSparseCoxCV,
    FederatedSparseRegressor,
    FederatedSparseRegressorCV,
    stability_selection,
)
from parsifl.sites.pages import build_fit


def figures(page: Path) -> list[tuple[str, ElementTree.Element]]:
    """Return captions and parsed images."""
    found = re.findall(
        r"<figure><figcaption>(.*?)</figcaption>(<svg.*?</svg>)", page.read_text(), re.S
    )
    return [(caption, ElementTree.fromstring(svg)) for caption, svg in found]


def captions(page: Path) -> list[str]:
    return [caption.split(",")[0].split(".")[0].split(":")[0] for caption, _ in figures(page)]


def test_a_classifier_has_every_figure_that_rows_allow(tmp_path: Path) -> None:
    x, y, groups = data(FederatedSparseClassifierCV)
    model = FederatedSparseClassifierCV(path=[1, 2, 4], rule="one-se").fit(x, y, groups)
    stable = stability_selection(
        FederatedSparseClassifier(2), x, y, groups, subsamples=4, by="rows", threshold=0.8
    )
    page = build_fit(model, tmp_path / "new" / "fit.html", x, y, groups, stability=stable)
    assert captions(page)[0] == "observed minus predicted"
    assert captions(page)[3:] == [
        "Coefficient path",
        "Cross-validation over sites",
        "Stability selection",
        "ROC curve",
        "Calibration",
    ]
    text = page.read_text()
    for words in ("chosen: 2 (one-se)", "best + 1 SE", "threshold 0.8", "hence optimistic", "AUC "):
        assert words in text
    assert "A logistic regression of " in text
    names = [node.get("id") for _, svg in figures(page) for node in svg.iter() if node.get("id")]
    clips = [name for name in names if name and re.match("[a-z][0-9a-f]{10}", name)]
    assert len(clips) == len(set(clips)) > 0
    assert not re.search(r"""(?:src|href)=["']?(?:http|//)""", text)
    assert "#000000" not in text  # lines have the colour of the page's theme


def test_survival_curves_are_drawn_on_test_rows(tmp_path: Path) -> None:
    x, y, groups = data(FederatedSparseCoxCV)
    model = FederatedSparseCox(2).fit(x, y, groups)
    page = build_fit(model, tmp_path / "fit.html", test=(x[:50], y[:50]))
    assert captions(page)[-1] == "Kaplan-Meier curves by predicted hazard"
    assert "on test rows" in page.read_text()
    path = build_fit(model, tmp_path / "path.html", x, y, groups, path=[1, 2])
    assert "Coefficient path" in captions(path)


def test_a_fit_without_rows_has_coefficients_and_forest_plots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, y, groups = data(FederatedSparseRegressorCV)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    model = FederatedSparseRegressor(2).fit(x, y, [f"ward {site}" for site in groups])
    page = build_fit(model, tmp_path / "fit.html")
    assert captions(page) == ["Coefficient path", "x2", "x5"]
    assert "site ward 1" in page.read_text()
    with pytest.raises(ConfigError, match=r"install the extra: parsifl\[plots\]"):
        build_fit(model, tmp_path / "more.html", x, y, groups, path=[1])
    paper: Any = FederatedSparseRegressor(2, solver="fedgradmp").fit(x, y, groups)
    text = build_fit(paper, tmp_path / "paper.html").read_text()
    assert "there are no standard errors" in text
    assert "x5" in text
