"""A site with a table: its guards decide what leaves it, and its audit file records what left."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from parsifl import wire
from parsifl.algorithms.fedbestsubset import FedBestSubset
from parsifl.core import tree
from parsifl.core.batching import Rows
from parsifl.core.errors import WireError
from parsifl.core.problem import Problem
from parsifl.data.clients import ClientData
from parsifl.data.preprocessing import Array
from parsifl.data.ragged import Ragged
from parsifl.engine.experiment import Experiment
from parsifl.flower import guards as rules
from parsifl.flower.audit import Audit, check_history, digest
from parsifl.flower.client import MakeProblem, NodeConfig, RemoteClient
from parsifl.flower.data_schema import DataSchema
from parsifl.flower.guards import Guards, Refusal
from parsifl.flower.logs import node_log
from parsifl.flower.message import Envelope, Kind, printable
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
from parsifl.flower.tables import Agreement, Prepared, RegressionSpec
from parsifl.linear.cox import Cox
from parsifl.linear.glm import GLM
from parsifl.linear.site_statistics import cox_losses

_PASSING = ("experiment", "machine")
"""What a reply says of the run and of the machine: the same numbers are released once."""

LoadTable = Callable[[NodeConfig], Any]
"""Returns columns of text by name (`read_csv`), or a frame of pandas or polars."""


def problem_of(spec: RegressionSpec, kept: tuple[int, ...] = ()) -> MakeProblem:
    """Return what builds the problem of a regression; columns are centred, rows have weights."""

    def make(data: ClientData) -> Problem:
        width = int(data.x.shape[1])
        if spec.family == "cox":
            return Cox(width, l2=spec.l2, keep=kept, weighted=True)
        loss = "squared-half" if spec.family == "linear" else spec.family
        return GLM(
            width,
            loss,
            l2=spec.l2,
            intercept=spec.family != "linear",  # the target of a linear regression is centred
            keep=kept,
            weighted=True,
            offset=spec.family == "poisson",
        )

    return make


class TableSite:
    """A site with a table: it sends aggregates, trains on its encoded rows, and sends products.

    Parameters
    ----------
    root
        The folder for client state; the audit file is in its subfolder `client-NUMBER`.
    spec
        The model; a request that names another one is refused.
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
        table: Any,
        root: Path,
        spec: RegressionSpec,
        schema: TableSchema | None = None,
        guards: Guards | None = None,
    ) -> None:
        self._experiment, self._client, self._root = experiment, client, root
        self._table, self._spec = table, spec
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
            if self._guards.release == "manual" and failure_in(reply) is None:
                reply = self._approved(kind, reply)
            size = sum(len(part) for part in reply.parts.values())
            self._audit.write({**entry, "bytes": size, **json.loads(reply.text)})
        return reply

    def _approved(self, kind: Kind, reply: Envelope) -> Envelope:
        """Return a reply that someone at the site has approved; else keep it there, and refuse."""
        head = json.loads(reply.text)
        said = {name: head[name] for name in head if name not in _PASSING}
        name = digest(said, *map(reply.parts.get, sorted(reply.parts)))
        if self._audit.approved(name, kind, reply.text):
            return reply
        return self._refuse("release", "a person at the site must release this reply first")

    def _refuse(self, rule: str, text: str) -> Envelope:
        reason = printable(f"site {self._client} refuses (rule '{rule}'): {text}")
        node_log().warning("%s", reason)
        failure = FailureReply(error="Refusal", rule=rule, detail=reason, client=self._client)
        return failure.envelope()

    def _answer(self, kind: Kind, envelope: Envelope, entry: dict[str, Any]) -> Envelope:
        request = read(REQUESTS[kind], envelope)
        own = prepare(self._table, self._spec, self._schema, self._guards)
        rules.check_plan(self._experiment, self._client, own.rows, self._guards)
        table = {name: list(map(str, self._table[name])) for name in own.columns}
        entry["table"] = digest(table, asdict(self._spec))
        if isinstance(request, AgreeRequest):
            most = self._guards.columns(own.rows)
            return AgreeReply(
                client=self._client,
                columns=most,
                units=self._schema.units,
                summary=own.summary(),
            ).envelope()
        agreement = getattr(request, "agreement", None)
        if agreement is None:
            raise WireError("agreement: none, and a site answers nothing without one")
        rules.check_agreement(agreement, own, self._guards)
        x, y = agreement.preprocessing.standardised(own.columns), agreement.targets(own.columns)
        data = _data(x, y)
        make = problem_of(self._spec, agreement.kept)
        if isinstance(request, ProductsRequest):
            return self._products(request, own, data, make(data), entry)
        site = RemoteClient(self._experiment, self._client, data, self._root, make)
        if not isinstance(request, WorkRequest):
            return site.hello()
        if request.data_schema != DataSchema.of(data):
            raise Refusal("data-schema", "the agreed form of a row is not that of its table")
        if isinstance(request, EvaluateRequest):
            return _whole(site.evaluate(request, envelope.parts))
        assert isinstance(request, TrainRequest)
        self._hold(request, entry, request.round, envelope.parts.get("down"))
        if isinstance(self._experiment.build_algorithm(), FedBestSubset):
            self._check_sums(envelope, own, agreement, data, make(data), entry)
            return _whole(site.train(request, envelope.parts))
        return self._narrow(_whole(site.train(request, envelope.parts)), own.rows, entry)

    def _check_sums(
        self,
        envelope: Envelope,
        own: Prepared,
        agreement: Agreement,
        data: ClientData,
        problem: Any,
        entry: dict[str, Any],
    ) -> None:
        """Check a round of sums: few columns, no small cell, and no row that stands out."""
        kind = self._experiment.build_algorithm().tree_types().downlink
        try:
            question = wire.decode(envelope.parts.get("down", b""), kind, limit=1 << 28)
            at = question.at[problem.name]
            candidates = [int(place) for place in question.candidates]
            used = [int(place) for place in at.nonzero()[:, 0]]
            fits = at.shape == (problem.width,)
        except (WireError, LookupError, AttributeError, TypeError, ValueError):
            raise WireError("down: not a question about sums") from None
        if not fits:
            raise WireError("down: not a question about sums")
        rules.check_question(candidates, used, problem.width, own.rows, self._guards)
        self._release(own, agreement, data, problem, at, candidates, entry)

    def _release(
        self,
        own: Prepared,
        agreement: Agreement,
        data: ClientData,
        problem: Any,
        at: torch.Tensor,
        columns: Sequence[int],
        entry: dict[str, Any],
    ) -> None:
        """Hold sums at these coefficients against all that left, and note them as released."""
        names, units = agreement.preprocessing.names, agreement.preprocessing.units
        inner = [place for place in columns if place < len(names)]
        places = [agreement.preprocessing.columns[units[place]].name for place in inner]
        rules.check_cells(own, places, np.asarray(data.x)[:, inner], self._guards)
        entry["columns"] = [names[place] for place in inner]
        weights, products = row_weights(problem, data, at), None
        if isinstance(problem, Cox):
            time, event, _ = data.y.unbind(1)
            products = partial(RiskSetProducts, time=time.numpy(), event=event.numpy())
        self._audit.release(entry["table"], weights, self._guards, products)

    def _hold(
        self,
        request: TrainRequest | ProductsRequest,
        entry: dict[str, Any],
        *what: Any,
    ) -> None:
        """Hold a request against what has left before."""
        if request.client != self._client:
            raise WireError(f"client: this is {self._client}, not {request.client}")
        agreement = request.agreement
        assert agreement is not None
        entry["run"] = request.experiment
        entry["agreement"] = digest(agreement.to_json())
        entry["request"] = digest(*what)
        check_history(self._audit.entries(), entry, self._experiment.rounds, self._guards)

    def _narrow(self, reply: Envelope, rows: int, entry: dict[str, Any]) -> Envelope:
        """Return a reply whose upload has few coefficients for the number of rows."""
        if "upload" in reply.parts:
            kind = self._experiment.build_algorithm().tree_types().uplink
            leaves = tree.leaves(wire.decode(reply.parts["upload"], kind, limit=1 << 31))
            entry["coefficients"] = sum(int(leaf.count_nonzero()) for leaf in leaves)
            rules.check_width(entry["coefficients"], rows, self._guards)
        return reply

    def _products(
        self,
        request: ProductsRequest,
        own: Prepared,
        data: ClientData,
        problem: Any,
        entry: dict[str, Any],
    ) -> Envelope:
        """Return loss, gradient and curvature at the coefficients that are asked about."""
        agreement, width = request.agreement, problem.width
        support = rules.check_support(
            request.support, width, self._experiment, own.rows, self._guards
        )
        if len(request.coefficients) != len(support):
            raise WireError("coefficients: one for each column of the support is needed")
        self._hold(request, entry, support, list(request.coefficients))
        at, columns = torch.zeros(width, dtype=torch.float64), torch.tensor(support)
        at[columns] = torch.tensor(request.coefficients, dtype=torch.float64)
        self._release(own, agreement, data, problem, at, support, entry)
        rows = Rows(data.x, data.y, torch.ones(own.rows, dtype=torch.float64))
        found = problem.curvature_sums({problem.name: at}, rows, columns)
        constant = torch.lgamma(data.y[:, 0] + 1).sum() if self._spec.family == "poisson" else 0.0
        sums = {
            "loss": found.loss,
            "constant": torch.as_tensor(constant, dtype=torch.float64),
            "gradient": found.gradient[columns],
            "curvature": found.curvature,
        }
        head = {name: getattr(request, name) for name in ("client", "round", "experiment")}
        return ProductsReply(**head).envelope({"sums": wire.encode(sums)})


