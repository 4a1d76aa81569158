from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
import threading
import warnings
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.sparse import csr_matrix
from tests.records import read_metrics
from tests.report.folders import costs, make_run
from tests.support.fixtures import classifier, clients
from torch import nn

import parsifl
from parsifl import data
from parsifl.algorithms.fedavg import FedAvg
from parsifl.core.errors import CheckpointError, ClientError, ConfigError
from parsifl.core.problem import Problem
from parsifl.data.clients import ClientData
from parsifl.engine import run_dir as load
from parsifl.engine.fingerprint import identity
from parsifl.engine.record import RoundRecord
from parsifl.engine.run_dir import RunDir, environment, open_run, read_config, read_records
from parsifl.engine.settings import Evaluation, NetworkModel
from parsifl.engine.simulate import simulate
from parsifl.engine.training import RoundEnd
from parsifl.linear.glm import GLM
from parsifl.nn.neural import NeuralProblem
from parsifl.report import build

METHOD = FedAvg(lr=0.1, local_steps=2, batch_size=4)


def run(folder: Path, **changes: Any) -> Any:
    given = {"algorithm": METHOD, "problem": classifier(), "clients": clients(), "rounds": 2}
    return simulate(**{**given, "run_dir": folder, **changes})


def test_a_run_is_a_folder(tmp_path: Path) -> None:
    result = run(tmp_path / "deep" / "run")
    place = tmp_path / "deep" / "run"
    assert result.run_dir == place
    names = sorted(path.name for path in place.iterdir())
    assert names == [
        "checkpoint",
        "clients.json",
        "config.toml",
        "environment.json",
        "metrics.jsonl",
        "target.json",
    ]
    assert open_run(place).target == 2
    assert read_config(place)["algorithm"]["name"] == "fedavg"
    assert read_config(place)["algorithm"]["lr"] == 0.1
    assert read_metrics(place) == result.metrics
    assert json.loads((place / "environment.json").read_text()).items() >= environment().items()
    scores = json.loads((place / "clients.json").read_text())
    assert scores["round"] == 2
    assert scores["personal"]["test"]["clients"] == [0, 1, 2, 3]


def test_a_folder_is_not_overwritten_by_chance(tmp_path: Path) -> None:
    run(tmp_path)
    with pytest.raises(CheckpointError, match="already holds a run of this configuration; resume"):
        run(tmp_path)


@pytest.mark.parametrize(
    ("change", "shown"),
    [
        (
            {"algorithm": FedAvg(lr=0.2, local_steps=2, batch_size=4)},
            r"algorithm.lr: 0.1 there, 0.2 requested",
        ),
        ({"algorithm": replace(METHOD, epochs=1.0)}, r"algorithm.epochs: 'absent' there, 1.0"),
        ({"seed": 1}, r"run.seed: 0 there, 1 requested"),
        ({"participation": 0.5}, "run.participation"),
        ({"precision": "int8"}, "run.precision"),
        ({"evaluation": Evaluation(fine_tune_steps=2)}, "run.evaluation.fine_tune_steps"),
        ({"network": NetworkModel(latency=1.0)}, "run.network.latency"),
        ({"problem": classifier(hidden=6)}, "problem.parameters"),
        ({"problem": classifier(torch.float32)}, "problem.checksum"),
        ({"clients": clients((6, 9, 8, 12))}, "data.checksum"),
        ({"clients": clients(profiles=[{"local_steps": 1}, {}, {}, {}])}, "data.profiles"),
    ],
)
def test_a_folder_of_another_configuration_is_refused_with_the_difference(
    tmp_path: Path, change: dict[str, Any], shown: str
) -> None:
    run(tmp_path)
    before = (tmp_path / "metrics.jsonl").read_bytes()
    with pytest.raises(
        CheckpointError,
        match=f"holds a run of another configuration:\n(.*\n)*.*{shown}(.*\n)*Resume",
    ):
        run(tmp_path, resume=True, rounds=3, **change)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize("lost", ["checkpoint", "checkpoint/LATEST"])
@pytest.mark.parametrize("target", ["whole", "missing", "damaged"])
def test_a_run_whose_checkpoints_are_gone_does_not_start_over(
    lost: str, target: str, tmp_path: Path
) -> None:
    run(tmp_path, rounds=1)
    place = tmp_path / lost
    shutil.rmtree(place) if place.is_dir() else place.unlink()
    if target != "whole":
        (tmp_path / "target.json").unlink()
    if target == "damaged":
        (tmp_path / "target.json").write_text("[1]")
    before = (tmp_path / "metrics.jsonl").read_bytes()
    with pytest.raises(CheckpointError, match="restore it from a copy, or delete the run dir"):
        run(tmp_path, resume=True)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


