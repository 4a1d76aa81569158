"""docs/flower.md: its tables and unit files are held against the code."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import asdict, fields
from fractions import Fraction
from pathlib import Path

import pytest
from tests.flower.inprocess import InProcess

from parsifl.core import registry
from parsifl.core.algorithm import GatherAlgorithm
from parsifl.core.errors import ConfigError
from parsifl.flower.app_template import write_units
from parsifl.flower.settings import Deployment
from parsifl.sites.deployment.guards import Guards

PAGE = Path(__file__).parents[2] / "docs" / "flower.md"


def table() -> dict[str, dict[str, int]]:
    """Return the table of bytes: by algorithm, by column."""
    lines = PAGE.read_text().splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("| algorithm | dense"))
    names = cells(lines[start])[1:]
    found = {}
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        name, *sizes = cells(line)
        numbers = [int(size.replace(",", "")) for size in sizes]
        found[name] = dict(zip(names, numbers, strict=True))
    return found


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_the_table_of_bytes_is_what_is_booked(tmp_path: Path) -> None:
    pytest.importorskip("flwr", reason="needs flwr: install the extra parsifl[flower]")
    from tests.flower.deployed import TABLE, tabled

    written = table()
    assert written.keys() == TABLE.keys()
    for place, (name, sizes) in enumerate(written.items()):
        link = InProcess(tabled(name), tmp_path / f"state{place}")
        records = link.run(tmp_path / f"run{place}")
        assert sizes["dense"] == sum(r["dense_up"] for r in records)
        # which entries are zero may differ a little by processor
        close = 0.02 if "," in name else 0.0
        up, down = (sum(r[key] for r in records) for key in ("bytes_up", "bytes_down"))
        assert sizes["payload up"] == pytest.approx(up, rel=close)
        assert sizes["payload down"] == pytest.approx(down, rel=close)
        assert sizes["socket up"] > sizes["payload up"]
        assert sizes["socket down"] > sizes["payload down"]


def test_the_methods_that_need_single_uploads_are_those_that_are_named() -> None:
    method = {type(registry.get(name)) for name in registry.algorithms()}
    named = {kind.__name__ for kind in method if issubclass(kind, GatherAlgorithm)}
    (line,) = (line for line in PAGE.read_text().splitlines() if "compare clients" in line)
    assert named == set(re.findall(r"\w*Fed\w+", line))


def test_every_setting_is_explained_with_its_default() -> None:
    lines = PAGE.read_text().splitlines()
    for setting in fields(Deployment):
        (line,) = (line for line in lines if line.startswith(f"| `{setting.name}` |"))
        default = str(getattr(Deployment(), setting.name)).lower().removesuffix(".0")
        assert cells(line)[1].strip("`") == default


def test_every_guard_is_explained_with_its_default() -> None:
    lines = PAGE.read_text().splitlines()
    for name, value in asdict(Guards()).items():
        (line,) = (line for line in lines if line.startswith(f"| `guard-{name}` |"))
        default = "|".join(value) if isinstance(value, tuple) else value
        default = "profile" if default is None else default  # as the guard-profile has it
        assert (
            cells(line)[1] == default
            if isinstance(default, str)
            else (float(Fraction(cells(line)[1])) == default)
        )


@pytest.mark.parametrize("name", ["superlink", "supernode"])
def test_systemd_accepts_the_units(name: str, tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("needs systemd-analyze")
    write_units(tmp_path / "units", "fl.example.org", 1)
    text = (tmp_path / "units" / f"{name}.service").read_text()
    program = {"superlink": "flower-superlink", "supernode": "parsifl flower node"}[name]
    command = re.search(rf"/opt/parsifl/bin/{program}", text)
    assert command is not None
    unit = tmp_path / f"{name}.service"
    unit.write_text(text.replace(command[0], "/bin/true"))  # it must exist to be accepted
    found = subprocess.run(
        ["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stderr
    complaints = [line for line in found.stderr.splitlines() if unit.name in line]
    # these are for systemd 254 and later; the page says what earlier ones do
    younger = ("RestartSteps", "RestartMaxDelaySec")
    assert [line for line in complaints if not any(key in line for key in younger)] == []


@pytest.mark.parametrize("name", ["superlink", "supernode"])
def test_the_units_are_hardened(name: str, tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("needs systemd-analyze")
    write_units(tmp_path, "fl.example.org", 1)
    unit = tmp_path / f"{name}.service"
    command = ["systemd-analyze", "security", "--offline=true", "--threshold=40", str(unit)]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    if "--offline" in found.stderr or "not been booted" in found.stderr:
        pytest.skip("needs systemd-analyze security --offline")
    assert found.returncode == 0, found.stdout + found.stderr
    assert "MemoryMax=" in unit.read_text()


def test_units_name_the_server_and_the_node_and_replace_nothing(tmp_path: Path) -> None:
    write_units(tmp_path, "10.0.0.7", 12)
    text = (tmp_path / "supernode.service").read_text()
    assert "--superlink 10.0.0.7:9000" in text
    assert "--auth-supernode-private-key /etc/parsifl/node12 " in text
    assert "'partition-id=12 data=" in text
    with pytest.raises(ConfigError, match=r"flower\.env, superlink\.service, supernode\.service"):
        write_units(tmp_path, "10.0.0.7", 13)
