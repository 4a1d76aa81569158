"""Generate pages for mkdocs from the code: one per algorithm and one per example."""

from __future__ import annotations

import dataclasses
import html
import inspect
import re
from pathlib import Path
from typing import Any

import jupytext
from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from sizes import Sizes, sizes

from parsifl.cli.list_show import describe
from parsifl.core.registry import algorithms, find

_BLOCK = re.compile(r"^\.\. math::(.*?)(?=\n\s*\n|\Z)", re.DOTALL | re.MULTILINE)
_INLINE = re.compile(r":math:`([^`]*)`")
_FILE = re.compile(r"^<!-- file: (\S+) -->$", re.MULTILINE)
_SCRIPTS = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))
_FIELD = re.compile(r"^(\w+(?:, \w+)*)\n((?:    .*\n?|\n)+)", re.MULTILINE)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Add the algorithms and the pages of folders to the navigation."""
    pages = [{find(name).__name__: f"algorithms/{name}.md"} for name in algorithms()]
    navigation = config.nav or []
    titles = [next(iter(entry)) for entry in navigation]
    place = titles.index("Reference")
    navigation.insert(place, {"Algorithms": [{"All": "algorithms/index.md"}, *pages]})
    navigation.insert(place, {"Examples": [f"examples/{s.stem}.md" for s in _SCRIPTS]})
    for title, folder in {"Reproduction": "reproduction", "Decisions": "adr"}.items():
        found = sorted(Path(config.docs_dir, folder).glob("*.md"))
        first = [path for path in found if path.name == "index.md"]
        others = [path for path in found if path.name != "index.md"]
        if found:
            navigation.append({title: [f"{folder}/{path.name}" for path in (*first, *others)]})
    config.nav = navigation
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page for each algorithm, one that lists them, and a page for each example."""
    files.append(File.generated(config, "algorithms/index.md", content=index()))
    for name in algorithms():
        files.append(File.generated(config, f"algorithms/{name}.md", content=page(name)))
    for script in _SCRIPTS:
        notebook, place = jupytext.read(script), f"examples/{script.stem}"
        content = jupytext.writes(notebook, fmt="ipynb")
        files.append(File.generated(config, f"{place}.ipynb", content=content))
        files.append(File.generated(config, f"{place}.md", content=example(script.stem, notebook)))
    return files


def example(name: str, notebook: Any) -> str:
    """Return the page of an example: its cells, and a link to the notebook."""
    opening, *cells = notebook.cells
    download = f"Download it as [a notebook]({name}.ipynb), or run `examples/{name}.py`."
    parts = [opening.source, download]
    parts += [
        f"```python\n{cell.source}\n```" if cell.cell_type == "code" else cell.source
        for cell in cells
    ]
    return "\n\n".join(parts) + "\n"


def on_page_markdown(markdown: str, config: MkDocsConfig, **_: Any) -> str:
    """Replace file markers by the content of the files."""
    root = Path(config.docs_dir).parent
    return _FILE.sub(lambda found: f"```python\n{(root / found[1]).read_text()}```", markdown)


def index() -> str:
    """Return the page that lists the algorithms."""
    lines = ["# Algorithms", "", "Generated from the classes. `parsifl show NAME` prints the same."]
    lines += ["", "| name | | paper |", "|-|-|-|"]
    for name in algorithms():
        found = describe(name)
        first = found["text"].partition("\n")[0]
        lines.append(f"| [{found['class']}]({name}.md) | {_cell(first)} | {found['cites']} |")
    return "\n".join(lines) + "\n"


def page(name: str) -> str:
    """Return the page of an algorithm."""
    found = describe(name)
    text = found["text"].partition("Parameters\n----------")[0].strip()
    parts = [
        f"# {found['class']}",
        _prose(text),
        f"*{found['cites']}.*",
        "## Fields",
        f'Set with `--set name=value` or `parsifl.get("{name}", name=value)`.',
        _fields(name, found["fields"]),
        "## Messages and state",
        _messages(name),
    ]
    limits = _limits(name, found["requires"])
    if limits:
        parts += ["## Limits", limits]
    return "\n\n".join(parts) + "\n"


