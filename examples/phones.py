"""A plan for phones of three strengths that train MobileNet together.

Ten phones may train a tenth of the parameters, ten of them 40 %, ten everything. Which layers
should each phone train? Compares the plan with simple designs. Needs no data.

    python examples/phones.py
"""

from __future__ import annotations

import torch

from parsifl import masks, models

PHONES, SHARES = 10, (0.1, 0.4, 1.0)


def main() -> None:
    """Plan by parameters, then by FLOPs, and print both."""
    with torch.device("meta"):
        network = models.build("mobilenet", classes=10)
    layers = masks.blocks(network)
    total = sum(layer.size for layer in layers)
    budgets = [share * total for share in SHARES for _ in range(PHONES)]
    plan = masks.optimal(layers, budgets, seconds=10)

    print(f"MobileNet: {len(layers)} blocks, {total:,} parameters below the head\n")
    print(masks.picture(plan))
    print(f"\nJ = {plan.value:,.0f}; no plan is below {plan.bound:,.0f}", end="; ")
    print("proven optimal" if plan.proven else f"at most {plan.gap:.0%} of J could be saved")
    for row in masks.rows_of(plan):
        share = row["parameters"] / total
        print(f"phones {row['devices'][0]:>2} to {row['devices'][-1]:>2} train {share:.0%}")

    print("\ndesign                        bias         J")
    for row in masks.compare(plan, draws=200):
        print(f"{row['design']:<22} {row['bias']:>11,.0f} {row['J']:>11,.0f}")

    sample = torch.empty(20, 3, 32, 32, device="meta")
    print("\nwhat a phone saves (batches of 20)\n\nmasked  parameters  FLOPs saved")
    for row in masks.curve(network, sample, [0.0, 0.25, 0.5, 0.75, 0.9]):
        print(f"{row['rate']:>6.0%} {row['parameters']:>11,} {row['flops_saved']:>11.0f} %")


if __name__ == "__main__":
    main()
