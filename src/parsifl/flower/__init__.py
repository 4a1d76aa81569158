"""Deployment of algorithms on Flower, durable and secured (extra `parsifl[flower]`).

An app needs two lines and a function that reads a client's data::

    app = parsifl.flower.client_app(load)     # client_app.py, on every node
    app = parsifl.flower.server_app()         # server_app.py, on the server
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from parsifl.flower.clientapp import client_app, regression_client_app
    from parsifl.flower.serverapp import regression_server_app, server_app

__all__ = ["client_app", "regression_client_app", "regression_server_app", "server_app"]


def __getattr__(name: str) -> Any:
    # flwr is an extra: it is imported only when an app is created
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        import flwr  # noqa: F401
    except ImportError:
        from parsifl.core.errors import ConfigError

        raise ConfigError("flwr is not installed; install the extra: parsifl[flower]") from None
    from importlib import import_module

    side = "clientapp" if "client" in name else "serverapp"
    return getattr(import_module(f"{__name__}.{side}"), name)
