"""Statistics across sites: sparse regression, classification and survival without pooling rows.

The estimators follow scikit-learn. They select the non-zero coefficients and estimate their values.
After a selection `summary()` gives no p-values and no confidence intervals. `split_inference` gives
valid ones, `post_double_selection` those of one exposure, and `stability_selection` measures how
often a coefficient is selected.

What is here, in the order of reading:

- `families`: problems beside the generalized linear models of `parsifl.linear` (Cox);
- `search`: the best-subset search from sums over sites, its federated algorithm, and certificates;
- `estimators`: the estimators, with cross-validation, tables, and saved models;
- `standard_errors`, `heterogeneity`, `summary`, `inference`: covariances, differences between
  sites, the table of coefficients, and inference after a selection;
- `diagnosis`, `plots`: theorem constants, figures;
- `pages`: coefficients and fits in the report;
- `deployment`: sites with tables on Flower, their guards, and the app template.

The folder imports the simulator; `deployment` also imports `parsifl.flower`, `pages` also imports
`parsifl.report`. Nothing outside imports it: the algorithm, the app template and the section of
the report are entry points.
"""

from __future__ import annotations

from parsifl.sites import plots
from parsifl.sites.diagnosis import Diagnosis, diagnose
from parsifl.sites.estimators.classifier import FederatedSparseClassifier
from parsifl.sites.estimators.cox import FederatedSparseCox
from parsifl.sites.estimators.cv import (
    FederatedSparseClassifierCV,
    FederatedSparseCoxCV,
    FederatedSparsePoissonCV,
    FederatedSparseRegressorCV,
)
from parsifl.sites.estimators.poisson import FederatedSparsePoisson
from parsifl.sites.estimators.preprocessor import FederatedPreprocessor
from parsifl.sites.estimators.regressor import FederatedSparseRegressor
from parsifl.sites.estimators.saved import load, save
from parsifl.sites.inference import (
    Stability,
    post_double_selection,
    split_inference,
    stability_selection,
)
from parsifl.sites.search.certificate import Certificate
from parsifl.sites.summary import Inference

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
