"""Mutated messages of every kind and both directions, and what must come of them.

A mutant is accepted or rejected with a reason in one printable line. It never raises anything
else, takes no more than half a second, and leaves the other clients alone.
"""

from __future__ import annotations

import copy
import json
import random
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from parsifl import wire
from parsifl.core.errors import DataError, ParsiflError
from parsifl.core.keys import Key
from parsifl.engine.experiment import Experiment, problem_for
from parsifl.engine.pool import ClientResult
from parsifl.flower.client import RemoteClient
from parsifl.flower.exchange import Exchange, Request, UploadTemplates
from parsifl.flower.hello import agree
from parsifl.flower.membership import Membership
from parsifl.flower.message import Envelope, Kind, Replies, Requests, answered
from parsifl.flower.network_schema import (
    EvaluateReply,
    EvaluateRequest,
    HelloReply,
    HelloRequest,
    TrainRequest,
    describe,
    failure_in,
    read,
    read_reply,
)
from parsifl.flower.pool import FlowerPool
from parsifl.flower.settings import Deployment, DeploymentSettings
from parsifl.sites.deployment.agreement import Agreement, RegressionSpec
from parsifl.sites.deployment.guards import Guards
from parsifl.sites.deployment.messages import (
    AgreeReply,
    AgreeRequest,
    ProductsReply,
    ProductsRequest,
)
from parsifl.sites.deployment.table_site import TableSite
from parsifl.wire import MessageStats, frame

Direction = Literal["request", "reply"]
KINDS: tuple[Kind, ...] = ("hello", "train", "evaluate", "agree", "products")
MESSAGES: list[tuple[Kind, Direction]] = [
    (kind, direction) for kind in KINDS for direction in ("request", "reply")
]
EXPECTED = {
    "CapabilityError",
    "ConfigError",
    "DataError",
    "LostState",
    "Refusal",
    "UnusableResult",
    "WireError",
}
RUN = "0123456789abcdef" * 2
SPEC = RegressionSpec("days")
INTERESTING: list[Any] = [
    None, True, False, 0, -1, 1, 2, 7, 255, 2**31 - 1, 2**31, 2**40 - 1, 2**53 + 1, 2**63, 2**64,
    10**18, 10**400, -(10**400), 0.5, -0.0, 1e-320, 1e308, -1e308, float("nan"), float("inf"), "",
    "x", "1", "\ud800", "\x00", "\x1b[2J\x07\n", "\u202e", "../..", "x" * 101, "x" * 5000, [], {},
    [[]], [None], {"": 0}, {"a": {"b": {}}}, [0] * 300, ["x"] * 9, {"test": 1}, RUN, RUN.upper(),
]  # fmt: skip


@dataclass(frozen=True)
class Silent:
    """A `Link` to nobody."""

    def nodes(self) -> list[int]:
        return []

    def ask(
        self,
        requests: Requests,
        timeout: float,
        enough: Callable[[Replies], bool] | None = None,
    ) -> Replies:
        del requests, timeout, enough
        return {}

    def pause(self, seconds: float) -> None:
        del seconds


