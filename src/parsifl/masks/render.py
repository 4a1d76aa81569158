"""Plans as text (devices x layers), and a comparison of designs as plain data."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from parsifl.core.keys import Key
from parsifl.masks import heuristics
from parsifl.masks.instance import Masks
from parsifl.masks.plan import MaskPlan, plan_of

_TRAINED, _FROZEN = "#", "."
_MOST_ROWS = 40


def draw(plan: MaskPlan, most_rows: int = _MOST_ROWS) -> str:
    """Draw which devices train which layers; devices of equal mask share a row.

    >>> from parsifl.masks import optimal
    >>> print(draw(optimal({"a": 1, "b": 2}, [1, 3])))
    layers    ab
    device 0  #.
    device 1  ##
    covered   21
    """
    rows = _rows(plan)
    shown = rows[:most_rows]
    labels = [_label(devices) for _, devices in shown]
    names = _letters(plan.layers)
    width = max(len(label) for label in [*labels, "covered", "layers"])
    lines = [f"{'layers':<{width}}  {''.join(names)}"]
    for label, (mask, _) in zip(labels, shown, strict=True):
        lines.append(f"{label:<{width}}  {''.join(_TRAINED if on else _FROZEN for on in mask)}")
    if len(rows) > most_rows:
        lines.append(f"and {len(rows) - most_rows} more masks")
    lines.append(_covered(plan, width))
    return "\n".join(lines)


def _covered(plan: MaskPlan, width: int) -> str:
    """Return how many devices (or, with more than nine, which tenth of them) train each layer."""
    coverage, devices = plan.masks.sum(axis=0), len(plan.masks)
    if devices <= 9:
        return f"{'covered':<{width}}  {''.join(str(count) for count in coverage)}"
    tenths = np.minimum(coverage * 10 // devices, 9)
    return f"{'tenths':<{width}}  {''.join(str(tenth) for tenth in tenths)}"


def rows_of(plan: MaskPlan) -> list[dict[str, Any]]:
    """Return the distinct masks with their devices, as plain data."""
    return [
        {
            "devices": list(devices),
            "layers": [name for name, on in zip(plan.layers, mask, strict=True) if on],
            "parameters": int(mask @ plan.instance.sizes),
        }
        for mask, devices in _rows(plan)
    ]


def compare(
    plan: MaskPlan, *, draws: int = 1000, sca: bool = False, seed: int = 0
) -> list[dict[str, Any]]:
    """Return the plan and the designs of the paper, one row of plain data each."""
    instance = plan.instance
    key = Key(seed, purpose="comparison")

    def best() -> Masks | None:
        return heuristics.best_of_random(instance, key, draws, plan.objective)

    designs: list[tuple[str, Callable[[], Masks | None]]] = [
        ("sequential", lambda: heuristics.sequential(instance)),
        ("random", lambda: heuristics.random(instance, key)),
        (f"best of {draws} random", best),
    ]
    if sca:
        designs.append(("SCA (Algorithm 3)", lambda: _sca(plan)))
    table = [_row("optimal", plan, None)]
    for name, make in designs:
        begin = time.perf_counter()
        masks = make()
        seconds = time.perf_counter() - begin
        if masks is None:
            table.append({"design": name, "seconds": seconds, "problem": "no feasible draw"})
            continue
        other = plan_of(instance, masks, plan.objective, method=name, seconds=seconds)
        table.append(_row(name, other, instance.broken(masks)))
    return table


def _sca(plan: MaskPlan) -> Masks:
    from parsifl.masks.sca import sca

    return sca(plan.instance).masks


def _row(name: str, plan: MaskPlan, problem: str | None) -> dict[str, Any]:
    return {
        "design": name,
        "bias": plan.bias,
        "slack": plan.slack,
        "J": plan.J,
        "V": plan.V,
        "floor": plan.floor,
        "trainable": plan.trainable,
        "seconds": plan.seconds,
        "problem": problem,
    }


def _rows(plan: MaskPlan) -> list[tuple[np.ndarray, list[int]]]:
    seen: dict[bytes, tuple[np.ndarray, list[int]]] = {}
    for device, mask in zip(plan.devices, plan.masks, strict=True):
        seen.setdefault(mask.tobytes(), (mask, []))[1].append(device)
    return list(seen.values())


def _label(devices: Sequence[int]) -> str:
    if len(devices) == 1:
        return f"device {devices[0]}"
    if devices[-1] - devices[0] == len(devices) - 1:
        return f"devices {devices[0]}-{devices[-1]}"
    return f"{len(devices)} devices, {devices[0]} first"


def _letters(names: Sequence[str]) -> list[str]:
    if all(len(name) == 1 for name in names):
        return list(names)
    return [str(index % 10) for index in range(len(names))]
