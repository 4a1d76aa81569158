"""A workload in pfl (pfl-research), PyTorch, simulated backend in one process."""

from __future__ import annotations

import time
from typing import Any

import torch
import workload
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from torch import nn


class Classifier(nn.Module):
    """The model with the loss and the metrics that pfl requires."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = workload.module()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        return self.layers(x)  # type: ignore[no-any-return]  # a module returns anything

    def loss(self, x: torch.Tensor, y: torch.Tensor, is_eval: bool = False) -> torch.Tensor:
        """Return the mean cross-entropy."""
        self.eval() if is_eval else self.train()
        return nn.functional.cross_entropy(self(x), y)

    @torch.no_grad()
    def metrics(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, Any]:
        """Return the loss."""
        return {"loss": Weighted(float(self.loss(x, y, is_eval=True)) * len(y), len(y))}


class Clock(TrainingProcessCallback):  # type: ignore[misc]  # pfl is not here when types are checked
    """Records the end times of rounds."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def after_central_iteration(self, *_: Any, **__: Any) -> tuple[bool, Any]:
        """Record the time."""
        self.ends.append(time.perf_counter())
        return False, Metrics()


def main() -> None:
    """Run federated averaging."""
    data, clock, module = workload.data(), Clock(), Classifier()
    users = FederatedDataset(
        lambda user: Dataset(raw_data=list(data[user])),
        get_user_sampler("minimize_reuse", list(range(workload.CLIENTS))),
    )
    model = PyTorchModel(
        module,
        local_optimizer_create=torch.optim.SGD,
        central_optimizer=torch.optim.SGD(module.parameters(), lr=1.0),
    )
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=workload.ROUNDS + 1,
            evaluation_frequency=10**6,
            train_cohort_size=workload.COHORT,
            val_cohort_size=0,
        ),
        SimulatedBackend(training_data=users, val_data=users),
        model,
        NNTrainHyperParams(
            local_num_epochs=1,
            local_learning_rate=workload.RATE,
            local_batch_size=workload.BATCH,
        ),
        NNEvalHyperParams(local_batch_size=workload.ROWS),
        [clock],
    )
    workload.tell(clock.ends)


if __name__ == "__main__":
    main()
