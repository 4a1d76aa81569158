"""Time a deployed round: `python tools/bench_deployed_round.py --rounds 10 [--no-workers]`.

A SuperLink and SuperNodes run on this machine with TLS and node keys. Every round is evaluated. The
seconds per round are those of the records, without start and end of the deployment; the CPU seconds
are those of all processes, including start and end. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import resource
import tempfile
from statistics import median

from parsifl.engine.experiment import Experiment
from parsifl.flower.cluster import run_on_flower


def computing() -> float:
    """Return the CPU seconds of this process and of finished children."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def measure(chosen: Experiment, *, workers: bool) -> tuple[float, float]:
    """Deploy once; return the seconds and the CPU seconds per round."""
    before = computing()
    with tempfile.TemporaryDirectory() as folder:
        records = run_on_flower(chosen, folder, workers=workers).records
    each = [sum(record.seconds.values()) for record in records]
    print("rounds: " + ", ".join(f"{seconds:.1f}" for seconds in each), "s")
    spent = sum(each)
    return spent / chosen.rounds, (computing() - before) / chosen.rounds


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--algorithm", default="ditto")
    parser.add_argument("--clients", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--no-workers", action="store_true", help="a new process per message")
    given = parser.parse_args()
    chosen = Experiment(given.algorithm, data="digits", clients=given.clients, rounds=given.rounds)
    found = [measure(chosen, workers=not given.no_workers) for _ in range(given.repeat)]
    for wall, cpu in found:
        print(f"{wall:.2f} s per round, {cpu:.1f} s of CPU time per round")
    print(f"median: {median(wall for wall, _ in found):.2f} s per round")


if __name__ == "__main__":
    main()
