"""Sparse regression and classification across clients, as scikit-learn estimators.

What is inferred: which coefficients are not zero, and their values. What is not: after selection
there are no p-values and no confidence intervals, and none are reported. `stability_selection`
says how often a coefficient is selected, which is another question.
"""

from __future__ import annotations

from parsifl.estimators.classifier import FederatedSparseClassifier

from parsifl.estimators.regressor import FederatedSparseRegressor


__all__ = [
    "FederatedSparseClassifier",
    "FederatedSparseRegressor",
    "FederatedSparseRegressorCV",
    "Stability",
    "stability_selection",
]
