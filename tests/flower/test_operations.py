"""What an operations team uses: status, metrics, logs, checks, retention and backups."""

from __future__ import annotations

import hashlib
import io
import json
import logging
import socket
import tarfile
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from tests.flower.inprocess import Answer, InProcess
from tests.flower.test_server import experiment
from typer.testing import CliRunner

import parsifl
from parsifl.cli.app import app
from parsifl.core.errors import CheckpointError, ConfigError, ParsiflError
from parsifl.flower import hello, logs, monitor, retention, server_health, tls
from parsifl.flower.message import Envelope, Replies, Requests
from parsifl.flower.monitor import read_status
from parsifl.flower.server import Federation
from parsifl.flower.settings import Deployment, DeploymentSettings


def call(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(words))
    return result.exit_code, result.output


def test_status_follows_a_run(tmp_path: Path) -> None:
    seen: list[dict[str, Any]] = []

    def look(kind: str, client: int, _request: Envelope, answer: Any) -> Answer:
        if (tmp_path / "run" / "status.json").exists():
            seen.append(read_status(tmp_path / "run"))
        if kind == "train" and client == 1 and len(seen) > 6:
            return Envelope('{"error": "OSError"}')
        reply: Envelope = answer()
        return reply

    link = InProcess(experiment("fedavg", rounds=3), tmp_path / "state", look)
    link.run(tmp_path / "run")
    assert {state["state"] for state in seen} >= {"waiting for clients", "training"}
    found = read_status(tmp_path / "run")
    assert found["round"] == 3
    assert found["bytes_up"] > 0
    assert [client["node"] for client in found["clients"]] == [100, 101, 102, 103]
    assert all(client["parsifl"] == parsifl.__version__ for client in found["clients"])
    code, text = call("flower", "status", str(tmp_path / "run"))
    assert code == 0
    assert "round 3 of 3" in text
    code, text = call("flower", "status", str(tmp_path / "run"), "--json")
    assert json.loads(text)["rounds"] == 3


def test_a_status_that_is_missing_or_damaged_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no server"):
        read_status(tmp_path)
    (tmp_path / "status.json").write_text("[1]")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_status(tmp_path)


def test_a_foreign_status_file_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "status.json").write_text("mine")
    link = InProcess(experiment("fedavg", rounds=1), tmp_path / "state")
    with pytest.raises(CheckpointError, match=r"status\.json"):
        link.run(tmp_path / "run")
    assert (tmp_path / "run" / "status.json").read_text() == "mine"