def test_a_run_without_a_checkpoint_says_that_it_starts_over(tmp_path: Path) -> None:
    def interrupt(event: RoundEnd) -> None:
        if event.record.round == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, callbacks=[interrupt])
    assert len(read_metrics(tmp_path)) == 1
    with pytest.warns(UserWarning, match="stopped before its first checkpoint: round 1 is repeat"):
        again = run(tmp_path, resume=True)
    assert [record.round for record in again.records] == [1, 2]
    run(tmp_path, resume=True, rounds=3)  # it has a checkpoint now


def test_an_empty_text_is_no_directory() -> None:
    with pytest.raises(ConfigError, match="run_dir is empty"):
        run("")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["notes", "notes/run"])
def test_a_file_is_no_place_for_a_run(name: str, tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    notes.write_text("dear diary")
    with pytest.raises(CheckpointError, match="a file is in the way; choose another directory"):
        run(tmp_path / name)
    assert notes.read_text() == "dear diary"


def test_a_folder_of_a_version_that_runs_clients_in_another_way_is_refused(tmp_path: Path) -> None:
    run(tmp_path)
    config = tmp_path / "config.toml"
    config.write_text(config.read_text().replace("block = 20", "block = 10"))
    refused = r"run with a different executor(.*\n)*.*run.block: 10 there"
    with pytest.raises(CheckpointError, match=refused):
        run(tmp_path, resume=True, rounds=3)


def test_another_executor_is_rejected_on_resume(tmp_path: Path) -> None:
    run(tmp_path)
    with pytest.raises(CheckpointError, match=r"different executor(.*\n)*.*run.executor"):
        run(tmp_path, resume=True, executor="loop")


def test_a_directory_of_an_older_format_is_rejected_by_its_format(tmp_path: Path) -> None:
    run(tmp_path)
    config = tmp_path / "config.toml"
    config.write_text(config.read_text().replace("format = 2\n", ""))
    with pytest.raises(CheckpointError, match=r"run directory format 1, but Parsifl .* format 2"):
        run(tmp_path, resume=True, rounds=3)


def test_how_data_were_made_is_part_of_the_configuration(tmp_path: Path) -> None:
    few, many = (
        data.prepare("digits", clients=4, partition=f"dirichlet:alpha={alpha}", seed=0)
        for alpha in (0.05, 100)
    )
    assert few.source["partition"] == "dirichlet:alpha=0.05"
    problem = parsifl.NeuralProblem(lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 10)))
    for name, found in (("few", few), ("many", many)):
        simulate(FedAvg(local_steps=1), problem, found, 1, run_dir=tmp_path / name)
    first, second = (read_config(tmp_path / name)["data"]["source"] for name in ("few", "many"))
    assert first != second
    assert first.keys() >= {"partition", "test", "validation", "normalize"}


def described(data: ClientData | None = None, problem: Problem | None = None) -> dict[str, Any]:
    return identity(METHOD, problem or classifier(), data or clients(), {"seed": 0})


def test_rows_that_move_to_another_client_are_other_data() -> None:
    data = clients((6, 9, 8))
    rows = np.concatenate(list(data.train))
    moved = replace(data, train=[rows[:7], rows[7:15], rows[15:]])
    assert described(data)["data"] != described(moved)["data"]
    assert described(data) == described(clients((6, 9, 8)))


def test_other_layers_with_the_same_parameters_are_another_problem() -> None:
    def build(middle: nn.Module) -> Problem:
        torch.manual_seed(0)
        return NeuralProblem(nn.Sequential(nn.Linear(4, 3), middle, nn.Linear(3, 3)))

    with torch.random.fork_rng():
        relu, tanh = build(nn.ReLU()), build(nn.Tanh())
    assert described(problem=relu)["problem"] != described(problem=tanh)["problem"]


def test_csr_data_are_told_apart_by_their_rows() -> None:
    data = clients((2, 2), test=0)
    values, columns = np.ones(4), np.arange(4)
    ones, others = (
        replace(data, x=csr_matrix((values, columns, np.array(ends)), shape=(4, 4)))
        for ends in ([0, 1, 2, 3, 4], [0, 2, 2, 3, 4])
    )
    assert described(ones)["data"] != described(others)["data"]


