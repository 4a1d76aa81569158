"""Fuzz the messages between server and clients: `python tools/fuzz_messages.py --count 1000000`.

Every mutant must be accepted or rejected with a reason; a mutant that raises another exception is
printed with its seed. With `--atheris` (after `pip install atheris`) the search starts from valid
messages and is guided by coverage.
"""

from __future__ import annotations

import argparse
import logging
import random
import resource
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).parents[1]))

if TYPE_CHECKING:
    from tests.fuzz.mutants import Targets

    from parsifl.flower.message import Envelope


def attack(targets: Targets, seed: int) -> tuple[str, float]:
    """Try one mutant; return the outcome and the seconds of CPU time."""
    from tests.fuzz.mutants import MESSAGES, mutate

    draw = random.Random(seed)
    kind, direction = draw.choice(MESSAGES)
    other = targets.corpus[draw.choice(MESSAGES)]
    mutant = mutate(targets.corpus[kind, direction], other, draw)
    started = time.thread_time()
    found = targets.outcome(kind, direction, mutant)
    spent = time.thread_time() - started
    return f"{kind} {direction} {'accepted' if found == 'accepted' else 'rejected'}", spent


def run(count: int, first: int) -> int:
    """Try many mutants; return how many are neither accepted nor rejected."""
    from tests.fuzz.mutants import Targets

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
        f"slowest {slowest[0]:.3f} s of CPU (seed {slowest[1]}); memory grew by {grown:.0f} MB"
    )
    return bad


def packed(number: int, envelope: Envelope) -> bytes:
    """Return a message as bytes: its number, each part with its length, the text."""
    parts = b"".join(len(part).to_bytes(3, "big") + part for part in envelope.parts.values())
    return bytes([number]) + parts + envelope.text.encode("utf-8", "surrogatepass")


def unpacked(data: bytes, corpus: list[Envelope]) -> tuple[int, Envelope]:
    """Return the message that bytes encode; any bytes encode one."""
    from parsifl.flower.message import Envelope

    number, rest = (data[0] if data else 0) % len(corpus), data[1:]
    parts = {}
    for name in corpus[number].parts:
        size = int.from_bytes(rest[:3], "big")
        parts[name], rest = rest[3 : 3 + size], rest[3 + size :]
    return number, Envelope(rest.decode("utf-8", "replace"), parts)


def run_atheris(count: int) -> None:
    """Let coverage choose texts and parts; the first inputs are valid messages."""
    import atheris

    with atheris.instrument_imports(include=["parsifl.flower", "parsifl.wire", "parsifl.core"]):
        from tests.fuzz.mutants import MESSAGES, Targets

    logging.getLogger("parsifl").setLevel(logging.CRITICAL)  # every mutant would be logged
    targets = Targets()
    corpus = [targets.corpus[message] for message in MESSAGES]

    def one(data: bytes) -> None:
        number, envelope = unpacked(data, corpus)
        targets.outcome(*MESSAGES[number], envelope)

    with tempfile.TemporaryDirectory(prefix="parsifl-corpus-") as folder:
        for number, envelope in enumerate(corpus):
            Path(folder, str(number)).write_bytes(packed(number, envelope))
        limits = [f"-runs={count}", "-max_len=8192", "-timeout=10", "-rss_limit_mb=4096"]
        atheris.Setup([sys.argv[0], *limits, folder], one)
        atheris.Fuzz()


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--atheris", action="store_true")
    chosen = parser.parse_args()
    if chosen.atheris:
        run_atheris(chosen.count)
        return
    seed = random.SystemRandom().randrange(2**40) if chosen.seed is None else chosen.seed
    print(f"seeds {seed} to {seed + chosen.count - 1}", flush=True)
    sys.exit(1 if run(chosen.count, seed) else 0)


if __name__ == "__main__":
    main()
