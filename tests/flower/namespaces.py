"""Machines of their own on one machine: network namespaces behind a bridge."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Self

import pytest

_HOSTS = Path("/etc/netns")


def run(*command: str) -> None:
    """Run a command; raise with what it says if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")


class Namespaces:
    """A server and nodes, each with its own interfaces, ports and /etc/hosts.

    Parameters
    ----------
    server
        The name under which the nodes find the server.
    shaping
        What `tc ... netem` is told for every link, such as "delay 40ms 10ms loss 1%".
    """

    def __init__(self, nodes: int, server: str, shaping: str = "") -> None:
        start = f"parsifl{os.getpid()}"
        self.server, self.nodes = f"{start}s", [f"{start}n{i}" for i in range(nodes)]
        self._name, self._shaping = server, shaping

    def __enter__(self) -> Self:
        if os.geteuid() != 0 or not all(map(shutil.which, ("ip", "tc"))):
            pytest.skip("needs root and iproute2")
        try:
            self._make()
        except OSError as error:
            self._remove()
            pytest.skip(f"this machine does not allow it: {error}")
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._remove()

    def within(self, namespace: str, *command: str) -> list[str]:
        """Return the command that runs another one in a namespace."""
        return ["ip", "netns", "exec", namespace, *command]

    def _make(self) -> None:
        for namespace in (self.server, *self.nodes):
            run("ip", "netns", "add", namespace)
            run("ip", "-n", namespace, "link", "set", "lo", "up")
            place = _HOSTS / namespace
            place.mkdir(parents=True)
            (place / "hosts").write_text(f"127.0.0.1 localhost\n10.213.0.1 {self._name}\n")
        inside = ("ip", "-n", self.server)
        run(*inside, "link", "add", "bridge0", "type", "bridge")
        run(*inside, "addr", "add", "10.213.0.1/24", "dev", "bridge0")
        run(*inside, "link", "set", "bridge0", "up")
        for number, namespace in enumerate(self.nodes):
            near, address = f"to{number}", f"10.213.0.{10 + number}/24"
            run(*inside, "link", "add", near, "type", "veth", "peer", "eth0", "netns", namespace)
            run(*inside, "link", "set", near, "master", "bridge0", "up")
            run("ip", "-n", namespace, "addr", "add", address, "dev", "eth0")
            run("ip", "-n", namespace, "link", "set", "eth0", "up")
            for where, device in ((self.server, near), (namespace, "eth0")):
                if self._shaping:
                    told = self._shaping.split()
                    run("tc", "-n", where, "qdisc", "add", "dev", device, "root", "netem", *told)

    def _remove(self) -> None:
        for namespace in (self.server, *self.nodes):
            subprocess.run(["ip", "netns", "del", namespace], capture_output=True, check=False)
            shutil.rmtree(_HOSTS / namespace, ignore_errors=True)
