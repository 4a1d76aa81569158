"""Deployment of any algorithm on Flower, durable and secured (extra `parsifl[flower]`).

An app needs two lines and a function that reads a client's data::

    app = parsifl.flower.client_app(load)     # client_app.py, on every node
    app = parsifl.flower.server_app()         # server_app.py, on the server

What is here, in the order of reading: `message` and `network_schema` (what is sent), `client` (a
client that answers), `clientapp`, `server` and `serverapp` (the two apps), `pool`, `exchange` and
`membership` (clients as the loop sees them), `worker` and `node` (long-lived processes on a node),
`settings`, `monitor`, `retention`, `tls`, `cluster` (trials on this machine), `cli`.

The folder imports the simulator only. It knows no statistics: `parsifl.sites.deployment` adds its
own messages, apps and templates.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from parsifl.core import renamed

if TYPE_CHECKING:
    from parsifl.flower.clientapp import client_app
    from parsifl.flower.serverapp import server_app

__all__ = ["client_app", "need_flower", "server_app"]


def need_flower() -> None:
    """Raise ConfigError if Flower is not installed."""
    try:
        import flwr  # noqa: F401
    except ImportError:
        from parsifl.core.errors import ConfigError

        raise ConfigError("flwr is not installed; install the extra: parsifl[flower]") from None


def __getattr__(name: str) -> Any:
    # flwr is an extra: it is imported only when an app is created
    if name not in __all__:
        raise renamed.missing(__name__, name)
    need_flower()
    from importlib import import_module

    side = "clientapp" if "client" in name else "serverapp"
    return getattr(import_module(f"{__name__}.{side}"), name)
