"""The Flower ClientApp: a user's `load` function and a `Site` behind it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from parsifl.flower import settings
from parsifl.flower.letter import Letter
from parsifl.flower.link import Kind
from parsifl.flower.payload import pack, unpack
from parsifl.flower.privacy import check_mods
from parsifl.flower.site import Load, MakeProblem, Site, alone, client_number, state_root, told


def client_app(
    load: Load | None = None, problem: MakeProblem | None = None, mods: Sequence[Any] = ()
) -> ClientApp:
    """Make a ClientApp that runs any registered algorithm on data that stay where they are.

    Parameters
    ----------
    load
        Takes the node's configuration and returns this client's data: a pair `(X, y)`, or a
        `ClientData` of one client. None is for trials: the data set that the app's `data` names,
        divided by its `partition`, of which each node keeps its own part.
    problem
        Builds the problem from data of the agreed form; else the app's `model` is built.
    mods
        Flower mods that do not look into arrays; others are refused.
    """
    check_mods(mods)
    app = ClientApp(mods=list(mods))

    def handler(kind: Kind) -> Callable[[Message, Context], Message]:
        def handle(message: Message, context: Context) -> Message:
            letter = told(lambda: _answer(kind, message, context, load, problem))
            return Message(pack(letter), reply_to=message)

        return handle

    app.query()(handler("hello"))
    app.train()(handler("train"))
    app.evaluate()(handler("judge"))
    return app


def _answer(
    kind: Kind, message: Message, context: Context, load: Load | None, make: MakeProblem | None
) -> Letter:
    experiment, node = settings.read(context.run_config).experiment, context.node_config
    client = client_number(node)
    arrays = alone(experiment.load(), client) if load is None else load(dict(node))
    site = Site(experiment, client, arrays, state_root(node), make)
    return site.answer(kind, unpack(message.content))
