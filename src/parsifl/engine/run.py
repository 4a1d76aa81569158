"""The result of a simulation."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from parsifl.core.algorithm import AnyAlgorithm
from parsifl.core.errors import CapabilityError, ConfigError
from parsifl.core.keys import Key
from parsifl.core.problem import Model, Problem
from parsifl.engine.evaluation import Evaluation
from parsifl.engine.evaluator import Evaluator
from parsifl.engine.export import Export, export
from parsifl.engine.profiling import profile
from parsifl.engine.run_dir import Record
from parsifl.engine.state_store import StateStore
from parsifl.engine.summary import headline


@dataclass(frozen=True)
class Run:
    """A finished run.

    Attributes
    ----------
    metrics
        A record for every round: costs always, scores where the round was evaluated.
    server
        The server's last state.
    """

    method: AnyAlgorithm
    problem: Problem
    metrics: list[Record]
    server: Any
    evaluation: Evaluation
    folder: Path | None
    _judge: Evaluator
    _store: StateStore
    _key: Key

    @property
    def bytes_up(self) -> int:
        """All bytes that clients sent."""
        return sum(record["bytes_up"] for record in self.metrics)

    @property
    def bytes_down(self) -> int:
        """All bytes that the server sent."""
        return sum(record["bytes_down"] for record in self.metrics)

    @property
    def model(self) -> Model:
        """The global model."""
        model = self.method.model(self.problem, self.server)
        if model is None:
            raise CapabilityError(
                f"{type(self.method).__name__} has no global model; use personal(client)"
            )
        return model

    def personal(self, client: int) -> Model:
        """Return the personal model of a client."""
        clients = self._judge.clients
        if not isinstance(client, int | np.integer) or not 0 <= client < clients:
            raise ConfigError(f"client must be between 0 and {clients - 1}, got {client!r}")
        return self._judge.personal_model(self.server, self._store, client, self._key)

    def compact(self, client: int | None = None) -> Export:
        """Return the global model, or a client's, in its shortest form: to save or to measure."""
        if client is None:
            return export(self.model)
        shared = self.method.model(self.problem, self.server)
        return export(self.personal(client), shared, client)

    def export(self, client: int | None = None) -> nn.Module:
        """Return the global model, or a client's, as a plain module to ship.

        Layers of low rank become two thin layers where that is smaller. `compact` measures and
        saves it; docs/how-to/export.md shows both.
        """
        return self.compact(client).module()

    def profile(self) -> dict[str, float]:
        """Return the seconds of all rounds by phase, the longest first."""
        return profile(self.metrics)

    def summary(self) -> dict[str, Any]:
        """Return the headline numbers, from the round that the evaluation selects."""
        return headline(
            self.metrics,
            self.problem.primary_metric,
            self.problem.higher_is_better,
            self.evaluation,
        )
