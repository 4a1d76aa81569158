from __future__ import annotations

import base64
import hashlib
import itertools
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from tests.report.folders import make_run

from parsifl.core.errors import CheckpointError
from parsifl.engine.run_dir import read_runs
from parsifl.report import build
from parsifl.report.page import render

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"


class Checker(HTMLParser):
    """Records tags and checks that they are closed in order."""

    VOID = frozenset({"meta", "link", "input", "br", "img"})

    def __init__(self) -> None:
        super().__init__()
        self.stack: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.stack.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.stack.pop() == tag


def parse(text: str) -> Checker:
    checker = Checker()
    checker.feed(text)
    checker.close()
    assert checker.stack == []
    return checker


def test_the_page_is_one_well_formed_file_that_loads_nothing(tmp_path: Path) -> None:
    make_run(tmp_path / "runs" / "a", "local")
    make_run(tmp_path / "runs" / "b", "fedavg")
    output = tmp_path / "new" / "report.html"
    assert build([tmp_path / "runs"], output) == output
    page = parse(output.read_text(encoding="utf-8"))
    addresses = [v for _, a in page.tags for n, v in a.items() if n in ("src", "href") and v]
    assert all(address.startswith(("#", "data:")) for address in addresses)
    assert output.stat().st_size < 300_000
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))


def test_hostile_names_are_harmless(tmp_path: Path) -> None:
    for at, name in enumerate((HOSTILE, "fedavg")):
        make_run(tmp_path / f"<b>{at}", name, data=HOSTILE, settings={HOSTILE: HOSTILE}, seed=at)
    record = json.dumps({HOSTILE: HOSTILE})
    (tmp_path / "<b>0" / "environment.json").write_text(record)
    text = render(read_runs([tmp_path]))
    page = parse(text)
    assert [tag for tag, _ in page.tags].count("script") == 2
    assert not [tag for tag, _ in page.tags if tag in ("img", "b")]
    assert not [a for _, a in page.tags for name in a if name.startswith("on")]


def test_the_browser_may_run_only_this_very_program(tmp_path: Path) -> None:
    text = render(read_runs([make_run(tmp_path)]))
    policy = next(a["content"] for t, a in parse(text).tags if t == "meta" and "http-equiv" in a)
    script = re.findall(r"<script>(.*?)</script>", text, flags=re.DOTALL)
    assert len(script) == 1
    digest = base64.b64encode(hashlib.sha256(script[0].encode()).digest()).decode()
    assert policy is not None
    assert f"script-src 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy
    assert "connect-src 'none'" in policy


def test_every_kind_of_run_has_a_place(tmp_path: Path) -> None:
    make_run(tmp_path / "a", "fedavg")
    make_run(tmp_path / "b", "lasso", score="mse", maximize=False)
    make_run(tmp_path / "c", "ditto", evaluate=False)
    make_run(tmp_path / "d", "local", rounds=0)
    damaged = make_run(tmp_path / "e", "scaffold") / "metrics.jsonl"
    damaged.write_text(damaged.read_text() + '{"round": 5, "by')
    text = render(read_runs([tmp_path]))
    parse(text)
    assert "digits: accuracy (larger is better)" in text
    assert "digits: mse (smaller is better)" in text
    assert "c: no round has been evaluated yet" in text
    assert "d: no round has been finished yet" in text
    assert "e: metrics.jsonl: damaged line 5 left out" in text


