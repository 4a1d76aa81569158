"""Kill and damage runs at random: `python tools/inject_faults.py --kills 500 --corruptions 500`.

Half of them use the local pool and half the in-process message pool. A killed run must end with
bit-identical results. A damaged one may also stop with an error, or note what was lost. Any other
outcome is printed with its seed (`--seed` repeats it), and the exit code is 1.
"""

from __future__ import annotations

import argparse
import logging
import random
import sys
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.fuzz.faulted import Local, Messages, Scenario

RIGHT = ("same", "error", "noted")


def attack(scenario: Scenario, kills: int, corruptions: int, first: int) -> int:
    """Inject faults into one kind of run; return how many were silent, lost work or raised."""
    started, bad = time.perf_counter(), 0
    outcomes: Counter[str] = Counter()
    for seed in range(first, first + kills):
        fault = scenario.kill(seed)
        if fault:
            bad += 1
            print(f"kill, seed {seed}: {fault}"[:600], flush=True)
    for seed in range(first, first + corruptions):
        outcome, done = scenario.corrupt(seed)
        outcomes[outcome if outcome in RIGHT else "bad"] += 1
        if outcome not in RIGHT:
            bad += 1
            print(f"corruption, seed {seed}: {done}: {outcome}"[:600], flush=True)
    told = ", ".join(f"{outcomes[name]} {name}" for name in sorted(outcomes))
    print(
        f"{scenario.name}: {kills} kills and {corruptions} corruptions ({told}) from seed {first} "
        f"in {time.perf_counter() - started:.0f} s: {bad} bad",
        flush=True,
    )
    return bad


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--corruptions", type=int, default=100)
    parser.add_argument("--seed", type=int, default=None)
    given = parser.parse_args()
    first = random.SystemRandom().randrange(2**32) if given.seed is None else given.seed
    logging.getLogger("parsifl").setLevel(logging.CRITICAL)
    halves = given.kills // 2, given.corruptions // 2
    rest = given.kills - halves[0], given.corruptions - halves[1]
    bad = attack(Local(), *halves, first) + attack(Messages(), *rest, first)
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