class Targets:
    """A small federation whose parts take messages; build it once."""

    def __init__(self, root: Path | None = None) -> None:
        self.root = root or Path(tempfile.mkdtemp(prefix="parsifl-fuzz-"))
        self._learning()
        self._regression()
        self.corpus = self._corpus()

    # ------------------------------------------------------------------ an ordinary run
    def _learning(self) -> None:
        draw = np.random.default_rng(0)
        rows = (draw.standard_normal((12, 3)).astype(np.float32), draw.integers(0, 2, 12))
        self.experiment = Experiment("fedprox", {"local_steps": 1}, clients=3, model="glm")
        self.client = RemoteClient(self.experiment, 1, rows, self.root)
        self.hello = read(HelloReply, self.client.hello())
        self.schema = self.hello.data_schema
        method = self.experiment.build_algorithm()
        problem = problem_for("glm", self.schema.example())
        settings = DeploymentSettings(self.experiment, 3, Deployment(out=str(self.root / "run")))
        self.pool = FlowerPool(method, settings, Silent(), lambda _: None, lambda _: problem)
        self.pool.clients = [replace(_info(self.hello), id=number) for number in range(3)]
        self.pool._metric_names = frozenset({"loss", "accuracy"})
        self.pool._algorithm = method
        self.templates = UploadTemplates(method, problem, self.schema)
        server = method.init_server(problem, self.pool.clients, Key(0))
        self.down = method.broadcast(problem, server, self.pool.clients[1], Key(0))
        head: dict[str, Any] = {
            "client": 1, "round": 0, "experiment": RUN, "accepted": 0, "oldest": 0,
            "data_schema": self.schema,
        }  # fmt: skip
        self.train = TrainRequest(**head, uploads=True)
        self.evaluate = EvaluateRequest(**head)
        self.parts = {"down": wire.encode(self.down)}
        self.exchange = Exchange(
            self.templates,
            self.pool.members,
            Silent(),
            settings.deployment,
            self.experiment.precision,
            unresponsive=set(),
        )
        expected = self.templates.of(self.down, self.pool.clients[1], Key(0))
        self.asked = Request(
            self.pool.clients[1], self.train, self.parts, self.down, MessageStats(), expected, True
        )

    # ------------------------------------------------------------------ a sparse regression
    def _regression(self) -> None:
        draw = np.random.default_rng(1)
        self.table = {
            "age": [f"{value:.1f}" for value in draw.uniform(20, 90, 40)],
            "sex": ["f", "m"] * 20,
            "days": [f"{value:.2f}" for value in draw.uniform(1, 30, 40)],
        }
        settings = {"tau": 2, "batch_size": None}
        self.study = Experiment("fedgradmp", settings, clients=3, rounds=4, evaluate_every=0)
        self.summary = read(AgreeReply, self.site().answer("agree", AgreeRequest().envelope()))
        self.agreement = Agreement.of([self.summary.summary] * 3, SPEC, 10).to_json()
        self.products = ProductsRequest(
            client=1,
            round=0,
            experiment=RUN,
            agreement=self.agreement,
            support=(0, 1),
            coefficients=(0.0, 0.0),
        )

    def site(self) -> TableSite:
        """Return a site without a history of requests."""
        audit = self.root / "client-1" / "audit.jsonl"
        audit.unlink(missing_ok=True)
        guards = Guards(algorithms=("fedgradmp",))
        return TableSite(self.study, 1, self.table, self.root, SPEC, guards=guards)

    def _corpus(self) -> dict[tuple[Kind, Direction], Envelope]:
        model = {"model": wire.encode(self.down), **self.parts}
        hello = HelloRequest(agreement=self.agreement)
        found: dict[tuple[Kind, Direction], Envelope] = {
            ("hello", "request"): hello.envelope(),
            ("hello", "reply"): self.hello.envelope(),
            ("train", "request"): self.train.envelope(self.parts),
            ("train", "reply"): self.client.answer("train", self.train.envelope(self.parts)),
            ("evaluate", "request"): self.evaluate.envelope(model),
            ("evaluate", "reply"): self.client.answer("evaluate", self.evaluate.envelope(model)),
            ("agree", "request"): AgreeRequest().envelope(),
            ("agree", "reply"): self.summary.envelope(),
            ("products", "request"): self.products.envelope(),
            ("products", "reply"): self.site().answer("products", self.products.envelope()),
        }
        assert not any(failure_in(envelope) for envelope in found.values())
        return found

    # ------------------------------------------------------------------ what becomes of a mutant
    def outcome(self, kind: Kind, direction: Direction, envelope: Envelope) -> str:
        """Return "accepted", or the reason why the mutant is rejected."""
        found = (self._asked if direction == "request" else self._replied)(kind, envelope)
        assert found.isprintable(), found
        assert 0 < len(found) <= 500, found
        found.encode()
        return found

    def _asked(self, kind: Kind, envelope: Envelope) -> str:
        if kind in ("agree", "products"):
            reply = self.site().answer(kind, envelope)
        else:
            reply = answered(lambda: self.client.answer(kind, envelope))
        if kind == "hello":  # of both kinds of nodes
            refused = failure_in(self.site().answer(kind, envelope))
            assert refused is None or refused.rule != "failure", refused
        failure = failure_in(reply)
        if failure is None:
            return "accepted"
        # a tree of the right type and the wrong form fails wherever the algorithm reads it: the
        # client reports the type of the exception, and its state is what it was
        assert kind in ("train", "evaluate") or failure.error in EXPECTED, failure
        assert failure.rule != "failure", failure
        return failure.reason

    def _replied(self, kind: Kind, envelope: Envelope) -> str:
        try:
            return getattr(self, f"_{kind}_reply")(envelope) or "accepted"
        except (ParsiflError, DataError) as error:
            return describe(error)

    def _train_reply(self, envelope: Envelope) -> str:
        found = self.exchange._accepted(self.asked, envelope)
        self.exchange.notes.clear()
        if isinstance(found, ClientResult):
            return ""
        assert "cannot be used (" not in found, found
        return found

    def _evaluate_reply(self, envelope: Envelope) -> str:
        reply = read_reply(EvaluateReply, envelope, self.evaluate)
        return self.pool._scores(self.pool.clients[1], reply).reason

    def _hello_reply(self, envelope: Envelope) -> str:
        hello = read_reply(HelloReply, envelope)
        Membership(Silent(), 3, lambda _: None, Deployment())._admit(101, hello, 0.0)
        agree(dict(enumerate([self.schema, hello.data_schema, self.schema])))
        self.templates.of(self.down, _info(hello), Key(0))
        return ""

    def _agree_reply(self, envelope: Envelope) -> str:
        reply = read_reply(AgreeReply, envelope)
        Agreement.of([self.summary.summary, reply.summary, self.summary.summary], SPEC, 10)
        return ""

    def _products_reply(self, envelope: Envelope) -> str:
        read_reply(ProductsReply, envelope, self.products)
        from parsifl.sites.deployment.regression import Regression

        server: Any = object.__new__(Regression)
        server.bytes_sums = 0
        server._sums(self.products, envelope, 2)
        return ""