def test_metrics_are_served_on_loopback_and_carry_no_client_text(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client", reason="needs prometheus-client")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = int(free.getsockname()[1])

    def lie(kind: str, client: int, _request: Envelope, answer: Any) -> Answer:
        if kind == "train" and client == 2:
            return Envelope(json.dumps({"error": "Boo", "detail": "secret-text"}))
        reply: Envelope = answer()
        return reply

    link = InProcess(experiment("fedavg", rounds=2), tmp_path / "state", lie)
    link.run(tmp_path / "run", metrics_port=port)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as reply:
        text = reply.read().decode()
    assert "parsifl_round 2.0" in text
    assert "parsifl_clients_connected 4.0" in text
    assert "parsifl_dropped_total 2.0" in text
    assert 'parsifl_exchange_seconds_count{kind="train"} 2.0' in text
    assert "secret-text" not in text


def hello_with(change: dict[str, Any]) -> Any:
    def fault(kind: str, client: int, _request: Envelope, answer: Any) -> Answer:
        reply: Envelope = answer()
        if kind == "hello" and client == 1:
            found = json.loads(reply.text)
            found["machine"] = found["machine"] | change if change else None
            return Envelope(json.dumps(found))
        return reply

    return fault


@pytest.mark.parametrize(
    ("change", "text"),
    [({"parsifl": "0.1.0"}, "runs Parsifl 0.1.0"), ({}, "does not report its version")],
)
def test_a_node_with_another_version_is_rejected_by_name(
    tmp_path: Path, change: dict[str, Any], text: str
) -> None:
    link = InProcess(experiment("fedavg", rounds=1), tmp_path / "state", hello_with(change))
    with pytest.raises(ParsiflError, match="the clients 1 of 4 have not reported"):
        link.run(tmp_path / "run", wait=0.01)
    assert any(text in line for line in link.log)


def test_a_clock_that_is_off_and_a_full_disk_are_named(tmp_path: Path) -> None:
    change = {"clock": time.time() - 1200.0, "free": 1 << 20}
    link = InProcess(experiment("fedavg", rounds=1), tmp_path / "state", hello_with(change))
    link.run(tmp_path / "run")
    assert any("clock is 1,200 s behind" in line for line in link.log)
    assert any("only 1 MiB are free" in line for line in link.log)


def federation(link: InProcess, out: Path) -> Federation:
    deployment = Deployment(out=str(out), check=True)
    return Federation(DeploymentSettings(link.experiment, 4, deployment), link, link.log.append)


def test_a_check_reports_every_client_and_trains_nothing(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    link = InProcess(experiment("fedavg", rounds=1), tmp_path / "state")
    assert federation(link, tmp_path / "run").check() == []
    assert {kind for kind, _ in link.asked} == {"hello"}
    assert sum("rows, Parsifl" in line for line in link.log) == 4
    changed = InProcess(link.experiment, tmp_path / "state", hello_with({"torch": "1.0"}))
    found = federation(changed, tmp_path / "run").check()
    assert any("different versions of torch" in text for text in found)


def test_the_free_space_is_that_of_the_nearest_directory(tmp_path: Path) -> None:
    found = hello.this_machine(tmp_path / "not" / "yet")
    assert found.free > 0
    ahead = found.model_copy(update={"clock": time.time() + 3600})
    assert hello.concerns(ahead, time.time())[0].startswith("its clock is 3,600 s ahead")


def test_logs_are_json_lines_with_run_round_and_client(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(logs.VARIABLE, "json")
    logger = logging.getLogger("parsifl")
    before, propagates, level = list(logger.handlers), logger.propagate, logger.level
    try:
        logs.note_context(run="ab", round=3, client=1)
        try:
            raise ValueError("why")
        except ValueError:
            logs.node_log().exception("failed %s", "here")
        logs.server_log("round 3 is done")
        first, second = (json.loads(line) for line in capsys.readouterr().err.splitlines())
    finally:
        logger.handlers, logger.propagate = before, propagates
        logger.setLevel(level)
    assert {k: first[k] for k in ("level", "message", "run", "round", "client")} == {
        "level": "error",
        "message": "failed here",
        "run": "ab",
        "round": 3,
        "client": 1,
    }
    assert "ValueError: why" in first["exception"]
    assert second["message"] == "round 3 is done"


def test_client_state_is_listed_and_forgotten(tmp_path: Path) -> None:
    root = tmp_path / "state"
    for name in ("a", "b"):
        InProcess(experiment("ditto", rounds=1), root).run(tmp_path / name)
    foreign = root / "my-model"
    foreign.mkdir()
    runs = retention.stored_runs(root)
    assert len(runs) == 2
    assert all(item.size > 0 for item in runs)
    (runs[0].path / "client-0" / "notes.txt").write_text("mine")
    code, text = call("flower", "forget", str(root))
    assert code == 0
    assert "2 of 2 runs listed" in text
    assert call("flower", "forget", str(root), "--delete")[0] != 0
    assert call("flower", "forget", str(root), "--run", "0" * 32, "--delete")[0] != 0
    assert (
        "0 of 2 runs deleted"
        in call("flower", "forget", str(root), "--older-than", "1", "--delete")[1]
    )
    assert (
        "2 of 2 runs deleted"
        in call("flower", "forget", str(root), "--older-than", "0", "--delete")[1]
    )
    assert foreign.exists()
    assert (runs[0].path / "client-0" / "notes.txt").read_text() == "mine"
    assert not runs[1].path.exists()


def test_a_backup_is_restored_and_resumed_with_the_same_bits(tmp_path: Path) -> None:
    chosen = experiment("ditto", rounds=4)
    whole = InProcess(chosen, tmp_path / "s1").run(tmp_path / "whole")
    short = experiment("ditto", rounds=2)
    InProcess(short, tmp_path / "s2").run(tmp_path / "run")
    (tmp_path / "run" / "flower").mkdir()
    (tmp_path / "run" / "flower" / "ca.key").write_text("private")
    file = tmp_path / "run.tar.gz"
    assert call("flower", "backup", str(tmp_path / "run"), str(file))[0] == 0
    with tarfile.open(file) as archive:
        assert not any("ca.key" in name for name in archive.getnames())
    assert call("flower", "restore", str(file), str(tmp_path / "again"))[0] == 0
    resumed = InProcess(chosen, tmp_path / "s2").run(tmp_path / "again", resume=True)
    assert [r["personal"] for r in resumed] == [r["personal"] for r in whole]
    with pytest.raises(CheckpointError, match="not empty"):
        retention.restore(file, tmp_path / "again")


@pytest.mark.parametrize("damage", ["cut", "changed", "outside", "empty"])
def test_a_damaged_backup_writes_nothing(tmp_path: Path, damage: str) -> None:
    InProcess(experiment("fedavg", rounds=1), tmp_path / "s").run(tmp_path / "run")
    file = tmp_path / "run.tar.gz"
    retention.backup(tmp_path / "run", file)
    if damage == "cut":
        file.write_bytes(file.read_bytes()[:-200])
    elif damage == "empty":
        file.write_bytes(b"")
    else:
        with tarfile.open(file) as archive:
            archive.extractall(tmp_path / "x", filter="data")
        (tmp_path / "x" / "config.toml").write_text("other")
        (tmp_path / "evil").write_text("evil")
        with tarfile.open(file, "w:gz") as archive:
            for path in sorted((tmp_path / "x").rglob("*")):
                if path.is_file():
                    archive.add(path, path.relative_to(tmp_path / "x").as_posix())
            if damage == "outside":
                archive.add(tmp_path / "evil", "../evil2")
    with pytest.raises(CheckpointError, match=r"damaged|cannot? be read|can be read"):
        retention.restore(file, tmp_path / "again")
    assert not (tmp_path / "again").exists() or not any((tmp_path / "again").iterdir())
    assert not (tmp_path / "evil2").exists()


def test_a_run_that_is_being_written_is_not_backed_up(tmp_path: Path) -> None:
    from parsifl.engine.safe_files import _lock, locked

    InProcess(experiment("fedavg", rounds=1), tmp_path / "s").run(tmp_path / "run")
    import os

    with locked(tmp_path / "elsewhere"):
        descriptor = _lock(tmp_path / "run")
        if descriptor is None:
            pytest.skip("needs file locks")
        with pytest.raises(CheckpointError, match="another run is writing"):
            retention.backup(tmp_path / "run", tmp_path / "b.tar.gz")
        os.close(descriptor)


def test_a_node_gets_a_new_key_pair(tmp_path: Path) -> None:
    from parsifl.flower.tls import make_keys

    keys = make_keys(tmp_path / "keys", 2)
    before = [keys.public(n).read_bytes() for n in range(2)]
    assert call("flower", "rotate", str(tmp_path / "keys"), "--node", "1")[0] == 0
    assert keys.public(0).read_bytes() == before[0]
    assert keys.public(1).read_bytes() != before[1]
    assert keys.node(1).stat().st_mode & 0o777 == 0o600
    assert call("flower", "rotate", str(tmp_path / "keys"), "--node", "2")[0] != 0


def test_a_backup_is_private_and_never_written_through_a_link(tmp_path: Path) -> None:
    InProcess(experiment("fedavg", rounds=1), tmp_path / "s").run(tmp_path / "run")
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / ".run.tar.gz.tmp").symlink_to(victim)
    retention.backup(tmp_path / "run", tmp_path / "run.tar.gz")
    assert victim.read_text() == "precious"
    assert (tmp_path / "run.tar.gz").stat().st_mode & 0o777 == 0o600


BAD_NAMES = [
    ["../outside"], ["a/../b"], ["/absolute"], ["."], ["a/."], ["a//b"], ["a", "a/b"],
    ["x" * 300], ["/".join("a" * 600)], ["escape\x1b[2J"], ["line\nbreak"],
]  # fmt: skip


@pytest.mark.parametrize("names", BAD_NAMES)
def test_names_in_a_backup_are_checked_before_anything_is_written(
    tmp_path: Path, names: list[str]
) -> None:
    def archive(contents: dict[str, bytes]) -> Path:
        sums = {name: hashlib.sha256(data).hexdigest() for name, data in contents.items()}
        manifest = json.dumps({"format": 1, "files": sums}).encode()
        with tarfile.open(tmp_path / "run.tar.gz", "w:gz") as file:
            for name, data in {retention.MANIFEST: manifest, **contents}.items():
                entry = tarfile.TarInfo(name)
                entry.size = len(data)
                file.addfile(entry, io.BytesIO(data))
        return tmp_path / "run.tar.gz"

    with pytest.raises(CheckpointError, match="is not a backup that can be read"):
        retention.restore(archive({"config.toml": b"x", **dict.fromkeys(names, b"x")}),
                          tmp_path / "again")  # fmt: skip
    assert not (tmp_path / "again").exists()
    assert not (tmp_path / "outside").exists()
    assert retention.restore(archive({"config.toml": b"x", "a/b": b"y"}), tmp_path / "again") == 2


def test_leftovers_of_a_killed_node_are_forgotten_too(tmp_path: Path) -> None:
    folder = tmp_path / ("0" * 32) / "client-0"
    folder.mkdir(parents=True)
    (folder / "round-00000001.state").write_bytes(b"x")
    (folder / ".round-00000002.state.0123456789abcdef.tmp").write_bytes(b"x")
    retention.forget(retention.stored_runs(tmp_path))
    assert not any(tmp_path.iterdir())


def test_control_characters_of_a_crafted_status_do_not_reach_the_terminal(tmp_path: Path) -> None:
    InProcess(experiment("fedavg", rounds=1), tmp_path / "s").run(tmp_path)
    path = tmp_path / "status.json"
    attack = "\x1b]0;owned\x07\x1b[2J"
    path.write_text(json.dumps({**json.loads(path.read_text()), "last_error": attack}))
    output = call("flower", "status", str(tmp_path))[1]
    assert "last error: ?]0;owned??[2J" in output
    assert "\x1b" not in output


class Clock:
    """A clock that only `Late` moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1e9
        for name in ("time", "monotonic"):
            monkeypatch.setattr(time, name, lambda: self.now)


class Late(InProcess):
    """Clients that reply after `delays` seconds; the caller sees each reply when it arrives."""

    clock: Clock
    delays: dict[int, float]

    def ask(self, requests: Requests, timeout: float, enough: Any = None) -> Replies:
        start, found = self.clock.now, dict[int, Envelope | str]()
        for node in sorted(requests, key=lambda node: self.delays.get(self.clients[node], 0)):
            self.clock.now = start + self.delays.get(self.clients[node], 0)
            found |= super().ask({node: requests[node]}, timeout)
            if enough is not None and enough(found):
                break
        return found

    def pause(self, seconds: float) -> None:
        self.clock.now += seconds


def late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **delays: float) -> Late:
    link = Late(experiment("fedavg", rounds=2), tmp_path / "state")
    (tmp_path / "run").mkdir()
    link.clock = Clock(monkeypatch)
    link.delays = {int(name[1:]): seconds for name, seconds in delays.items()}
    return link


def test_a_client_that_joins_late_does_not_make_the_clocks_of_others_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = late(tmp_path, monkeypatch, c3=80)
    link.clients = {100: 0, 101: 1, 102: 2}
    pauses = iter(range(1000))

    def pause(seconds: float) -> None:
        link.clock.now += seconds
        if next(pauses) == 120:
            link.clients[103] = 3

    link.pause = pause  # type: ignore[method-assign]
    assert link.federation(tmp_path / "run", wait=300.0).check() == []
    assert "waiting for the clients 3" in link.log
    assert link.log.count("waiting for the clients 3") < 12


def test_a_clock_that_is_off_is_found_although_its_node_is_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = late(tmp_path, monkeypatch, c1=50, c3=80)
    link.fault = hello_with({"clock": 1e9 - 40.0})  # 90 s behind when it is sent
    (problem,) = link.federation(tmp_path / "run", wait=300.0).check()
    assert problem == "client 1 (node 101): its clock is 90 s behind the server's"


def test_every_reply_is_stamped_when_it_arrives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = late(tmp_path, monkeypatch, c1=5, c2=30)
    link.run(tmp_path / "run")
    entries = read_status(tmp_path / "run")["clients"]
    assert [entry["reply_seconds"] for entry in entries] == [0, 5, 30, 0]
    replies = [entry["last_reply"] for entry in entries]
    assert [reply - replies[0] for reply in replies] == [0, 5, 30, 0]


def test_a_resumed_server_starts_from_its_records(tmp_path: Path) -> None:
    InProcess(experiment("fedavg", rounds=2), tmp_path / "s").run(tmp_path / "run")
    before = read_status(tmp_path / "run")
    assert before["bytes_up"] > 0
    link = InProcess(experiment("fedavg", rounds=3), tmp_path / "s")
    seen: list[dict[str, Any]] = []

    def look(kind: str, _client: int, _request: Envelope, answer: Any) -> Answer:
        if kind == "train":
            seen.append(read_status(tmp_path / "run"))
        reply: Envelope = answer()
        return reply

    link.fault = look
    link.run(tmp_path / "run", resume=True)
    for name in ("round", "bytes_up", "bytes_down"):
        assert seen[0][name] == before[name]
    assert read_status(tmp_path / "run")["round"] == 3


def status_of(tmp_path: Path, **changes: Any) -> tuple[int, str]:
    path = tmp_path / "status.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    code, text = call("flower", "status", str(tmp_path))
    return code, text.splitlines()[0]


def test_a_server_that_is_not_heard_has_ended(tmp_path: Path) -> None:
    InProcess(experiment("fedavg", rounds=2), tmp_path / "s").run(tmp_path)
    now = time.time()
    code, line = status_of(tmp_path, state="training", updated=now - 10)
    assert (code, "fedavg: training, round 2 of 2" in line) == (0, True)
    code, line = status_of(tmp_path, state="training", updated=now - 3600)
    assert (code, "fedavg: ended, last heard 3,60" in line) == (1, True)
    assert status_of(tmp_path, state="done", updated=now - 3600)[0] == 0
    code, line = status_of(tmp_path, state="failed", updated=now)
    assert (code, "failed" in line) == (1, True)


def test_the_heartbeat_writes_until_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(monitor, "_HEARTBEAT_SECONDS", 0.01)
    federation = InProcess(experiment("fedavg", rounds=1), tmp_path / "s").federation(
        tmp_path / "r"
    )
    federation.run()
    before = read_status(tmp_path / "r")
    with federation.monitor.heartbeat():
        deadline = time.monotonic() + 60
        while read_status(tmp_path / "r")["updated"] == before["updated"]:
            assert time.monotonic() < deadline
    after = read_status(tmp_path / "r")
    assert {**after, "updated": 0} == {**before, "updated": 0}
    assert not [thread for thread in threading.enumerate() if "heartbeat" in thread.name]


def test_the_expiry_of_the_certificate_and_a_full_disk_are_reported(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    keys = tls.make_keys(tmp_path / "keys", 1, days=10)
    link = InProcess(experiment("fedavg", rounds=1), tmp_path / "s")
    federation = link.federation(tmp_path / "run", certificate=str(keys.certificate))
    (problem,) = federation.check()
    assert problem in [f"server: its certificate expires in {n} days; renew it" for n in (9, 10)]
    federation.run()
    expires = read_status(tmp_path / "run")["server"]["certificate_expires"]
    assert abs(expires - time.time() - 10 * 86_400) < 3600
    assert "certificate expires on" in call("flower", "status", str(tmp_path / "run"))[1]
    health = server_health.ServerHealth
    assert health(1 << 20, None).problems() == ["server: only 1 MiB are free for the run directory"]
    assert health(1 << 40, time.time() - 1).problems() == [
        "server: its certificate has expired; renew it"
    ]
    with pytest.raises(ConfigError, match=r"deployment\.certificate="):
        link.federation(tmp_path / "run", certificate=str(tmp_path / "missing"))


def test_a_node_is_added_and_the_certificate_renewed(tmp_path: Path) -> None:
    keys = tls.make_keys(tmp_path / "keys", 2, days=3)
    before = [keys.public(n).read_bytes() for n in range(2)]
    assert call("flower", "add-node", str(keys.path))[0] == 0
    assert [keys.public(n).read_bytes() for n in range(2)] == before
    assert keys.node(2).stat().st_mode & 0o777 == 0o600
    assert keys.public(2).exists()
    old = keys.certificate.read_bytes()
    assert call("flower", "renew", str(keys.path), "--days", "90")[0] == 0
    assert keys.certificate.read_bytes() != old
    assert call("flower", "add-node", str(tmp_path / "nowhere"))[0] != 0


FLWR = """#!/bin/sh
echo "$@" >> {log}
[ "$1" = run ] || exit 0
echo "Successfully started run 4711"
echo "waiting for the clients 1, 2"
{rest}
"""


@pytest.mark.parametrize("passes", [True, False])
def test_check_prints_while_it_waits_and_ends_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, passes: bool
) -> None:
    program, log = tmp_path / "flwr", tmp_path / "log"
    rest = 'echo "the check found no problem"' if passes else "sleep 600"
    program.write_text(FLWR.format(log=log, rest=rest))
    program.chmod(0o700)
    monkeypatch.setattr("parsifl.flower.node.program", lambda _: str(program))
    assert call("flower", "init", str(tmp_path / "app"))[0] == 0
    printed: list[str] = []

    def echo(text: str, **_: Any) -> None:
        printed.append(text)
        if not passes and "waiting" in text:  # it was printed before the command has ended
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("parsifl.flower.cli.operations.typer.echo", echo)
        code, _ = call("flower", "check", str(tmp_path / "app"))
    assert "waiting for the clients 1, 2\n" in printed
    assert (code == 0) is passes
    assert ("stop 4711" in log.read_text()) is not passes
