"""One method on one problem: the runs and the single steps that the checks look at."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from parsifl.core import tree
from parsifl.core.algorithm import (
    AnyAlgorithm,
    ClientInfo,
    ClientUpdate,
    ClientUpload,
)
from parsifl.core.batching import ClientRoundData
from parsifl.core.errors import ConfigError, ParsiflError
from parsifl.core.keys import Key
from parsifl.core.leaves import densify
from parsifl.core.problem import Model, Problem
from parsifl.data.clients import ClientData
from parsifl.engine.batch_sampler import BatchSampler, Infos
from parsifl.engine.local_pool import LocalPool
from parsifl.engine.pool import ClientProgram
from parsifl.engine.run import Run
from parsifl.engine.simulate import simulate
from parsifl.engine.training import Training
from parsifl.testing.conformance.examples import Example, example_for

SEED = 3
ROUNDS = 3
SMALL: Mapping[str, Any] = {"local_steps": 3, "batch_size": 4}


class ConformanceError(ParsiflError):
    """A method does not keep a promise."""


class NotApplicable(Exception):
    """A check says nothing about this method; the text tells why."""


@dataclass(frozen=True, eq=False)
class Turn:
    """One client's part in a round: what went in, and what came out."""

    info: ClientInfo
    down: Any
    client: Any
    shard: ClientRoundData
    result: ClientUpdate[Any, Any]


@dataclass(frozen=True, eq=False)
class WatchedProgram(ClientProgram):
    """What clients do, with everything that goes in and comes out."""

    calls: list[tuple[Any, Any, ClientRoundData, ClientUpdate[Any, Any]]] = field(
        default_factory=list
    )

    def __call__(self, received: Any, state: Any, data: ClientRoundData) -> ClientUpdate[Any, Any]:
        """Train one client, and keep arguments and result."""
        update = super().__call__(received, state, data)
        self.calls.append((received, state, data, update))
        return update


@dataclass(frozen=True, eq=False)
class Scene:
    """A moment between two rounds."""

    server: Any
    clients: dict[int, Any] = field(default_factory=dict)
    round: int = 0
    turns: tuple[Turn, ...] = ()
    """The round that led here."""


@dataclass(frozen=True, eq=False)
class Trial:
    """A configured method with a problem and clients."""

    method: AnyAlgorithm
    problem: Problem
    data: ClientData
    own_example: bool = True
    """Whether problem and data are ours, so that they may be made again in another dtype."""

    @cached_property
    def infos(self) -> Infos:
        """What the server knows of the clients."""
        return Infos(self.data)

    @cached_property
    def shards(self) -> BatchSampler:
        """Where shards are drawn."""
        return BatchSampler(self.data, self.problem)

    @property
    def key(self) -> Key:
        """The key of the whole trial."""
        return Key(SEED)

    # ------------------------------------------------------------------ whole runs
    def simulate(self, executor: Any = "loop", rounds: int = ROUNDS, **options: Any) -> Run:
        """Run the engine."""
        return simulate(
            self.method, self.problem, self.data, rounds, seed=SEED, executor=executor, **options
        )

    @cached_property
    def sequential(self) -> Run:
        """A run one by one."""
        return self.simulate("loop")

    @cached_property
    def batched(self) -> dict[str, Run]:
        """The same run, many at once: as the engine chooses, and under vmap without fusing."""
        chosen = self.simulate("fused")
        if chosen.records[0].executor != "fused":
            return {"vmap": chosen}
        return {"fused": chosen, "vmap": self.simulate("vmap")}

    # ------------------------------------------------------------------ single steps
    @cached_property
    def start(self) -> Scene:
        """Before the first round."""
        method, key = self.method, self.key.replace(purpose="server")
        return Scene(method.init_server(self.problem, self.infos, key))

    @cached_property
    def first(self) -> Scene:
        """After one round."""
        return self.step(self.start)

    @cached_property
    def second(self) -> Scene:
        """After two rounds: no state is as it was first made."""
        return self.step(self.first)

    def step(self, scene: Scene) -> Scene:
        """Take one round with every client, through the loop and a watched program."""
        program = WatchedProgram(self.method, self.problem)
        pool = LocalPool(program, self.data)
        pool.store.restore(scene.clients)
        training = Training(self.method, self.problem, pool, seed=SEED)
        server, _ = training.round(scene.server, scene.round)
        infos = [self.infos[client] for client in range(len(self.data))]
        turns = tuple(
            Turn(info, *watched) for info, watched in zip(infos, program.calls, strict=True)
        )
        clients = {turn.info.id: turn.result.state for turn in turns}
        return Scene(server, clients, scene.round + 1, turns)

    def turn(self, scene: Scene, client: int) -> Turn:
        """Let one client work."""
        down, state = self.received(scene, client)
        info = self.infos[client]
        key = self.key.replace(round=scene.round)
        shard = self.shards.draw(client, self.method.batches(info, scene.round), key)
        result = self.method.client_update(self.problem, down, state, shard)
        return Turn(info, down, state, shard, result)

    def received(self, scene: Scene, client: int) -> tuple[Any, Any]:
        """Return what a client is sent, and its state."""
        key, info = self.key.replace(round=scene.round), self.infos[client]
        here = key.replace(client=client, purpose="broadcast")
        down = self.method.broadcast(self.problem, scene.server, info, here)
        if client in scene.clients:
            return down, scene.clients[client]
        return down, ClientProgram(self.method, self.problem).initial_state(info, down, key.seed)

    def combine(self, server: Any, turns: tuple[Turn, ...], round: int) -> Any:
        """Aggregate the uploads in the order given."""
        key = self.key.replace(round=round, purpose="aggregate")
        accumulator = self.method.accumulator(self.problem)
        for turn in turns:
            weight = self.method.weight(turn.info)
            upload = ClientUpload(turn.info, weight, turn.result.upload, turn.down)
            accumulator.add(upload)
        return self.method.aggregate(self.problem, server, accumulator.total(), key)

    def personal(self, scene: Scene, client: int) -> Model:
        """Return the model that a client is judged on."""
        down, state = self.received(scene, client)
        key = self.key.replace(round=scene.round, purpose="tuning")
        shard = self.shards.draw(
            client, self.method.personalization_batches(self.infos[client]), key
        )
        return self.method.personalize(self.problem, down, state, shard)

    def models(self, scene: Scene) -> dict[str, Any]:
        """Return the parameters of the global model and of all personal ones."""
        shared = self.method.model(self.problem, scene.server)
        found = {f"client {i}": self.personal(scene, i).params for i in range(len(self.data))}
        return found if shared is None else {"global": shared.params, **found}


