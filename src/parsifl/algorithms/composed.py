"""Composed: another algorithm with compressed uploads, robust aggregation or a server optimizer."""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor

from parsifl.core import config, keys, tree
from parsifl.core.algorithm import (
    Accumulator,
    AdditiveAlgorithm,
    AnyAlgorithm,
    ClientInfo,
    ClientUpdate,
    ClientUpload,
    FederatedAlgorithm,
    TreeTypes,
    canonical,
)
from parsifl.core.batching import ClientRoundData, DataRequest
from parsifl.core.errors import CapabilityError, ConfigError
from parsifl.core.keys import Key
from parsifl.core.leaves import densify
from parsifl.core.problem import Model, Params
from parsifl.core.registry import Registry
from parsifl.solvers.server_optimizers import SERVER_OPTIMIZERS, ServerOptimizer
from parsifl.solvers.svt import Compact
from parsifl.solvers.upload_transforms import UploadTransform, upload_transforms

C = TypeVar("C")
G = TypeVar("G")
S = TypeVar("S")
RobustRule = Accumulator[Any, Params]
"""Combines uploads into a single one, which then counts with the weight of all clients."""
Aggregation = Callable[[], RobustRule]


@dataclass(frozen=True)
class TransformState(Generic[C, G]):
    """The algorithm's own client state, and that of every stage."""

    inner: C
    stages: G


@dataclass(frozen=True)
class OptimizedServer(Generic[S]):
    """The algorithm's own server state, which is parameters, and that of the optimizer."""

    params: Params
    optimizer: S


