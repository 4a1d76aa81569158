"""Sparse regression and classification across clients, as scikit-learn estimators.

What is inferred: which coefficients are not zero, and their values. What is not: after selection
there are no p-values and no confidence intervals, and none are reported. `stability_selection`
says how often a coefficient is selected, which is another question.
"""

from __future__ import annotations

from parsifl.estimators.classifier import FederatedSparseClassifier
from parsifl.estimators.cv import FederatedSparseRegressorCV
from parsifl.estimators.diagnosis import Diagnosis, diagnose
from parsifl.estimators.regressor import FederatedSparseRegressor
from parsifl.estimators.stability import Stability, stability_selection

__all__ = [
    "Diagnosis",
    "FederatedSparseClassifier",
    "FederatedSparseRegressor",
    "FederatedSparseRegressorCV",
    "Stability",
    "diagnose",
    "stability_selection",
]
