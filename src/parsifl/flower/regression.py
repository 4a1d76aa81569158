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
from parsifl.core.errors import ConfigError, ParsiflError, WireError
from parsifl.core.keys import Key
from parsifl.core.problem import Problem
from parsifl.engine.owned import replace_file
from parsifl.engine.pool import ClientRequest
from parsifl.flower.membership import Log, all_of
from parsifl.flower.message import Letter
from parsifl.flower.server import Federation
from parsifl.flower.settings import Settings
from parsifl.flower.tables import Agreement, Array, Table
from parsifl.flower.tablesite import least_squares
from parsifl.flower.transport import Link

MODEL_FILE = "model.json"
_SUMS = dict[str, Tensor]
_AGREE_SECONDS = 90.0


class Regression(Federation):
    """The server of a sparse regression; ends with `model.json` in the run folder."""

    _files = (MODEL_FILE,)

    def __init__(self, settings: Settings, link: Link, log: Log, target: str) -> None:
        super().__init__(settings, link, log, least_squares)
        self._target = target
        self.bytes_sums = 0

    def _prepare(self, *, resumed: bool) -> None:
        """Agree on columns, levels, missing values and scales, in one round of sums."""
        if resumed:
            return
        found: dict[int, dict[str, Any]] = {}
        end = time.monotonic() + self._settings.deployment.wait
        reasons: dict[int, str] = {}
        while len(found) < self._settings.clients:
            # whoever could not answer is asked again: its table may have been mended meanwhile
            asked = [node for node in self._link.nodes() if reasons.get(node) != ""]
            letters = dict.fromkeys(asked, Letter({}))
            enough = all_of(set(range(self._settings.clients)) - set(found))
            for node, reply in self._link.ask("agree", letters, _AGREE_SECONDS, enough).items():
                reason = self._take(reply, found)
                if reason and reason != reasons.get(node):
                    self._log(f"node {node} cannot take part yet: {reason}")
                reasons[node] = reason
            if time.monotonic() > end:
                raise ParsiflError(
                    f"{len(found)} of {self._settings.clients} clients have told of their tables; "
                    + "; ".join(sorted({reason for reason in reasons.values() if reason}))
                )
            if len(found) < self._settings.clients:
                self._link.pause(1.0)
        summaries = [found[client] for client in sorted(found)]
        self._pool.common = {"agreement": Agreement.of(summaries, self._target).to_json()}

    def _take(self, reply: Letter | str, found: dict[int, dict[str, Any]]) -> str:
        try:
            if isinstance(reply, str) or "error" in reply.meta:
                return str(reply if isinstance(reply, str) else reply.meta["error"])[:500]
            client = reply.get("client", int)
            if not 0 <= client < self._settings.clients:
                return f"there is no client {client}"
            found.setdefault(client, reply.get("summary", dict))
        except WireError as error:
            return str(error)
        return ""

    def _finish(self, problem: Problem, server: Any) -> None:
        """Replace the coefficients on the support by pooled least squares, and save the model."""
        agreement = Agreement.read(self._pool.common["agreement"])
        params = self._algorithm.model(problem, server)
        if params is None:
            raise ConfigError(f"{type(self._algorithm).__name__} has no global model to save")
        found = params.params["coef"].numpy()
        support = np.flatnonzero(found)
        exact = np.zeros_like(found)
        exact[support] = self._refitted([int(position) for position in support])
        coef, intercept = agreement.original(exact)
        model = LinearModel(agreement, coef, intercept)
        replace_file(self._run_dir.path / MODEL_FILE, model.to_text().encode())
        self._log(f"{len(support)} of {len(coef)} coefficients differ from zero")

    def _refitted(self, support: list[int]) -> Array:
        size = len(support)
        online = self._pool.members.online()
        wanted = {online[c]: c for c in range(self._settings.clients) if c in online}
        letters = {
            node: self._pool.message(
                ClientRequest(self._pool.clients[client], Key(0), None), {}, support=support
            )
            for node, client in wanted.items()
        }
        replies = self._link.ask("products", letters, self._settings.deployment.timeout)
        sums = {
            client: self._sums(client, replies.get(node), size) for node, client in wanted.items()
        }
        system, right = np.diag(np.zeros(size)), np.zeros(size)
        for client in range(self._settings.clients):
            if client not in sums:
                raise ParsiflError(f"client {client} is not connected for the last step; resume")
            system, right = system + sums[client]["xx"], right + sums[client]["xy"]
        return np.asarray(np.linalg.lstsq(system, right, rcond=1e-14)[0])

    def _sums(self, client: int, reply: Letter | str | None, size: int) -> dict[str, Array]:
        if isinstance(reply, Letter) and "error" in reply.meta:
            raise ParsiflError(f"client {client}: {str(reply.meta['error'])[:500]}")
        if not isinstance(reply, Letter) or "sums" not in reply.parts:
            raise ParsiflError(f"client {client} has not told its products; resume the run")
        if reply.get("client", int) != client:
            raise WireError(f"client: an answer of {reply.meta['client']}, not {client}")
        data = reply.parts["sums"]
        message = wire.decode(data, _SUMS, limit=16 * (size + 2) ** 2 + 4096)
        form = {"xx": torch.empty(size, size, dtype=torch.float64, device="meta"),
                "xy": torch.empty(size, dtype=torch.float64, device="meta")}  # fmt: skip
        wire.check(message, form)
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
        values = json.loads(Path(path).read_text())
        agreement = Agreement.read(values["agreement"])
        return cls(agreement, np.array(values["coef"]), float(values["intercept"]))

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
