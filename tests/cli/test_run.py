from __future__ import annotations

import functools
import json
import warnings
from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

from parsifl.cli.app import app, mount_plugins
from parsifl.cli.errors import FriendlyGroup
from parsifl.cli.list_show import list_
from parsifl.core.errors import ConfigError
from parsifl.data.clients import ClientData
from parsifl.engine import experiment
from parsifl.engine.training import Training

QUICK = ["--data", "digits", "--clients", "5", "--rounds", "2", "--set", "local_steps=2"]


def invoke(*words: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, list(words))
    return result.exit_code, result.stdout, result.stderr


def test_run_prints_a_table_and_keeps_the_folder(tmp_path: Path) -> None:
    code, out, err = invoke("run", "fedavg", *QUICK, "--out", str(tmp_path / "run"))
    assert code == 0, err
    assert "fedavg" in out
    assert (tmp_path / "run" / "config.toml").exists()
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 2
    assert "round 2 of 2" in err


def test_scores_on_training_rows_are_recorded_if_asked_for(tmp_path: Path) -> None:
    for name, words in (("with", ["--train-scores"]), ("without", [])):
        code, _, err = invoke("run", "fedavg", *QUICK, *words, "--out", str(tmp_path / name))
        assert code == 0, err
        line = json.loads((tmp_path / name / "metrics.jsonl").read_text().splitlines()[-1])
        assert ("train" in line["global"]) == bool(words)


def test_the_distance_to_known_coefficients_is_printed() -> None:
    dataset = "fedgradmp:clients=4,samples=30,dimension=20,sparsity=3"
    words = ["--data", dataset, "--rounds", "6", "--set", "tau=3", "--test", "0"]
    code, out, err = invoke("run", "fedgradmp", *words)
    assert code == 0, err
    assert float(out.rpartition("last round: ")[2]) < 1e-6
    assert "true coefficients" not in invoke("run", "fedavg", *QUICK)[1]


def test_json_holds_the_headline_and_nothing_else() -> None:
    code, out, err = invoke("run", "local", *QUICK, "--json")
    assert code == 0
    row = json.loads(out)
    assert row["algorithm"] == "local"
    assert row["bytes_up"] == 0
    assert 0 <= row["personal"]["mean"] <= 1
    assert err == ""


def test_a_client_that_is_left_out_is_named_once_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = experiment.Experiment.load

    def spoilt(self: experiment.Experiment, data_dir: str | Path | None = None) -> ClientData:
        data = whole(self, data_dir)
        assert isinstance(data.x, torch.Tensor)
        x = data.x.clone()
        x[data.train[3]] = torch.nan
        return replace(data, x=x)

    monkeypatch.setattr(experiment.Experiment, "load", spoilt)
    for quiet in ([], ["--json"]):
        options = ("--evaluate-every", "0", "--set", "eta_g=1", *quiet)
        code, _, err = invoke("run", "fedslr", *QUICK, *options)
        assert code == 0, err
        assert err.count("warning: client 3 was dropped in round 1: ") == 1
        assert err.count("dropped") == 1


def test_warnings_are_told_without_lines_of_our_source() -> None:
    words = ["run", "fedslr", *QUICK, "--set", "lam=100"]
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        code, _, err = invoke(*words)
    assert code == 0, err
    assert err.count("warning: FedSLR's penalty lam=100 left no singular value") == 1
    assert ".py" not in err


def test_a_second_run_into_the_same_folder_needs_resume(tmp_path: Path) -> None:
    words = ["run", "fedavg", *QUICK, "--out", str(tmp_path)]
    assert invoke(*words)[0] == 0
    code, _, err = invoke(*words)
    assert code == 2
    assert "resume" in err
    assert invoke(*words, "--resume")[0] == 0


def test_another_configuration_is_refused_with_the_difference(tmp_path: Path) -> None:
    assert invoke("run", "fedavg", *QUICK, "--out", str(tmp_path))[0] == 0
    code, _, err = invoke(
        "run", "fedavg", *QUICK, "--set", "lr=0.5", "--resume", "--out", str(tmp_path)
    )
    assert code == 2
    assert "algorithm.lr: 0.02 there, 0.5 requested" in err


