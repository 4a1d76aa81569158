"""Tables 5 and 6 and Figure 3: which layers devices train, and what that saves."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from functools import partial
from pathlib import Path
from statistics import fmean

import torch

from parsifl import masks
from parsifl.core.keys import Key
from parsifl.masks import heuristics
from parsifl.masks.instance import Instance, Masks, bias, instance_of, slack
from parsifl.nn import models
from parsifl_reproduction.perfedmask.claims import in_order, verdict
from parsifl_reproduction.perfedmask.setup import PAPER, Cell, plan
from parsifl_reproduction.recipe import Claim, Context, Job, Recipe, Result, Values, by_label

_MASKS, _DRAWS, _NODES = "masks", 20, 50

# ---------------------------------------------------------------------- Table 6
TABLE_6: dict[tuple[int, int], Fraction] = {
    (1, 1): Fraction(8, 3),
    (1, 2): Fraction(10, 3),
    (1, 3): Fraction(2),
    (2, 2): Fraction(2),
    (2, 3): Fraction(2),
    (3, 3): Fraction(2),
    (4, 4): Fraction(0),
}
"""The least bias for the budgets of devices 1 and 2; device 3 trains all four parameters."""


def _run_table6(folder: Path | None) -> Values:
    del folder  # it takes a second
    plans = {pair: masks.optimal([1, 1, 1, 1], [*pair, 4]) for pair in TABLE_6}
    return {
        f"{a},{b}": {"J": plan.J, "bias": plan.bias, "proven": plan.proven}
        for (a, b), plan in plans.items()
    }


def _conclude_table6(context: Context, results: Sequence[Result]) -> list[Claim]:
    del context
    claims = []
    for (a, b), paper in TABLE_6.items():
        statement = f"budgets {a}, {b} and 4 of 4 parameters: the least J (bias + unused budgets)"
        if not results:
            claims.append(Claim(statement, str(paper), "", "not run"))
            continue
        found = results[0].values[f"{a},{b}"]
        held = abs(found["J"] - float(paper)) < 1e-9 and found["proven"]
        note = f"proven optimal; its bias is {found['bias']:.4g}"
        ours = f"{found['J']:.4f}"
        claims.append(Claim(statement, str(paper), ours, "held" if held else "did not hold", note))
    return claims


# ---------------------------------------------------------------------- Table 5
TABLE_5_BIAS = {"sequential": 3.364e6, "random": 0.609e6, "optimal": 0.204e6}
TABLE_5 = {
    Cell("CIFAR-100", "perfedmask", nu=0.2): 29.84,
    Cell("CIFAR-100", "perfedmask sequential", nu=0.2): 27.02,
    Cell("CIFAR-100", "perfedmask random", nu=0.2): 28.88,
}
"""Test accuracy before fine-tuning."""


def _run_table5(folder: Path | None) -> Values:
    """Weigh the three designs on MobileNet with 80 weak devices of 100."""
    del folder  # it takes seconds
    with torch.device("meta"):
        blocks = masks.layer_groups(models.build("mobilenet"))
    total = sum(block.size for block in blocks)
    found: Values = {"total": total}
    for share in (0.125, 0.95):
        budgets = [share * total] * 80 + [float(total)] * 20
        instance = instance_of(blocks, budgets)
        best = masks.optimal(blocks, budgets, "J", nodes=_NODES)
        least = masks.optimal(blocks, budgets, "bias", nodes=_NODES)
        drawn = [_weigh(instance, heuristics.random(instance, Key(s))) for s in range(_DRAWS)]
        found[f"{share:g}"] = {
            "sequential": _weigh(instance, heuristics.sequential(instance)),
            "random": tuple(fmean(part) for part in zip(*drawn, strict=True)),
            "optimal": (best.bias, best.J),
            "least_bias": least.bias,
            "bias_bound": least.bound,
            "J_bound": best.bound,
        }
    return found


def _weigh(instance: Instance, design: Masks) -> tuple[float, float]:
    """Return the bias of a design and its J."""
    unequal = bias(instance.sizes, design)
    return unequal, unequal + slack(instance, design)


def _plan_table5(context: Context) -> list[Job]:
    return [Job(_MASKS, 0, _run_table5), *plan(list(TABLE_5), context)]


def _conclude_table5(context: Context, results: Sequence[Result]) -> list[Claim]:
    grouped = by_label(results)
    trained = in_order(context, results, TABLE_5, "perfedmask", "before")
    if _MASKS not in grouped:
        statement = "the bias of the three designs, recomputed"
        return [Claim(statement, "3.364 M, 0.609 M, 0.204 M", "", "not run"), *trained]
    found = grouped[_MASKS][0]
    here, weakest = found["0.125"], found["0.95"]
    claims = [_bias_claim(name, paper, here[name][0]) for name, paper in TABLE_5_BIAS.items()]
    bound = weakest["bias_bound"]
    claims.append(
        Claim(
            "some masks reach a bias of 0.204 M with 80 weak devices of 100",
            "0.204 M",
            f"at least {here['bias_bound'] / 1e6:.3f} M at psi = d/8, and at least "
            f"{bound / 1e6:.3f} M even at psi = 0.95 d",
            "held" if bound <= 0.204e6 else "did not hold",
            "proven for masks that keep their budgets and leave no device idle",
        )
    )
    others = [here[name][1] for name in ("sequential", "random")]
    claims.append(
        Claim(
            "optimised masks have the least J = bias + unused budgets (what the paper minimises)",
            "not given",
            f"{here['optimal'][1] / 1e6:.3f} M against {others[0] / 1e6:.3f} M (sequential) and "
            f"{others[1] / 1e6:.3f} M (random)",
            "held" if here["optimal"][1] < min(others) else "did not hold",
            "proven optimal" if here["J_bound"] > here["optimal"][1] - 1 else "",
        )
    )
    return claims + trained


def _bias_claim(name: str, paper: float, ours: float) -> Claim:
    return Claim(
        f"the bias of {name} masks at psi = d/8",
        f"{paper / 1e6:.3f} M",
        f"{ours / 1e6:.3f} M",
        "held" if abs(ours - paper) < 0.01 * paper else "did not hold",
        "sequential masks of equal budgets are all the same, so that they have the least bias "
        "there is; the paper's order is the reverse",
    )


# ---------------------------------------------------------------------- Figure 3
def _run_figure3(model: str, folder: Path | None) -> Values:
    del folder  # it takes seconds
    with torch.device("meta"):
        module = models.build(model)
    sample = torch.empty(50, 3, 32, 32, device="meta")
    return {design: masks.curve(module, sample, design=design) for design in ("fullest", "last")}


def _plan_figure3(context: Context) -> list[Job]:
    del context
    return [Job(model, 0, partial(_run_figure3, model)) for model in ("preresnet18", "mobilenet")]


def _conclude_figure3(context: Context, results: Sequence[Result]) -> list[Claim]:
    del context
    grouped = by_label(results)
    claims = []
    for model in ("preresnet18", "mobilenet"):
        statement = f"{model}: masking more saves parameters and operations"
        if model not in grouped:
            claims.append(Claim(statement, "the curves rise", "", "not run"))
            continue
        rows = grouped[model][0]["last"]
        last, middle = rows[-1], rows[len(rows) // 2]
        rises = last["flops_saved"] > middle["flops_saved"] > 0
        ours = (
            f"at a masking rate of {last['rate']:.2f}: {last['parameters_saved']:.0f} % of the "
            f"parameters and {last['flops_saved']:.0f} % of the operations; at "
            f"{middle['rate']:.2f}: {middle['flops_saved']:.0f} %"
        )
        claims.append(Claim(statement, "the curves rise", ours, verdict(rises)))
    return claims


def _plan_table6(context: Context) -> list[Job]:
    del context
    return [Job(_MASKS, 0, _run_table6)]


RECIPES = (
    Recipe(
        "perfedmask-table5", "Three designs of masks", PAPER, _plan_table5, _conclude_table5
    ),
    Recipe(
        "perfedmask-table6", "Masks of a toy with three devices", PAPER, _plan_table6,
        _conclude_table6,
    ),
    Recipe(
        "perfedmask-figure3", "What masking saves", PAPER, _plan_figure3, _conclude_figure3
    ),
)  # fmt: skip
