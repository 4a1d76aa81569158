"""The page in a real browser: figures, controls, keyboard, pictures, themes, widths."""

from __future__ import annotations

import queue
import threading
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.report.browser import Page, browse
from tests.report.folders import make_run
from tests.report.test_state_sparsity import supports, write

from parsifl.report import build
from parsifl.report.live import serve

CURVES = "document.querySelector('[data-figure=curves]')"
CANVAS = f"{CURVES}.querySelector('.canvas')"


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    with browse() as found:
        yield found


@pytest.fixture
def report(page: Page, tmp_path: Path) -> Iterator[str]:
    runs = tmp_path / "runs"
    for seed in range(2):
        make_run(runs / f"l{seed}", "local", seed=seed, level=0.7, models=("personal",))
        make_run(runs / f"a{seed}", "fedavg", seed=seed, level=0.6, validation=True)
        make_run(runs / f"d{seed}", "<img src=x onerror=alert(1)>", seed=seed, level=0.8)
    write(runs / "d0", {"s": None}, {"d": {"v": "*"}}, supports())
    make_run(runs / "m", "lasso", score="mse", maximize=False)
    make_run(runs / "n", "lasso", data="new", rounds=0)
    address = build([runs], tmp_path / "report.html").as_uri()
    page.problems.clear()
    page.requests.clear()
    page.prefer("light")
    page.resize(1100)
    page.open(address)
    yield address
    page.run("0")  # collect what is still on its way
    assert page.problems == []
    assert [url for url in page.requests if url.startswith(("http", "ws"))] == []


def choose(page: Page, figure: str, label: str, option: str) -> None:
    page.run(
        f"(() => {{ const label = [...document.querySelectorAll('[data-figure={figure}] label')]"
        f".find((l) => l.textContent.startsWith('{label}'));"
        f"const s = label.querySelector('select'); s.value = '{option}';"
        f"if (s.value !== '{option}') throw new Error('no option {option}');"
        f"s.dispatchEvent(new Event('change')); }})()"
    )


@pytest.mark.usefixtures("report")
def test_every_figure_is_drawn_and_described(page: Page) -> None:
    described = page.run(
        "[...document.querySelectorAll('.canvas svg')].map((s) => s.getAttribute('aria-label'))"
    )
    assert len(described) == 10  # four in each with scores, the bars without, one of states
    assert "At the end: fedavg" in described[0]
    assert page.run(f"{CANVAS}.querySelectorAll('.line').length") == 3
    assert page.run("document.body.textContent.includes('Nothing to draw yet.')")
    assert page.run("document.querySelectorAll('img').length") == 0


@pytest.mark.usefixtures("report")
def test_controls_change_the_figure(page: Page) -> None:
    choose(page, "curves", "Against", "up")
    choose(page, "curves", "Model", "global")
    page.run(f"{CURVES}.querySelectorAll('input').forEach((box) => box.click())")
    caption = page.run(f"{CURVES}.querySelector('figcaption').textContent")
    assert caption.startswith("Global error (1 \N{MINUS SIGN} accuracy) on test rows")
    assert page.run(f"{CANVAS}.querySelectorAll('.line').length") == 2  # local has no global model
    choose(page, "clients", "Show", "local")
    choose(page, "clients", "As", "violin")
    text = page.run("document.querySelector('[data-figure=clients] svg').textContent")
    assert "100 % better" in text
    assert "0 % better" in text


@pytest.mark.usefixtures("report")
def test_states_are_pictured(page: Page) -> None:
    inside = "document.querySelector('[data-figure=inside]')"
    assert page.run(f"{inside}.querySelectorAll('.cell').length") == 3 + 11  # and the scale
    choose(page, "inside", "Show", "overlap")
    assert page.run(f"{inside}.querySelectorAll('.cell').length") == 9 + 11


@pytest.mark.usefixtures("report")
def test_methods_are_toggled_by_keyboard(page: Page) -> None:
    page.run("document.querySelector('.chip').focus()")
    page.run("document.activeElement.click()")
    assert page.run("document.querySelector('.chip').getAttribute('aria-pressed')") == "false"
    assert page.run(f"{CANVAS}.querySelectorAll('.line').length") == 2
    assert page.run("document.querySelectorAll('tr.dim').length") == 1
    page.run("document.querySelector('.legend .plain').click()")
    assert page.run(f"{CANVAS}.querySelectorAll('.line').length") == 3


@pytest.mark.usefixtures("report")
def test_values_are_read_by_keyboard(page: Page) -> None:
    page.run(f"{CANVAS}.focus()")
    page.press("End")
    said = page.run("document.getElementById('live').textContent")
    assert said.startswith("round 4 ")
    assert "fedavg 64.5 % ± 0.1 %" in said
    assert not page.run("document.getElementById('tip').hidden")
    page.press("Home")
    assert page.run("document.getElementById('live').textContent").startswith("round 1 ")
    page.press("Escape")
    assert page.run("document.getElementById('tip').hidden")


