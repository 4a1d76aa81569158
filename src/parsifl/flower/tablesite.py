"""A site with a table: its guards decide what leaves it, and its audit file records what left."""

from __future__ import annotations

import logging
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
from parsifl.flower.message import Letter
from parsifl.flower.schema import Schema, prepare
from parsifl.flower.tables import Agreement, Array, Prepared, Table, summarise
from parsifl.flower.transport import Kind
from parsifl.linear.glm import GLM

LoadTable = Callable[[NodeConfig], Table]
_LONGEST_REASON = 500
_logger = logging.getLogger("parsifl")


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
        schema: Schema | None = None,
        guards: Guards | None = None,
    ) -> None:
        self._experiment, self._client, self._root = experiment, client, root
        self._table, self._target = table, target
        self._schema, self._guards = schema or Schema(), guards or Guards()
        self._audit = Audit(root / f"client-{client}")

    def answer(self, kind: Kind, letter: Letter) -> Letter:
        """Answer a request of this kind; this is the only way out of the site."""
        entry: dict[str, Any] = {"kind": kind}
        with self._audit.locked():
            try:
                reply = self._answer(kind, letter, entry)
            except Refusal as refusal:
                reply = self._refuse(refusal.rule, str(refusal))
            except WireError as error:  # its text is about the request, not about the table
                reply = self._refuse("request", str(error))
            except Exception:
                _logger.exception("a request for '%s' could not be answered", kind)
                reply = self._refuse("failure", "its work failed; the reason is in the node's log")
            size = sum(len(part) for part in reply.parts.values())
            self._audit.write({**entry, "bytes": size, **reply.meta})
        return reply

    def _refuse(self, rule: str, text: str) -> Letter:
        reason = f"site {self._client} refuses (rule '{rule}'): {text}"[:_LONGEST_REASON]
        _logger.warning("%s", reason)
        return Letter({"error": reason, "rule": rule})

    def _answer(self, kind: Kind, letter: Letter, entry: dict[str, Any]) -> Letter:
        own = prepare(self._table, self._target, self._schema, self._guards)
        rules.check_plan(self._experiment, self._client, own.rows, self._guards)
        entry["table"] = digest({name: list(v) for name, v in self._table.items()}, self._target)
        if kind == "agree":
            return Letter({"client": self._client, "summary": summarise(own)})
        agreement = Agreement.read(letter.meta.get("agreement"))
        rules.check_agreement(agreement, own)
        x, y = agreement.encode(own.table)
        if kind == "products":
            return self._products(letter, agreement, own, x, y, entry)
        data = _data(x, y)
        site = RemoteClient(self._experiment, self._client, data, self._root, least_squares)
        if kind == "hello":
            return site.hello()
        if DataSchema.read(letter.meta.get("facts")) != DataSchema.of(data):
            raise Refusal("facts", "the agreed form of a row is not that of its table")
        if kind == "evaluate":
            return _whole(site.evaluate(letter))
        self._hold(letter, agreement, entry, letter.meta.get("round"), letter.parts.get("down"))
        return self._narrow(_whole(site.train(letter)), own.rows, entry)

    def _hold(
        self, letter: Letter, agreement: Agreement, entry: dict[str, Any], *what: Any
    ) -> None:
        """Hold a request against what has left before."""
        if letter.get("client", int) != self._client:
            raise WireError(f"client: this is {self._client}, not {letter.meta['client']}")
        entry["run"] = letter.get("experiment", str)[:32]
        entry["agreement"] = digest(agreement.to_json())
        entry["request"] = digest(*what)
        check_history(self._audit.entries(), entry, self._experiment.rounds, self._guards)

    def _narrow(self, reply: Letter, rows: int, entry: dict[str, Any]) -> Letter:
        """Return a reply whose upload has few coefficients for the number of rows."""
        if "upload" in reply.parts:
            kind = self._experiment.method().tree_types().uplink
            leaves = tree.leaves(wire.decode(reply.parts["upload"], kind))
            entry["coefficients"] = sum(int(leaf.count_nonzero()) for leaf in leaves)
            rules.check_width(entry["coefficients"], rows, self._guards)
        return reply

    def _products(
        self,
        letter: Letter,
        agreement: Agreement,
        own: Prepared,
        x: Array,
        y: Array,
        entry: dict[str, Any],
    ) -> Letter:
        """Return x'x and x'y of the selected columns."""
        asked, width = letter.get("support", list), x.shape[1]
        support = rules.check_support(asked, width, self._experiment, own.rows, self._guards)
        self._hold(letter, agreement, entry, support)
        part = x[:, support][np.arange(len(x))]
        places = [column.name for column in agreement.columns for _ in column.names]
        rules.check_cells(own, [places[place] for place in support], part, self._guards)
        entry["columns"] = [agreement.names[place] for place in support]
        weight = np.ones(len(x))
        sums = {
            "xx": torch.from_numpy(part.T @ (part * weight[:, None])),
            "xy": torch.from_numpy(part.T @ (weight * y)),
        }
        return Letter({"client": self._client}, {"sums": wire.encode(sums)})


def _whole(reply: Letter) -> Letter:
    """Return a reply of local work that succeeded; the text of a failure may hold values."""
    if "error" in reply.meta:
        _logger.error("local work failed: %s", reply.meta["error"])
        raise Refusal("failure", "its work failed; the reason is in the node's log")
    return reply


def _data(x: Array, y: Array) -> ClientData:
    targets = torch.from_numpy(np.stack([y, np.ones(len(y))], axis=1))
    rows, none = Ragged.of([range(len(y))]), Ragged.empty(1)
    return ClientData(torch.from_numpy(x), targets, rows, none, none, ({},), name="own")
