"""The ClientApp of a site with a table.

As in `flower.clientapp`, a process that only forwards a message imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from flwr.clientapp import ClientApp

from parsifl.flower.clientapp import ParsiflClientApp
from parsifl.flower.message import WORK, Answering

if TYPE_CHECKING:
    from parsifl.sites.deployment.agreement import RegressionSpec
    from parsifl.sites.deployment.table_site import LoadTable

KINDS = (*WORK, "agree", "products")
"""The kinds of messages that a site answers."""


def regression_client_app(
    load: LoadTable,
    spec: RegressionSpec,
    missing: Sequence[str] = (),
    words: Sequence[str] = (),
) -> ClientApp:
    """Create a ClientApp for a sparse regression over tables (see `regression_server_app`).

    Parameters
    ----------
    load
        Takes the node's configuration and returns this client's table: columns of text by name,
        as returned by `tables.read_csv`, or a pandas or polars frame.
    spec
        The model; the same as that of the server.
    missing
        Codes that mark a missing value, such as "N/A" or "<0.3"; the entry `missing` of the
        node's configuration adds to them ("N/A|.|<0.3").
    words
        Columns that hold words although values look like numbers, such as codes of diagnoses; the
        entry `words` of the node's configuration adds to them.

    Notes
    -----
    Each site checks what leaves it against limits in its node's configuration (see
    `guards.Guards`).
    """

    def make(run: Mapping[str, Any], node: Mapping[str, Any]) -> Answering:
        from parsifl.flower import client, settings
        from parsifl.sites.deployment.guards import Guards
        from parsifl.sites.deployment.table_site import TableSchema, TableSite

        experiment, number = settings.read(run).experiment, client.client_number(node)
        schema = TableSchema(tuple(missing), tuple(words)).joined(node)
        guards, root = Guards.of(node), client.state_root(node)
        return TableSite(experiment, number, load(node), root, spec, schema, guards)

    return ParsiflClientApp(make, KINDS)
