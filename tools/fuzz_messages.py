"""Fuzz the messages between server and clients: `python tools/fuzz_messages.py --count 1000000`.

Every mutant must be accepted or rejected with a reason; a mutant that raises anything else is
printed with the seed that makes it again. With `--atheris` (if it is installed) coverage decides
which bytes are tried.
"""

from __future__ import annotations

import argparse
import logging
import random
import resource
import sys
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.fuzz.mutants import MESSAGES, Targets, mutate

from parsifl.flower.message import Envelope


def attack(targets: Targets, seed: int) -> tuple[str, float]:
    """Try one mutant; return the outcome and the seconds."""
    draw = random.Random(seed)
    kind, direction = draw.choice(MESSAGES)
    other = targets.corpus[draw.choice(MESSAGES)]
    mutant = mutate(targets.corpus[kind, direction], other, draw)
    started = time.perf_counter()
    found = targets.outcome(kind, direction, mutant)
    spent = time.perf_counter() - started
    return f"{kind} {direction} {'accepted' if found == 'accepted' else 'rejected'}", spent


def run(count: int, first: int) -> int:
    """Try many mutants; return the number of those that are neither accepted nor rejected."""
    logging.getLogger("parsifl").setLevel(logging.CRITICAL)  # every mutant would be logged
    targets = Targets()
    for message, envelope in targets.corpus.items():  # fills caches
        targets.outcome(*message, envelope)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    outcomes: Counter[str] = Counter()
    slowest, bad, started = (0.0, -1), 0, time.perf_counter()
    for seed in range(first, first + count):
        try:
            outcome, spent = attack(targets, seed)
        except Exception as error:
            bad += 1
            print(f"seed {seed}: {type(error).__name__}: {error}"[:500], flush=True)
            continue
        outcomes[outcome] += 1
        slowest = max(slowest, (spent, seed))
        if (seed - first + 1) % 50_000 == 0:
            print(f"{seed - first + 1} of {count}, {bad} bad", flush=True)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    for name, number in sorted(outcomes.items()):
        print(f"{name}: {number}")
    print(
        f"{count} mutants from seed {first} in {time.perf_counter() - started:.0f} s: {bad} bad; "
        f"slowest {slowest[0]:.3f} s (seed {slowest[1]}); memory grew by {grown:.0f} MB"
    )
    return bad


def run_atheris(arguments: list[str]) -> None:
    """Let coverage choose texts and parts."""
    import atheris

    logging.getLogger("parsifl").setLevel(logging.CRITICAL)  # every mutant would be logged
    targets = Targets()

    def one(data: bytes) -> None:
        provider = atheris.FuzzedDataProvider(data)
        kind, direction = MESSAGES[provider.ConsumeIntInRange(0, len(MESSAGES) - 1)]
        parts = dict(targets.corpus[kind, direction].parts)
        for name in parts:
            parts[name] = provider.ConsumeBytes(provider.ConsumeIntInRange(0, 400))
        text = provider.ConsumeUnicode(provider.remaining_bytes())
        targets.outcome(kind, direction, Envelope(text, parts))

    atheris.Setup([sys.argv[0], *arguments], one)
    atheris.Fuzz()


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--atheris", action="store_true")
    chosen, rest = parser.parse_known_args()
    if chosen.atheris:
        run_atheris(rest)
        return
    seed = random.SystemRandom().randrange(2**40) if chosen.seed is None else chosen.seed
    print(f"seeds {seed} to {seed + chosen.count - 1}", flush=True)
    sys.exit(1 if run(chosen.count, seed) else 0)


if __name__ == "__main__":
    main()
