"""Which node is which client: node numbers are Flower's and change, client numbers are ours."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from parsifl.core.algorithm import ClientInfo
from parsifl.core.errors import ParsiflError, WireError
from parsifl.flower.data_schema import DataSchema
from parsifl.flower.message import Letter
from parsifl.flower.transport import Answers, Link

_PAUSE = 1.0
_HELLO_SECONDS = 90.0
_ATTEMPTS = 3
_LONGEST_PROFILE = 10_000
_MOST_SAMPLES = 1 << 40
Log = Callable[[str], None]


class Membership:
    """Keeps who is who; nodes that join later are asked for their client once.

    If two connected nodes claim one client, the first is believed until it is gone.
    """

    def __init__(self, link: Link, clients: int, log: Log) -> None:
        self._link, self._clients, self._log = link, clients, log
        self._claims: dict[int, int] = {}
        self._failed: dict[int, int] = {}
        self._connected: list[int] = []
        self.greeting = Letter({})
        self.infos: dict[int, ClientInfo] = {}
        self.facts: dict[int, DataSchema] = {}

    def restore(self, stored: Mapping[str, Any]) -> None:
        """Take what a checkpoint knows of the clients: they must come back as they were."""
        for entry in stored["clients"]:
            client, info, facts = _read_hello(Letter(entry))
            self.infos[client], self.facts[client] = info, facts

    def to_json(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
        return {
            "clients": [
                {
                    "client": client,
                    "samples": info.samples,
                    "profile": dict(info.profile),
                    "facts": self.facts[client].to_json(),
                }
                for client, info in sorted(self.infos.items())
            ]
        }

    def gather(self, enough: Callable[[], bool], wait: float) -> None:
        """Greet nodes until there are enough of them, or raise after `wait` seconds."""
        end = time.monotonic() + wait
        while True:
            self.refresh(max(end - time.monotonic(), _PAUSE))
            if enough():
                return
            if time.monotonic() >= end:
                there = sorted(self.online())
                missing = sorted(set(range(self._clients)) - set(there))
                raise ParsiflError(
                    f"after {wait:g} s the clients {_list(missing)} of {self._clients} have not "
                    f"reported (there are {_list(there) or 'none'}); start their nodes, each "
                    "with its own partition-id, or wait longer (deployment.wait)"
                )
            self._link.pause(_PAUSE)

    def refresh(self, timeout: float) -> None:
        """Look who is connected, and greet newcomers."""
        self._connected = self._link.nodes()
        missing = set(range(self._clients)) - set(self.online())
        fresh = [
            node
            for node in self._connected
            if node not in self._claims and self._failed.get(node, 0) < _ATTEMPTS
        ]
        if not fresh or not missing:
            return
        letters = dict.fromkeys(fresh, self.greeting)
        # one of them may be dead and not yet missed: do not wait long, nor for more than we need
        enough = all_of(missing)
        answers = self._link.ask("hello", letters, min(timeout, _HELLO_SECONDS), enough)
        heard = fresh if not enough(answers) else [node for node in fresh if node in answers]
        for node in heard:
            try:
                self._admit(node, answers.get(node, "no answer"))
            except WireError as error:
                self._failed[node] = self._failed.get(node, 0) + 1
                self._log(f"node {node} is not admitted: {error}")

    def _admit(self, node: int, answer: Letter | str) -> None:
        if isinstance(answer, str):
            raise WireError(answer)
        if "error" in answer.meta:
            raise WireError(str(answer.meta["error"])[:500])
        client, info, facts = _read_hello(answer)
        if client >= self._clients:
            raise WireError(f"it says it is client {client}; there are 0 to {self._clients - 1}")
        known = self.infos.get(client)
        if known is not None and (known, self.facts[client]) != (info, facts):
            raise WireError(
                f"client {client} began this run with {known.samples} rows and another form of "
                f"data or profile than it has now ({info.samples} rows); start a new run"
            )
        holder = self.online().get(client)
        if holder is not None:
            self._log(f"node {node} claims client {client}, which node {holder} is already")
        self.infos[client], self.facts[client] = info, facts
        self._claims[node] = client

    def online(self) -> dict[int, int]:
        """Return the node of every client that is connected."""
        found: dict[int, int] = {}
        for node, client in self._claims.items():  # the first claim wins
            if node in self._connected:
                found.setdefault(client, node)
        return found


def all_of(wanted: set[int]) -> Callable[[Answers], bool]:
    """Return a function that tells whether answers claim to come from all of these clients."""

    def enough(answers: Answers) -> bool:
        letters = (answer for answer in answers.values() if isinstance(answer, Letter))
        told = (letter.meta.get("client") for letter in letters)
        return wanted <= {client for client in told if type(client) is int}

    return enough


def _read_hello(letter: Letter) -> tuple[int, ClientInfo, DataSchema]:
    client, samples = letter.get("client", int), letter.get("samples", int)
    profile = letter.get("profile", dict)
    if client < 0 or not 0 <= samples < _MOST_SAMPLES:
        raise WireError(f"client {client} with {samples} rows makes no sense")
    text = json.dumps(profile)
    if len(text) > _LONGEST_PROFILE or not all(_is_finite(value) for value in profile.values()):
        raise WireError("profile: too long, or not finite")
    return client, ClientInfo(client, samples, profile), DataSchema.read(letter.meta.get("facts"))


def _is_finite(value: Any) -> bool:
    return not isinstance(value, float) or math.isfinite(value)


def _list(clients: Sequence[int]) -> str:
    return ", ".join(str(client) for client in clients)
