"""What the documentation says is run: code, commands, links, the skeleton, the site."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from tests.docs_module import docs_module
from tests.programs import Programs
from tests.report.browser import browse
from typer.testing import CliRunner

from parsifl.cli.app import app
from parsifl.core.registry import algorithms
from parsifl.testing.conformance import check_algorithm

ROOT = Path(__file__).parents[1]
PAGES = [
    path
    for path in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/**/*.md"))]
    if "reproduction" not in path.parts
]
NEEDS_DATA = "# needs PARSIFL_DATA"
FRAGMENTS = {"docs/flower.md": "a fragment of a Flower app; tests/flower deploys whole ones"}
_FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_FILE = re.compile(r"^<!-- file: (\S+) -->$", re.MULTILINE)  # as in docs/hooks.py
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def blocks(path: Path, language: str) -> list[str]:
    """Return the code blocks of a page, with included files in the place of their names."""
    text = _FILE.sub(
        lambda found: f"```python\n{(ROOT / found[1]).read_text()}```", path.read_text()
    )
    return [code for kind, code in _FENCE.findall(text) if kind == language]


def commands(path: Path) -> list[list[str]]:
    """Return the `parsifl` commands of a page, without the folder that a command is found in."""
    lines = [
        shlex.split(line, comments=True)
        for code in blocks(path, "sh")
        for line in code.replace("\\\n", " ").splitlines()
    ]
    return [words[1:] for words in lines if words and Path(words[0]).name == "parsifl"]


def with_code(language: str) -> list[Path]:
    return [path for path in PAGES if blocks(path, language)]


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_there_is_something_to_run() -> None:
    assert len(with_code("python")) >= 8
    assert sum(len(commands(path)) for path in PAGES) >= 12


@pytest.mark.slow
@pytest.mark.parametrize("path", with_code("python"), ids=name)
def test_python_blocks_run(path: Path, tmp_path: Path, programs: Programs) -> None:
    """The blocks of a page are one program, in a process of its own."""
    if name(path) in FRAGMENTS:
        pytest.skip(FRAGMENTS[name(path)])
    found = blocks(path, "python")
    known = bool(os.environ.get("PARSIFL_DATA"))
    left_out = [i for i, code in enumerate(found) if code.startswith(NEEDS_DATA) and not known]
    program = tmp_path / f"{path.stem}_page.py"
    program.write_text("\n".join(code for i, code in enumerate(found) if i not in left_out))
    ended = programs.run(program, tmp_path)
    assert ended.returncode == 0, ended.stderr[-2000:]
    if left_out:
        pytest.skip(f"blocks {left_out} need real data (PARSIFL_DATA); the others ran")


@pytest.mark.slow
@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize("path", [path for path in PAGES if commands(path)], ids=name)
def test_commands_run(path: Path) -> None:
    """The commands of a page work one after the other; long runs are cut short."""
    for words in commands(path):
        code, output = invoked(shortened(words))
        assert code == 0, f"parsifl {shlex.join(words)}\n{output}"


def invoked(words: list[str]) -> tuple[int, str]:
    if "--reproducible" not in words:
        result = CliRunner().invoke(app, words)
        return result.exit_code, result.output
    # it must be requested before torch is loaded: in a process of its own
    command = [sys.executable, "-c", "from parsifl.cli import main; main()", *words]
    ended = subprocess.run(command, capture_output=True, text=True)
    return ended.returncode, ended.stdout + ended.stderr


def shortened(words: list[str]) -> list[str]:
    """Return a command with at most three rounds."""
    words = [*words, "--rounds", "3"] if words == ["demo"] else list(words)
    if "--rounds" in words:
        place = words.index("--rounds") + 1
        words[place] = str(min(int(words[place]), 3))
    return words


def test_long_commands_are_cut_short() -> None:
    assert shortened(["run", "x", "--rounds", "50"]) == ["run", "x", "--rounds", "3"]
    assert shortened(["demo"]) == ["demo", "--rounds", "3"]
    assert shortened(["list", "models"]) == ["list", "models"]


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_links_lead_somewhere(path: Path) -> None:
    text = _FENCE.sub("", path.read_text())
    for target in _LINK.findall(text):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, anchor = target.partition("#")
        there = (path.parent / file).resolve() if file else path
        if there.parent == ROOT / "docs/algorithms":  # written by docs/hooks.py
            assert there.stem in {"index", *algorithms()}, f"{name(path)} links to {target}"
            continue
        if there.parent == ROOT / "docs/examples":  # likewise
            there = ROOT / "examples" / f"{there.stem}.py"
        assert there.exists(), f"{name(path)} links to {target}"
        if anchor:
            titles = re.findall(r"^#+ (.*)$", there.read_text(), re.MULTILINE)
            slugs = {re.sub(r"[^\w\- ]", "", title).lower().replace(" ", "-") for title in titles}
            assert anchor in slugs, f"{name(path)} links to {target}"


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_commands_that_are_named_exist(path: Path) -> None:
    known = set(typer.main.get_command(app).commands)  # type: ignore[attr-defined]  # a group
    named = set(re.findall(r"`parsifl ([a-z]+)", path.read_text()))
    assert named <= known


def test_the_skeleton_keeps_every_promise() -> None:
    spec = importlib.util.spec_from_file_location("skeleton", ROOT / "docs/skeleton.py")
    assert spec is not None
    assert spec.loader is not None
    skeleton = importlib.util.module_from_spec(spec)
    sys.modules["skeleton"] = skeleton  # dataclasses look their module up by name
    try:
        spec.loader.exec_module(skeleton)
        check_algorithm(skeleton.FedShrink(lr=0.1, local_steps=2, batch_size=4))
    finally:
        del sys.modules["skeleton"]


def test_pages_tell_what_a_method_really_sends() -> None:
    found = docs_module("sizes").sizes("fedavg")
    assert found.parameters == 784 * 100 + 100 + 100 * 10 + 10
    values, dense, sent = found.up
    assert values == found.parameters
    assert dense == 4 * values
    assert dense < sent < dense + 400
    assert docs_module("sizes").sizes("local").up == (0, 0, 0)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site; warnings (of broken links too) are errors."""
    for tool in ("mkdocs", "material", "mkdocstrings", "latex2mathml", "jupytext"):
        if importlib.util.find_spec(tool) is None:
            pytest.skip(f"needs {tool}: pip install 'parsifl[docs]'")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.slow
def test_the_site_needs_no_network(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 40
    for page in pages:
        loaded = re.findall(r'<(?:script|img|link)[^>]*="(https?:[^"]*)"', page.read_text())
        assert not loaded, f"{page.name} loads {loaded}"
    equation = (site / "algorithms/scaffold.html").read_text()
    assert "<math" in equation
    assert "\\leftarrow" not in equation
    assert "159,020 (2 d)" in equation
    assert (site / "examples/phones.ipynb").exists()


@pytest.mark.slow
def test_the_search_works_from_a_folder(site: Path) -> None:
    with browse() as page:
        page.visit((site / "index.html").as_uri())
        page.wait("document.querySelector('.md-search__input') !== null")
        page.run("document.querySelector('.md-search__input').focus()")
        page.run(
            "(() => { const box = document.querySelector('.md-search__input');"
            "box.value = 'entropy';"
            "box.dispatchEvent(new Event('keyup', {bubbles: true}));"
            "box.dispatchEvent(new Event('input', {bubbles: true})); })()"
        )
        page.wait("document.querySelectorAll('.md-search-result__item').length > 0")
        assert not [url for url in page.requests if url.startswith("http")]