@pytest.mark.usefixtures("report")
def test_nothing_sticks_out_of_a_phone(page: Page) -> None:
    page.resize(390, 800)
    page.wait(f"{CANVAS}.clientWidth < 390 && {CANVAS}.querySelector('svg').clientWidth < 390")
    assert page.run("document.documentElement.scrollWidth") == 390
    small = page.run(
        "[...document.querySelectorAll('button:not(.sort), select')]"
        ".filter((b) => b.offsetParent && b.offsetHeight < 32).length"
    )
    assert small == 0


def test_dark_mode_follows_the_system_and_can_be_overridden(page: Page, report: str) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    assert page.run(ground) == "rgb(251, 251, 249)"
    page.prefer("dark")
    page.open(report)
    assert page.run(ground) == "rgb(20, 24, 28)"
    page.run("document.getElementById('theme').click()")
    assert page.run(ground) == "rgb(251, 251, 249)"


@pytest.mark.usefixtures("report")
def test_figures_and_tables_are_saved(page: Page, tmp_path: Path) -> None:
    page.prefer("dark")  # pictures are for paper: light all the same
    svg, png = (
        page.save(f"{CURVES}.querySelector('[data-image={kind}]').click()", tmp_path)
        for kind in ("svg", "png")
    )
    csv, latex = (
        page.save(f"document.querySelector('[data-export={kind}-save]').click()", tmp_path)
        for kind in ("csv", "latex")
    )
    assert {file.name for file in tmp_path.iterdir()} >= {
        "s0-curves.svg",
        "s0-curves.png",
        "s0-results.csv",
        "s0-results.tex",
    }
    root = ElementTree.fromstring(svg)
    strokes = {node.get("stroke") for node in root.iter()}
    assert "rgb(6, 78, 194)" in strokes
    assert not [node for node in root.iter() if node.get("class")]
    assert png.startswith(b"\x89PNG")
    assert csv.startswith(b"algorithm,")
    assert b"\\toprule" in latex


@pytest.mark.usefixtures("report")
def test_cells_and_clients_are_read_by_the_keyboard(page: Page) -> None:
    spoken = "document.getElementById('live').textContent"
    page.run("document.querySelector('[data-figure=inside] .canvas').focus()")
    page.press("ArrowRight")
    assert page.run("document.querySelectorAll('[data-figure=inside] .frame').length") == 1
    page.wait(f"{spoken}.startsWith('client 0, v: 50')")
    page.press("ArrowDown")
    page.wait(f"{spoken}.startsWith('client 1, v')")
    page.press("End")
    page.wait(f"{spoken}.startsWith('client 2, v')")
    page.run("document.querySelector('[data-figure=clients] .canvas').focus()")
    assert page.run("document.querySelectorAll('.frame').length") == 0
    page.press("Home")
    page.wait(f"{spoken}.includes('client 0, seed 0: ')")
    page.press("ArrowRight")
    page.wait(f"{spoken}.includes('client 0, seed 1: ')")  # the next better one
    page.press("Escape")
    assert page.run("document.getElementById('tip').hidden")


@pytest.mark.usefixtures("report")
def test_the_bars_show_the_bound(page: Page) -> None:
    alone = "document.querySelector('[data-figure=bars] .canvas')"
    assert page.run(f"{alone}.querySelectorAll('.bound').length") == 6
    words = page.run(f"{alone}.querySelector('svg').getAttribute('aria-label')")
    assert "125 % of the bound" in words or "125.0 % of the bound" in words


@pytest.mark.usefixtures("report")
def test_tables_are_sorted_by_a_column(page: Page) -> None:
    page.run("document.querySelectorAll('[data-table=s0-results] .sort')[1].click()")
    names = "[...document.querySelectorAll('[data-table=s0-results] tbody th')]"
    order = page.run(f"{names}.map((cell) => cell.textContent.trim().slice(0, 5))")
    assert order == ["<img ", "local", "fedav"]


def test_a_watched_page_follows_the_run_and_keeps_the_choices(page: Page, tmp_path: Path) -> None:
    make_run(tmp_path / "a", rounds=2)
    make_run(tmp_path / "b", "ditto", rounds=2)
    told: queue.Queue[str] = queue.Queue()
    stop = threading.Event()
    thread = threading.Thread(target=serve, args=([tmp_path], told.put), kwargs={"stop": stop})
    thread.start()
    try:
        page.problems.clear()
        page.open(told.get(timeout=10))
        choose(page, "curves", "Model", "global")
        page.run("document.querySelector('.chip').click()")
        make_run(tmp_path / "a", rounds=6)
        page.wait("document.querySelector('[data-row] td:nth-of-type(8)')?.textContent === '6'")
        page.wait("document.documentElement.classList.contains('ready')")
        assert page.run(f"{CURVES}.querySelector('select').value") == "global"
        assert page.run("document.querySelector('.chip').getAttribute('aria-pressed')") == "false"
        assert page.problems == []
    finally:
        page.leave()
        stop.set()
        thread.join(timeout=10)