def trial_for(
    method: AnyAlgorithm, problem: Problem | None = None, data: ClientData | None = None
) -> Trial:
    """Put a method on trial: on its own problem and data, or on an example that fits it."""
    if (problem is None) != (data is None):
        raise ConformanceError("give both problem= and data=, or neither")
    if problem is not None and data is not None:
        return Trial(method, problem, data, own_example=False)
    example: Example = example_for(method)
    return Trial(method, example.problem, example.data)


def small(kind: type[AnyAlgorithm]) -> AnyAlgorithm:
    """Build a method with few local steps; `conformance` may hold further settings."""
    known = {item.name for item in fields(kind)}  # type: ignore[arg-type]  # methods are dataclasses
    own = dict(kind.conformance.settings)
    method = kind(**own)
    for name, value in SMALL.items():
        if name in known - own.keys():
            try:
                method = replace(method, **{name: value})  # type: ignore[type-var]  # see above
            except ConfigError:  # a method may allow fewer values; its own default is then kept
                continue
    return method


def snapshot(run: Run) -> dict[str, Any]:
    """Return everything that a run leaves behind, as one tree."""
    personal = {str(i): run.personal(i).params for i in range(len(run.pool.clients))}
    states = {str(client): state for client, state in run.pool.store}
    return {"server": run.server, "clients": states, "personal": personal}


def difference(left: Any, right: Any) -> float:
    """Return the largest difference over all leaves, relative to the size of the leaf."""
    ours, form = tree.flatten(densify(left))
    theirs, other_form = tree.flatten(densify(right))
    if form != other_form:
        raise ConformanceError("the results differ in structure")
    return max((_leaf_difference(a, b) for a, b in zip(ours, theirs, strict=True)), default=0.0)


def _leaf_difference(left: Tensor, right: Tensor) -> float:
    if left.shape != right.shape or left.dtype != right.dtype:
        raise ConformanceError(
            f"a leaf is {left.dtype} {tuple(left.shape)} here, {right.dtype} {tuple(right.shape)} "
            "there"
        )
    if not left.numel():
        return 0.0
    gap = (left.to(torch.float64) - right.to(torch.float64)).abs().max()
    return float(gap / right.to(torch.float64).abs().max().clamp(min=1.0))
