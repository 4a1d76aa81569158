"""Reads the scores that clients report."""

from __future__ import annotations

import math

from parsifl.core.algorithm import ClientInfo
from parsifl.core.errors import WireError
from parsifl.engine.pool import ClientScores
from parsifl.engine.record import MODELS, SPLITS
from parsifl.flower.message import Letter

_MOST_ROWS = 1 << 40


def read_scores(client: ClientInfo, reply: Letter | str) -> ClientScores:
    """Return the scores in a reply; raise WireError if there are none that can be true."""
    if isinstance(reply, str):
        raise WireError(reply)
    scores, samples = reply.get("scores", dict), reply.get("samples", dict)
    rows: dict[str, int] = {}
    values: dict[str, dict[str, dict[str, float]]] = {}
    for model in MODELS:
        by_split = scores.get(model, {})
        if not isinstance(by_split, dict):
            raise WireError(f"scores.{model}: expected scores by split")
        for split in SPLITS:
            found, count = by_split.get(split), samples.get(split)
            if found is None:
                continue
            good = type(count) is int and 0 < count < _MOST_ROWS
            if not good or not isinstance(found, dict) or not found:
                raise WireError(f"scores.{model}.{split}: expected numbers by name")
            if not all(type(v) is float and math.isfinite(v) for v in found.values()):
                raise WireError(f"scores.{model}.{split}: expected finite numbers")
            rows[split] = count
            values.setdefault(model, {})[split] = found
    return ClientScores(client, rows, values)