def test_more_rounds_extend_a_finished_run(tmp_path: Path) -> None:
    words = ["run", "ditto", *QUICK, "--out", str(tmp_path)]
    assert invoke(*words)[0] == 0
    assert invoke(*words, "--rounds", "3", "--resume")[0] == 0
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3


def test_a_config_file_gives_values_and_options_win(tmp_path: Path) -> None:
    file = tmp_path / "experiment.toml"
    file.write_text(
        'data = "digits"\nclients = 4\nrounds = 9\n[settings]\nlr = 0.5\nlocal_steps = 1\n'
        '[evaluation]\nselect = "best-test"\n'
    )
    code, out, err = invoke("run", "fedavg", "--config", str(file), "--rounds", "1", "--json")
    assert code == 0, err
    assert json.loads(out)["rounds"] == 1
    assert json.loads(out)["select"] == "best-test"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["fedavgg"], "did you mean 'fedavg'?"),
        (["fedavg", "--set", "lrr=1"], "did you mean 'lr'?"),
        (["fedavg", "--set", "lr=fast"], "FedAvg.lr"),
        (["fedavg", "--set", "lr=-1"], "greater than 0"),
        (["fedavg", "--set", "lr"], "write setting=value"),
        (["fedavg", "--set", "batch_size=100000000000000000000"], "less than or equal to"),
        (["fedavg", "--set", "local_steps=2000000000"], "Lower local_steps"),
        (["fedavg", "--set", "local_steps=2147483647"], "Lower local_steps"),
        (["fedavg", "--test", "nan"], "from 0 to 1"),
        (["fedavg", "--profiles", "budget"], "write entry=value"),
        (["fedavg", "--data", "digitz"], "did you mean 'digits'?"),
        (["fedavg", "--partition", "dirichlett"], "did you mean 'dirichlet'?"),
        (["fedavg", "--clients", "100000"], "clients"),
        (["fedavg", "--clients", "0"], "clients"),
        (["fedavg", "--rounds", "0"], "rounds"),
        (["fedavg", "--participation", "2"], "participation"),
        (["fedavg", "--engine", "warp"], "flower, flower-sim, local"),
        (["fedavg", "--model", "mlpp"], "did you mean 'mlp'?"),
        (["fedavg", "--model", "glmm"], "did you mean 'glm'?"),
        (["fedgradmp"], "use parsifl.GLM (--model glm)"),
        (["fedrep", "--model", "glm"], "use parsifl.NeuralProblem (--model mlp, vgg, ...)"),
        (["fedavg", "--config", "missing.toml"], "missing.toml"),
        (["fedavg", "--select", "best-validation"], "validation"),
        (["fedavg", "--precision", "int4"], "precision"),
        (["fedavg", "--config", "/"], "directory"),
        (["fedavg", "--resume"], "--out"),
    ],
)
def test_mistakes_are_named_without_a_traceback(words: list[str], message: str) -> None:
    code, _, err = invoke("run", *QUICK, *words)
    assert code == 2
    assert message in err
    assert "Traceback" not in err
    assert err.startswith("error: ")