def test_a_folder_that_is_no_run_leaves_no_file(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="is not a run directory"):
        build([tmp_path / "empty"], tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()


def test_embedded_tables_match_the_shown_ones(tmp_path: Path) -> None:
    text = render(read_runs([make_run(tmp_path / "a"), make_run(tmp_path / "b", "local")]))
    found = re.search(r'id="data">(.*?)</script>', text, flags=re.DOTALL)
    assert found is not None
    data = json.loads(found[1])
    shown = {a["data-table"] for _, a in parse(text).tags if "data-table" in a}
    assert set(data["tables"]) == shown
    assert data["tables"]["s0-results"]["csv"].startswith("algorithm,global accuracy,")


Colour = np.ndarray[tuple[int], np.dtype[np.float64]]

# Machado, Oliveira and Fernandes 2009: how people without one kind of cone see linear RGB
VISIONS = {
    "all cones": np.eye(3),
    "deuteranopia": np.array(
        [
            [0.367322, 0.860646, -0.227968],
            [0.280085, 0.672501, 0.047413],
            [-0.011820, 0.042940, 0.968881],
        ]
    ),
    "protanopia": np.array(
        [
            [0.152286, 1.052583, -0.204868],
            [0.114503, 0.786281, 0.099216],
            [-0.003882, -0.048116, 1.051998],
        ]
    ),
    "tritanopia": np.array(
        [
            [1.255528, -0.076749, -0.178779],
            [-0.078411, 0.930809, 0.147602],
            [0.004733, 0.691367, 0.303900],
        ]
    ),
}
XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])


def linear(colour: str) -> Colour:
    parts = np.array([int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)])
    return np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)


def lab(rgb: Colour) -> Colour:
    scaled = XYZ @ np.clip(rgb, 0, 1) / np.array([0.9505, 1.0, 1.089])
    f = np.where(scaled > 0.008856, np.cbrt(scaled), 7.787 * scaled + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def contrast(one: str, other: str) -> float:
    low, high = sorted(float(XYZ[1] @ linear(colour)) for colour in (one, other))
    return (high + 0.05) / (low + 0.05)


def themes(folder: Path) -> list[dict[str, str]]:
    text = render(read_runs([make_run(folder)]))
    found = re.findall(r"\{([^{}]*--page:[^{}]*)\}", text)
    return [dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", theme)) for theme in found]


def test_colours_can_be_seen_in_light_and_dark(tmp_path: Path) -> None:
    light, asked, system = themes(tmp_path)
    assert asked == system  # dark because the reader, or because the system, asks for it
    for colours in (light, asked):
        for ground in (colours["page"], colours["card"]):
            assert contrast(colours["ink"], ground) >= 7
            assert contrast(colours["soft"], ground) >= 4.5
            assert contrast(colours["accent"], ground) >= 4.5
            for at in range(8):
                assert contrast(colours[f"c{at}"], ground) >= 3


@pytest.mark.parametrize("vision", VISIONS)
def test_methods_can_be_told_apart_by_everybody(tmp_path: Path, vision: str) -> None:
    for colours in themes(tmp_path):
        seen = [lab(VISIONS[vision] @ linear(colours[f"c{at}"])) for at in range(8)]
        apart = [float(np.linalg.norm(a - b)) for a, b in itertools.combinations(seen, 2)]
        assert min(apart) > 20


def test_the_coefficients_of_a_regression_are_shown(tmp_path: Path) -> None:
    make_run(tmp_path / "study", "fedbestsubset")
    summary = {
        "table": [["", "estimate", "A"], ["age<b>", "0.25", "0.5"]],
        "guarantee": "No column was selected.",
        "methods": "A linear regression was fitted. No column was selected.",
        "clients": ["A", "B<i>"],
        "sites": [
            {"name": "(intercept)", "all": 1.0, "estimates": [None], "errors": [None]},
            {"name": "age<b>", "all": 0.25, "estimates": [0.5, 0.1], "errors": [0.2, 0.1]},
        ],
    }
    (tmp_path / "study" / "model.json").write_text(json.dumps({"summary": summary}))
    text = render(read_runs([tmp_path / "study"], []))
    parse(text)
    assert "age&lt;b&gt;" in text
    assert "No column was selected." in text
    assert "A linear regression was fitted." in text
    assert text.count('by site"') == 1  # a forest plot, and none of the intercept
    (tmp_path / "study" / "model.json").write_text('{"summary": 7}')
    assert "age&lt;b&gt;" not in render(read_runs([tmp_path / "study"], []))
