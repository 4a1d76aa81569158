"""The headline of a run: one row of numbers, with the protocol that they follow."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from parsifl.core.errors import ConfigError
from parsifl.engine.record import MODELS, RoundRecord

COSTS = ("bytes_up", "bytes_down", "dense_up", "dense_down", "simulated_seconds")


def headline(
    records: Sequence[RoundRecord], score: str, maximize: bool, select: str
) -> dict[str, Any]:
    """Return each model's score in the round that the protocol selects, and the total costs."""
    row: dict[str, Any] = {"score": score, "select": select, "rounds": len(records)}
    for model in MODELS:
        chosen = select_round(records, model, score, maximize, select)
        row[model] = None if chosen is None else chosen.scores[model]["test"][score]
        row[f"{model}_round"] = None if chosen is None else chosen.round
    for name in COSTS:
        row[name] = sum(getattr(record, name) for record in records)
    row["seconds"] = sum(sum(record.seconds.values()) for record in records)
    row["dropped"] = sum(len(record.dropped) for record in records)
    return row


def select_round(
    records: Sequence[RoundRecord], model: str, score: str, maximize: bool, select: str
) -> RoundRecord | None:
    """Return the round that the headline comes from; None if no round has test scores.

    Rounds whose score is not finite are never the best.
    """
    evaluated = [
        record for record in records if score in record.scores.get(model, {}).get("test", {})
    ]
    if not evaluated:
        return None
    if select == "last":
        return evaluated[-1]
    split = "test" if select == "best-test" else "validation"
    if split not in evaluated[0].scores[model]:
        raise ConfigError(
            "select='best-validation' needs validation rows; hold some out (validation=0.1)"
        )
    sign = 1.0 if maximize else -1.0

    def goodness(record: RoundRecord) -> float:
        value = sign * record.scores[model][split][score]["mean"]
        return value if math.isfinite(value) else -math.inf

    return max(evaluated, key=goodness)
