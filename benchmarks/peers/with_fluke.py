"""A workload in fluke."""

from __future__ import annotations

import time
from typing import Any

import torch

# fluke imports torchvision, whose compiled operators do not load with another build of torch;
# they are not used here, but the import requires them
_OPERATORS = torch.library.Library("torchvision", "DEF")
for _name in ("nms", "qnms"):
    _OPERATORS.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

import workload  # noqa: E402
from fluke import DDict, FlukeENV  # noqa: E402
from fluke.algorithms.fedavg import FedAVG  # noqa: E402
from fluke.data import DataSplitter, DummyDataContainer, FastDataLoader  # noqa: E402


class Clock:
    """Records the end times of rounds."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def end_round(self, **_: Any) -> None:
        """Record the time."""
        self.ends.append(time.perf_counter())


def main() -> None:
    """Run federated averaging without evaluation."""
    loaders = [
        FastDataLoader(x, y, num_labels=10, batch_size=workload.BATCH, shuffle=True)
        for x, y in workload.data()
    ]
    nobody: list[Any] = [None] * workload.CLIENTS
    container = DummyDataContainer(loaders, nobody, None, 10)
    settings = DDict(
        model=workload.module(),
        client=DDict(
            batch_size=workload.BATCH,
            local_epochs=1,
            loss="CrossEntropyLoss",
            optimizer=DDict(name="SGD", lr=workload.RATE),
            scheduler=DDict(name="StepLR", step_size=1, gamma=1.0),
        ),
        server=DDict(weighted=True),
    )
    FlukeENV().set_seed(0)
    algorithm = FedAVG(workload.CLIENTS, DataSplitter(container), settings)
    clock = Clock()
    algorithm.attach([clock])
    algorithm.run(workload.ROUNDS + 1, workload.COHORT / workload.CLIENTS)
    workload.tell(clock.ends)


if __name__ == "__main__":
    main()
