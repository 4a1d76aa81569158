"""The ServerApp of a sparse regression over tables."""

from __future__ import annotations

from flwr.serverapp import ServerApp

from parsifl.flower.logs import server_log
from parsifl.flower.serverapp import app_of
from parsifl.sites.deployment.agreement import RegressionSpec
from parsifl.sites.deployment.regression import Regression


def regression_server_app(spec: RegressionSpec) -> ServerApp:
    """Create a ServerApp for a sparse regression over tables.

    One round of sums agrees on columns, levels, missing values and scales; then the rounds of
    the algorithm select columns; a last round of sums gives the coefficients and their errors. The
    estimator is saved as `model.json` in the run directory (`parsifl.sites.load` reads it).
    """
    return app_of(lambda chosen, link: Regression(chosen, link, server_log, spec))
