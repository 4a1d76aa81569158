"""From nothing to a report: a new algorithm, checked, run beside two known ones, and compared.

The algorithm is docs/skeleton.py. Uses the digits that ship with scikit-learn.

    python examples/new_algorithm.py [folder]
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import parsifl
from parsifl import data
from parsifl.experiment import problem_for
from parsifl.report import build
from parsifl.testing.conformance import check_algorithm

SKELETON = Path(__file__).parents[1] / "docs" / "skeleton.py"
ROUNDS = 20


def main(folder: Path) -> None:
    """Check the method, run three, write the report."""
    method = load(SKELETON).FedShrink
    check_algorithm(method(lr=0.1, steps=2, batch=4))
    print("FedShrink keeps every promise")

    clients = data.prepare("digits", clients=10, partition="dirichlet:alpha=0.3")
    problem = problem_for("mlp", clients)
    methods = {
        "local": parsifl.get("local", lr=0.1),
        "fedavg": parsifl.get("fedavg", lr=0.1),
        "fedshrink": method(lr=0.1, lam=0.01),
    }
    for name, chosen in methods.items():
        run = parsifl.simulate(
            chosen, problem, clients, ROUNDS, folder=folder / name, evaluate_every=5
        )
        personal = run.summary()["personal"]["mean"]
        print(f"{name:<10} personal accuracy {personal:.3f}, {run.bytes_up:>9,} bytes up")
    page = build([folder / name for name in methods], folder / "report.html")
    print(f"the report is in {page}")


def load(file: Path) -> ModuleType:
    """Import a file that is in no package."""
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module  # a dataclass looks its module up by name
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/new-algorithm"))
