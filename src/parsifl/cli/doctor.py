"""`parsifl doctor`: whether everything is in place on this machine."""

from __future__ import annotations

import json
import os
import platform
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import typer

if TYPE_CHECKING:
    from parsifl.data.registry import Entry

Status = Literal["ok", "note", "problem"]
_MARKS: dict[Status, str] = {"ok": "ok", "note": "note", "problem": "PROBLEM"}
_OLDEST_PYTHON = (3, 11)
_FOR_DEVELOPERS = ("dev", "docs")
_REQUIREMENT = re.compile(r"([\w.-]+)\s*(?:\[[^]]*\])?\s*([^;]*)(?:;.*extra == ['\"](\w+)['\"])?")


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at; a problem keeps Parsifl from working, a note does not."""

    name: str
    status: Status
    text: str


def doctor(
    data_dir: Path | None = typer.Option(None, "--data-dir", help="Look for data here first."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON for machines."),
) -> None:
    """Check the installation, threads, the data folder and optional extras.

    The exit code is 0 if Parsifl can work, 1 if there is a problem.

    Examples:

      parsifl doctor

      parsifl doctor --json
    """
    findings = examine(data_dir)
    broken = any(finding.status == "problem" for finding in findings)
    if as_json:
        typer.echo(json.dumps({"ok": not broken, "findings": [asdict(f) for f in findings]}))
    else:
        for finding in findings:
            typer.echo(f"{_MARKS[finding.status]:<8} {finding.name}: {finding.text}")
        typer.echo("\nThere is a problem." if broken else "\nParsifl can work here.")
    raise typer.Exit(int(broken))


def examine(data_dir: Path | None = None) -> list[Finding]:
    """Look at everything; a check that fails unexpectedly is a problem with its reason."""
    try:
        requirements = metadata.requires("parsifl") or []
    except metadata.PackageNotFoundError:
        requirements = []
    checks: dict[str, Callable[[], Iterator[Finding]]] = {
        "python": python,
        "packages": lambda: packages(requirements),
        "extras": lambda: extras(requirements),
        "threads": threads,
        "algorithms": registered,
        "wire": messages,
        "data": lambda: data_folders(data_dir),
    }
    found: list[Finding] = []
    for name, check in checks.items():
        try:
            found += check()
        except Exception as error:  # a broken installation may fail in any way; say how
            found.append(Finding(name, "problem", f"{type(error).__name__}: {error}"))
    return found


def python() -> Iterator[Finding]:
    """Look at the interpreter and at Parsifl itself."""
    import parsifl

    oldest = ".".join(map(str, _OLDEST_PYTHON))
    if sys.version_info < _OLDEST_PYTHON:
        yield Finding("python", "problem", f"{platform.python_version()}, needs {oldest} or newer")
    else:
        yield Finding("python", "ok", f"{platform.python_version()} on {platform.system()}")
    yield Finding("parsifl", "ok", parsifl.__version__)


def packages(requirements: Sequence[str]) -> Iterator[Finding]:
    """Compare what is installed with what Parsifl asks for."""
    if not requirements:
        yield Finding("packages", "note", "parsifl is not installed as a package; cannot tell")
    for name, bounds, extra in map(_parts, requirements):
        if extra is None:
            have = _version(name)
            if have is None:
                yield Finding(name, "problem", f"is missing; pip install '{name}{bounds}'")
            elif not _fits(have, bounds):
                yield Finding(name, "problem", f"{have}, needs {bounds}")
            else:
                yield Finding(name, "ok", have)


def extras(requirements: Sequence[str]) -> Iterator[Finding]:
    """Name the optional parts that are not installed."""
    for name, bounds, extra in map(_parts, requirements):
        if extra is None or extra in _FOR_DEVELOPERS:
            continue
        have = _version(name)
        if have is None:
            text = f"not installed ({name}); pip install 'parsifl[{extra}]'"
            yield Finding(f"extra {extra}", "note", text)
        elif not _fits(have, bounds):
            yield Finding(f"extra {extra}", "note", f"{name} {have}, needs {bounds}")
        else:
            yield Finding(f"extra {extra}", "ok", f"{name} {have}")


def threads() -> Iterator[Finding]:
    """Look at cores, threads, and what threads do while they wait (docs/adr/0004)."""
    import torch

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    used = torch.get_num_threads()
    text = f"torch uses {used} of {cores} cores"
    if cores is not None and used > cores:
        yield Finding("threads", "note", f"{text}; set OMP_NUM_THREADS={cores}")
    else:
        yield Finding("threads", "ok", text)
    policy = os.environ.get("OMP_WAIT_POLICY", "not set")
    if policy.upper() == "PASSIVE":
        yield Finding("waiting", "ok", "threads sleep while they wait (OMP_WAIT_POLICY=PASSIVE)")
    else:
        text = f"OMP_WAIT_POLICY is {policy}: rounds are slow when another program uses a core"
        yield Finding("waiting", "note", f"{text}; set it to PASSIVE")
    device = "CUDA is available" if torch.cuda.is_available() else "CPU only"
    yield Finding("device", "ok", device)


def registered() -> Iterator[Finding]:
    """Load every algorithm, those of other packages included."""
    from parsifl.core.registry import algorithms

    yield Finding("algorithms", "ok", f"{len(algorithms())} registered")


def messages() -> Iterator[Finding]:
    """Send a sparse message to ourselves: this needs torch, NumPy and the entropy coder."""
    import torch

    from parsifl import wire

    sent = torch.zeros(1000).index_fill(0, torch.arange(0, 1000, 40), 2.5)
    data = wire.encode({"w": sent})
    if torch.equal(wire.decode(data, dict[str, torch.Tensor])["w"], sent):
        yield Finding(
            "wire", "ok", f"a sparse message of 1000 entries came back, {len(data)} bytes"
        )
    else:
        yield Finding("wire", "problem", "a message came back changed; reinstall parsifl")


def data_folders(data_dir: Path | None) -> Iterator[Finding]:
    """Look at the folders of data sets, and name the sets that are at hand."""
    from parsifl import data
    from parsifl.data.download import FOLDER_VARIABLE, Files
    from parsifl.data.registry import entry

    named = {"--data-dir": data_dir, f"${FOLDER_VARIABLE}": os.environ.get(FOLDER_VARIABLE)}
    for source, folder in named.items():
        if folder and not Path(folder).expanduser().is_dir():
            yield Finding("data folder", "problem", f"{source} is {folder}, which is no folder")
    entries = [entry(name) for name in data.names()]
    remote = [found for found in entries if found.about.remotes]
    here = [found.name for found in remote if _complete(found, Files(found, data_dir).roots())]
    roots = ", ".join(str(root) for root in Files(entries[0], data_dir).roots())
    yield Finding("data folder", "ok", f"searched in this order: {roots}")
    shown = ", ".join(here) or "none; they are fetched when first used"
    yield Finding(
        "data sets", "ok", f"{len(here)} of {len(remote)} sets with files are at hand: {shown}"
    )


def _complete(found: Entry, roots: Sequence[Path]) -> bool:
    """Tell whether each part is in some folder, as it is fetched or unpacked; nothing is read."""

    def here(*files: str) -> bool:
        return all(any((root / file).exists() for root in roots) for file in files)

    return all(
        here(part.path) or (part.members and here(*(name for name, _ in part.members)))
        for part in found.about.remotes
    )


def _parts(requirement: str) -> tuple[str, str, str | None]:
    """Take a requirement apart.

    >>> _parts("flwr<1.43,>=1.41; extra == 'flower'")
    ('flwr', '<1.43,>=1.41', 'flower')
    """
    found = _REQUIREMENT.match(requirement)
    if found is None:
        return requirement, "", None
    return found[1], found[2].strip(), found[3]


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _fits(have: str, bounds: str) -> bool:
    """Tell whether a version keeps bounds such as `>=1.41,<1.43`; other signs are let through.

    >>> _fits("1.9.1+cpu", ">=1.10"), _fits("1.42", "<1.43,>=1.41")
    (False, True)
    """
    mine = _numbers(have)
    for bound in filter(None, bounds.split(",")):
        sign, other = re.match(r"\s*([<>=!~]*)\s*(.*)", bound).groups()  # type: ignore[union-attr]  # matches anything
        if (sign == ">=" and mine < _numbers(other)) or (sign == "<" and mine >= _numbers(other)):
            return False
    return True


def _numbers(version: str) -> tuple[int, ...]:
    release = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in release[0].split(".")) if release else ()
