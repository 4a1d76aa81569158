"""Sparse regression across sites: one round agrees on columns, one ends in exact least squares."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from parsifl import wire
from parsifl.core.errors import ConfigError, DataError, ParsiflError
from parsifl.core.problem import Problem
from parsifl.engine.owned import replace_file
from parsifl.flower.membership import Log, all_of
from parsifl.flower.message import Envelope
from parsifl.flower.network_schema import (
    AgreeReply,
    AgreeRequest,
    ProductsReply,
    ProductsRequest,
    describe,
    read_reply,
)
from parsifl.flower.server import Federation
from parsifl.flower.settings import DeploymentSettings
from parsifl.flower.tables import Agreement, Array, Summary, Table
from parsifl.flower.tablesite import least_squares
from parsifl.flower.transport import Link, Requests

MODEL_FILE = "model.json"
_SUMS = dict[str, Tensor]
_AGREE_SECONDS = 90.0


class Regression(Federation):
    """The server of a sparse regression; ends with `model.json` in the run folder."""

    _files = (MODEL_FILE,)

    def __init__(self, settings: DeploymentSettings, link: Link, log: Log, target: str) -> None:
        super().__init__(settings, link, log, least_squares)
        self._target = target
        self.bytes_sums = 0

    def _prepare(self, *, resumed: bool) -> None:
        """Agree on columns, levels, missing values and scales, in one round of sums."""
        if resumed:
            return
        found: dict[int, Summary] = {}
        end = time.monotonic() + self._settings.deployment.wait
        reasons: dict[int, str] = {}
        while True:
            # sites that could not answer are asked again: their tables may have been corrected
            nodes = self._pool.members.nodes()
            asked = [node for node in nodes if reasons.get(node) != ""]
            requests: Requests = dict.fromkeys(asked, ("agree", AgreeRequest().envelope()))
            enough = all_of(set(range(self._settings.clients)) - set(found))
            for node, reply in self._link.ask(requests, _AGREE_SECONDS, enough).items():
                reason = self._take(node, reply, found)
                if reason and reason != reasons.get(node):
                    self._log(f"node {node} cannot take part yet: {reason}")
                reasons[node] = reason
            if len(found) == self._settings.clients:
                break
            if time.monotonic() > end:
                raise ParsiflError(
                    f"{len(found)} of {self._settings.clients} clients have described their "
                    "tables; "
                    + "; ".join(sorted({reason for reason in reasons.values() if reason}))
                )
            self._link.pause(1.0)
        summaries = [found[client] for client in sorted(found)]
        self._pool.agreement = Agreement.of(summaries, self._target)

    def _take(self, node: int, reply: Envelope | str, found: dict[int, Summary]) -> str:
        """Keep a summary; return why it cannot be used, or an empty text."""
        try:
            message = read_reply(AgreeReply, reply)
            self._pool.members.bind(message.client, node)
            found[message.client] = message.summary
        except Exception as error:  # whatever one node sends, the others take part
            return describe(error)
        return ""

    def _finish(self, problem: Problem, server: Any) -> None:
        """Replace the coefficients on the support by pooled least squares, and save the model."""
        agreement = self._pool.agreement
        assert agreement is not None
        params = self._algorithm.model(problem, server)
        if params is None:
            raise ConfigError(f"{type(self._algorithm).__name__} has no global model to save")
        found = params.params["coef"].numpy()
        support = np.flatnonzero(found)
        exact = np.zeros_like(found)
        exact[support] = self._refitted(agreement, [int(position) for position in support])
        coef, intercept = agreement.original(exact)
        model = LinearModel(agreement, coef, intercept)
        replace_file(self._run_dir.path / MODEL_FILE, model.to_text().encode())
        self._log(f"{len(support)} of {len(coef)} coefficients differ from zero")

    def _refitted(self, agreement: Agreement, support: list[int]) -> Array:
        size = len(support)
        online = self._pool.members.online()
        requests = {
            client: ProductsRequest(
                client=client,
                round=0,
                experiment=self._pool.experiment,
                agreement=agreement,
                support=tuple(support),
            )
            for client in range(self._settings.clients)
            if client in online
        }
        sent: Requests = {
            online[client]: ("products", request.envelope()) for client, request in requests.items()
        }
        replies = self._link.ask(sent, self._settings.deployment.timeout)
        system, right = np.diag(np.zeros(size)), np.zeros(size)
        for client in range(self._settings.clients):
            if client not in requests:
                raise ParsiflError(f"client {client} is not connected for the last step; resume")
            sums = self._sums(requests[client], replies.get(online[client]), size)
            system, right = system + sums["xx"], right + sums["xy"]
        return np.asarray(np.linalg.lstsq(system, right, rcond=1e-14)[0])

    def _sums(
        self, request: ProductsRequest, reply: Envelope | str | None, size: int
    ) -> dict[str, Array]:
        try:
            read_reply(ProductsReply, reply, request)
            data = reply.parts["sums"] if isinstance(reply, Envelope) else b""
            message = wire.decode(data, _SUMS, limit=16 * (size + 2) ** 2 + 4096)
            form = {"xx": torch.empty(size, size, dtype=torch.float64, device="meta"),
                    "xy": torch.empty(size, dtype=torch.float64, device="meta")}  # fmt: skip
            wire.check(message, form)
        except Exception as error:  # all products are needed: the run stops, and names the client
            raise ParsiflError(
                f"client {request.client} sent no products that can be used: {describe(error)}; "
                "resume the run"
            ) from None
        self.bytes_sums += len(data)
        return {name: value.numpy().copy() for name, value in message.items()}


@final
@dataclass(frozen=True)
class LinearModel:
    """A fitted regression in the units of the tables.

    Attributes
    ----------
    coef_, intercept_
        One coefficient for each of `agreement.names`, and the intercept.
    """

    agreement: Agreement
    coef_: Array
    intercept_: float

    @classmethod
    def load(cls, path: str | Path) -> LinearModel:
        """Read a saved model."""
        try:
            values = json.loads(Path(path).read_text())
            agreement = Agreement.read(values["agreement"])
            coef = np.array(values["coef"], dtype=np.float64)
            intercept = float(values["intercept"])
        except (LookupError, TypeError, ValueError, RecursionError, OverflowError) as error:
            raise DataError(f"{path} is not a saved model ({type(error).__name__})") from None
        if coef.shape != (len(agreement.names),) or not np.isfinite([*coef, intercept]).all():
            raise DataError(f"{path} is damaged: its coefficients do not fit its columns")
        return cls(agreement, coef, intercept)

    def to_text(self) -> str:
        """Return the model as JSON; floats come back bit for bit."""
        values = {
            "coef": self.coef_.tolist(),
            "intercept": self.intercept_,
            "names": self.agreement.names,
            "agreement": self.agreement.to_json(),
        }
        return json.dumps(values, indent=1)

    def predict(self, table: Table) -> Array:
        """Predict the target for the rows of a table (its target column is not read)."""
        known = {**table, self.agreement.target: ["0"] * len(next(iter(table.values())))}
        x, _ = self.agreement.encode(known)
        scale = np.array([v for column in self.agreement.columns for v in column.scale])
        return np.asarray(x @ (self.coef_ * scale) + self.agreement.target_mean)