def test_a_line_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    result = run(tmp_path)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"round": 3, "bytes_up": 1')
    assert read_metrics(tmp_path) == result.metrics
    resumed = run(tmp_path, resume=True, rounds=3)
    assert [record["round"] for record in resumed.metrics] == [1, 2, 3]
    assert [record["round"] for record in read_metrics(tmp_path)] == [1, 2, 3]


@pytest.mark.parametrize("line", [b"nonsense\n", b"\xff\xfe\n", b""])
def test_lost_lines_are_noticed(tmp_path: Path, line: bytes) -> None:
    run(tmp_path)
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(line + b"".join(path.read_bytes().splitlines(keepends=True)[1:]))
    with pytest.raises(CheckpointError, match=r"metrics.jsonl is damaged: it has \d+ bytes"):
        run(tmp_path, resume=True, rounds=3)


def test_lines_of_rounds_after_the_checkpoint_are_made_again(tmp_path: Path) -> None:
    folder = RunDir(tmp_path)
    tmp_path.mkdir(exist_ok=True)
    for number in (1, 2, 3):
        folder.append(RoundRecord(number, 5, dropped={4: "why"}))
    assert folder.truncate(2) == [RoundRecord(n, 5, dropped={4: "why"}) for n in (1, 2)]
    assert [record["round"] for record in read_metrics(tmp_path)] == [1, 2]


def test_resume_starts_anew_where_there_is_nothing(tmp_path: Path) -> None:
    assert len(run(tmp_path / "new", resume=True).metrics) == 2


def test_resume_needs_a_folder() -> None:
    with pytest.raises(ConfigError, match="run_dir"):
        simulate(METHOD, classifier(), clients(), 1, resume=True)


def test_a_finished_run_that_is_resumed_is_as_it_was(tmp_path: Path) -> None:
    first, again = run(tmp_path), run(tmp_path, resume=True)
    assert again.metrics == first.metrics


def test_no_run_folder_and_a_damaged_config_are_told(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"not a run directory: it has no config.toml"):
        read_config(tmp_path)
    (tmp_path / "config.toml").write_text("a = [")
    with pytest.raises(CheckpointError, match="is damaged"):
        read_config(tmp_path)
    assert read_metrics(tmp_path) == []


def test_packages_that_are_not_installed_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("parsifl.engine.run_dir._PACKAGES", ("torch", "no-such-package"))
    assert sorted(environment()) == ["machine", "python", "torch"]


def test_other_losses_of_a_linear_model_are_another_problem() -> None:
    first = described(problem=GLM(4, "softmax", classes=3))["problem"]
    assert first != described(problem=GLM(4, "softmax", classes=3, l2=0.1))["problem"]
    assert first == described(problem=GLM(4, "softmax", classes=3))["problem"]


# ------------------------------------------------------------------ metrics.jsonl and the lock
def damage_of(lines: list[bytes]) -> dict[str, list[bytes]]:
    first, second = lines
    return {
        "a changed number": [first, second.replace(b'"cohort": 4', b'"cohort": 5')],
        "a round twice": [first, first],
        "the wrong order": [second, first],
        "a line too many at the front": [b"\n", first, second],
        "a number": [b"5\n", second],
        "null": [b"null\n", second],
        "a list": [b"[1]\n", second],
        "no round": [b"{}\n", second],
        "a text": [b'{"round": "1"}\n', second],
        "dropped by name": [b'{"round": 1, "cohort": 4, "dropped": {"x": "y"}}\n', second],
        "dropped is a list": [b'{"round": 1, "cohort": 4, "dropped": [1]}\n', second],
        "deep": [b"[" * 10**5 + b"\n", second],
        "cut": [first[:-9]],
        "nothing": [],
    }


@pytest.mark.parametrize("marked", [True, False])
@pytest.mark.parametrize("name", list(damage_of([b"", b""])))
def test_a_damaged_record_is_rejected_with_the_reason(
    name: str, marked: bool, tmp_path: Path
) -> None:
    run(tmp_path)
    path = tmp_path / "metrics.jsonl"
    content = path.read_bytes()
    assert b'"cohort": 4' in content
    path.write_bytes(b"".join(damage_of(content.splitlines(keepends=True))[name]))
    mark = (len(content), zlib.crc32(content)) if marked else None
    if not marked and name == "a changed number":
        return  # nothing but the checksum tells
    with pytest.raises(CheckpointError, match=r"metrics.jsonl is damaged"):
        RunDir(tmp_path).truncate(2, mark)
    if marked:
        with pytest.raises(CheckpointError, match=r"metrics.jsonl is damaged"):
            run(tmp_path, resume=True, rounds=3)


