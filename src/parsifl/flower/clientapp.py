"""The Flower ClientApp: a user's `load` function and a `Site` behind it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from parsifl.errors import ParsiflError
from parsifl.flower import settings
from parsifl.flower.letter import Letter
from parsifl.flower.payload import pack, unpack
from parsifl.flower.privacy import check_mods
from parsifl.flower.site import Load, MakeProblem, Site, alone, client_number, state_root

_LONGEST_REASON = 500


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

    def answer(name: str) -> Callable[[Message, Context], Message]:
        def handler(message: Message, context: Context) -> Message:
            letter = _answer(name, message, context, load, problem)
            return Message(pack(letter), reply_to=message)

        return handler

    app.query()(answer("hello"))
    app.train()(answer("train"))
    app.evaluate()(answer("judge"))
    return app


def _answer(
    name: str, message: Message, context: Context, load: Load | None, make: MakeProblem | None
) -> Letter:
    """Answer one message; a failure is told to the server by its name and first line."""
    try:
        experiment = settings.read(context.run_config).experiment
        node = context.node_config
        client = client_number(node)
        arrays = alone(experiment.load(), client) if load is None else load(dict(node))
        site = Site(experiment, client, arrays, state_root(node), make)
        if name == "hello":
            return site.hello()
        return getattr(site, name)(unpack(message.content))  # type: ignore[no-any-return]  # by name
    except ParsiflError as error:
        return Letter({"error": str(error)[:_LONGEST_REASON]})
    except Exception as error:  # the user's load may fail in any way; its text may hold data
        return Letter({"error": f"{type(error).__name__} (the text stays on the node)"})