@pytest.mark.parametrize(
    "words",
    [
        ["run", "fedavg", "--out", ""],
        ["run", "fedavg", "--data-dir="],
        ["demo", "--out", ""],
        ["sweep", "fedavg", "--out", ""],
        ["report", ""],
        ["report", "runs", "-o", ""],
        ["flower", "keys", ""],
        ["flower", "init", ""],
        ["flower", "forget", ""],
        ["data", "fetch", "digits", "--data-dir", ""],
        ["reproduce", "fedslr-table1", "--out", ""],
    ],
)
def test_an_empty_path_is_not_the_current_directory(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, err = invoke(*words)
    assert code == 2
    assert "the path is empty; write . for this directory" in err
    assert not list(tmp_path.iterdir())


def test_a_config_file_may_choose_flower_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "experiment.toml"
    file.write_text('engine = "flower-sim"\n')
    asked = []

    def deployed(chosen: experiment.Experiment, *_: object, **options: bool) -> None:
        asked.append((chosen.executor, options["simulation"]))
        raise ConfigError("that is enough")

    execute_simulation = functools.partial(deployed, simulation=True)
    monkeypatch.setattr("parsifl.flower.cli.trial.execute_simulation", execute_simulation)
    code, _, err = invoke("run", *QUICK, "fedavg", "--config", str(file))
    assert (code, err, asked) == (2, "error: that is enough\n", [("auto", True)])


def test_a_model_takes_options() -> None:
    code, out, err = invoke("run", "fedavg", *QUICK, "--model", "mlp:hidden=16", "--json")
    assert code == 0, err
    assert json.loads(out)["bytes_up"] < 5 * 2 * 4 * 1400  # 64 x 16 x 10: 1210 parameters


def test_demo_runs_every_method_and_writes_the_report(tmp_path: Path) -> None:
    code, out, err = invoke("demo", "--out", str(tmp_path), "--rounds", "2")
    assert code == 0, err
    for name in ("local", "fedavg", "scaffold", "ditto", "fedmac", "fedslr"):
        assert name in out
    assert "<html" in (tmp_path / "report.html").read_text()
    # a second demo goes on from the finished runs
    assert invoke("demo", "--out", str(tmp_path), "--rounds", "2")[0] == 0


def test_a_profile_shows_where_the_time_went() -> None:
    code, out, err = invoke("run", "fedavg", *QUICK, "--profile")
    assert code == 0, err
    assert all(phase in out for phase in ("phase", "local", "draw", "evaluate", "share"))
    assert out.count("Counting operations, once") == 1
    assert "count-once" not in out  # it is no part of a round
    code, out, err = invoke("run", "fedavg", *QUICK, "--profile", "--json")
    found = json.loads(out)
    assert sum(found["profile"].values()) == pytest.approx(found["seconds"])


@pytest.mark.parametrize(
    ("kept", "hook", "told"),
    [
        (True, "_train", "--resume starts from the beginning"),
        (True, "_run", "resume with the same command and --resume"),
        (False, "_train", "--out DIR"),
    ],
)
def test_who_stops_a_run_is_told_how_it_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: bool, hook: str, told: str
) -> None:
    run = Training._run

    def stop(*given: Any, **named: Any) -> None:
        if hook == "_run":  # it ends after its checkpoint
            run(*given, **named)
        raise KeyboardInterrupt

    words = ["run", "fedavg", *QUICK, *(["--out", str(tmp_path / "run")] if kept else [])]
    with monkeypatch.context() as patch:
        patch.setattr(Training, hook, stop)
        code, _, err = invoke(*words)
    assert code == 130
    assert told in err
    assert "Traceback" not in err
    assert invoke(*words, *(["--resume"] if kept else []))[0] == 0


def test_a_command_of_another_package_that_is_broken_leaves_the_others_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    broken = EntryPoint("tune", "package_that_is_not_there:tune", "parsifl.commands")
    monkeypatch.setattr("parsifl.core.plugins.entry_points", lambda **_: [broken])
    group = typer.Typer(cls=FriendlyGroup)
    group.command("list")(list_)
    mount_plugins(group)
    assert CliRunner().invoke(group, ["list", "algorithms"]).exit_code == 0
    for words in ([], ["fedavg", "--rounds", "5"]):
        result = CliRunner().invoke(group, ["tune", *words])
        assert result.exit_code == 2
        assert "'tune' of package_that_is_not_there:tune cannot be imported" in result.stderr


@pytest.mark.parametrize("words", [[], ["--list"], ["fedslr", "--scale", "smoke"]])
def test_reproduce_explains_how_to_install_it_whatever_is_asked(
    monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    monkeypatch.setattr("parsifl.core.plugins.entry_points", lambda **_: [])
    group = typer.Typer(cls=FriendlyGroup)
    group.command("list")(list_)
    mount_plugins(group)
    result = CliRunner().invoke(group, ["reproduce", *words])
    assert result.exit_code == 2
    assert "`pip install ./reproduction`" in result.stderr


def test_the_former_option_for_profiles_names_the_new_one() -> None:
    result = CliRunner().invoke(app, ["run", "fedavg", "--devices", "budget=0.5"])
    assert result.exit_code == 2
    assert "--devices was renamed to --profiles" in result.output
    other = CliRunner().invoke(app, ["run", "fedavg", "--batch", "3"])  # a setting, not an option
    assert other.exit_code == 2
    assert "No such option" in other.output
