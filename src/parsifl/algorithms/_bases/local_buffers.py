"""Buffers that stay on the clients: `NeuralProblem(..., buffers="local")`."""

from __future__ import annotations

import typing
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Generic, final

from parsifl.core.algorithm import (
    AdditiveAlgorithm,
    AnyAlgorithm,
    C,
    ClientInfo,
    ClientUpdate,
    TreeTypes,
)
from parsifl.core.batching import ClientRoundData, DataRequest
from parsifl.core.errors import CapabilityError
from parsifl.core.keys import Key
from parsifl.core.problem import Model, Params, Problem, local_buffers, split_buffers


@dataclass(frozen=True)
class BufferedState(Generic[C]):
    """A client's state for the inner algorithm, and its own buffers."""

    inner: C
    buffers: Params


@final
@dataclass(frozen=True)
class LocalBuffers(AdditiveAlgorithm[Problem, Any, Any, Any, Any, Any]):
    """Run an additive algorithm with buffers that never leave the clients.

    Each client trains and is evaluated with its own running statistics, which start as the
    problem's initial ones. There is no global model, because it would have no statistics. Sent: the
    messages of the inner algorithm, without the buffers. Kept: the inner state and the buffers.
    """

    inner: Any

    supports_buffers: ClassVar[bool] = True
    keeps_buffers_local: ClassVar[bool] = True

    def check_capabilities(self, problem: Problem) -> None:
        """Require what the inner algorithm requires, and dicts of parameters in its messages."""
        if not self.inner.supports_buffers:
            self.inner.check_capabilities(problem)
        types = self.inner.tree_types()
        for kind in (types.downlink, types.uplink):
            if typing.get_origin(kind) is not dict:
                raise CapabilityError(
                    f"{self.inner.title()} does not send plain parameters, so buffers='local' "
                    "cannot be left out of its messages: use buffers='average' or 'batch'"
                )

    def init_server(self, problem: Problem, clients: Sequence[ClientInfo], key: Key) -> Any:
        """Initialize the inner algorithm."""
        return self.inner.init_server(problem, clients, key)

    def broadcast(self, problem: Problem, server: Any, client: ClientInfo, key: Key) -> Any:
        """Send the parameters without buffers."""
        return split_buffers(problem, self.inner.broadcast(problem, server, client, key))[0]

    def init_client(
        self, problem: Problem, client: ClientInfo, received: Any, key: Key
    ) -> BufferedState[Any]:
        """Start with the initial buffers."""
        _, buffers = split_buffers(problem, problem.init(key))
        inner = self.inner.init_client(problem, client, {**received, **buffers}, key)
        return BufferedState(inner, buffers)

    def client_update(
        self, problem: Problem, received: Any, state: BufferedState[Any], data: ClientRoundData
    ) -> ClientUpdate[BufferedState[Any], Any]:
        """Train with the client's own buffers, and keep the updated ones."""
        params = {**received, **state.buffers}
        update = self.inner.client_update(problem, params, state.inner, data)
        upload, buffers = split_buffers(problem, update.upload)
        return replace(update, state=BufferedState(update.state, buffers), upload=upload)

    def compact(self, problem: Problem, upload: Any) -> Any:
        """Delegate to the inner algorithm."""
        return self.inner.compact(problem, upload)

    def acknowledge(
        self, problem: Problem, state: BufferedState[Any], upload: Any, arrived: Any
    ) -> BufferedState[Any]:
        """Delegate to the inner algorithm."""
        return replace(state, inner=self.inner.acknowledge(problem, state.inner, upload, arrived))

    def personalize(
        self, problem: Problem, received: Any, state: BufferedState[Any], data: ClientRoundData
    ) -> Model:
        """Evaluate the inner algorithm's model with the client's own buffers."""
        params = {**received, **state.buffers}
        model: Model = self.inner.personalize(problem, params, state.inner, data)
        return model

    def contribute(self, problem: Problem, upload: Any, weight: float) -> Any:
        """Contribute as the inner algorithm does."""
        return self.inner.contribute(problem, upload, weight)

    def aggregate(self, problem: Problem, server: Any, total: Any, key: Key) -> Any:
        """Aggregate as the inner algorithm does."""
        return self.inner.aggregate(problem, server, total, key)

    def weight(self, client: ClientInfo) -> float:
        """Weight clients as the inner algorithm does."""
        return float(self.inner.weight(client))

    def batches(self, client: ClientInfo, round: int) -> DataRequest:
        """Read what the inner algorithm reads."""
        request: DataRequest = self.inner.batches(client, round)
        return request

    def personalization_batches(self, client: ClientInfo) -> DataRequest:
        """Read what the inner algorithm reads."""
        request: DataRequest = self.inner.personalization_batches(client)
        return request

    def everyone_trains(self) -> bool:
        """Return the answer of the inner algorithm."""
        return bool(self.inner.everyone_trains())

    def learning_rate(self, round: int) -> float | None:
        """Return the inner algorithm's learning rate."""
        rate: float | None = self.inner.learning_rate(round)
        return rate

    def profile_fields(self) -> tuple[str, ...]:
        """Return the profile entries that the inner algorithm reads."""
        fields: tuple[str, ...] = self.inner.profile_fields()
        return fields

    def title(self) -> str:
        """Return the name of the inner algorithm with this policy."""
        return f"{self.inner.title()} with local buffers"

    def describe(self) -> dict[str, Any]:
        """Describe the inner algorithm, so that a report compares it under its own name."""
        return {**self.inner.describe(), "buffers": "local"}

    def tree_types(self) -> TreeTypes:
        """Return the inner types; clients keep their buffers too."""
        types: TreeTypes = self.inner.tree_types()
        return replace(types, client=BufferedState[types.client])  # type: ignore[name-defined]  # at run time


def with_buffer_policy(algorithm: AnyAlgorithm, problem: Problem) -> AnyAlgorithm:
    """Wrap an algorithm if the problem keeps its buffers on the clients."""
    if not local_buffers(problem) or algorithm.keeps_buffers_local:
        return algorithm
    return LocalBuffers(algorithm)
