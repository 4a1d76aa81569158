# %% [markdown]
"""# Violent crime by state: one sparse model, and a personal level for each state.

All states share few coefficients. The personal part is a level: the mean error of a state on its
own training rows, shrunk towards zero if the state has few of them. No row leaves a state.
The columns are strongly correlated, so more coefficients do not always predict better.

    PARSIFL_DATA=folder python examples/crime_by_state.py
"""

# %%
from __future__ import annotations

import numpy as np

from parsifl import data
from parsifl.core.keys import Key
from parsifl.sites import FederatedSparseRegressor

COEFFICIENTS = (2, 4, 16)
SHRINKAGE = 5.0  # a state with this many communities gets half of its mean error

# %% [markdown]
# ## Hold out rows
# A quarter of each state's communities are held out for evaluation. A state adds only its personal
# level to the shared model, and the level never leaves the state.


# %%
def held_out(state: np.ndarray) -> np.ndarray:
    """Mark a quarter of each state's rows; states with fewer than four keep all for training."""
    chosen = np.zeros(len(state), dtype=bool)
    draw = Key(0, purpose="example/split").numpy_generator()
    for number in range(state.max() + 1):
        rows = draw.permutation(np.flatnonzero(state == number))
        chosen[rows[: len(rows) // 4]] = True
    return chosen


def levels(errors: np.ndarray, state: np.ndarray, train: np.ndarray) -> np.ndarray:
    """Return each state's shrunken mean error on its own training rows."""
    count = np.bincount(state[train], minlength=state.max() + 1)
    total = np.bincount(state[train], weights=errors[train], minlength=state.max() + 1)
    return np.asarray(total / (count + SHRINKAGE))


# %%
crime = data.load("communities-crime")
x, y, state = np.asarray(crime.x), crime.y, np.asarray(crime.groups)
test = held_out(state)
train = ~test
print(f"{len(y)} communities in {state.max() + 1} states; mean squared errors on a quarter\n")
print(f"{'mean of all':<20} {np.mean((y[test] - y[train].mean()) ** 2):.4f}")
centred = y - y[train].mean()
own = centred - levels(centred, state, train)[state]
print(f"{'mean of the state':<20} {np.mean(own[test] ** 2):.4f}\n")

# %% [markdown]
# ## One sparse model for all states, and a level for each

# %%
print("coefficients  shared  with levels   bytes up")
for count in COEFFICIENTS:
    model = FederatedSparseRegressor(count)
    model.fit(x[train], y[train], groups=state[train])
    errors = y - model.predict(x)
    personal = errors - levels(errors, state, train)[state]
    shared, local = np.mean(errors[test] ** 2), np.mean(personal[test] ** 2)
    print(f"{count:>12}  {shared:.4f}       {local:.4f}   {model.bytes_up_:>8}")
    chosen = [crime.feature_names[i] for i in model.support_]
    print(f"{'':>14}{', '.join(chosen[:8])}{' ...' if len(chosen) > 8 else ''}")
