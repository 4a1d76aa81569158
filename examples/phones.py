# %% [markdown]
"""# A plan for phones of three strengths that train MobileNet.

Ten phones may train a tenth of the parameters, ten 40 %, and ten everything. Which layers should
each phone train? The example compares the plan with simple designs. It needs no data.

    python examples/phones.py
"""

# %%
from __future__ import annotations

import torch

from parsifl import masks
from parsifl.nn import models

PHONES, SHARES = 10, (0.1, 0.4, 1.0)

# %% [markdown]
# ## The plan
# A budget is the number of parameters that a phone may train. The plan comes with a bound that no
# other plan can beat.

# %%
with torch.device("meta"):  # shapes are enough to plan
    network = models.build("mobilenet", classes=10)
layers = masks.layer_groups(network)
total = sum(layer.size for layer in layers)
budgets = [share * total for share in SHARES for _ in range(PHONES)]
plan = masks.optimal(layers, budgets, seconds=10)

print(f"MobileNet: {len(layers)} blocks, {total:,} parameters below the head\n")
print(masks.draw(plan))
print(f"\nJ = {plan.value:,.0f}; no plan is below {plan.bound:,.0f}", end="; ")
print("proven optimal" if plan.proven else f"at most {plan.gap:.0%} of J could be saved")
for row in masks.rows_of(plan):
    share = row["parameters"] / total
    print(f"phones {row['devices'][0]:>2} to {row['devices'][-1]:>2} train {share:.0%}")

# %% [markdown]
# ## Compare with simple designs

# %%
print("design                        bias         J")
for row in masks.compare(plan, draws=200):
    print(f"{row['design']:<22} {row['bias']:>11,.0f} {row['J']:>11,.0f}")

# %% [markdown]
# ## Savings of a phone
# Frozen layers need no weight gradients, but gradients still pass through frozen layers above a
# trained one. Which layers are frozen therefore matters as much as how many parameters they have:
# the fullest set within the budget, as in the plan, may save fewer operations at a smaller budget,
# and training only the last layers saves more at every budget.

# %%
sample = torch.empty(20, 3, 32, 32, device="meta")
rates = [0.0, 0.25, 0.5, 0.75, 0.9]
print("        FLOPs saved (batches of 20) by training")
print("masked  the fullest set  the last layers")
fullest, last = (masks.curve(network, sample, rates, design=d) for d in ("fullest", "last"))
for rate, full, end in zip(rates, fullest, last, strict=True):
    print(f"{rate:>6.0%} {full['flops_saved']:>14.0f} % {end['flops_saved']:>14.0f} %")
