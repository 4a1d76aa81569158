"""Lost replies and silent nodes cost little: what a link and an exchange do about them."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.flower.inprocess import Answer, InProcess, fields
from tests.flower.test_server import experiment

from parsifl.flower import serverapp
from parsifl.flower.message import Envelope, Replies, Requests, pack
from parsifl.flower.serverapp import GridLink


class Clock:
    """A clock that only sleeping moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1e9
        for name in ("time", "monotonic"):
            monkeypatch.setattr(time, name, lambda: self.now)
        monkeypatch.setattr(time, "sleep", self.sleep)

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Grid:
    """Flower's grid: node i replies after `delays[i]` seconds; the first `lost` replies are lost.

    A node works on one message after the other.
    """

    def __init__(self, clock: Clock, delays: Sequence[float]) -> None:
        self._clock, self.delays = clock, list(delays)
        self._numbers = itertools.count()
        self.lost: dict[int, int] = {}
        self.gone: set[int] = set()
        self.asked: list[int] = []
        self._ready: dict[str, tuple[float, int]] = {}
        self._busy: dict[int, float] = {}

    def get_node_ids(self) -> list[int]:
        return [node for node in range(len(self.delays)) if node not in self.gone]

    def push_messages(self, messages: Iterable[Any]) -> list[str]:
        names = []
        for message in messages:
            node, name = message.metadata.dst_node_id, str(next(self._numbers))
            names.append(name)
            self.asked.append(node)
            begin = max(self._clock.now, self._busy.get(node, 0.0))
            self._busy[node] = begin + self.delays[node]
            if self.lost.get(node, 0) > 0:
                self.lost[node] -= 1
            else:
                self._ready[name] = (self._busy[node], node)
        return names

    def pull_messages(self, names: Iterable[str]) -> list[Any]:
        found = []
        for name in list(names):
            moment, node = self._ready.get(name, (float("inf"), 0))
            if moment <= self._clock.now:
                del self._ready[name]
                data = SimpleNamespace(reply_to_message_id=name, src_node_id=node)
                found.append(
                    SimpleNamespace(
                        metadata=data, content=pack(Envelope()), has_error=lambda: False
                    )
                )
        return found


@pytest.fixture(autouse=True)
def _messages(monkeypatch: pytest.MonkeyPatch) -> None:
    def message(_: object, dst_node_id: int, **__: object) -> SimpleNamespace:
        return SimpleNamespace(metadata=SimpleNamespace(dst_node_id=dst_node_id))

    monkeypatch.setattr(serverapp, "Message", message)  # Flower's needs a run


def ask(grid: Grid, link: GridLink, timeout: float = 600.0) -> Replies:
    return link.ask({node: ("train", Envelope()) for node in range(len(grid.delays))}, timeout)


def test_a_lost_reply_is_requested_again(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    grid = Grid(clock, [3.0] * 16)
    grid.lost = {7: 1}
    start = clock.now
    assert len(ask(grid, GridLink(grid))) == 16  # type: ignore[arg-type]
    assert clock.now - start < 60
    assert sorted(grid.asked) == sorted([*range(16), 7])


def test_a_node_is_asked_once_more_and_only_while_it_is_connected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(monkeypatch)
    grid = Grid(clock, [3.0] * 4)
    grid.lost = {1: 9, 2: 9}
    grid.gone = {2}
    assert sorted(ask(grid, GridLink(grid))) == [0, 3]  # type: ignore[arg-type]
    assert sorted(grid.asked) == [0, 1, 1, 2, 3]


def test_long_work_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    grid = Grid(clock, [100.0, 110.0, 120.0, 280.0])
    ask(grid, GridLink(grid))  # type: ignore[arg-type]
    assert grid.asked == [0, 1, 2, 3]
    grid = Grid(clock, [500.0, 550.0])
    ask(grid, GridLink(grid))  # type: ignore[arg-type]
    assert grid.asked == [0, 1]
    grid = Grid(clock, [1.0, 100.0, 110.0, 120.0])  # one fast node is not the median
    ask(grid, GridLink(grid))  # type: ignore[arg-type]
    assert grid.asked == [0, 1, 2, 3]


def test_a_slow_node_works_twice_at_most_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    grid = Grid(clock, [3.0, 3.0, 3.0, 40.0])
    link = GridLink(grid)  # type: ignore[arg-type]
    for _ in range(5):
        assert len(ask(grid, link)) == 4
    assert grid.asked.count(3) == 6


class Polled(InProcess):
    """Clients reply after a second; those in `silent` never do. `enough` is called every second."""

    clock: Clock
    silent: set[int]

    def ask(
        self, requests: Requests, timeout: float, enough: Callable[[Replies], bool] | None = None
    ) -> Replies:
        end = self.clock.now + timeout
        self.clock.now += 1
        answering = {n: r for n, r in requests.items() if self.clients[n] not in self.silent}
        found = super().ask(answering, timeout)
        while len(found) < len(requests) and self.clock.now < end:
            if enough is not None and enough(found):
                break
            self.clock.now += 1
        return found


def polled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Any) -> Polled:
    link = Polled(experiment("fedavg", rounds=6, evaluate_every=0), tmp_path / "s", fault)
    link.clock, link.silent = Clock(monkeypatch), set()
    return link


def test_a_silent_node_costs_one_timeout_and_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts: list[float] = []

    def fault(kind: str, client: int, _: Envelope, answer: Callable[[], Envelope]) -> Answer:
        if kind == "train" and client == 0:
            starts.append(link.clock.now)
            # from the next round on
            link.silent = {2: {1}, 4: set[int](), 5: {1}}.get(len(starts), link.silent)
        return answer()

    link = polled(tmp_path, monkeypatch, fault)
    records = link.run(tmp_path / "run", timeout=600.0)
    assert [list(record["dropped"]) for record in records] == [[], [], [1], [1], [], [1]]
    lengths = [end - start for start, end in itertools.pairwise([*starts, link.clock.now])]
    # the last round: the node had come back, so it is missed again
    assert [length > 590 for length in lengths] == [False, False, True, False, False, True]
    assert all(length > 590 or length < 10 for length in lengths)


def test_a_node_that_waits_for_release_is_not_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first: dict[int, float] = {}

    def fault(kind: str, client: int, asked: Envelope, answer: Callable[[], Envelope]) -> Answer:
        if kind != "train" or client != 1:
            return answer()
        start = first.setdefault(fields(asked)["round"], link.clock.now)
        if link.clock.now < start + 100:
            return Envelope('{"error": "Unreleased", "rule": "release", "client": 1}')
        return answer()

    link = polled(tmp_path, monkeypatch, fault)
    records = link.run(tmp_path / "run", timeout=600.0, quorum=1.0)
    assert [record["trained"] for record in records] == [4] * 6
