from __future__ import annotations

import io
import sys
import tomllib
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from parsifl.core.errors import ConfigError
from parsifl.engine.experiment import Experiment
from parsifl.flower.app_template import templates, write_app
from parsifl.flower.settings import Deployment, to_config

CONFIG = to_config(Experiment("fedavg", clients=3), Deployment())


@pytest.mark.parametrize("template", templates())
def test_an_app_is_complete(template: str, tmp_path: Path) -> None:
    write_app(tmp_path, template, CONFIG, "federation")
    project = tomllib.loads((tmp_path / "pyproject.toml").read_text())
    app = project["tool"]["flwr"]["app"]
    assert app["config"]["algorithm"] == "fedavg"
    for name in app["components"].values():
        module, _, variable = name.partition(":")
        source = (tmp_path / f"{module.replace('.', '/')}.py").read_text()
        compile(source, module, "exec")
        assert f"\n{variable} = " in source
    assert (tmp_path / "README.md").exists()
    with pytest.raises(ConfigError, match="already holds an app"):
        write_app(tmp_path, template, CONFIG, "federation")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Flower's own
def test_code_alone_goes_to_the_nodes(tmp_path: Path) -> None:
    pytest.importorskip("flwr", reason="needs flwr: install the extra parsifl[flower]")
    from flwr.cli.build import build_fab_from_disk

    write_app(tmp_path, "sparse-regression", CONFIG, "federation")
    (tmp_path / "run" / "checkpoint").mkdir(parents=True)
    for name in ("clients.json", "metrics.jsonl", "config.toml", "checkpoint/state.json"):
        (tmp_path / "run" / name).write_text("{}")
    data = build_fab_from_disk(tmp_path)
    with zipfile.ZipFile(io.BytesIO(data)) as app:
        names = {name for name in app.namelist() if not name.startswith(".info")}
    code = {f"federation/{name}.py" for name in ("__init__", "client_app", "server_app", "study")}
    assert names == {"pyproject.toml", *code}


def test_an_unknown_template_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'csv'"):
        write_app(tmp_path, "cvs", CONFIG, "federation")


def test_the_csv_template_reads_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_app(tmp_path / "app", "csv", CONFIG, "federation")
    (tmp_path / "a.csv").write_text("age,target,weight\n30,1,70.5\n40,0,80\n")
    apps = ModuleType("parsifl.flower")
    apps.client_app = lambda load: load  # type: ignore[attr-defined]  # a stand-in
    monkeypatch.setitem(sys.modules, "parsifl.flower", apps)
    names: dict[str, Any] = {}
    exec((tmp_path / "app" / "federation" / "client_app.py").read_text(), names)
    x, y = names["app"]({"data": str(tmp_path / "a.csv")})
    assert x.tolist() == [[30.0, 70.5], [40.0, 80.0]]
    assert y.tolist() == [1, 0]
    assert y.dtype == np.float64  # whole numbers are no classes unless CLASSES says so
    (tmp_path / "b.csv").write_text("weight,age,target\n70.5,30,1\n80,40,0\n")
    assert np.array_equal(names["app"]({"data": str(tmp_path / "b.csv")})[0], x)
    names["CLASSES"] = True
    assert names["app"]({"data": str(tmp_path / "a.csv")})[1].dtype == np.int64
