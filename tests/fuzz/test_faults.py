"""Random kills, corruptions and misled messages; `tools/inject_faults.py` runs more.

Seeds are new in every run and part of every failure. PARSIFL_FAULTS repeats one.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
from tests.fuzz.faulted import Local, Messages, Scenario
from tests.support.faults import MESSAGE_FAULTS, Disk, clock_jumps

FIRST = int(os.environ.get("PARSIFL_FAULTS") or random.SystemRandom().randrange(2**32))
SCENARIOS: dict[str, Scenario] = {"local": Local(), "messages": Messages()}
RIGHT = {"same", "error", "noted"}
CASES = [("local", number) for number in range(20)]
CASES += [("messages", number) for number in range(10)]  # each takes three times as long


@pytest.fixture(params=list(SCENARIOS))
def scenario(request: pytest.FixtureRequest) -> Scenario:
    return SCENARIOS[request.param]


@pytest.mark.parametrize(("name", "number"), CASES)
def test_a_killed_run_ends_with_the_same_bits(name: str, number: int) -> None:
    fault = SCENARIOS[name].kill(FIRST + number)
    assert not fault, f"seed {FIRST + number}: {fault}"


@pytest.mark.parametrize(("name", "number"), CASES)
def test_damage_is_never_silent(name: str, number: int) -> None:
    outcome, done = SCENARIOS[name].corrupt(FIRST + number)
    assert outcome in RIGHT, f"seed {FIRST + number}: {done}: {outcome}"


def test_every_write_of_a_run_may_be_changed_by_the_disk(tmp_path: Path) -> None:
    """A checksum of what was read back would agree with what the disk made of it."""
    local = SCENARIOS["local"]
    writes = [at for at in range(local.operations) if at % 6 == FIRST % 6]
    for at in writes:
        folder = tmp_path / str(at)
        with Disk(folder, at, "flip", FIRST):
            local.run(folder)
        latest = folder / "run" / "checkpoint" / "LATEST"
        lines = latest.read_bytes().splitlines(keepends=True)
        latest.write_bytes(lines[-1])  # as if it had been killed before the last round
        outcome = local.resumed(folder)
        assert outcome in RIGHT, f"seed {FIRST}, operation {at}: {outcome}"


@pytest.mark.parametrize("number", range(6))
def test_messages_that_go_astray_change_nothing_in_silence(number: int) -> None:
    messages = SCENARIOS["messages"]
    assert isinstance(messages, Messages)
    fault, planted = messages.mislead(FIRST + number)
    assert not fault, f"seed {FIRST + number}: {fault} after {planted}"


def test_every_fault_of_messages_is_planted() -> None:
    messages = SCENARIOS["messages"]
    assert isinstance(messages, Messages)
    seen = {fault for seed in range(3) for fault, _, _ in messages.mislead(seed)[1]}
    assert seen == set(MESSAGE_FAULTS)


def test_clocks_that_jump_change_nothing(scenario: Scenario, tmp_path: Path) -> None:
    assert scenario.operations
    with clock_jumps(FIRST):
        scenario.run(tmp_path)
    assert scenario.same(tmp_path), f"seed {FIRST}"


def test_a_disk_counts_and_fails_where_it_is_told(tmp_path: Path) -> None:
    with Disk(tmp_path) as disk:
        (tmp_path / "a").write_bytes(b"12345678")
        (tmp_path / "a").rename(tmp_path / "b")
    assert disk.log == ["write a", "rename a"]
    with pytest.raises(OSError, match="No space left"), Disk(tmp_path, 0, "full"):
        (tmp_path / "c").write_bytes(b"1" * 1000)
    with Disk(tmp_path, 0, "flip"):
        (tmp_path / "c").write_bytes(b"\x00" * 1000)
    content = (tmp_path / "c").read_bytes()
    assert sum(byte.bit_count() for byte in content) == 1
    with Disk(tmp_path, 0, "short"):
        (tmp_path / "c").write_bytes(b"1" * 1000)
    assert len((tmp_path / "c").read_bytes()) < 1000
