from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from tests.report.folders import make_run

from parsifl import Evaluation, NeuralProblem, get, simulate
from parsifl.engine.run_dir import open_run, read_runs
from parsifl.report.summary import Number, headline, render


def test_the_headline_agrees_with_the_engine(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    clients = [
        (random.normal(size=(24, 3)).astype(np.float32), random.integers(0, 2, 24))
        for _ in range(4)
    ]
    problem = NeuralProblem(lambda: torch.nn.Linear(3, 2))
    algorithm = get("ditto", lr=0.1, local_steps=2)
    evaluation = Evaluation(select="best-test", weighting="uniform")
    run = simulate(algorithm, problem, clients, 4, run_dir=tmp_path, evaluation=evaluation)
    (row,) = headline([open_run(tmp_path)])
    expected = run.summary()
    for model, evaluated in (("global", row.global_model), ("personal", row.personal_model)):
        assert evaluated is not None
        assert evaluated.mean == Number(expected[model]["mean"])
        assert evaluated.std == Number(expected[model]["std"])
        assert evaluated.worst_decile == Number(expected[model]["worst_decile"])
        assert f"best on test rows ({expected[f'{model}_round']})" in evaluated.protocol
        assert "all 4 clients" in evaluated.protocol
        assert "mean over clients unweighted (in training weighted by training rows)." in (
            evaluated.protocol
        )
    assert row.bytes_up.mean == run.bytes_up
    assert row.bytes_down.mean == run.bytes_down
    assert row.seconds.mean == pytest.approx(expected["seconds"])


def test_seeds_give_mean_and_sample_deviation(tmp_path: Path) -> None:
    for seed in range(3):
        make_run(tmp_path / str(seed), seed=seed)
    (row,) = headline(read_runs([tmp_path]))
    assert row.seeds == (0, 1, 2)
    assert row.personal_model is not None
    # the last round of seed s has mean 0.8 + 0.045 + 0.001 s
    assert row.personal_model.mean.mean == pytest.approx(0.846)
    assert row.personal_model.mean.spread == pytest.approx(0.001)
    assert row.bytes_up == Number(4000.0, 0.0)
    assert row.seconds.mean == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("select", "chosen"), [("last", 4), ("best-test", 4), ("best-validation", 2)]
)
def test_the_protocol_selects_the_round(tmp_path: Path, select: str, chosen: int) -> None:
    folder = make_run(tmp_path / "a", validation=True, evaluation={"select": select})
    found = open_run(folder).selected("personal")
    assert found is not None
    assert found.round == chosen


def test_a_small_score_may_be_the_best_one(tmp_path: Path) -> None:
    folder = make_run(tmp_path, score="mse", maximize=False, evaluation={"select": "best-test"})
    found = open_run(folder).selected("global")
    assert found is not None
    assert found.round == 1


def test_missing_validation_rows_are_said_so(tmp_path: Path) -> None:
    run = open_run(
        make_run(tmp_path, evaluation={"select": "best-validation", "fine_tune_steps": 5})
    )
    (row,) = headline([run])
    assert row.personal_model is not None
    assert "last evaluated round (4) (best-validation was requested" in row.personal_model.protocol
    assert "after 5 fine-tuning steps" in row.personal_model.protocol
    tuned = open_run(make_run(tmp_path / "epochs", evaluation={"fine_tune_epochs": 5.0}))
    (row,) = headline([tuned])
    assert row.personal_model is not None
    assert "after 5 epochs of fine-tuning" in row.personal_model.protocol


@pytest.mark.parametrize(
    ("who", "words"),
    [("sampled", "clients that have trained"), ("unseen", "clients that never train")],
)
def test_the_protocol_names_the_clients(tmp_path: Path, who: str, words: str) -> None:
    (row,) = headline([open_run(make_run(tmp_path, evaluation={"clients": who}))])
    assert row.global_model is not None
    assert words in row.global_model.protocol


def test_the_terminal_table_shows_every_row(tmp_path: Path) -> None:
    make_run(tmp_path / "a", "fedavg", seed=0)
    make_run(tmp_path / "b", "fedavg", seed=1)
    make_run(tmp_path / "c", "[bold]local", models=("personal",))
    make_run(tmp_path / "d", "lasso", score="mse", maximize=False, evaluate=False)
    console = Console(width=200)
    with console.capture() as capture:
        console.print(render(headline(read_runs([tmp_path]))))
    text = " ".join(capture.get().split())
    assert " ± 0.1 %" in text
    assert "[bold]local" in text
    assert "4.00 kB" in text
    assert "8.00 kB" in text
    assert "mean over clients weighted by test rows" in text
    assert "standard deviation over seeds" in text
    assert "mse" in text


def test_a_narrow_terminal_cuts_no_number_off(tmp_path: Path) -> None:
    for seed in range(3):
        make_run(tmp_path / str(seed), "fedavg", seed=seed)
    table = render(headline(read_runs([tmp_path])))

    def words(width: int) -> list[str]:
        console = Console(width=width)
        with console.capture() as capture:
            console.print(table)
        return sorted(capture.get().split())

    assert "…" not in "".join(words(80))
    wide = [word for word in words(200) if word[0].isdigit() or word == "±"]
    assert wide == [word for word in words(80) if word[0].isdigit() or word == "±"]


def test_no_rows_make_an_empty_table() -> None:
    assert headline([]) == []
    assert render([]).row_count == 0


def test_the_terminal_table_names_the_rows_of_each_protocol(tmp_path: Path) -> None:
    same = [open_run(make_run(tmp_path / name, name)) for name in ("fedavg", "ditto")]
    other = open_run(make_run(tmp_path / "c", "fedprox", evaluation={"clients": "sampled"}))
    one, several = (str(render(headline(runs)).caption) for runs in (same, [*same, other]))
    assert [line.partition(":")[0] for line in one.splitlines()[:2]] == ["Global", "Personal"]
    assert [line.partition(":")[0] for line in several.splitlines()[:4]] == [
        "Global (fedavg, ditto)",
        "Global (fedprox)",
        "Personal (fedavg, ditto)",
        "Personal (fedprox)",
    ]


def test_long_labels_leave_room_for_numbers(tmp_path: Path) -> None:
    long = "dirichlet:alpha=100,balanced=true"
    for name, normalize in (("a", "unit"), ("b", "pixel")):
        settings = {"partition": f"{long}{name}", "normalize": normalize}
        make_run(tmp_path / name, "fedavg", settings=settings)
    table = render(headline(read_runs([tmp_path])))
    console = Console(width=80)
    with console.capture() as capture:
        console.print(table)
    shown = capture.get()
    assert max(map(len, shown.splitlines())) <= 80
    for number in ("84.5", "4.00 kB", "8.00 kB"):
        assert shown.count(number) >= 2
    assert f"{long}a" in "".join(line[:20].strip() for line in shown.splitlines())