def test_every_flipped_bit_of_the_record_is_noticed(tmp_path: Path) -> None:
    run(tmp_path)
    path = tmp_path / "metrics.jsonl"
    content = path.read_bytes()
    mark = (len(content), zlib.crc32(content))
    for at in range(0, len(content), 7):
        path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        with pytest.raises(CheckpointError, match="checksum"):
            RunDir(tmp_path).truncate(2, mark)


def test_a_second_run_in_the_same_directory_stops_with_an_error(tmp_path: Path) -> None:
    failures: list[BaseException] = []

    def second(event: RoundEnd) -> None:
        def try_it() -> None:
            try:
                run(tmp_path, resume=True)
            except CheckpointError as error:
                failures.append(error)

        if event.record.round == 1:
            thread = threading.Thread(target=try_it)
            thread.start()
            thread.join()

    first = run(tmp_path, callbacks=[second])
    assert len(failures) == 1
    assert "another run is writing to" in str(failures[0])
    assert [record["round"] for record in first.metrics] == [1, 2]
    assert len(run(tmp_path, resume=True, rounds=3).metrics) == 3  # the lock is released


def test_another_process_is_kept_out_too(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from parsifl.engine.safe_files import locked\n"
        "with locked(Path(sys.argv[1])): print('in')"
    )
    with RunDir(tmp_path).locked():
        found = subprocess.run(
            [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False
        )
    assert "another run is writing to" in found.stderr
    assert not list(tmp_path.iterdir())


def test_a_name_that_cannot_be_a_directory_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="not a valid directory name"):
        run(tmp_path / "a\0b")


def test_a_run_folder_is_read_whole(tmp_path: Path) -> None:
    run = load.open_run(make_run(tmp_path / "a", "ditto", seed=3, rounds=4))
    assert (run.algorithm, run.seed, run.score, run.maximize, run.data) == (
        "ditto",
        3,
        "accuracy",
        True,
        "digits",
    )
    assert [round.round for round in run.records] == [1, 2, 3, 4]
    assert len(run.records[0].dropped) == 1
    assert run.records[3].metrics == {"density": 0.25}
    assert run.records[3].scores["personal"]["test"]["accuracy"]["mean"] == pytest.approx(0.848)
    assert run.clients_round == 4
    assert len(run.clients["global", "test"].values["accuracy"]) == 10
    assert run.environment["torch"] == "2.13.0"
    assert run.notes == ()