def _prose(text: str) -> str:
    """Convert a docstring to Markdown with MathML equations, which need no script."""

    def shown(found: re.Match[str]) -> str:
        return f'<div class="equation">{_mathml(found[1], "block")}</div>'

    joined = text.replace("\n:math:", " :math:")  # markup at the start of a line would be a block
    return _INLINE.sub(lambda found: _mathml(found[1], "inline"), _BLOCK.sub(shown, joined))


def _mathml(latex: str, display: str) -> str:
    known = " ".join(latex.split()).replace(r"\arg", r"\operatorname{arg}")
    markup = convert(known, display=display)
    unread = re.findall(r"\\[a-zA-Z]+", markup)
    if unread:
        raise PluginError(f"cannot convert {unread} to MathML; rewrite {latex.strip()!r}")
    return markup


def _fields(name: str, fields: list[dict[str, Any]]) -> str:
    meanings = _meanings(find(name))
    lines = ["| field | type | default | |", "|-|-|-|-|"]
    for field in fields:
        kind, default = _code(field["type"]), _code(repr(field["default"]))
        meaning = _cell(meanings.get(field["name"], ""))
        lines.append(f"| `{field['name']}` | {kind} | {default} | {meaning} |")
    return "\n".join(lines)


def _meanings(kind: type[Any]) -> dict[str, str]:
    """Read the Parameters sections of a class and its bases; the class takes precedence."""
    meanings: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        section = inspect.cleandoc(vars(base).get("__doc__") or "")
        section = section.partition("Parameters\n----------\n")[2]
        for found in _FIELD.finditer(section):
            text = " ".join(found[2].split())
            meanings |= dict.fromkeys(found[1].split(", "), text)
    return meanings


def _messages(name: str) -> str:
    types = find(name)().tree_types()
    rows = {
        "sent down to a client": types.downlink,
        "sent up to the server": types.uplink,
        "kept on a client": types.client,
        "kept on the server": types.server,
    }
    lines = ["| | type |", "|-|-|"]
    lines += [f"| {what} | {_type(kind)} |" for what, kind in rows.items()]
    return "\n".join([*lines, "", _sizes(sizes(name))])


def _sizes(found: Sizes) -> str:
    def row(way: str, sizes: tuple[int, int, int]) -> str:
        values, dense, sent = sizes
        if not sent:
            return f"| {way} | nothing | | |"
        times = values / found.parameters
        return f"| {way} | {values:,} ({times:.3g} d) | {dense:,} | {sent:,} |"

    item, whole = found.item, found.item * found.parameters
    lines = [
        f"For {found.model} with d = {found.parameters:,} parameters of {item} bytes ({whole:,} in "
        "total), default settings, one client, the third round on random rows:",
        "",
        "| | values in the message | bytes if dense | bytes sent |",
        "|-|-|-|-|",
        row("down", found.down),
        row("up", found.up),
        "",
        f"A tensor of n entries, k of them non-zero, takes min({item} n, {item} k + log2 C(n, k) / "
        f"8) bytes, a low-rank matrix {item} r (d1 + d2), and the header of a message about 50 to "
        "300 bytes: "
        "[the wire format](../reference/wire.md). The sparsity of a message depends on the data "
        "and on the settings; the report of a run shows the bytes that it sent.",
    ]
    return "\n".join(lines)


def _type(kind: Any) -> str:
    if kind is None or kind is type(None):
        return "nothing"
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        names = ", ".join(f"`{field.name}`" for field in dataclasses.fields(kind))
        return f"`{kind.__name__}` with {names}"
    plain = str(kind).replace("torch.", "").replace("parsifl.core.leaves.", "")
    return _code(plain)


def _limits(name: str, requires: dict[str, str]) -> str:
    kind: Any = find(name)
    lines = [
        f"- Needs a problem that is `{capability}`" + (offered and f": {offered}") + "."
        for capability, offered in requires.items()
    ]
    if kind().everyone_trains():
        lines.append("- All clients train in each round; only the cohort uploads.")
    for check, reason in kind.conformance.exempt.items():
        lines.append(f"- Exempt from the check “{check}”: {reason}.")
    return "\n".join(lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _code(text: str) -> str:
    """Return code for a table cell; a bar would end the cell, even in backticks."""
    return f"<code>{html.escape(text).replace('|', '&#124;')}</code>"