@dataclass(frozen=True)
class Composed(FederatedAlgorithm[Any, Any, Any, Any, Any, Any]):
    """Modify another algorithm by up to three changes, applied in this order.

    The loop, pools, codec and checkpoints see an ordinary algorithm. Without changes the results
    are bit-identical to the inner algorithm's.

    Parameters
    ----------
    algorithm
        The algorithm to change.
    uploads
        Stages of uploads, applied in order on the client and undone in reverse order on the
        server (`Delta`, `TopK`).
    aggregation
        A robust rule, such as `CoordinateMedian`, for additive algorithms. It returns one upload,
        which the algorithm aggregates as if every client had sent it.
    server_optimizer
        Updates the server's parameters (`Adam` turns FedAvg into FedAdam), for algorithms whose
        server state is parameters.

    Examples
    --------
    >>> from parsifl.algorithms.fedavg import FedAvg
    >>> from parsifl.solvers.server_optimizers import Adam
    >>> fedadam = Composed(FedAvg(lr=0.1), server_optimizer=Adam(lr=0.05))
    """

    cites: ClassVar[str] = "Reddi et al., Adaptive Federated Optimization, ICLR 2021"

    algorithm: AnyAlgorithm
    uploads: tuple[UploadTransform, ...] = ()
    aggregation: Aggregation | None = None
    server_optimizer: ServerOptimizer | None = None

    def __post_init__(self) -> None:
        types = self.algorithm.tree_types()
        name = type(self.algorithm).__name__
        if self.server_optimizer is not None and types.server != Params:
            raise ConfigError(
                f"a server optimizer needs an algorithm whose server state is parameters; "
                f"{name} keeps {_kind(types.server)}"
            )
        if not self.uploads and self.aggregation is None:
            return
        if types.uplink not in (Params, Compact):
            raise ConfigError(
                f"upload transforms and robust aggregation need an algorithm that uploads "
                f"parameters; {name} uploads {_kind(types.uplink)}"
            )
        if not self.algorithm.uniform_uploads:
            raise ConfigError(
                "upload transforms and robust aggregation need an algorithm whose clients all "
                f"upload the same parameters; clients of {name} upload submodels"
            )
        if self.uploads and types.downlink not in (Params, Compact):
            raise ConfigError(
                "upload transforms read the parameters that a client received; "
                f"{name} sends {types.downlink}: remove `uploads`"
            )
        if self.aggregation is not None and not isinstance(self.algorithm, AdditiveAlgorithm):
            raise ConfigError(
                "robust aggregation needs an algorithm whose server sums uploads (an "
                f"AdditiveAlgorithm); {name} reads every upload: remove `aggregation`"
            )

    # ------------------------------------------------------------------ server
    def init_server(self, problem: Any, clients: Sequence[ClientInfo], key: Key) -> Any:
        """Add the optimizer's state."""
        inner = self.algorithm.init_server(problem, clients, key)
        if self.server_optimizer is None:
            return inner
        return OptimizedServer(inner, self.server_optimizer.init(inner))

    def broadcast(self, problem: Any, server: Any, client: ClientInfo, key: Key) -> Any:
        """Send the algorithm's message."""
        return self.algorithm.broadcast(problem, self._inner(server), client, key)

    def accumulator(self, problem: Any) -> Accumulator[Any, Any]:
        """Decode, then combine."""
        inner = self.algorithm.accumulator(problem)
        if self.aggregation is not None:
            assert isinstance(self.algorithm, AdditiveAlgorithm)
            inner = _Robust(self.algorithm, problem, self.aggregation())
        return _Decoding(inner, self.uploads) if self.uploads else inner

    def aggregate(self, problem: Any, server: Any, total: Any, key: Key) -> Any:
        """Aggregate, then apply the optimizer."""
        if self.server_optimizer is None:
            return self.algorithm.aggregate(problem, server, total, key)
        mean = self.algorithm.aggregate(problem, server.params, total, key)
        params, state = self.server_optimizer.step(server.params, mean, server.optimizer)
        return OptimizedServer(params, state)

    def weight(self, client: ClientInfo) -> float:
        """Weight clients as the algorithm does."""
        return self.algorithm.weight(client)

    def model(self, problem: Any, server: Any) -> Model | None:
        """Return the algorithm's global model."""
        return self.algorithm.model(problem, self._inner(server))

    def _inner(self, server: Any) -> Any:
        return server if self.server_optimizer is None else server.params

    # ------------------------------------------------------------------ client
    def init_client(self, problem: Any, client: ClientInfo, received: Any, key: Key) -> Any:
        """Add the states of the stages."""
        inner = self.algorithm.init_client(problem, client, received, key)
        if not self.uploads:
            return inner
        return TransformState(inner, tuple(stage.init(received) for stage in self.uploads))

    def client_update(
        self, problem: Any, received: Any, state: Any, data: ClientRoundData
    ) -> ClientUpdate[Any, Any]:
        """Train, then encode the upload."""
        if not self.uploads:
            return self.algorithm.client_update(problem, received, state, data)
        update = self.algorithm.client_update(problem, received, state.inner, data)
        upload, stages = densify(update.upload), []
        for number, (stage, stage_state) in enumerate(zip(self.uploads, state.stages, strict=True)):
            upload, following = stage.encode(
                upload, received, stage_state, keys.fold(data.key, number)
            )
            stages.append(following)
        return replace(update, state=TransformState(update.state, tuple(stages)), upload=upload)

    def compact(self, problem: Any, upload: Any) -> Any:
        """Delegate to the algorithm, unless stages change the upload."""
        return upload if self.uploads else self.algorithm.compact(problem, upload)

    def acknowledge(self, problem: Any, state: Any, upload: Any, arrived: Any) -> Any:
        """Let the algorithm correct its state by the rounding errors of the encoded upload."""
        if not self.uploads:
            return self.algorithm.acknowledge(problem, state, upload, arrived)
        encoded, received = densify(upload), densify(arrived)
        inner = self.algorithm.acknowledge(problem, state.inner, encoded, received)
        return replace(state, inner=inner)

    def personalize(self, problem: Any, received: Any, state: Any, data: ClientRoundData) -> Model:
        """Return the algorithm's personal model."""
        client_state = state.inner if self.uploads else state
        return self.algorithm.personalize(problem, received, client_state, data)

    def batches(self, client: ClientInfo, round: int) -> DataRequest:
        """Read what the algorithm reads."""
        return self.algorithm.batches(client, round)

    def personalization_batches(self, client: ClientInfo) -> DataRequest:
        """Read what the algorithm reads."""
        return self.algorithm.personalization_batches(client)

    # ------------------------------------------------------------------ declared
    def everyone_trains(self) -> bool:
        """Follow the algorithm."""
        return self.algorithm.everyone_trains()

    def needs_every_upload(self) -> bool:
        """Return whether uploads are decoded or compared one by one."""
        changed = bool(self.uploads) or self.aggregation is not None
        return changed or self.algorithm.needs_every_upload()

    def learning_rate(self, round: int) -> float | None:
        """Follow the algorithm."""
        return self.algorithm.learning_rate(round)

    def profile_fields(self) -> tuple[str, ...]:
        """Follow the algorithm."""
        return self.algorithm.profile_fields()

    def describe(self) -> dict[str, Any]:
        """Describe the algorithm together with the changes."""
        changes: dict[str, Any] = {"uploads": [_described(stage) for stage in self.uploads]}
        if self.aggregation is not None:
            changes["aggregation"] = getattr(self.aggregation, "__name__", repr(self.aggregation))
        if self.server_optimizer is not None:
            changes["server_optimizer"] = _described(self.server_optimizer)
        return {**self.algorithm.describe(), "composed": changes}

    def check_capabilities(self, problem: Any) -> None:
        """Follow the algorithm."""
        self.algorithm.check_capabilities(problem)

    def tree_types(self) -> TreeTypes:
        """Compose the types of the trees."""
        tree_types = self.algorithm.tree_types()
        if self.uploads:
            uplink, stages = tree_types.uplink, []
            for stage in self.uploads:
                uplink, stage_type = stage.types(uplink)
                stages.append(stage_type)
            stage_types: Any = types.GenericAlias(tuple, tuple(stages))
            client = types.GenericAlias(TransformState, (tree_types.client, stage_types))
            tree_types = replace(tree_types, client=client, uplink=uplink)
        if self.server_optimizer is not None:
            server = types.GenericAlias(OptimizedServer, self.server_optimizer.state_type())
            tree_types = replace(tree_types, server=server)
        return tree_types


