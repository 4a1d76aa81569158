"""Former names of settings and modules: there are no aliases, an old name raises an error.

Importing this module imports nothing else of Parsifl.
"""

from __future__ import annotations

import importlib.abc
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

SETTINGS = {
    "batch": "batch_size",
    "decay": "weight_decay",
    "devices": "profiles",
    "partial": "last_batch",
    "steps": "local_steps",
}
"""The present name of each setting."""

MODULES = {
    "parsifl.algorithms.fedbestsubset": "parsifl.sites.search.fedbestsubset",
    "parsifl.cli.flower": "parsifl.flower.cli.trial",
    "parsifl.cli.operations": "parsifl.flower.cli.operations",
    "parsifl.cli.report": "parsifl.report.cli",
    "parsifl.estimators": "parsifl.sites",
    "parsifl.flower.agreement": "parsifl.sites.deployment.agreement",
    "parsifl.flower.guards": "parsifl.sites.deployment.guards",
    "parsifl.flower.regression": "parsifl.sites.deployment.regression",
    "parsifl.flower.table_site": "parsifl.sites.deployment.table_site",
    "parsifl.linear.cox": "parsifl.sites.families.cox",
    "parsifl.linear.site_statistics": "parsifl.linear.sums",
    "parsifl.report.coefficients": "parsifl.sites.pages.coefficients",
    "parsifl.report.fit_page": "parsifl.sites.pages.fit_page",
    "parsifl.solvers.best_subset": "parsifl.sites.search.best_subset",
    "parsifl.solvers.subset_model": "parsifl.sites.search.subset_model",
    "parsifl.solvers.subset_state": "parsifl.sites.search.subset_state",
}
"""The present name of each module."""

MEMBERS = {
    "parsifl.algorithms.FedBestSubset": "parsifl.sites.search.fedbestsubset.FedBestSubset",
    "parsifl.flower.regression_client_app": "parsifl.sites.deployment.regression_client_app",
    "parsifl.flower.regression_server_app": "parsifl.sites.deployment.regression_server_app",
    "parsifl.report.build_fit": "parsifl.sites.pages.build_fit",
}
"""The present name of each public class or function."""


def missing(module: str, name: str) -> AttributeError:
    """Return the error for an attribute that a module lacks."""
    old = f"{module}.{name}"
    new = MODULES.get(old) or MEMBERS.get(old)
    hint = f": it is now {new}" if new else ""
    return AttributeError(f"module '{module}' has no attribute '{name}'{hint}")


class _Finder(importlib.abc.MetaPathFinder):
    """Names the new module when an old one is imported."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,  # noqa: ARG002 - the protocol of importlib
        target: ModuleType | None = None,  # noqa: ARG002
    ) -> ModuleSpec | None:
        """Raise ModuleNotFoundError for an old name."""
        new = MODULES.get(fullname)
        if new is not None:
            raise ModuleNotFoundError(f"{fullname} is now {new}", name=fullname)
        return None


def install() -> None:
    """Name the new module when an old one is imported."""
    # first: an empty folder of the old name would be imported as a namespace package
    sys.meta_path.insert(0, _Finder())
