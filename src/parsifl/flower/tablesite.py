"""A site with a table: its guards decide what leaves it, and its audit file records what left."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from parsifl import wire
from parsifl.core import tree
from parsifl.core.errors import WireError
from parsifl.core.problem import Problem
from parsifl.data.clients import ClientData
from parsifl.data.ragged import Ragged
from parsifl.engine.experiment import Experiment
from parsifl.flower import guards as rules
from parsifl.flower.audit import Audit, check_history, digest
from parsifl.flower.client import NodeConfig, RemoteClient
from parsifl.flower.data_schema import DataSchema
from parsifl.flower.guards import Guards, Refusal
from parsifl.flower.logs import node_log
from parsifl.flower.message import Envelope, printable
from parsifl.flower.network_schema import (
    REQUESTS,
    AgreeReply,
    AgreeRequest,
    EvaluateRequest,
    FailureReply,
    ProductsReply,
    ProductsRequest,
    TrainRequest,
    WorkRequest,
    failure_in,
    read,
)
from parsifl.flower.table_schema import TableSchema, prepare
from parsifl.flower.tables import Agreement, Array, Prepared, Table, summarise
from parsifl.flower.transport import Kind
from parsifl.linear.glm import GLM

LoadTable = Callable[[NodeConfig], Table]


def least_squares(data: ClientData) -> Problem:
    """Return the problem of the rounds: centred data, so no intercept; one weight a row."""
    return GLM(int(data.x.shape[1]), "squared-half", intercept=False, weighted=True)


class TableSite:
    """A site with a table: it sends aggregates, trains on its encoded rows, and sends products.

    Parameters
    ----------
    root
        The folder for client state; the audit file is in its subfolder `client-NUMBER`.
    target
        The column that is predicted; a request that names another one is refused.
    schema
        What the site declares of its columns.
    guards
        The site's limits. Every request is held against them, against the site's own table and
        against what has left before; what breaks a rule is answered with that rule and no data.
    """

    def __init__(
        self,
        experiment: Experiment,
        client: int,
        table: Table,
        root: Path,
        target: str,
        schema: TableSchema | None = None,
        guards: Guards | None = None,
    ) -> None:
        self._experiment, self._client, self._root = experiment, client, root
        self._table, self._target = table, target
        self._schema, self._guards = schema or TableSchema(), guards or Guards()
        self._audit = Audit(root / f"client-{client}")

    def answer(self, kind: Kind, envelope: Envelope) -> Envelope:
        """Answer a request of this kind; this is the only way out of the site."""
        entry: dict[str, Any] = {"kind": kind}
        with self._audit.locked():
            try:
                reply = self._answer(kind, envelope, entry)
            except Refusal as refusal:
                reply = self._refuse(refusal.rule, str(refusal))
            except WireError as error:  # its text is about the request, not about the table
                reply = self._refuse("request", str(error))
            except Exception:
                node_log().exception("a request for '%s' could not be answered", kind)
                reply = self._refuse("failure", "its work failed; the reason is in the node's log")
            size = sum(len(part) for part in reply.parts.values())
            self._audit.write({**entry, "bytes": size, **json.loads(reply.text)})
        return reply

    def _refuse(self, rule: str, text: str) -> Envelope:
        reason = printable(f"site {self._client} refuses (rule '{rule}'): {text}")
        node_log().warning("%s", reason)
        return FailureReply(error="Refusal", rule=rule, detail=reason).envelope()

    def _answer(self, kind: Kind, envelope: Envelope, entry: dict[str, Any]) -> Envelope:
        request = read(REQUESTS[kind], envelope)
        own = prepare(self._table, self._target, self._schema, self._guards)
        rules.check_plan(self._experiment, self._client, own.rows, self._guards)
        entry["table"] = digest({name: list(v) for name, v in self._table.items()}, self._target)
        if isinstance(request, AgreeRequest):
            return AgreeReply(client=self._client, summary=summarise(own)).envelope()
        agreement = getattr(request, "agreement", None)
        if agreement is None:
            raise WireError("agreement: none, and a site answers nothing without one")
        rules.check_agreement(agreement, own)
        x, y = agreement.encode(own.table)
        if isinstance(request, ProductsRequest):
            return self._products(request, own, x, y, entry)
        data = _data(x, y)
        site = RemoteClient(self._experiment, self._client, data, self._root, least_squares)
        if not isinstance(request, WorkRequest):
            return site.hello()
        if request.data_schema != DataSchema.of(data):
            raise Refusal("data-schema", "the agreed form of a row is not that of its table")
        if isinstance(request, EvaluateRequest):
            return _whole(site.evaluate(request, envelope.parts))
        assert isinstance(request, TrainRequest)
        self._hold(request, agreement, entry, request.round, envelope.parts.get("down"))
        return self._narrow(_whole(site.train(request, envelope.parts)), own.rows, entry)

    def _hold(
        self,
        request: TrainRequest | ProductsRequest,
        agreement: Agreement,
        entry: dict[str, Any],
        *what: Any,
    ) -> None:
        """Hold a request against what has left before."""
        if request.client != self._client:
            raise WireError(f"client: this is {self._client}, not {request.client}")
        entry["run"] = request.experiment
        entry["agreement"] = digest(agreement.to_json())
        entry["request"] = digest(*what)
        check_history(self._audit.entries(), entry, self._experiment.rounds, self._guards)

    def _narrow(self, reply: Envelope, rows: int, entry: dict[str, Any]) -> Envelope:
        """Return a reply whose upload has few coefficients for the number of rows."""
        if "upload" in reply.parts:
            kind = self._experiment.method().tree_types().uplink
            leaves = tree.leaves(wire.decode(reply.parts["upload"], kind, limit=1 << 31))
            entry["coefficients"] = sum(int(leaf.count_nonzero()) for leaf in leaves)
            rules.check_width(entry["coefficients"], rows, self._guards)
        return reply

    def _products(
        self, request: ProductsRequest, own: Prepared, x: Array, y: Array, entry: dict[str, Any]
    ) -> Envelope:
        """Return x'x and x'y of the selected columns."""
        agreement, asked, width = request.agreement, request.support, x.shape[1]
        support = rules.check_support(asked, width, self._experiment, own.rows, self._guards)
        self._hold(request, agreement, entry, support)
        part = x[:, support][np.arange(len(x))]
        places = [column.name for column in agreement.columns for _ in column.names]
        rules.check_cells(own, [places[place] for place in support], part, self._guards)
        entry["columns"] = [agreement.names[place] for place in support]
        weight = np.ones(len(x))
        sums = {
            "xx": torch.from_numpy(part.T @ (part * weight[:, None])),
            "xy": torch.from_numpy(part.T @ (weight * y)),
        }
        head = {name: getattr(request, name) for name in ("client", "round", "experiment")}
        return ProductsReply(**head).envelope({"sums": wire.encode(sums)})


def _whole(reply: Envelope) -> Envelope:
    """Return a reply of local work that succeeded; the text of a failure may hold values."""
    failure = failure_in(reply)
    if failure is not None:
        node_log().error("local work failed: %s", failure.reason)
        raise Refusal("failure", "its work failed; the reason is in the node's log")
    return reply


def _data(x: Array, y: Array) -> ClientData:
    targets = torch.from_numpy(np.stack([y, np.ones(len(y))], axis=1))
    rows, none = Ragged.of([range(len(y))]), Ragged.empty(1)
    return ClientData(torch.from_numpy(x), targets, rows, none, none, ({},), name="own")
