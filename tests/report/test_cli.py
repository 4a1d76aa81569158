from __future__ import annotations

import os
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import typer
from tests.report.folders import make_run
from typer.testing import CliRunner

from parsifl.cli.app import app


def test_report_prints_the_table_and_writes_the_page(tmp_path: Path) -> None:
    make_run(tmp_path / "runs" / "a", "fedavg")
    make_run(tmp_path / "runs" / "b", "local")
    output = tmp_path / "page.html"
    result = CliRunner().invoke(app, ["report", str(tmp_path / "runs"), "-o", str(output)])
    assert result.exit_code == 0, result.output
    assert "fedavg" in result.stdout
    assert "page.html" in result.stdout
    assert "2 algorithms on digits" in output.read_text(encoding="utf-8")


def test_a_damaged_folder_is_named_in_the_terminal_and_on_the_page(tmp_path: Path) -> None:
    make_run(tmp_path / "runs" / "a")
    (make_run(tmp_path / "runs" / "b") / "config.toml").write_text("algorithm = = 3")
    output = tmp_path / "page.html"
    result = CliRunner().invoke(app, ["report", str(tmp_path / "runs"), "-o", str(output)])
    assert result.exit_code == 0, result.output
    assert "note: left out" in result.stderr
    assert "config.toml cannot be read" in result.stderr
    assert "config.toml cannot be read" in output.read_text(encoding="utf-8")


def test_only_a_page_is_replaced(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    before = (run / "config.toml").read_bytes()
    result = CliRunner().invoke(app, ["report", str(run), "-o", str(run / "config.toml")])
    assert result.exit_code == 2
    assert "exists and is not an HTML page" in result.stderr
    assert (run / "config.toml").read_bytes() == before
    page = tmp_path / "page.html"
    for _ in range(2):
        assert CliRunner().invoke(app, ["report", str(run), "-o", str(page)]).exit_code == 0


def test_a_folder_that_is_no_run_is_a_message(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["report", str(tmp_path)])
    assert result.exit_code == 2
    assert "is not a run directory" in result.stderr
    assert "Traceback" not in result.output


def test_watch_serves_until_interrupted(tmp_path: Path) -> None:
    make_run(tmp_path / "a")
    words = ["-c", "from parsifl.cli.app import app; app()", "report", "--watch", str(tmp_path)]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        [sys.executable, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        # a suite that runs in the background ignores Ctrl-C, and children inherit that
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            address = next(word for word in line.split() if word.startswith("http://127.0.0.1:"))
            with urllib.request.urlopen(address, timeout=10) as answer:
                assert b"fedavg" in answer.read()
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=20)
        finally:
            process.kill()
    assert process.returncode == 0
    assert "Traceback" not in errors


def test_the_options_are_those_of_the_command() -> None:
    from parsifl.report.cli import report

    single = typer.Typer()
    single.command()(report)
    text = CliRunner().invoke(single, ["--help"], env={"COLUMNS": "100", "NO_COLOR": "1"}).stdout
    for option in ("--output", "--watch", "--port"):
        assert option in text


def test_control_characters_of_a_crafted_run_do_not_reach_the_terminal(tmp_path: Path) -> None:
    attack = "\x1b]0;owned\x07\x1b[2J\u202e"
    make_run(tmp_path / "a", score=f"x{attack}")
    make_run(tmp_path / "b", f"fedavg{attack}", settings={f"lr{attack}": attack})
    (make_run(tmp_path / "c\x07") / "config.toml").write_text("algorithm = '\x1b'")
    result = CliRunner().invoke(app, ["report", str(tmp_path), "-o", str(tmp_path / "page.html")])
    assert result.exit_code == 0, result.output
    assert "fedavg?" in result.output
    assert not {"\x1b", "\x07", "\u202e"} & set(result.output)


def test_control_characters_of_an_error_do_not_reach_the_terminal(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["report", str(tmp_path / "gone\x07\u202e")])
    assert result.exit_code == 2
    assert "gone??" in result.output
