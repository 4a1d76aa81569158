"""From nothing to a report: a new algorithm, checked, run beside two known ones, and compared.

The algorithm is docs/skeleton.py. Uses the digits that ship with scikit-learn.

    python examples/new_algorithm.py [folder]
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import parsifl
from parsifl import data
from parsifl.experiment import problem_for
from parsifl.report import build
from parsifl.testing.conformance import check_algorithm

DOCS = Path(__file__).parents[1] / "docs"
ROUNDS = 20


def main(folder: Path) -> None:
    """Check the method, run three, write the report."""
    sys.path.insert(0, str(DOCS))
    method = importlib.import_module("skeleton").FedShrink
    check_algorithm(method(lr=0.1, steps=2, batch=4))
    print("FedShrink keeps every promise")

    clients = data.prepare("digits", clients=10, partition="dirichlet:alpha=0.3")
    problem = problem_for("mlp", clients)
    methods = {
        "local": parsifl.get("local", lr=0.1),
        "fedavg": parsifl.get("fedavg", lr=0.1),
        "fedshrink": method(lr=0.1, lam=0.002),
    }
    for name, chosen in methods.items():
        run = parsifl.simulate(
            chosen, problem, clients, ROUNDS, folder=folder / name, evaluate_every=5
        )
        personal = run.summary()["personal"]["mean"]
        print(f"{name:<10} personal accuracy {personal:.3f}, {run.bytes_up:>9,} bytes up")
    page = build([folder / name for name in methods], folder / "report.html")
    print(f"the report is in {page}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/new-algorithm"))