def row_weights(problem: Any, data: ClientData, at: torch.Tensor) -> Array:
    """Return the weights [2, rows] by which sums at these coefficients add up rows and products.

    The products of a Cox model follow from the logarithms of the hazard ratios, which stand in the
    place of the second weights.
    """
    params = {problem.name: at}
    if isinstance(problem, Cox):
        u = problem.predict(params, data.x).requires_grad_()
        time, event, weight = data.y.unbind(1)
        (slope,) = torch.autograd.grad((weight * cox_losses(u, time, event, weight)).sum(), u)
        return np.stack([slope.numpy(), u.detach().numpy()])
    u = problem.predict(params, data.x)
    u = u + data.y[:, -1] if problem.offset else u
    return np.stack(
        [problem.datafit.slope(u, data.y[:, 0]).numpy(), problem.datafit.curvature(u).numpy()]
    )


class RiskSetProducts:
    """The matrix K of the curvature X'KX of a Cox model with Breslow's ties.

    With hazard ratios r, K_ij = -r_i r_j C(min(t_i, t_j)) off the diagonal, where C(t) adds up
    d / S^2 over the events until t, and S the ratios at risk; rows of K add up to 0.

    Parameters
    ----------
    log_ratios
        The logarithm of each row's hazard ratio.
    """

    def __init__(self, log_ratios: Array, *, time: Array, event: Array) -> None:
        self.rows = len(time)
        ratio = np.exp(log_ratios - log_ratios.max())
        moments, place = np.unique(time, return_inverse=True)
        events = np.bincount(place, event, len(moments))
        at_risk = np.cumsum(np.bincount(place, ratio, len(moments))[::-1])[::-1]
        per_set = np.where(events > 0, 1 / np.maximum(at_risk, np.finfo(float).tiny), 0.0)
        self._ratio, self._time = ratio, place
        self._squares = np.cumsum(events * per_set * per_set)
        self._diagonal = ratio * np.cumsum(events * per_set)[place]

    def block(self, part: slice) -> Array:
        """Return some rows of K."""
        first = np.minimum(self._time[part, None], self._time)
        found = -self._ratio[part, None] * self._ratio * self._squares[first]
        numbers = np.arange(self.rows)[part]
        found[np.arange(len(numbers)), numbers] += self._diagonal[part]
        return np.asarray(found)


def _whole(reply: Envelope) -> Envelope:
    """Return a reply of local work that succeeded; the text of a failure may hold values."""
    failure = failure_in(reply)
    if failure is not None:
        node_log().error("local work failed: %s", failure.reason)
        raise Refusal("failure", "its work failed; the reason is in the node's log")
    return reply


def _data(x: Array, y: Array) -> ClientData:
    rows, none = Ragged.of([range(len(y))]), Ragged.empty(1)
    features, targets = torch.from_numpy(x), torch.from_numpy(y)
    return ClientData(features, targets, rows, none, none, ({},), name="own")
