from __future__ import annotations

import http.client
import queue
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from tests.report.folders import make_run

from parsifl.core.errors import CheckpointError
from parsifl.report.live import LivePage, serve


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    make_run(tmp_path / "a", rounds=2)
    told: queue.Queue[str] = queue.Queue()
    stop = threading.Event()
    thread = threading.Thread(target=serve, args=([tmp_path], told.put), kwargs={"stop": stop})
    thread.start()
    yield told.get(timeout=10)
    stop.set()
    thread.join(timeout=10)
    assert not thread.is_alive()


def ask(address: str, path: str, host: str | None = None) -> tuple[int, str]:
    parts = urlsplit(address)
    connection = http.client.HTTPConnection(str(parts.hostname), parts.port, timeout=10)
    try:
        connection.request("GET", path, headers={} if host is None else {"Host": host})
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def test_the_page_follows_the_folder(address: str, tmp_path: Path) -> None:
    assert address.startswith("http://127.0.0.1:")
    _, before = ask(address, "/version")
    status, page = ask(address, "/")
    assert status == 200
    assert f'content="{before}"' in page
    make_run(tmp_path / "a", rounds=3)
    make_run(tmp_path / "b", "ditto")
    _, after = ask(address, "/version")
    assert after != before
    _, page = ask(address, "/")
    assert f'content="{after}"' in page
    assert "ditto" in page


def test_nothing_else_is_served(address: str) -> None:
    assert ask(address, "/../a/config.toml")[0] == 404
    assert ask(address, "/config.toml")[0] == 404


def test_other_names_for_this_machine_are_refused(address: str) -> None:
    port = urlsplit(address).port
    assert ask(address, "/", host=f"evil.example:{port}")[0] == 403
    assert ask(address, "/", host=f"localhost:{port}")[0] == 200


def test_many_requests_at_once_are_answered(address: str) -> None:
    answers: list[int] = []
    threads = [
        threading.Thread(target=lambda: answers.append(ask(address, "/version")[0]))
        for _ in range(40)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=20)
    assert answers == [200] * 40


def test_the_last_good_page_stays_when_a_folder_goes(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a")
    page = LivePage([folder])
    before = page.current()
    shutil.rmtree(folder)
    assert page.current() == before


def test_an_unchanged_folder_is_not_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = LivePage([make_run(tmp_path / "a")])
    monkeypatch.setattr("parsifl.report.live.render", None)
    assert "fedavg" in page.current()


def test_watching_what_is_no_run_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is not a run directory"):
        serve([tmp_path], print)
