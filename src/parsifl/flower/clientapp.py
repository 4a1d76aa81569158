"""The Flower ClientApp: a user's `load` function and the client behind it.

Every message starts a process. This module imports torch only in a process that computes: if the
node has a worker (`parsifl flower node`), it passes the message to the worker.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from parsifl.core.errors import ConfigError
from parsifl.flower import worker
from parsifl.flower.message import (
    WORK,
    Answering,
    Envelope,
    Kind,
    answered,
    message_type,
    pack,
    respond,
    unpack,
)
from parsifl.flower.worker import AppPlace, WorkerTask

if TYPE_CHECKING:
    from parsifl.flower.client import Load, MakeProblem

Make = Callable[[Mapping[str, Any], Mapping[str, Any]], Answering]
"""Creates a client from the configurations of the run and of the node."""


class ParsiflClientApp(ClientApp):
    """A ClientApp that creates its client, in this process or in the node's worker."""

    def __init__(self, make: Make, kinds: Sequence[Kind], mods: Sequence[Any] = ()) -> None:
        super().__init__(mods=list(mods))
        self.make = make
        for kind in kinds:
            family, _, action = message_type(kind).partition(".")
            register = {"query": self.query, "train": self.train, "evaluate": self.evaluate}[family]
            register(action or "default")(self._handler(kind))

    def _handler(self, kind: Kind) -> Callable[[Message, Context], Message]:
        def handle(message: Message, context: Context) -> Message:
            reply = answered(lambda: self._reply(kind, unpack(message.content), context))
            return Message(pack(reply), reply_to=message)

        return handle

    def _reply(self, kind: Kind, envelope: Envelope, context: Context) -> Envelope:
        run, node = dict(context.run_config), dict(context.node_config)
        socket_path = os.environ.get(worker.VARIABLE)
        if socket_path is None:
            return respond(self.make(run, node), kind, envelope)
        task = WorkerTask(kind, self._place(), context.run_id, run, node, envelope)
        return worker.ask(Path(socket_path), task)

    def _place(self) -> AppPlace:
        """Return the module that holds this app, for the worker to import."""
        for module in list(sys.modules.values()):
            file = getattr(module, "__file__", None)
            names = [name for name, value in vars(module).items() if value is self]
            if file is not None and names:
                root = Path(file).parents[module.__name__.count(".")]
                return AppPlace(str(root), module.__name__, names[0])
        raise ConfigError(
            "the app must be a variable of a module, so that its worker can import it"
        )


def client_app(
    load: Load | None = None, problem: MakeProblem | None = None, mods: Sequence[Any] = ()
) -> ClientApp:
    """Create a ClientApp that runs any registered algorithm on local data.

    Parameters
    ----------
    load
        Takes the node's configuration and returns this client's data: a pair `(X, y)`, or a
        `ClientData` of one client. None is for trials: each node uses its part of the dataset
        that the app's `data` names, divided by its `partition`.
    problem
        Builds the problem from data of the agreed schema; None builds the app's `model`.
    mods
        Flower mods that do not read arrays; others are rejected.
    """
    if mods:
        from parsifl.flower.disclosure import check_mods

        check_mods(mods)

    def make(run: Mapping[str, Any], node: Mapping[str, Any]) -> Answering:
        from parsifl.flower import client, settings

        experiment, number = settings.read(run).experiment, client.client_number(node)
        arrays = client.alone(experiment.load(), number) if load is None else load(node)
        root, profile = client.state_root(node), client.profile_of(node)
        return client.RemoteClient(experiment, number, arrays, root, problem, profile)

    return ParsiflClientApp(make, WORK, mods)
