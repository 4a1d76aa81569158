from __future__ import annotations

import dataclasses
import subprocess
import sys
import typing
from pathlib import Path

import pytest
from tests.support.fixtures import classifier, clients

from parsifl.algorithms.fedavg import FedAvg
from parsifl.core.errors import ConfigError
from parsifl.engine import settings
from parsifl.engine.experiment import Experiment
from parsifl.engine.settings import RunOptions, RunSettings, declarations
from parsifl.engine.simulate import simulate

ADDED = '    marker: Annotated[Count, Help("A setting that only this test has.")] = 7\n'
ADD_A_SETTING = """
import importlib.util, sys
spec = importlib.util.find_spec("parsifl.engine.settings")
module = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = module
source = open(spec.origin).read()
start = source.index("    patience: Annotated")
exec(compile(source[:start] + {added!r} + source[start:], spec.origin, "exec"), vars(module))
"""
SEE_IT = """
import inspect
from pathlib import Path
from typer.testing import CliRunner
from parsifl.cli import options, run
from parsifl.cli.app import app
from parsifl.engine import study
from parsifl.engine.experiment import Experiment
from parsifl.engine.simulate import simulate
from parsifl.flower.settings import Deployment, read, to_config

assert inspect.signature(simulate).parameters["marker"].default == 7
assert "A setting that only this test has." in simulate.__doc__
for command in (["run"], ["sweep"], ["flower", "init"]):
    text = CliRunner().invoke(app, [*command, "--help"]).output
    assert "--marker INTEGER" in text and "A setting that only this test has." in text, text
Path("run.toml").write_text('algorithm = "fedavg"\\nmarker = 3\\n')
seen = []
run.execute = lambda chosen, *_, **__: seen.append(chosen.marker) or sys.exit()
CliRunner().invoke(app, ["run", "fedavg", "--config", "run.toml"])
CliRunner().invoke(app, ["run", "fedavg", "--config", "run.toml", "--marker", "4"])
assert seen == [3, 4], seen
base = Experiment("fedavg", clients=2)
planned = study.experiments(base, {"marker": ["5", "6"]}, 1)
assert [experiment.marker for _, experiment in planned] == [5, 6]
written = to_config(Experiment("fedavg", clients=2, marker=8), Deployment())
assert written["marker"] == 8
assert read({"algorithm": "fedavg", "clients": 2, "marker": 9}).experiment.marker == 9
"""


def test_a_setting_that_is_added_in_one_place_is_known_everywhere(tmp_path: Path) -> None:
    code = ADD_A_SETTING.format(added=ADDED) + SEE_IT
    ended = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr


def test_the_types_for_editors_are_those_of_the_declaration() -> None:
    declared = typing.get_type_hints(RunSettings)
    declared.pop("are_arguments")
    assert declared.pop("rounds") is int  # a positional argument of `simulate`
    assert typing.get_type_hints(RunOptions) == declared


def test_every_setting_of_a_run_has_a_description() -> None:
    nested = [each for table in declarations(Experiment) for each in table.nested]
    every = [*declarations(Experiment), *[each for each in nested if each.option]]
    assert len(every) > len(dataclasses.fields(RunSettings))
    assert all(each.text.endswith(".") for each in every)
    options = [each.option for each in every if each.option]
    assert len(options) == len(set(options))


def test_an_unknown_setting_is_named() -> None:
    with pytest.raises(ConfigError, match="did you mean 'patience'"):
        simulate(FedAvg(), classifier(), clients(), 1, patients=3)  # type: ignore[call-arg]


def test_the_former_name_of_the_profiles_names_the_new_one() -> None:
    with pytest.raises(ConfigError, match="`devices` was renamed to `profiles`"):
        Experiment.read({"algorithm": "fedavg", "devices": "budget=0.5"})


def test_no_setting_of_an_algorithm_hides_one_of_a_run() -> None:
    from parsifl.core.registry import algorithms

    names = {each.name for each in declarations(settings.ExperimentSettings)}
    shared = {
        name: names & {each.name for each in dataclasses.fields(kind)}  # type: ignore[arg-type]
        for name, kind in algorithms().items()
    }
    assert {name: fields for name, fields in shared.items() if fields} == {}
