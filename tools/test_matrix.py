"""Run the tests that assert bits with one factor of the machine changed at a time.

A factor is a set of environment variables that select instruction sets or a number of threads.
Usage: python tools/test_matrix.py [FACTOR ...], where FACTOR is a part of a name below.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
JOBS = 2
_AVX512 = ("avx512f", "avx512dq", "avx512bw", "avx512vl")  # flags that ATen requires
_VARIED = (
    "MKL_ENABLE_INSTRUCTIONS",
    "MKL_CBWR",
    "ATEN_CPU_CAPABILITY",
    "ONEDNN_MAX_CPU_ISA",
    "PARSIFL_TEST_THREADS",
    "PARSIFL_REPRODUCIBLE",
)


@dataclass(frozen=True)
class Factor:
    """Environment variables, and the processor flags that they require."""

    variables: dict[str, str]
    needs: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Return the variables in shell syntax."""
        return " ".join(f"{name}={value}" for name, value in self.variables.items()) or "(as is)"


FACTORS = (
    Factor({}),
    *(Factor({"MKL_ENABLE_INSTRUCTIONS": each}) for each in ("AVX2", "AVX", "SSE4_2")),
    Factor({"MKL_CBWR": "COMPATIBLE"}),
    Factor({"ATEN_CPU_CAPABILITY": "default"}),
    Factor({"ATEN_CPU_CAPABILITY": "avx2"}, ("avx2", "fma")),
    Factor({"ATEN_CPU_CAPABILITY": "avx512"}, _AVX512),
    Factor({"ONEDNN_MAX_CPU_ISA": "SSE41"}),
    *(Factor({"PARSIFL_TEST_THREADS": each}) for each in ("2", "4")),  # 1 is the default
    Factor(
        {
            "MKL_ENABLE_INSTRUCTIONS": "AVX2",
            "ATEN_CPU_CAPABILITY": "avx2",
            "ONEDNN_MAX_CPU_ISA": "AVX2",
        },
        ("avx2", "fma"),
    ),
)


@dataclass(frozen=True)
class Outcome:
    """The outcome of the tests under one factor."""

    factor: Factor
    status: str  # passed, failed or skipped
    detail: str
    output: str = ""


def processor_flags() -> frozenset[str]:
    """Return the instruction sets of this processor, as reported by Linux."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line.split() for line in lines if line.startswith("flags")), []))


def marked_files() -> list[str]:
    """Return the test files with marked tests, because collecting all files takes longer."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    return [str(file) for file in files if "mark.bits" in file.read_text()]


def run(factor: Factor) -> Outcome:
    """Run the marked tests in their own process."""
    missing = [flag for flag in factor.needs if flag not in processor_flags()]
    if missing:
        return Outcome(factor, "skipped", f"this processor lacks {', '.join(missing)}")
    kept = {name: value for name, value in os.environ.items() if name not in _VARIED}
    command = [sys.executable, "-m", "pytest", "-q", "-m", "bits", "-p", "no:randomly"]
    command += ["-p", "no:cacheprovider", *marked_files()]
    start = time.perf_counter()
    ended = subprocess.run(
        command,
        env={**kept, **factor.variables},
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    summary = next(iter(ended.stdout.splitlines()[-1:]), "no output").strip("= ")
    detail = f"{summary} ({time.perf_counter() - start:.0f} s with start-up)"
    return Outcome(factor, "failed" if ended.returncode else "passed", detail, ended.stdout)


def main(names: Sequence[str]) -> int:
    """Print a line per factor and a summary; return 1 if any failed."""
    chosen = [each for each in FACTORS if not names or any(name in str(each) for name in names)]
    outcomes: list[Outcome] = []
    with ThreadPoolExecutor(JOBS) as pool:
        for outcome in pool.map(run, chosen):
            outcomes.append(outcome)
            print(f"{outcome.status:8s}{outcome.factor}: {outcome.detail}", flush=True)
    for outcome in outcomes:
        if outcome.status == "failed":
            print(f"\n--- {outcome.factor}\n{outcome.output}")
    counts = {
        status: sum(outcome.status == status for outcome in outcomes)
        for status in ("passed", "failed", "skipped")
    }
    print(", ".join(f"{count} {status}" for status, count in counts.items()))
    return 1 if counts["failed"] or not counts["passed"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
