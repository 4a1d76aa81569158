"""Puts together what clients report of their models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from parsifl.core.errors import WireError
from parsifl.core.problem import Problem
from parsifl.engine.evaluation import Evaluation, Scores
from parsifl.engine.run_dir import Record
from parsifl.flower.message import Letter

_MODELS = ("global", "personal")
_SPLITS = ("validation", "test")


def add_scores(
    record: Record,
    answers: Mapping[int, Letter | str],
    evaluation: Evaluation,
    problem: Problem,
) -> Record:
    """Add summaries to a round's record, naming who could not be judged; return all scores."""
    detail: Record = {"round": record["round"]}
    found: dict[tuple[str, str], dict[int, tuple[int, dict[str, float]]]] = {}
    for client, answer in sorted(answers.items()):
        try:
            _read(client, answer, found)
        except WireError as error:
            record.setdefault("unjudged", {})[client] = str(error)
    for model in _MODELS:
        for split in _SPLITS:
            score = _scores(found.get((model, split), {}))
            if score is not None:
                summary = score.summary(evaluation, problem)
                record.setdefault(model, {})[split] = summary
                detail.setdefault(model, {})[split] = score.to_json()
    return detail


def _read(
    client: int,
    answer: Letter | str,
    found: dict[tuple[str, str], dict[int, tuple[int, dict[str, float]]]],
) -> None:
    if isinstance(answer, str):
        raise WireError(answer)
    scores, samples = answer.get("scores", dict), answer.get("samples", dict)
    read: dict[tuple[str, str], tuple[int, dict[str, float]]] = {}
    for model in _MODELS:
        for split in _SPLITS:
            values, rows = scores.get(model, {}).get(split), samples.get(split)
            if values is None:
                continue
            good = type(rows) is int and rows > 0 and isinstance(values, dict) and values
            if not good or not all(type(value) is float for value in values.values()):
                raise WireError(f"scores.{model}.{split}: expected numbers by name")
            read[model, split] = (rows, values)
    for place, entry in read.items():
        found.setdefault(place, {})[client] = entry


def _scores(entries: Mapping[int, tuple[int, dict[str, float]]]) -> Scores | None:
    if not entries:
        return None
    names = set.intersection(*(set(values) for _, values in entries.values()))
    first = next(iter(entries.values()))[1]
    columns: dict[str, Any] = {
        name: np.array([values[name] for _, values in entries.values()])
        for name in first
        if name in names
    }
    rows = np.array([rows for rows, _ in entries.values()])
    return Scores(np.array(list(entries)), rows, columns)
