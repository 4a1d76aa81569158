# %% [markdown]
"""# A new algorithm in 35 lines: define it, check it, and compare it with two others.

Clients train as in FedAvg, but send only the largest entries of the change. The code handles
neither bytes nor batches of clients: the codec omits zeros, and the engine does the rest. The
example uses the digits that ship with scikit-learn.

    python examples/new_algorithm.py
"""

# %%
from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, final

import torch
from torch import Tensor

import parsifl
from parsifl import data
from parsifl.algorithms._bases.averaging import Averaging, Mean
from parsifl.algorithms._bases.local_sgd import LocalSgd
from parsifl.core.algorithm import ClientUpdate
from parsifl.core.batching import ClientRoundData
from parsifl.core.config import Fraction
from parsifl.core.keys import Key
from parsifl.core.problem import Params, Problem
from parsifl.engine.experiment import problem_for
from parsifl.report import build
from parsifl.solvers.sgd import SgdConfig, sgd
from parsifl.testing.conformance import check_algorithm

FOLDER = Path("runs/new-algorithm")
ROUNDS = 20

# %% [markdown]
# ## Define the algorithm
# An algorithm is a frozen dataclass: its fields are its settings, its methods are pure.
# `client_update` is written for one client; the engine runs it for many at once.


# %%
def largest(change: Tensor, share: float) -> Tensor:
    """Keep the entries of largest magnitude, and set the others to zero."""
    count = max(1, int(share * change.numel()))
    least = change.abs().flatten().topk(count).values[-1]
    return torch.where(change.abs() >= least, change, 0.0)


@final
@dataclass(frozen=True)
class FedTop(LocalSgd, Averaging[Problem, None]):
    r"""Local SGD; a client sends the largest entries of its change.

    .. math:: \Delta_i = \operatorname{top}(w_i - w), \qquad w \leftarrow w + \sum_i p_i \Delta_i

    with p_i by `weighting`. Sent: the model down, a `share` of each tensor up. Kept: nothing.
    """

    cites: ClassVar[str] = "An example; see Aji and Heafield, Sparse Communication, EMNLP 2017"
    share: Fraction = 0.05

    def client_update(
        self,
        problem: Problem,
        received: Params,
        state: None,  # noqa: ARG002 - the contract names it
        data: ClientRoundData,
    ) -> ClientUpdate[None, Params]:
        """Train, and return the largest changes."""
        trained = sgd(problem, received, data["train"], SgdConfig(self.learning_rate(data.round)))
        return ClientUpdate(
            None, {name: largest(trained[name] - received[name], self.share) for name in received}
        )

    def aggregate(self, problem: Problem, server: Params, total: Mean, key: Key) -> Params:  # noqa: ARG002 - the contract
        """Add the mean change."""
        return {name: server[name] + change for name, change in total.value().items()}


# %% [markdown]
# ## Check it
# The conformance suite tests purity, batched against sequential execution, resumption, the wire
# format, that uploads contain no personal state, and more.

# %%
check_algorithm(FedTop(lr=0.1, local_steps=2, batch_size=4))
print("FedTop passes every check")

# %% [markdown]
# ## Compare it with two known algorithms

# %%
clients = data.prepare("digits", clients=10, partition="dirichlet:alpha=0.3")
problem = problem_for("mlp", clients)
algorithms = {
    "local": parsifl.get("local", lr=0.1),
    "fedavg": parsifl.get("fedavg", lr=0.1),
    "fedtop": FedTop(lr=0.1),
}
for name, algorithm in algorithms.items():
    run = parsifl.simulate(
        algorithm, problem, clients, ROUNDS, run_dir=FOLDER / name, evaluate_every=5, resume=True
    )
    personal = run.summary()["personal"]["mean"]
    print(f"{name:<10} personal accuracy {personal:.3f}, {run.bytes_up:>9,} bytes up")

# %%
page = build([FOLDER / name for name in algorithms], FOLDER / "report.html")
print(f"the report is in {page}")
