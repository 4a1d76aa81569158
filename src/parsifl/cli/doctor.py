"""`parsifl doctor`: check the installation."""

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
from packaging.requirements import Requirement

if TYPE_CHECKING:
    from parsifl.data.registry import Entry

Status = Literal["ok", "note", "problem"]
_MARKS: dict[Status, str] = {"ok": "ok", "note": "note", "problem": "PROBLEM"}
_OLDEST_PYTHON = (3, 11)
_FOR_DEVELOPERS = ("dev", "docs")


@dataclass(frozen=True)
class CheckResult:
    """The result of one check; a problem keeps Parsifl from working, a note does not."""

    name: str
    status: Status
    text: str


def doctor(
    data_dir: Path | None = typer.Option(
        None, "--data-dir", help="Directory to search for datasets first."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Check the installation, threads, data directories and optional extras.

    The exit code is 1 if a problem keeps Parsifl from working, else 0.

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
        typer.echo("\nA problem was found." if broken else "\nNo problems found.")
    raise typer.Exit(int(broken))


def examine(data_dir: Path | None = None) -> list[CheckResult]:
    """Run all checks; one that fails unexpectedly is reported as a problem."""
    try:
        requirements = metadata.requires("parsifl") or []
    except metadata.PackageNotFoundError:
        requirements = []
    checks: dict[str, Callable[[], Iterator[CheckResult]]] = {
        "python": python,
        "packages": lambda: packages(requirements),
        "extras": lambda: extras(requirements),
        "threads": threads,
        "algorithms": registered,
        "wire": messages,
        "data": lambda: data_folders(data_dir),
    }
    checks_done: list[CheckResult] = []
    for name, check in checks.items():
        try:
            checks_done += check()
        except Exception as error:  # a broken installation may fail in any way
            checks_done.append(CheckResult(name, "problem", f"{type(error).__name__}: {error}"))
    return checks_done


def python() -> Iterator[CheckResult]:
    """Check the versions of Python and Parsifl."""
    import parsifl

    oldest = ".".join(map(str, _OLDEST_PYTHON))
    if sys.version_info < _OLDEST_PYTHON:
        yield CheckResult(
            "python", "problem", f"{platform.python_version()}, needs {oldest} or newer"
        )
    else:
        yield CheckResult("python", "ok", f"{platform.python_version()} on {platform.system()}")
    yield CheckResult("parsifl", "ok", parsifl.__version__)


def packages(requirements: Sequence[str]) -> Iterator[CheckResult]:
    """Compare installed packages with the requirements."""
    if not requirements:
        yield CheckResult(
            "packages", "note", "parsifl is not installed as a package; versions not checked"
        )
    for needed in map(Requirement, requirements):
        if _extra(needed) is None:
            have = _version(needed.name)
            if have is None:
                text = f"missing; pip install '{needed.name}{needed.specifier}'"
                yield CheckResult(needed.name, "problem", text)
            elif not needed.specifier.contains(have, prereleases=True):
                yield CheckResult(needed.name, "problem", f"{have}, needs {needed.specifier}")
            else:
                yield CheckResult(needed.name, "ok", have)


def extras(requirements: Sequence[str]) -> Iterator[CheckResult]:
    """Report optional dependencies that are not installed."""
    for needed in map(Requirement, requirements):
        extra, name = _extra(needed), needed.name
        if extra is None or extra in _FOR_DEVELOPERS:
            continue
        have = _version(name)
        if have is None:
            text = f"not installed ({name}); pip install 'parsifl[{extra}]'"
            yield CheckResult(f"extra {extra}", "note", text)
        elif not needed.specifier.contains(have, prereleases=True):
            yield CheckResult(f"extra {extra}", "note", f"{name} {have}, needs {needed.specifier}")
        else:
            yield CheckResult(f"extra {extra}", "ok", f"{name} {have}")


def threads() -> Iterator[CheckResult]:
    """Check cores, threads, and how idle threads wait (docs/adr/0004)."""
    import torch

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    used = torch.get_num_threads()
    text = f"torch uses {used} of {cores} cores"
    if cores is not None and used > cores:
        yield CheckResult("threads", "note", f"{text}; set OMP_NUM_THREADS={cores}")
    else:
        yield CheckResult("threads", "ok", text)
    policy = os.environ.get("OMP_WAIT_POLICY", "not set")
    if policy.upper() == "PASSIVE":
        yield CheckResult("waiting", "ok", "idle threads sleep (OMP_WAIT_POLICY=PASSIVE)")
    else:
        text = f"OMP_WAIT_POLICY is {policy}: rounds are slow when another program uses a core"
        yield CheckResult("waiting", "note", f"{text}; set it to PASSIVE")
    device = "CUDA is available" if torch.cuda.is_available() else "CPU only"
    yield CheckResult("device", "ok", device)


def registered() -> Iterator[CheckResult]:
    """Load every algorithm, including those of other packages."""
    from parsifl.core.registry import algorithms

    yield CheckResult("algorithms", "ok", f"{len(algorithms())} registered")


def messages() -> Iterator[CheckResult]:
    """Encode and decode a sparse message."""
    import torch

    from parsifl import wire

    sent = torch.zeros(1000).index_fill(0, torch.arange(0, 1000, 40), 2.5)
    data = wire.encode({"w": sent})
    if torch.equal(wire.decode(data, dict[str, torch.Tensor])["w"], sent):
        yield CheckResult(
            "wire", "ok", f"a sparse message of 1000 entries was decoded, {len(data)} bytes"
        )
    else:
        yield CheckResult("wire", "problem", "a decoded message differs; reinstall parsifl")


def data_folders(data_dir: Path | None) -> Iterator[CheckResult]:
    """Check the data directories, and list the datasets that are present."""
    from parsifl import data
    from parsifl.data.download import FOLDER_VARIABLE, Files
    from parsifl.data.registry import entry

    named = {"--data-dir": data_dir, f"${FOLDER_VARIABLE}": os.environ.get(FOLDER_VARIABLE)}
    for source, folder in named.items():
        if folder and not Path(folder).expanduser().is_dir():
            yield CheckResult("data directory", "problem", f"{source} is not a directory: {folder}")
    entries = [entry(name) for name in data.names()]
    remote = [dataset for dataset in entries if dataset.about.remotes]
    here = [
        dataset.name for dataset in remote if _complete(dataset, Files(dataset, data_dir).roots())
    ]
    roots = ", ".join(str(root) for root in Files(entries[0], data_dir).roots())
    yield CheckResult("data directory", "ok", f"searched in this order: {roots}")
    shown = ", ".join(here) or "none; they are downloaded when first used"
    yield CheckResult(
        "datasets", "ok", f"{len(here)} of {len(remote)} datasets with files are present: {shown}"
    )


def _complete(dataset: Entry, roots: Sequence[Path]) -> bool:
    """Return whether each file exists, as downloaded or unpacked; nothing is read."""

    def here(*files: str) -> bool:
        return all(any((root / file).exists() for root in roots) for file in files)

    return all(
        here(part.path) or (part.members and here(*(name for name, _ in part.members)))
        for part in dataset.about.remotes
    )


def _extra(requirement: Requirement) -> str | None:
    """Return the extra that a requirement belongs to; None if it is always needed."""
    match = re.search(r"extra == ['\"]([\w-]+)['\"]", str(requirement.marker or ""))
    return match[1] if match else None


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
