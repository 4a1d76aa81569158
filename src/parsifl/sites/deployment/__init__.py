"""A sparse regression over tables on Flower (extra `parsifl[flower]`).

An app needs a table at every site and one model for all::

    app = regression_client_app(load, SPEC)   # client_app.py, at every site
    app = regression_server_app(SPEC)         # server_app.py, on the server

Read `agreement` (the model, and the encoding that all sites share), `messages`, `guards` (the
limits of a site), `table_site` (how a site answers), `regression` (the server), `template`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from parsifl.sites.deployment.agreement import RegressionSpec
    from parsifl.sites.deployment.clientapp import regression_client_app
    from parsifl.sites.deployment.serverapp import regression_server_app

__all__ = ["RegressionSpec", "regression_client_app", "regression_server_app"]
_HOMES = {
    "RegressionSpec": "agreement",
    "regression_client_app": "clientapp",
    "regression_server_app": "serverapp",
}


def __getattr__(name: str) -> Any:
    # flwr is an extra: it is imported only when an app is created
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name != "RegressionSpec":
        from parsifl.flower import need_flower

        need_flower()
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
