"""Sparse regression, classification and survival across sites, as scikit-learn estimators.

The estimators select the non-zero coefficients and estimate their values. After a selection
`summary()` gives no p-values and no confidence intervals. `split_inference` gives valid ones,
`post_double_selection` those of one exposure, and `stability_selection` measures how often a
coefficient is selected.
"""

from __future__ import annotations

from parsifl.estimators import plots
from parsifl.estimators.certificate import Certificate
from parsifl.estimators.classifier import FederatedSparseClassifier
from parsifl.estimators.cox import FederatedSparseCox
from parsifl.estimators.cv import (
    FederatedSparseClassifierCV,
    FederatedSparseCoxCV,
    FederatedSparsePoissonCV,
    FederatedSparseRegressorCV,
)
from parsifl.estimators.diagnosis import Diagnosis, diagnose
from parsifl.estimators.inference import (
    Inference,
    Stability,
    post_double_selection,
    split_inference,
    stability_selection,
)
from parsifl.estimators.poisson import FederatedSparsePoisson
from parsifl.estimators.preprocessor import FederatedPreprocessor
from parsifl.estimators.regressor import FederatedSparseRegressor
from parsifl.estimators.saved import load, save

__all__ = [
    "Certificate",
    "Diagnosis",
    "FederatedPreprocessor",
    "FederatedSparseClassifier",
    "FederatedSparseClassifierCV",
    "FederatedSparseCox",
    "FederatedSparseCoxCV",
    "FederatedSparsePoisson",
    "FederatedSparsePoissonCV",
    "FederatedSparseRegressor",
    "FederatedSparseRegressorCV",
    "Inference",
    "Stability",
    "diagnose",
    "load",
    "plots",
    "post_double_selection",
    "save",
    "split_inference",
    "stability_selection",
]
