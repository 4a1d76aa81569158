"""Three machines, as docs/flower.md has them: its own commands, in network namespaces."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from tests.flower.inprocess import InProcess
from tests.flower.namespaces import Namespaces
from tests.flower.test_documentation import PAGE
from tests.flower.test_settings import flat
from tests.records import read_metrics

pytest.importorskip("flwr", reason="needs flwr: install the extra parsifl[flower]")

from tests.flower.deployed import limit, server_state, until

from parsifl.core import tree
from parsifl.flower.client import RemoteClient
from parsifl.flower.message import Envelope, Kind, respond
from parsifl.flower.node import end, start
from parsifl.flower.settings import DONE_FILE, read

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        "PARSIFL_DEPLOY" not in os.environ,
        reason="deploys for minutes: `make deploy` sets PARSIFL_DEPLOY=1, as CI does",
    ),
]
SERVER = "fl.example.org"
BIN = Path(sys.executable).parent


class Page:
    """The commands of the page, with its places below a folder."""

    def __init__(self, folder: Path) -> None:
        self._text, self._folder = PAGE.read_text(), folder

    def placed(self, text: str, **changes: str) -> str:
        places = {
            "/opt/parsifl/bin": str(BIN),
            "/etc/parsifl/keys": f"{self._folder}/keys",
            "/etc/parsifl": f"{self._folder}/keys",
            "/var/lib/parsifl": f"{self._folder}/var",
            "/srv": f"{self._folder}/srv",
        }
        for old, new in {**places, **changes}.items():
            text = text.replace(old, new)
        return text

    def unit(self, name: str, **changes: str) -> list[str]:
        """Return the command of a systemd unit that `parsifl flower units` has written."""
        unit = (self._folder / "units" / f"{name}.service").read_text()
        command = re.search(r"^ExecStart=((?:.*\\\n)*.*)$", unit, re.MULTILINE)
        assert command is not None
        return shlex.split(self.placed(command[1].replace("\\\n", " "), **changes))

    def environment(self) -> dict[str, str]:
        """Return the settings of every process."""
        (block,) = re.findall(r"```ini\n# /etc/parsifl/flower.env\n(.*?)```", self._text, re.DOTALL)
        pairs = (line.split("=", 1) for line in self.placed(block).splitlines() if line)
        kept = ("PYTHONPATH", "PARSIFL_DATA")  # of the sources under test
        return {
            **{name: os.environ[name] for name in kept if name in os.environ},
            **dict(pairs),
            "HOME": str(self._folder),
            "OMP_NUM_THREADS": "1",
        }

    def shell(self, start: str) -> str:
        """Return the indented block that has a line which starts like this."""
        blocks = re.findall(r"(?:^    .*\n)+", self._text, re.MULTILINE)
        (block,) = (b for b in blocks if any(x.strip().startswith(start) for x in b.splitlines()))
        return self.placed("\n".join(line[4:] for line in block.splitlines()))


class Files(InProcess):
    """The same clients in this process."""

    def __post_init__(self) -> None:
        self.clients = {100 + i: i for i in range(3)}

    def site(self, client: int) -> Callable[[Kind, Envelope], Envelope]:
        site = RemoteClient(self.experiment, client, _table(client), self.root)
        return lambda kind, request: respond(site, kind, request)


def _table(number: int) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    draw = np.random.default_rng(number)
    x = draw.normal(size=(30 + 10 * number, 12)).round(3)
    return x, (x[:, 2] - 2 * x[:, 7] + 0.1 * draw.normal(size=len(x))).round(3)


def _write_table(path: Path, number: int) -> None:
    x, y = _table(number)
    lines = [",".join([*(f"x{i:02d}" for i in range(12)), "target"])]
    for row, target in zip(x.tolist(), y.tolist(), strict=True):
        lines.append(",".join(map(repr, (*row, target))))
    path.write_text("\n".join(lines) + "\n")


def _shell(command: str, folder: Path, environment: Mapping[str, str]) -> None:
    done = subprocess.run(
        ["bash", "-ec", command], cwd=folder, env=dict(environment), text=True, check=False,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("shaping", ["", "delay 40ms 10ms loss 1%"], ids=["plain", "lossy"])
@pytest.mark.parametrize("node", ["flower-supernode", "parsifl flower node"])
def test_the_documented_commands_across_machines(shaping: str, node: str, tmp_path: Path) -> None:
    page = Page(tmp_path)
    environment = page.environment()
    for name in ("srv", "var"):
        (tmp_path / name).mkdir()
    for number in range(3):
        _write_table(tmp_path / "srv" / f"hospital{number}.csv", number)
    made = page.shell("parsifl flower init hospitals").replace("--rounds 10", "--rounds 3")
    _shell(made, tmp_path, environment)
    _shell(page.shell("parsifl flower keys"), tmp_path, environment)
    _shell(page.shell("parsifl flower units"), tmp_path, environment)
    running: list[subprocess.Popen[bytes]] = []
    with limit(900), Namespaces(3, SERVER, shaping) as machines:
        try:
            link = machines.within(machines.server, *page.unit("superlink"))
            running.append(start(link, tmp_path / "link.log", environment, tmp_path))
            log = tmp_path / "link.log"
            until(lambda: "running" in log.read_text().lower(), "the SuperLink listens", 60)
            asked = ["bash", "-ec", page.shell("for i in 0 1 2; do flwr supernode register")]
            shell, said = machines.within(machines.server, *asked), tmp_path / "shell.log"
            running.append(start(shell, said, environment, tmp_path))
            # a node whose key is not known yet ends, and only systemd would start it again
            until(lambda: said.read_text().count("registered successfully") == 3, "keys are known")
            for number, machine in enumerate(machines.nodes):
                changes = {
                    "parsifl flower node": node,
                    "partition-id=1": f"partition-id={number}",
                    "/node1": f"/node{number}",
                    "hospital.csv": f"hospital{number}.csv",
                }
                command = machines.within(machine, *page.unit("supernode", **changes))
                place = tmp_path / f"node{number}.log"
                # nodes have disks of their own
                own = {**environment, "FLWR_HOME": f"{tmp_path}/flwr{number}"}
                running.append(start(command, place, own, tmp_path))
            until(lambda: (tmp_path / "var/first" / DONE_FILE).exists(), "the run ends")
        finally:
            end(running)
    out = tmp_path / "var" / "first"
    assert [record["trained"] for record in read_metrics(out)] == [3, 3, 3]
    written = tomllib.loads((tmp_path / "hospitals" / "pyproject.toml").read_text())
    experiment = read(flat(written["tool"]["flwr"]["app"]["config"])).experiment
    Files(experiment, tmp_path / "state").run(tmp_path / "expected")
    assert tree.same(server_state(out, experiment), server_state(tmp_path / "expected", experiment))
