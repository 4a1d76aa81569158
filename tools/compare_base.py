"""Compare the results of another commit with those of the working tree, bit for bit.

Both run every algorithm on the digits data on this machine, only through the command line, so
that interfaces may differ. It compares the tensors of the final checkpoint (server and client
states) as a multiset, and `metrics.jsonl` without timings, key by key.

    python tools/compare_base.py REF [ALGORITHM ...]
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

LINEAR = ("fedht", "fediterht", "distributediht", "fedgradmp", "inexactfedgradmp", "fedbestsubset")
TIMINGS = ("seconds", "simulated_seconds", "executor")
RENAMED = {"info": "metrics", "fallbacks": "notes", "unjudged": "unevaluated"}
EXECUTORS = {"loop": "sequential", "auto": "auto"}
"""The executors, and their names in earlier versions (`--engine`)."""

# Runs inside either version: arguments are (output directory, algorithm, ...).
DRIVER = """
import os, sys
from parsifl.cli import main
out, devices = sys.argv[1:3]
executors, linear, names = (text.split(",") for text in sys.argv[3:6])
if names == [""]:
    try:
        from parsifl.core import registry
    except ImportError:
        from parsifl import registry
    names = sorted(registry.algorithms())
for name in names:
    for executor in executors:
        option, value = executor.split("=")
        sys.argv = ["parsifl", "run", name, "--data", "digits", "--clients", "7", "--rounds", "3",
            "--participation", "0.7", "--seed", "2", "--devices", devices,
            "--partition", "dirichlet:alpha=0.5", option, value, "--json",
            "--model", "glm" if name in linear else "mlp:hidden=16",
            "--out", os.path.join(out, value.replace("sequential", "loop"), name)]
        try:
            main()
        except SystemExit as end:
            if end.code:
                print("FAILED", name, file=sys.stderr)
"""


def run(source: Path, out: Path, names: Sequence[str]) -> None:
    """Run all algorithms with the code in `source`."""
    today = (source / "src/parsifl/core").is_dir()
    executors = [
        f"--executor={new}" if today else f"--engine={old}" for new, old in EXECUTORS.items()
    ]
    environment = {**os.environ, "PYTHONPATH": str(source / "src"), "PYTHONWARNINGS": "ignore"}
    devices = "local_steps=10+20" if today else "steps=10+20"
    words = [str(out), devices, ",".join(executors), ",".join(LINEAR), ",".join(names)]
    command = [sys.executable, "-c", DRIVER, *words]
    subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)


def tensors(run_dir: Path) -> Counter[str]:
    """Return the digests of all tensors of the last checkpoint, each with its count."""
    from safetensors.numpy import load_file

    checkpoints = run_dir / "checkpoint"
    latest = (checkpoints / "LATEST").read_text().split()[0]
    state = json.loads((checkpoints / latest / "state.json").read_text())
    clients = state.get("clients") or state.get("pool", {}).get("segments", [])
    files = [checkpoints / latest / "server.safetensors"]
    newest: dict[str, Any] = {}
    for segment in clients:
        newest.update(load_file(checkpoints / "clients" / segment[0]))
    values = [*load_file(files[0]).values(), *newest.values()]
    return Counter(
        hashlib.sha256(f"{value.dtype}{value.shape}".encode() + value.tobytes()).hexdigest()
        for value in values
    )


def records(run_dir: Path) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl without fields that may differ."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [
        {
            RENAMED.get(k, k): v
            for k, v in line.items()
            if k not in TIMINGS and v not in ({}, [], "")
        }
        for line in lines
    ]


def compare(base: Path, ours: Path) -> list[str]:
    """Return the differences between two run directories."""
    found = []
    if tensors(base) != tensors(ours):
        found.append("states")
    for before, after in zip(records(base), records(ours), strict=True):
        shared = before.keys() & after.keys()
        found += [
            f"round {before['round']} {key}" for key in sorted(shared) if before[key] != after[key]
        ]
        found += [
            f"round {before['round']} {key} missing" for key in sorted(before.keys() - after.keys())
        ]
    return found


def main() -> int:
    """Compare and print one line per algorithm and executor."""
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    ref, names = sys.argv[1], sys.argv[2:]
    root = Path(__file__).resolve().parents[1]
    failures = 0
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder) / "base"
        subprocess.run(
            ["git", "worktree", "add", "--detach", str(base), ref],
            cwd=root,
            check=True,
            capture_output=True,
        )
        try:
            run(base, Path(folder) / "before", names)
            run(root, Path(folder) / "after", names)
        finally:
            subprocess.run(
                ["git", "worktree", "remove", "--force", str(base)], cwd=root, check=True
            )
        for before in sorted((Path(folder) / "before").glob("*/*")):
            label = f"{before.name} ({before.parent.name})"
            after = Path(folder) / "after" / before.parent.name / before.name
            try:
                different = compare(before, after)
            except OSError as error:
                different = [f"no result: {error}"]
            failures += bool(different)
            print(f"{label:32} {'; '.join(different[:4]) or 'equal'}")
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
