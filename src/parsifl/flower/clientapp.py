"""The Flower ClientApp: a user's `load` function and a `RemoteClient` behind it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, get_args

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from parsifl.engine.experiment import Experiment
from parsifl.flower import settings
from parsifl.flower.client import (
    Answering,
    Load,
    MakeProblem,
    NodeConfig,
    RemoteClient,
    alone,
    answered,
    client_number,
    profile_of,
    respond,
    state_root,
)
from parsifl.flower.guards import Guards
from parsifl.flower.message import Envelope
from parsifl.flower.privacy import check_mods
from parsifl.flower.records import MESSAGE_TYPES, pack, unpack
from parsifl.flower.table_schema import TableSchema
from parsifl.flower.tables import RegressionSpec
from parsifl.flower.tablesite import LoadTable, TableSite
from parsifl.flower.transport import Kind


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

    def site(experiment: Experiment, client: int, node: NodeConfig) -> RemoteClient:
        arrays = alone(experiment.load(), client) if load is None else load(node)
        root, profile = state_root(node), profile_of(node)
        return RemoteClient(experiment, client, arrays, root, problem, profile)

    return _app(site, ("hello", "train", "evaluate"), mods)


def regression_client_app(
    load: LoadTable,
    spec: RegressionSpec,
    missing: Sequence[str] = (),
    words: Sequence[str] = (),
) -> ClientApp:
    """Make a ClientApp for a sparse regression over tables (see `regression_server_app`).

    Parameters
    ----------
    load
        Takes the node's configuration and returns this client's table: columns of text by name,
        such as `tables.read_csv` gives, or a frame of pandas or polars.
    spec
        The model; the same as that of the server.
    missing
        Codes that stand for a missing value, such as "N/A" or "<0.3"; the entry `missing` of the
        node's configuration adds to them ("N/A|.|<0.3").
    words
        Columns that hold words although values look like numbers, such as codes of diagnoses; the
        entry `words` of the node's configuration adds to them.

    Notes
    -----
    Each site checks what leaves it by limits in its node's configuration (see `guards.Guards`).
    """
    declared = TableSchema(tuple(missing), tuple(words))

    def site(experiment: Experiment, client: int, node: NodeConfig) -> TableSite:
        schema, guards = declared.joined(node), Guards.of(node)
        table, root = load(node), state_root(node)
        return TableSite(experiment, client, table, root, spec, schema, guards)

    return _app(site, get_args(Kind))


def _app(
    make: Callable[[Experiment, int, NodeConfig], Answering],
    kinds: Sequence[Kind],
    mods: Sequence[Any] = (),
) -> ClientApp:
    check_mods(mods)
    app = ClientApp(mods=list(mods))

    def answer(kind: Kind, message: Message, context: Context) -> Envelope:
        experiment, node = settings.read(context.run_config).experiment, dict(context.node_config)
        site = make(experiment, client_number(node), node)
        return respond(site, kind, unpack(message.content))

    def handler(kind: Kind) -> Callable[[Message, Context], Message]:
        def handle(message: Message, context: Context) -> Message:
            reply = answered(lambda: answer(kind, message, context))
            return Message(pack(reply), reply_to=message)

        return handle

    for kind in kinds:
        family, _, action = MESSAGE_TYPES[kind].partition(".")
        register = {"query": app.query, "train": app.train, "evaluate": app.evaluate}[family]
        register(action or "default")(handler(kind))
    return app
