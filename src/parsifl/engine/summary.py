"""The headline of a run: one row of numbers, with the protocol that they follow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from parsifl.core.errors import ConfigError
from parsifl.engine.evaluation import Evaluation
from parsifl.engine.run_dir import Record

MODELS = ("global", "personal")


def headline(
    records: Sequence[Record], score: str, maximize: bool, evaluation: Evaluation
) -> dict[str, Any]:
    """Pick each model's score from the round that the protocol selects, and add up the costs."""
    row: dict[str, Any] = {"score": score, "select": evaluation.select, "rounds": len(records)}
    for model in MODELS:
        chosen = _selected(records, model, score, maximize, evaluation.select)
        row[model] = None if chosen is None else chosen[model]["test"][score]
        row[f"{model}_round"] = None if chosen is None else chosen["round"]
    for name in ("bytes_up", "bytes_down", "dense_up", "dense_down", "simulated_seconds"):
        row[name] = sum(record[name] for record in records)
    row["seconds"] = sum(sum(record["seconds"].values()) for record in records)
    row["dropped"] = sum(len(record["dropped"]) for record in records)
    return row


def _selected(
    records: Sequence[Record], model: str, score: str, maximize: bool, select: str
) -> Record | None:
    judged = [record for record in records if "test" in record.get(model, {})]
    if not judged:
        return None
    if select == "last":
        return judged[-1]
    split = "test" if select == "best-test" else "validation"
    if split not in judged[0][model]:
        raise ConfigError(
            "select='best-validation' needs validation rows; hold some out (validation=0.1)"
        )
    sign = 1.0 if maximize else -1.0
    return max(judged, key=lambda record: sign * record[model][split][score]["mean"])
