"""The scikit-learn estimators.

Read `base` (fitting), `settings` (parameters that all share), one file for each family, `cv`
(cross-validation), `exact` and `published` (the two kinds of solvers), `moments` (encoding of
arrays), `preprocessor` (encoding of tables), `saved` and `export`.
"""