def test_damaged_lines_are_left_out_and_named(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a", rounds=3)
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    lacking = {key: value for key, value in costs(9).items() if key != "round"}
    damaged = [lines[0], "{broken", lines[1], '"text"', json.dumps(lacking), "[" * 100_000]
    (folder / "metrics.jsonl").write_text("\n".join([*damaged, lines[2], lines[2][:50]]))
    run = load.open_run(folder)
    assert [round.round for round in run.records] == [1, 2, 3]
    assert run.notes == ("metrics.jsonl: damaged lines 2, 4, 5, 6, 8 left out",)


def test_a_folder_without_rounds_or_evaluations_is_read_with_a_note(tmp_path: Path) -> None:
    started = make_run(tmp_path / "a", rounds=0)
    (started / "metrics.jsonl").unlink()
    assert load.open_run(started).notes == ("no round has been finished yet",)
    unjudged = load.open_run(make_run(tmp_path / "b", evaluate=False))
    assert unjudged.notes == ("no round has been evaluated yet",)
    assert unjudged.evaluated("global") == []
    config = (tmp_path / "b" / "config.toml").read_text()
    (tmp_path / "b" / "config.toml").write_text(
        config.replace("[run]\n", "[run]\nevaluate_every = 0\n")
    )
    assert load.open_run(tmp_path / "b").notes == ()


@pytest.mark.parametrize("content", ["{", "[1]", '{"round": 1, "global": {"test": {}}}'])
def test_damaged_client_scores_are_left_out(tmp_path: Path, content: str) -> None:
    folder = make_run(tmp_path / "a")
    (folder / "clients.json").write_text(content)
    run = load.open_run(folder)
    assert run.clients == {}
    assert run.notes == ("clients.json is damaged and left out",)


def test_columns_of_unequal_length_are_damage(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a")
    scores = {"clients": [0, 1], "samples": [1, 1], "accuracy": [0.5]}
    content = json.dumps({"round": 1, "global": {"test": scores}})
    (folder / "clients.json").write_text(content)
    assert load.open_run(folder).clients == {}


def test_not_finite_scores_do_not_count_as_judged(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a", rounds=2, level=float("nan"))
    assert load.open_run(folder).evaluated("personal") == []


def test_what_is_no_run_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="run directory not found"):
        load.open_run(tmp_path / "absent")
    with pytest.raises(CheckpointError, match=r"has a config\.toml"):
        load.open_run(tmp_path)
    with pytest.raises(CheckpointError, match="no run directory was named"):
        load.read_runs([])
    (tmp_path / "config.toml").write_text("[tool]\nname = 'other'\n")
    with pytest.raises(CheckpointError, match=r"no algorithm\.name"):
        load.open_run(tmp_path)
    (tmp_path / "config.toml").write_text("algorithm = = 3")
    with pytest.raises(CheckpointError, match="cannot be read"):
        load.open_run(tmp_path)


def test_a_folder_of_run_folders_stands_for_them(tmp_path: Path) -> None:
    first, second = make_run(tmp_path / "runs" / "a"), make_run(tmp_path / "runs" / "b")
    (tmp_path / "runs" / "other").mkdir()
    (tmp_path / "runs" / "report.html").write_text("")
    assert load.find_runs([tmp_path / "runs", first]) == [first, second]
    assert [run.path for run in load.read_runs([tmp_path / "runs"])] == [first, second]


def test_run_folders_are_found_below_folders(tmp_path: Path) -> None:
    deep = make_run(tmp_path / "sweep" / "lr=0.1" / "seed-0")
    assert load.find_runs([tmp_path]) == [deep]


def test_a_damaged_folder_among_others_is_named(tmp_path: Path) -> None:
    good = make_run(tmp_path / "a")
    (make_run(tmp_path / "b") / "config.toml").write_text("algorithm = = 3")
    (make_run(tmp_path / "c") / "config.toml").unlink()
    left_out: list[str] = []
    assert [run.path for run in load.read_runs([tmp_path], left_out)] == [good]
    assert all(str(tmp_path / name) in note for name, note in zip("bc", left_out, strict=True))
    with pytest.raises(CheckpointError, match="cannot be read"):
        load.read_runs([tmp_path])
    with pytest.raises(CheckpointError, match="cannot be read"):
        load.read_runs([good, tmp_path / "b"], left_out)
    (good / "config.toml").write_text("")
    with pytest.raises(CheckpointError, match="no run directory can be read"):
        load.read_runs([tmp_path], left_out)


def test_reading_does_not_load_torch() -> None:
    code = "import sys, parsifl.report, parsifl.report.live; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_numbers_that_are_not_finite_are_valid_json_and_come_back(tmp_path: Path) -> None:
    def reject(constant: str) -> None:
        raise AssertionError(constant)

    summary = {"mean": math.inf, "std": math.nan, "worst_decile": -math.inf}
    record = RoundRecord(1, 2, scores={"global": {"test": {"loss": summary}}})
    RunDir(tmp_path).append(record)
    RunDir(tmp_path).write_clients({"global": {"test": {"loss": [math.nan]}}})
    for name in ("metrics.jsonl", "clients.json"):
        json.loads((tmp_path / name).read_text(), parse_constant=reject)
    (again,) = read_records(tmp_path)
    assert repr(again) == repr(record)


DEEP = "[" * 100_000
DAMAGED_FILES = [
    *(("environment.json", content) for content in ("[]", "5", DEEP, "{", '{"resumed": 5}')),
    *(("target.json", content) for content in ("[]", DEEP)),
    *(("config.toml", content) for content in (f"a = {'9' * 5000}", f"a = {DEEP}", "a")),
    ("metrics.jsonl", json.dumps({"round": 1, "cohort": 1, "bytes_up": 10**400})),
    ("metrics.jsonl", json.dumps({"round": 1, "cohort": 1, "flops": 10**400})),
    ("metrics.jsonl", json.dumps({"round": 1, "cohort": 1, "devices": [{"clients": 10**400}]})),
]


@pytest.mark.parametrize(("name", "content"), DAMAGED_FILES)
def test_damaged_files_never_end_in_a_traceback(tmp_path: Path, name: str, content: str) -> None:
    run(tmp_path)
    (tmp_path / name).write_text(content)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # other versions
        for use in (
            lambda: run(tmp_path, resume=True, rounds=3),
            lambda: build([tmp_path], tmp_path / "report.html"),
        ):
            try:
                use()
            except CheckpointError as error:
                assert name in str(error)  # noqa: PT017 - an error is allowed, not required


def test_a_resume_with_other_versions_is_noted(tmp_path: Path) -> None:
    run(tmp_path, rounds=2)
    file = tmp_path / "environment.json"
    first = {**json.loads(file.read_text()), "numpy": "1.0"}
    file.write_text(json.dumps(first))
    with pytest.warns(UserWarning, match=r"resumed with other versions: numpy 1\.0 -> "):
        again = run(tmp_path, resume=True, rounds=3)
    notes = [record.notes for record in again.records]
    assert notes[:2] == [(), ()]
    assert "resumed with other versions" in notes[2][0]
    appended = {**first, "resumed": [{"after_round": 2, **environment()}]}
    assert json.loads(file.read_text()) == appended
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(tmp_path, resume=True, rounds=4)  # the same versions as the last time
    assert json.loads(file.read_text()) == appended


def test_a_resume_without_its_environment_is_noted(tmp_path: Path) -> None:
    run(tmp_path, rounds=2)
    (tmp_path / "environment.json").unlink()
    with pytest.warns(UserWarning, match=r"environment\.json is missing or damaged"):
        again = run(tmp_path, resume=True, rounds=3)
    assert "missing or damaged" in again.records[2].notes[0]


def overflowing(folder: Path, **changes: Any) -> Any:
    """Run with uploads that exceed the range of float16: round 1 fails."""
    huge = [(x, 1e6 * np.ones(len(x))) for x in np.ones((3, 8, 2))]
    given = {
        "algorithm": FedAvg(lr=0.5, local_steps=1, batch_size=8),
        "problem": GLM(2),
        "clients": huge,
        "rounds": 1,
        "precision": "float16",
    }
    return simulate(**{**given, "run_dir": folder, **changes})


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"participation": 1.5}, "participation = 1.5: Input should be less than or equal to 1"),
        ({"participation": 0}, "participation = 0: Input should be greater than 0"),
        ({"algorithm": FedAvg(batch_size=999, last_batch="drop")}, "Use a smaller batch_size"),
        ({"algorithm": FedAvg(batch_size=2**30, local_steps=9)}, "Lower local_steps"),
        ({"clients": clients(profiles=[{"local_steps": 1, "epochs": 1}] * 4)}, "give one"),
    ],
)
def test_an_invalid_setting_writes_no_file(
    tmp_path: Path, change: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        run(tmp_path / "run", **change)
    assert not files(tmp_path)


@pytest.mark.parametrize("resume", [False, True])
def test_a_run_without_a_finished_round_is_replaced(tmp_path: Path, resume: bool) -> None:
    with pytest.raises(ClientError, match="float16"):
        overflowing(tmp_path)
    assert read_config(tmp_path)["run"]["precision"] == "float16"
    corrected = overflowing(tmp_path, precision="exact", resume=resume)
    assert read_config(tmp_path)["run"]["precision"] == "exact"
    assert read_metrics(tmp_path) == corrected.metrics


@pytest.mark.parametrize("name", ["notes.txt", "checkpoint/weights.bin", "environment.json"])
def test_a_directory_with_foreign_files_is_not_replaced(tmp_path: Path, name: str) -> None:
    with pytest.raises(ClientError, match="float16"):
        overflowing(tmp_path)
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("precious")
    before = files(tmp_path)
    with pytest.raises(CheckpointError, match="holds a run of another configuration"):
        overflowing(tmp_path, precision="exact")
    assert files(tmp_path) == before


def test_a_run_that_is_in_its_first_round_is_not_replaced(tmp_path: Path) -> None:
    errors: list[CheckpointError] = []

    def other() -> None:
        with pytest.raises(CheckpointError) as caught:
            run(tmp_path, algorithm=replace(METHOD, lr=0.2))
        errors.append(caught.value)

    def intrude(_: RoundEnd) -> None:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()

    finished = run(tmp_path, rounds=1, callbacks=[intrude])
    assert "another run is writing" in str(errors[0])
    assert read_config(tmp_path)["algorithm"]["lr"] == 0.1
    assert read_metrics(tmp_path) == finished.metrics


def test_a_linked_file_is_not_replaced(tmp_path: Path) -> None:
    with pytest.raises(ClientError, match="float16"):
        overflowing(tmp_path / "run")
    (tmp_path / "run" / "link").symlink_to(tmp_path)
    assert not RunDir(tmp_path / "run").replaceable()
