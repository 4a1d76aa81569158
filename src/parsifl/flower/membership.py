"""The mapping of Flower's node ids to client numbers."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

from parsifl.core.algorithm import ClientInfo
from parsifl.core.errors import ParsiflError, WireError
from parsifl.flower.hello import DataSchema, Machine, concerns, mismatch
from parsifl.flower.message import Envelope, Link, Replies, Requests
from parsifl.flower.network_schema import (
    HelloReply,
    HelloRequest,
    RemoteFailure,
    SitesRefused,
    claimed_client,
    describe,
    read,
    read_reply,
)
from parsifl.flower.settings import Deployment

_PAUSE = 1.0
_HELLO_SECONDS = 90.0
_ATTEMPTS = 3
Log = Callable[[str], None]


class Membership:
    """Records which node is which client; nodes that join later are asked once.

    A client belongs to the node that reported it first, also after a restart of the server: with
    node keys, Flower's node ids are bound to keys. With `deployment.rebind`, another node may take
    over a client whose node is not connected, or has not reported to this server. Clients in
    `left_out` are excluded.
    """

    def __init__(
        self,
        link: Link,
        clients: int,
        log: Log,
        deployment: Deployment,
        left_out: Container[int] = (),
    ) -> None:
        self._link, self._clients, self._log = link, clients, log
        self._deployment, self._left_out = deployment, left_out
        self._refused: dict[int, str] = {}  # by client
        self._unreleased: set[int] = set()  # nodes whose hello waits for release
        self._node_of: dict[int, int] = {}  # by client
        self._reported: set[int] = set()  # nodes whose hello was accepted by this server
        self._failed: dict[int, int] = {}
        self._connected: list[int] = []
        self.greeting = HelloRequest()
        self.infos: dict[int, ClientInfo] = {}
        self.schemas: dict[int, DataSchema] = {}
        self.machines: dict[int, Machine] = {}
        self.concerns: dict[int, list[str]] = {}

    def restore(self, stored: Mapping[str, Any]) -> None:
        """Restore the clients of a checkpoint; they must reconnect unchanged."""
        for entry in stored["clients"]:
            hello = read(HelloReply, Envelope(json.dumps(entry["hello"])))
            self._keep(hello)
            # may be called twice: keep nodes that have reported since
            self._node_of.setdefault(hello.client, int(entry["node"]))

    def to_json(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {
            "clients": [
                {
                    "node": self._node_of[client],
                    "hello": self._hello(client).model_dump(mode="json"),
                }
                for client in sorted(self.infos)
            ]
        }

    def _hello(self, client: int) -> HelloReply:
        info = self.infos[client]
        return HelloReply(
            client=client,
            samples=info.samples,
            profile=dict(info.profile),
            data_schema=self.schemas[client],
        )

    def _keep(self, hello: HelloReply) -> None:
        self.infos[hello.client] = ClientInfo(hello.client, hello.samples, hello.profile)
        self.schemas[hello.client] = hello.data_schema

    def gather(self, needed: int, wait: float) -> None:
        """Ask nodes to report until `needed` clients have; raise after `wait` seconds.

        A client whose site refuses is missing: the error comes at once if too few others are left.
        """
        end = time.monotonic() + wait
        while True:
            self.refresh(max(end - time.monotonic(), _PAUSE))
            if len(self.online()) >= needed:
                return
            if len(self._expected()) - len(self._refused) < needed:
                raise SitesRefused("; ".join(self._refused.values()), self._refused)
            if time.monotonic() >= end:
                there = sorted(self.online())
                missing = sorted(self._expected() - set(there))
                raise ParsiflError(
                    f"after {wait:g} s the clients {_list(missing)} of {self._clients} have not "
                    f"reported (reported: {_list(there) or 'none'}); start their nodes, each "
                    "with its own partition-id, or wait longer (deployment.wait). A node whose "
                    "clock is minutes off counts as offline: compare `date -u` on both machines"
                )
            self._link.pause(_PAUSE)

    def nodes(self) -> list[int]:
        """Update the list of connected nodes."""
        self._connected = self._link.nodes()
        return self._connected

    def refresh(self, timeout: float) -> None:
        """Update the list of connected nodes, and ask new ones to report."""
        self.nodes()
        missing = self._expected() - set(self.online())
        fresh = [
            node
            for node in self._connected
            if node not in self._reported and self._failed.get(node, 0) < _ATTEMPTS
        ]
        if not fresh or not missing:
            return
        requests: Requests = dict.fromkeys(fresh, ("hello", self.greeting.envelope()))
        # one of them may be dead but still listed: do not wait long, nor for more than needed
        enough, arrived = self.all_of(missing), dict[int, float]()

        def heard_enough(replies: Replies) -> bool:
            for node in replies:
                arrived.setdefault(node, time.time())
            return enough(replies)

        replies = self._link.ask(requests, min(timeout, _HELLO_SECONDS), heard_enough)
        heard = fresh if not enough(replies) else [node for node in fresh if node in replies]
        for node in heard:
            try:
                hello = read_reply(HelloReply, replies.get(node))
                self._admit(node, hello, arrived.get(node, time.time()))
            except Exception as error:  # an invalid reply of one node must not affect the others
                self._reject(node, error)

    def _reject(self, node: int, error: Exception) -> None:
        remote = error if isinstance(error, RemoteFailure) else None
        named = None if remote is None else remote.client
        # a node speaks for its own client only
        if named is not None and (reason := self.contradiction(named, node)):
            error, remote = WireError(reason), None
        if remote is not None and remote.unreleased:  # asked until a person has released it
            if node not in self._unreleased:
                self._log(f"node {node} waits: {describe(error)}")
            self._unreleased.add(node)
            return
        self._failed[node] = self._failed.get(node, 0) + 1
        self._log(f"node {node} is rejected: {describe(error)}")
        guarded = self.greeting.agreement is not None  # other clients have no guards
        if guarded and remote is not None and remote.guard and named is not None:
            self._refused[named] = describe(error)

    def _expected(self) -> set[int]:
        return {client for client in range(self._clients) if client not in self._left_out}

    def _admit(self, node: int, hello: HelloReply, arrived: float) -> None:
        client, limit = hello.client, self._deployment.classes
        if reason := mismatch(hello.machine):
            raise WireError(reason)
        if limit is not None and (hello.data_schema.classes or 0) > limit:
            raise WireError(f"client {client} has more than {limit} classes (deployment.classes)")
        known = self.infos.get(client)
        if known is not None:
            now = ClientInfo(client, hello.samples, hello.profile)
            if (known, self.schemas[client]) != (now, hello.data_schema):
                raise WireError(
                    f"client {client} started this run with {known.samples} rows and another data "
                    f"schema or profile than it has now ({hello.samples} rows); start a new run"
                )
        self.bind(client, node)
        self._keep(hello)
        self._reported.add(node)
        self._refused.pop(client, None)
        assert hello.machine is not None
        self.machines[client] = hello.machine
        self.concerns[client] = concerns(hello.machine, arrived)
        for concern in self.concerns[client]:
            self._log(f"client {client} (node {node}): {concern}")

    def owners(self) -> dict[int, int]:
        """Return the node of every client that ever reported."""
        return dict(self._node_of)

    def adopt(self, owners: Mapping[int, int]) -> None:
        """Take over the nodes of clients from an earlier attempt at the run."""
        self._node_of.update(owners)

    def bind(self, client: int, node: int) -> None:
        """Bind a node to a client; raise WireError if that contradicts earlier reports."""
        if reason := self.contradiction(client, node):
            raise WireError(reason)
        self._node_of[client] = node

    def contradiction(self, client: int, node: int) -> str:
        """Return why a node cannot speak for a client, or ""."""
        claim = f"it claims to be client {client}"
        if client >= self._clients:
            return f"{claim}; there are 0 to {self._clients - 1}"
        if client in self._left_out:
            return f"{claim}, which was excluded from this run"
        if self._deployment.nodes and self._deployment.nodes.get(str(node)) != client:
            return f"{claim}, which deployment.nodes contradicts"
        owner = self._node_of.get(client, node)
        # a killed node counts as connected for a while, but does not report
        present = owner in self._connected and owner in self._reported
        free = self._deployment.rebind and not present
        if owner != node and not free:
            return f"{claim}, which is node {owner} in this run"
        others = [mine for mine, its in self._node_of.items() if its == node and mine != client]
        if others:
            return f"{claim}, but was client {others[0]} before"
        return ""

    def all_of(self, wanted: set[int]) -> Callable[[Replies], bool]:
        """Return a function that is true when replies come from all of these clients.

        A reply for the client of another node does not count.
        """

        def enough(replies: Replies) -> bool:
            claims = ((node, claimed_client(reply)) for node, reply in replies.items())
            return wanted <= {
                client
                for node, client in claims
                if client is not None and not self.contradiction(client, node)
            }

        return enough

    def online(self) -> dict[int, int]:
        """Return the node of every client that is connected and has reported."""
        return {
            client: node
            for client, node in self._node_of.items()
            if node in self._connected and node in self._reported
        }


def _list(clients: Sequence[int]) -> str:
    return ", ".join(str(client) for client in clients)
