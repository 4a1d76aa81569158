"""An adversary that searches for questions about one patient, who is named before the search.

It knows every column that has a coefficient in a question, the target, and everything that the
site sent. Its estimate of the patient's values in the other columns is the best linear one. The
guess without any answer is the mean. `make red-team` searches for longer.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from tests.sites.deployment.test_red_team import Attacker

from parsifl.sites.deployment.row_terms import RowTerms

PATIENT, ROWS, USED, OTHERS = 17, 80, 3, 40
TRIALS = int(os.environ.get("PARSIFL_RED_TEAM", "12"))
FAMILIES = ["linear", "logistic", "poisson", "cox"]


def patients(family: str, draw: np.random.Generator) -> pd.DataFrame:
    """Return three columns that questions use, and 40 that none uses, half of them 0 or 1."""
    table = pd.DataFrame({f"lab{i}": draw.normal(size=ROWS) for i in range(USED)})
    for i in range(OTHERS):
        numbers = draw.normal(size=ROWS)
        table[f"other{i:02}"] = numbers if i % 2 else (numbers > 0.3).astype(float)
    risk = 0.5 * table.lab0 - 0.5 * table.lab1
    if family == "linear":
        table["days"] = risk + draw.normal(size=ROWS)
    elif family == "logistic":
        table["outcome"] = np.where(draw.random(ROWS) < 1 / (1 + np.exp(-risk)), "dead", "alive")
    elif family == "poisson":
        table["years"], table["visits"] = draw.uniform(1, 2, ROWS), draw.poisson(2 * np.exp(risk))
    else:
        time = draw.exponential(np.exp(-risk))
        table["days"], table["died"] = np.minimum(time, 2), (time < 2).astype(int)
    return table


def question(attacker: Attacker, draw: np.random.Generator, earlier: list[Any]) -> Any:
    """Return coefficients that may give the patient much weight: a window, or a small change."""
    used = attacker.x[:, :USED]
    kind = draw.integers(4)
    at = np.zeros(attacker.width)
    if kind == 0 and earlier:  # almost an earlier question
        return earlier[-1] + 10 ** draw.uniform(-9, -1) * draw.normal(size=1) * (earlier[-1] != 0)
    direction = draw.normal(size=USED)
    if kind == 1:  # the direction in which the patient is extreme
        direction = np.linalg.solve(used.T @ used, used[PATIENT])
    at[:USED] = 10 ** draw.uniform(-1, 1.5) * direction / np.linalg.norm(direction)
    if attacker.width > attacker.x.shape[1]:  # the middle of the window, or the largest weight
        u = used @ at[:USED]
        at[-1] = -u[PATIENT] if kind < 3 else -u.max()
    return at


def error_of(family: str, seed: int, root: Path, **guards: Any) -> tuple[float, int]:
    """Return the adversary's error about the patient, relative to the guess, and the answers."""
    draw = np.random.default_rng([seed, FAMILIES.index(family)])
    attacker = Attacker(family, root, patients(family, draw), **guards)
    names = attacker.agreement.preprocessing.names
    assert names[:USED] == [f"lab{i}" for i in range(USED)]
    hidden = attacker.x[:, USED : len(names)]
    sums, vectors = [hidden.sum(0)], [np.ones(ROWS)]
    earlier: list[Any] = []
    for number in range(int(draw.integers(1, 7))):
        at = question(attacker, draw, earlier)
        earlier.append(at)
        few = draw.choice(USED, int(draw.integers(0, USED + 1)), replace=False).tolist()
        before = len(attacker.sums)
        attacker.ask(at, run=f"{number % 3:032x}", candidates=few)
        if len(attacker.sums) == before:
            continue
        reply = attacker.sums[-1]
        sums.append(reply.gradient.numpy()[USED : len(names)])
        if family == "linear":
            vectors.append(attacker.x @ at - attacker.y[:, 0])
            continue
        rows = RowTerms.of(attacker.problem, attacker.data, torch.as_tensor(at))
        vectors.append(rows.residuals)
        for place, column in enumerate(few):
            products = reply.curvature.numpy().reshape(len(few), -1)[place]
            sums.append(products[USED : len(names)])
            vectors.append(rows.products[:, column])
    sizes = [max(np.abs(vector).max(), 1e-300) for vector in vectors]
    known = np.stack([v / size for v, size in zip(vectors, sizes, strict=True)], axis=1)
    told = np.stack([s / size for s, size in zip(sums, sizes, strict=True)])
    noise = 1e-7 if family == "linear" or guards.get("noise") == 0.0 else 3 * 0.03 / np.sqrt(12)
    level = noise**2 * np.diag(np.arange(len(sizes)) > 0)
    estimate = known[PATIENT] @ np.linalg.pinv(known.T @ known + level, rcond=1e-12) @ told
    guess = hidden[PATIENT] - hidden.mean(0)
    error = float(np.sqrt(((estimate - hidden[PATIENT]) ** 2).mean() / (guess**2).mean()))
    return error, len(attacker.sums)


@pytest.mark.parametrize("family", FAMILIES)
def test_no_question_tells_more_than_half_of_a_patient(family: str, tmp_path: Path) -> None:
    found = [error_of(family, seed, tmp_path / str(seed)) for seed in range(TRIALS)]
    errors = [error for error, _ in found]
    sys.stdout.write(f"{family}: {TRIALS} searches, best error {min(errors):.2f} of the guess\n")
    assert sum(answers for _, answers in found) > 0
    assert min(errors) > 0.5


@pytest.mark.parametrize("family", ["logistic", "poisson"])
def test_the_adversary_finds_the_patient_where_nothing_is_guarded(
    family: str, tmp_path: Path
) -> None:
    allowed = {"leverage": 1.0, "noise": 0.0, "cell": 1}
    found = [error_of(family, seed, tmp_path / str(seed), **allowed) for seed in range(12)]
    assert min(error for error, _ in found) < 0.1
