# %% [markdown]
"""# Four hospitals fit one sparse model of heart disease, compared with their own models.

Each hospital could also fit its own model. Both kinds are evaluated on held-out patients, of the
same hospital and of the others, by the area under the ROC curve (AUC). AUC measures ranking, which
is comparable between hospitals although the share of ill patients differs. Only 8 of 123 Swiss
patients are healthy, so the Swiss column depends on two or three in each split.

    PARSIFL_DATA=folder python examples/four_hospitals.py
"""

# %%
from __future__ import annotations

import numpy as np
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import StratifiedShuffleSplit

from parsifl import data
from parsifl.sites import FederatedSparseClassifier

COEFFICIENTS = 6
SPLITS = 3


# %%
def fit(
    x: np.ndarray, y: np.ndarray, rows: np.ndarray, owner: np.ndarray | None
) -> FederatedSparseClassifier:
    """Fit to some rows; without owners they count as one hospital."""
    model = FederatedSparseClassifier(COEFFICIENTS, l2=0.01)
    return model.fit(x[rows], y[rows], groups=None if owner is None else owner[rows])


# %% [markdown]
# ## Fit each hospital alone, then all of them together
# Rows never leave a hospital; the federated fit sends sums over them.

# %%
heart = data.load("heart-disease")
x, y, owner = np.asarray(heart.x), heart.y, np.asarray(heart.groups)
names = [str(name) for name in heart.group_names] or [str(n) for n in np.unique(owner)]
sites = range(len(names))
scores = np.zeros((SPLITS, len(names) + 1, len(names)))
splitter = StratifiedShuffleSplit(SPLITS, test_size=0.3, random_state=0)
for split, (train, test) in enumerate(splitter.split(x, owner * 2 + y)):
    models = [fit(x, y, train[owner[train] == site], None) for site in sites]
    models.append(fit(x, y, train, owner))
    for row, model in enumerate(models):
        for site in sites:
            rows = test[owner[test] == site]
            scores[split, row, site] = roc_auc_score(y[rows], model.decision_function(x[rows]))

# %% [markdown]
# ## Compare the models

# %%
mean = scores.mean(axis=0)
print(f"AUC on patients left out, mean of {SPLITS} splits\n")
print(f"{'fitted to':<14}" + "".join(f"{'on ' + name:>15}" for name in names) + f"{'mean':>8}")
for label, values in zip([*names, "all, federated"], mean, strict=True):
    print(f"{label:<14}" + "".join(f"{v:>15.3f}" for v in values) + f"{values.mean():>8.3f}")

print("\ngain of the federated model, in AUC (negative: the hospital does better alone)\n")
for site, name in enumerate(names):
    own = mean[-1, site] - mean[site, site]
    others = [mean[-1, other] - mean[site, other] for other in sites if other != site]
    print(f"{name:<14} on its own patients {own:+.3f}, on the others' {np.mean(others):+.3f}")

# %% [markdown]
# ## The model itself

# %%
whole = fit(x, y, np.arange(len(y)), owner)
features = heart.feature_names or tuple(f"feature {i}" for i in range(x.shape[1]))
chosen = ", ".join(f"{features[i]} {whole.coef_[0, i]:+.2f}" for i in whole.support_)
print(f"the federated model of all patients: {chosen}")
print(f"sent: {whole.bytes_up_} bytes up, {whole.bytes_down_} down, in {whole.n_iter_} rounds")
