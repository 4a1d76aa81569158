"""Pages that mkdocs gets from the code: one an algorithm, written from its class."""

from __future__ import annotations

import dataclasses
import html
import inspect
import re
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

from parsifl.algorithm import message_types
from parsifl.cli.catalog import describe
from parsifl.registry import algorithms, find

_BLOCK = re.compile(r"^\.\. math::(.*?)(?=\n\s*\n|\Z)", re.DOTALL | re.MULTILINE)
_INLINE = re.compile(r":math:`([^`]*)`")
_FILE = re.compile(r"^<!-- file: (\S+) -->$", re.MULTILINE)
_FIELD = re.compile(r"^(\w+(?:, \w+)*)\n((?:    .*\n?|\n)+)", re.MULTILINE)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put the algorithms into the navigation, and what is in the folders of pages."""
    pages = [{find(name).__name__: f"algorithms/{name}.md"} for name in algorithms()]
    navigation = config.nav or []
    titles = [next(iter(entry)) for entry in navigation]
    place = titles.index("Reference")
    navigation.insert(place, {"Algorithms": [{"All": "algorithms/index.md"}, *pages]})
    for title, folder in {"Reproduction": "reproduction", "Decisions": "adr"}.items():
        found = sorted(Path(config.docs_dir, folder).glob("*.md"))
        if found:
            navigation.append({title: [f"{folder}/{path.name}" for path in found]})
    config.nav = navigation
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page for each algorithm and one that lists them."""
    files.append(File.generated(config, "algorithms/index.md", content=index()))
    for name in algorithms():
        files.append(File.generated(config, f"algorithms/{name}.md", content=page(name)))
    return files


def on_page_markdown(markdown: str, config: MkDocsConfig, **_: Any) -> str:
    """Put files into the places that name them."""
    root = Path(config.docs_dir).parent
    return _FILE.sub(lambda found: f"```python\n{(root / found[1]).read_text()}```", markdown)


def index() -> str:
    """Return the page that lists the algorithms."""
    lines = ["# Algorithms", "", "Written from the classes. `parsifl show NAME` prints the same."]
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
    """Turn a docstring into Markdown with MathML equations, which need no script to be seen."""

    def shown(found: re.Match[str]) -> str:
        return f'<div class="equation">{_mathml(found[1], "block")}</div>'

    joined = text.replace("\n:math:", " :math:")  # markup that begins a line would be a block
    return _INLINE.sub(lambda found: _mathml(found[1], "inline"), _BLOCK.sub(shown, joined))


def _mathml(latex: str, display: str) -> str:
    known = " ".join(latex.split()).replace(r"\arg", r"\operatorname{arg}")
    markup = convert(known, display=display)
    unread = re.findall(r"\\[a-zA-Z]+", markup)
    if unread:
        raise PluginError(f"cannot turn {unread} into MathML; write {latex.strip()!r} otherwise")
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
    """Read the Parameters sections of a class and of its bases; the class has the last word."""
    meanings: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        section = inspect.cleandoc(vars(base).get("__doc__") or "")
        section = section.partition("Parameters\n----------\n")[2]
        for found in _FIELD.finditer(section):
            text = " ".join(found[2].split())
            meanings |= dict.fromkeys(found[1].split(", "), text)
    return meanings


def _messages(name: str) -> str:
    types = message_types(find(name)())
    rows = {
        "sent down to a client": types.down,
        "sent up to the server": types.upload,
        "kept on a client": types.client,
        "kept on the server": types.server,
    }
    lines = ["| | type |", "|-|-|"]
    lines += [f"| {what} | {_type(kind)} |" for what, kind in rows.items()]
    return "\n".join(lines)


def _type(kind: Any) -> str:
    if kind is None or kind is type(None):
        return "nothing"
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        names = ", ".join(f"`{field.name}`" for field in dataclasses.fields(kind))
        return f"`{kind.__name__}` with {names}"
    plain = str(kind).replace("torch.", "").replace("parsifl.messages.", "")
    return _code(plain)


def _limits(name: str, requires: list[str]) -> str:
    kind: Any = find(name)
    lines = [f"- Needs a problem that is `{capability}`." for capability in requires]
    if kind.trains == "everyone":
        lines.append("- All clients train in each round; only the cohort uploads.")
    for promise, reason in getattr(kind, "exempt", {}).items():
        lines.append(f"- Exempt from the promise “{promise}”: {reason}.")
    return "\n".join(lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _code(text: str) -> str:
    """Return code for a table; a bar would end the cell, even in backticks."""
    return f"<code>{html.escape(text).replace('|', '&#124;')}</code>"