def _info(hello: HelloReply) -> Any:
    from parsifl.core.algorithm import ClientInfo

    return ClientInfo(hello.client, hello.samples, hello.profile)


# ---------------------------------------------------------------------- mutation
def mutate(envelope: Envelope, other: Envelope, draw: random.Random, value: Any = ...) -> Envelope:
    """Return a mutant of a message; `value` replaces one of its JSON values."""
    text, parts = envelope.text, dict(envelope.parts)
    choice = draw.random()
    if value is not ... or choice < 0.6:
        text = _changed_json(text, draw, value)
    elif choice < 0.75:
        text = _changed_text(text, other.text, draw)
    if parts and (choice > 0.7 or draw.random() < 0.15):
        name = draw.choice(sorted(parts))
        kind = draw.randrange(8)
        if kind == 0:
            del parts[name]
        elif kind == 1:
            parts[draw.choice(["upload", "down", "model", "server", "sums", "\x1b"])] = parts[name]
        else:
            parts[name] = _changed_bytes(parts[name], draw)
    elif draw.random() < 0.02:
        parts["upload"] = draw.randbytes(20)
    return Envelope(text, parts)


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [path] if path else []
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, inner in items:
        found += _places(inner, (*path, key))
    return found


def _changed_json(text: str, draw: random.Random, value: Any) -> str:
    content = json.loads(text)
    for _ in range(draw.choice([1, 1, 1, 2, 4])):
        places = _places(content)
        chosen = copy.deepcopy(draw.choice(INTERESTING) if value is ... else value)
        if not places or draw.random() < 0.03:
            content = chosen if draw.random() < 0.3 else {**_dict(content), "extra": chosen}
            continue
        *above, last = draw.choice(places)
        target: Any = content
        for step in above:
            target = target[step]
        kind = draw.random()
        if kind < 0.75:
            target[last] = chosen
        elif kind < 0.87:
            del target[last]
        elif isinstance(target, dict):
            name = chosen if isinstance(chosen, str) else str(chosen)[:50]
            target[name] = target[last]
        else:
            target.append(chosen)
    return json.dumps(content)


def _dict(content: Any) -> dict[str, Any]:
    return content if isinstance(content, dict) else {}


def _changed_text(text: str, other: str, draw: random.Random) -> str:
    at = draw.randrange(len(text) + 1)
    kind = draw.randrange(6)
    if kind == 0:
        return text[:at]
    if kind == 1:
        return text[:at] + draw.choice(['"', "{", "]", "\\", "\x00", "\ud800", "9" * 400, "e9"])
    if kind == 2:
        return text[:at] + other[draw.randrange(len(other)) :]
    if kind == 3:
        return text[:at] + chr(draw.randrange(0x110000)) + text[at + 1 :]
    if kind == 4:
        return "[" * draw.choice([10, 200, 100_000])
    return text + text


def _changed_bytes(data: bytes, draw: random.Random) -> bytes:
    if draw.random() < 0.1:
        return draw.randbytes(draw.choice([0, 1, 10, 100]))
    output = bytearray(data)
    for _ in range(draw.choice([1, 1, 2, 4])):
        at = draw.randrange(len(output) + 1)
        kind = draw.randrange(4)
        if kind == 0 and at < len(output):
            output[at] ^= 1 << draw.randrange(8)
        elif kind == 1:
            del output[at : at + draw.choice([1, 4, 64])]
        elif kind == 2:
            output[at:at] = draw.randbytes(draw.choice([1, 4, 16]))
        else:
            number = draw.choice([2**14, 2**31, 2**62])
            output[at:at] = bytes([number >> s & 127 | 128 for s in range(0, 56, 7)]) + b"\x01"
    if len(output) < frame.PREFIX.size or draw.random() < 0.1:
        return bytes(output)
    body = bytes(output[frame.PREFIX.size :])
    flags = output[5]
    prefix = frame.PREFIX.pack(frame.MAGIC, frame.VERSION, flags, frame.checksum(flags, [body]))
    return prefix + body
