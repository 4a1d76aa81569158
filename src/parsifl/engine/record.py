"""The record of a round: a line of metrics.jsonl. Importing this does not import torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from parsifl.core.errors import ConfigError

MODELS = ("global", "personal")
SPLITS = ("train", "validation", "test")


@dataclass(frozen=True)
class RoundRecord:
    """One round: a line of metrics.jsonl.

    Attributes
    ----------
    flops
        Both passes of all clients; None if some client could not be counted.
    parameters_up, parameters_down
        The number of values in the messages.
    dense_up, dense_down, entropy_up, entropy_down
        Bytes of the same messages sent dense, and their information content.
    devices
        How many `clients` spent how many operations `forward` and `backward`, with how many
        `trainable` parameters and values `sent` (None if unknown).
    dropped
        Clients that were dropped, with the reason.
    metrics
        Scalars of clients, averaged by weight, and of callbacks.
    scores
        By model ("global", "personal"), split and metric: mean, spread and worst decile.
    unevaluated
        Clients without scores, with the reason.
    notes
        Notes on the round, such as batches that ran client by client.
    stopped
        Why this round is the last, if a callback stopped the run.
    """

    round: int
    cohort: int
    trained: int = 0
    bytes_up: int = 0
    bytes_down: int = 0
    dense_up: int = 0
    dense_down: int = 0
    entropy_up: int = 0
    entropy_down: int = 0
    parameters_up: int = 0
    parameters_down: int = 0
    flops: int | None = 0
    devices: Sequence[Mapping[str, int | None]] = ()
    simulated_seconds: float = 0.0
    dropped: Mapping[int, str] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    scores: Mapping[str, Mapping[str, Mapping[str, Mapping[str, float]]]] = field(
        default_factory=dict
    )
    unevaluated: Mapping[int, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    seconds: Mapping[str, float] = field(default_factory=dict)
    executor: str = ""
    stopped: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return JSON values; scores are at the top level, by model."""
        fields = {name: value for name, value in vars(self).items() if name != "scores"}
        fields |= {
            "devices": [dict(device) for device in self.devices],
            "dropped": dict(self.dropped),
            "metrics": dict(self.metrics),
            "notes": list(self.notes),
            "seconds": dict(self.seconds),
        }
        for rare in ("unevaluated", "stopped"):
            if not fields[rare]:
                del fields[rare]
        return {**fields, **self.scores}

    @classmethod
    def from_json(cls, line: Mapping[str, Any]) -> RoundRecord:
        """Read a record. Unknown fields are ignored; missing fields take their default.

        Raises
        ------
        ValueError, TypeError, LookupError, AttributeError, OverflowError
            If a field has a value of the wrong type or range.
        """
        known: dict[str, Any] = {name: _count(line[name]) for name in _COUNTS if name in line}
        known |= {name: _numbers(line[name]) for name in ("metrics", "seconds") if name in line}
        known |= {name: str(line[name]) for name in ("executor", "stopped") if name in line}
        for numbered in ("dropped", "unevaluated"):  # JSON has text keys only
            known[numbered] = {int(i): str(why) for i, why in line.get(numbered, {}).items()}
        flops = line.get("flops", 0)
        return cls(
            **known,
            flops=None if flops is None else _count(flops),
            simulated_seconds=float(line.get("simulated_seconds", 0.0)),
            notes=tuple(map(str, line.get("notes", ()))),
            devices=tuple(_device(device) for device in line.get("devices", ())),
            scores={model: _scores(line[model]) for model in MODELS if line.get(model)},
        )


_COUNTS = (
    "round", "cohort", "trained", "bytes_up", "bytes_down", "dense_up", "dense_down",
    "entropy_up", "entropy_down", "parameters_up", "parameters_down",
)  # fmt: skip


_MOST = 10**30
"""Largest counter of a valid record; larger integers cannot be converted to float or to text."""


def _count(value: Any) -> int:
    number = int(value)
    if abs(number) > _MOST:
        raise OverflowError(f"a counter above {_MOST:.0e}")
    return number


def _device(counts: Mapping[str, Any]) -> dict[str, int | None]:
    return {str(name): None if count is None else _count(count) for name, count in counts.items()}


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    return {str(name): float(value) for name, value in values.items()}


def _scores(splits: Mapping[str, Any]) -> dict[str, dict[str, dict[str, float]]]:
    return {
        str(split): {
            str(metric): {part: float(summary[part]) for part in ("mean", "std", "worst_decile")}
            for metric, summary in metrics.items()
        }
        for split, metrics in splits.items()
    }


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
    """Return the round of the headline numbers; None if no round has test scores.

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
