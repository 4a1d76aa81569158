"""FedGradMP's recipes on a video frame and on digits: the reduction, the protocols, verdicts."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from parsifl.algorithms.fedgradmp import FedGradMP
from parsifl.core.keys import Key
from parsifl.data.clients import ClientData
from parsifl.engine.simulate import simulate
from parsifl.linear.glm import GLM
from parsifl_reproduction.fedgradmp import digits, video
from parsifl_reproduction.recipe import Context, Result, find

SPLITS = ("train", "test")
DATA = os.environ.get("PARSIFL_DATA", "")


def test_measuring_in_the_basis_of_the_atoms_changes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(video, "CLIENTS", 4)
    draw = np.random.default_rng(0)
    atoms, frame = torch.from_numpy(draw.standard_normal((40, 6))), draw.standard_normal(40)
    basis, small = torch.linalg.qr(atoms)
    reduced = video.measure(frame, basis, seed=0)
    key, rows = Key(0, purpose="video"), []
    for client in range(4):
        own = key.replace(client=client).numpy_generator()
        mean = np.sqrt(0.5) * own.standard_normal()
        rows.append(mean + (client + 1) ** -0.45 * own.standard_normal((30, 40)))
    full = ClientData(
        torch.from_numpy(np.concatenate(rows)),
        torch.from_numpy(np.concatenate(rows) @ frame),
        reduced.train,
        reduced.validation,
        reduced.test,
        reduced.profiles,
    )
    found = [
        simulate(
            FedGradMP(tau=2, local_steps=2, batch_size=None),
            GLM(len(psi), "squared-half", dictionary=psi),
            data,
            3,
            evaluate_every=0,
        ).model.params["coef"]
        for psi, data in ((small, reduced), (atoms, full))
    ]
    torch.testing.assert_close(found[0], found[1])


def test_shapes_move_over_a_background() -> None:
    pixels = video.moving_shapes(20, 30)
    assert pixels.shape == (600, 120)
    assert 0 <= pixels.min() < pixels.max() <= 1
    assert np.abs(pixels[:, 0] - pixels[:, 81]).max() > 0.05


def test_without_a_video_the_stand_in_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PARSIFL_DATA", raising=False)
    _, source = video.frames(Context(data_dir=str(tmp_path)))
    assert source.startswith("generated moving shapes")


@pytest.mark.parametrize(("error", "verdict"), [(0.1, "held"), (0.4, "did not hold")])
def test_verdicts_on_the_frame_follow_the_numbers(error: float, verdict: str) -> None:
    values = {"source": "a video", "pixels": 9, "omp": 0.1, "span": 0.05, "flat": 0.5}
    recipe, context = find("fedgradmp-figure2"), Context(seeds=1)
    results = [Result(job.label, 0, {**values, "error": error}) for job in recipe.plan(context)]
    claims = recipe.conclude(context, results)
    assert {claim.verdict for claim in claims} == {verdict}
    assert "stand-in" in claims[0].note


@pytest.mark.parametrize("name", [digits.OURS, *digits.BASELINES])
def test_every_method_takes_forty_steps_a_round(name: str) -> None:
    method: Any = digits.method(name, 0.1)
    assert method.local_steps * getattr(method, "inner_steps", 1) == 40
    assert method.batch_size == 50
    if name != "FedAvg":
        assert (method.tau, method.scope) == (90, "row")


@pytest.mark.parametrize("name", ["fedgradmp-figure6", "fedgradmp-figure7"])
def test_accuracies_decide_at_the_best_step_size(name: str) -> None:
    recipe, context = find(name), Context(seeds=1)

    def results(good: str, end: bool = False) -> list[Result]:
        return [
            Result(
                job.label,
                0,
                {f"{kind}{split}": accuracy for kind in ("", "sparse ") for split in SPLITS},
            )
            for job in recipe.plan(context)
            for accuracy in [
                (90.0 if job.label.startswith(f"{good} lr=") else 60.0)
                if job.label.endswith(f"lr={best_of(job.label) if end else 0.3}")
                else 50.0
            ]
        ]

    def best_of(label: str) -> float:
        return digits.rates(label.partition(" lr=")[0])[0]

    winner, loser = (digits.OURS, "FedAvg") if name.endswith("6") else (digits.RANDOM, digits.OURS)
    assert {c.verdict for c in recipe.conclude(context, results(winner))} == {"held"}
    lost = [c.verdict for c in recipe.conclude(context, results(loser))]
    assert "did not hold" in lost
    # a best rate at the end of the grid decides nothing
    ends = recipe.conclude(context, results(winner, end=True))
    assert {claim.verdict for claim in ends} == {"undecided"}


def test_further_seeds_compare_the_rates_that_the_first_three_chose() -> None:
    recipe, context = find("fedgradmp-figure6"), Context(seeds=5)
    keys = [f"{kind}{split}" for kind in ("", "sparse ") for split in SPLITS]
    first = [
        Result(job.label, job.seed, dict.fromkeys(keys, 90.0 if "lr=0.3" in job.label else 50.0))
        for job in recipe.plan(context)
    ]
    further = recipe.follow(context, first)
    names = (digits.OURS, *digits.BASELINES)
    assert {(job.label, job.seed) for job in further} == {
        (f"{name} lr=0.3", seed) for name in names for seed in (3, 4)
    }
    # the seeds that chose the rates do not decide
    later = [
        Result(job.label, job.seed, dict.fromkeys(keys, 50.0 + 9 * (digits.OURS in job.label)))
        for job in further
    ]
    claims = recipe.conclude(context, [*first, *later])
    assert {claim.verdict for claim in claims} == {"held"}
    assert {claim.left for claim in claims} == {(59.0, 59.0)}


@pytest.mark.skipif(not DATA, reason="PARSIFL_DATA names no folder with MNIST and QMNIST")
def test_writers_are_those_of_the_protocol() -> None:
    made = digits.digits(Context(), seed=0)
    assert len(made.train) == 300
    assert {len(rows) for rows in made.train.train} == {100}
    assert made.test_x.shape == (5000, 784)
    assert float(made.test_x.max()) == 1.0