def _described(part: Any) -> dict[str, Any]:
    return {"name": type(part).__name__, **config.to_json(part)}


@dataclass(frozen=True)
class _Decoding:
    """Decodes uploads before another accumulator adds them."""

    inner: Accumulator[Any, Any]
    stages: Sequence[UploadTransform]

    @property
    def mergeable(self) -> bool:
        return self.inner.mergeable

    def add(self, upload: ClientUpload[Any]) -> None:
        value = upload.value
        for stage in reversed(self.stages):
            value = stage.decode(value, upload.received)
        self.inner.add(replace(upload, value=value))

    def merge(self, total: Any) -> None:
        self.inner.merge(total)

    def total(self) -> Any:
        return self.inner.total()


class _Robust:
    """Turns the upload of a robust rule into the total that the algorithm aggregates."""

    mergeable = False

    def __init__(
        self,
        algorithm: AdditiveAlgorithm[Any, Any, Any, Any, Any, Any],
        problem: Any,
        rule: RobustRule,
    ) -> None:
        self._algorithm, self._problem, self._rule = algorithm, problem, rule
        self._weight = 0.0

    def add(self, upload: ClientUpload[Any]) -> None:
        self._rule.add(upload)
        self._weight += upload.weight

    def merge(self, total: Any) -> None:
        self._rule.merge(total)

    def total(self) -> Any:
        # weighted as the whole cohort: some servers divide by the number of all clients
        summand = self._algorithm.contribute(self._problem, self._rule.total(), self._weight)
        return canonical(tree.accumulate(None, summand))


class CoordinateMedian:
    """Aggregate client models by coordinate-wise median.

    Robust to fewer than half of the clients being arbitrary. Weights are ignored. All uploads are
    kept in memory, and the cost is O(n log n) per coordinate.

    References
    ----------
    Yin et al., Byzantine-Robust Distributed Learning, ICML 2018.
    """

    mergeable = False

    def __init__(self) -> None:
        self._uploads: list[Params] = []

    def add(self, upload: ClientUpload[Any]) -> None:
        """Keep an upload."""
        self._uploads.append(densify(upload.value))

    def merge(self, total: Params) -> None:
        """Raise an error: a median cannot be computed from partial totals."""
        raise CapabilityError("a median needs every upload; partial totals are not enough")

    def total(self) -> Params:
        """Return the median of the uploads."""
        names = self._uploads[0]
        return {name: _median([upload[name] for upload in self._uploads]) for name in names}


def _median(values: Sequence[Tensor]) -> Tensor:
    """Return the median; for an even count, the mean of the two middle values."""
    ordered = torch.stack(tuple(values)).sort(0).values
    count = len(values)
    return (ordered[(count - 1) // 2] + ordered[count // 2]) / 2


AGGREGATIONS: Registry[Aggregation] = Registry("aggregation", {"median": CoordinateMedian})
"""Robust rules by the name that describes a run."""


def compose(
    algorithm: AnyAlgorithm,
    uploads: str | None = None,
    aggregation: str | None = None,
    server_optimizer: str | None = None,
) -> AnyAlgorithm:
    """Return an algorithm with the changes that a run describes.

    >>> from parsifl.algorithms.fedavg import FedAvg
    >>> compose(FedAvg(), server_optimizer="adam:lr=0.05").server_optimizer.lr
    0.05
    """
    return Composed(
        algorithm,
        () if uploads is None else upload_transforms(uploads),
        None if aggregation is None else _aggregation(aggregation),
        None if server_optimizer is None else _server_optimizer(server_optimizer),
    )


def _aggregation(text: str) -> Aggregation:
    name, options = config.parse(text)
    rule = AGGREGATIONS.find(name)
    config.build(rule, options)  # no rule has options so far
    return rule


def _server_optimizer(text: str) -> ServerOptimizer:
    name, options = config.parse(text)
    return config.build(SERVER_OPTIMIZERS.find(name), options)


def _kind(tree: Any) -> str:
    """Return the type of a message or state as errors show it."""
    if tree is type(None):
        return "nothing"
    return tree.__name__ if isinstance(tree, type) else str(tree)
