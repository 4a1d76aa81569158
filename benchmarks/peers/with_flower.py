"""A workload in Flower's simulation: one processor for each client's worker."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import torch
import workload
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from torch import nn

client_app, server_app = ClientApp(), ServerApp()
ENDS: list[float] = []
DATA: list[Any] = []


@client_app.train()
def train(message: Message, context: Context) -> Message:
    """Train one epoch."""
    torch.set_num_threads(1)
    if not DATA:  # once for each worker
        DATA.extend(workload.data())
    x, y = DATA[int(context.node_config["partition-id"])]
    model = workload.module()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=workload.RATE)
    for rows in torch.randperm(workload.ROWS).split(workload.BATCH):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
        optimizer.step()
    content = {
        "arrays": ArrayRecord(model.state_dict()),
        "metrics": MetricRecord({"num-examples": workload.ROWS}),
    }
    return Message(content=RecordDict(content), reply_to=message)


class Timed(FedAvg):  # type: ignore[misc]  # Flower does not tell its types here
    """Records the end times of rounds."""

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
        """Take the mean."""
        found = super().aggregate_train(server_round, replies)
        ENDS.append(time.perf_counter())
        return found


@server_app.main()
def main(grid: Grid, _: Context) -> None:
    """Run federated averaging without evaluation."""
    Timed(
        fraction_train=workload.COHORT / workload.CLIENTS,
        fraction_evaluate=0.0,
        min_train_nodes=workload.COHORT,
        min_available_nodes=workload.CLIENTS,
    ).start(
        grid=grid,
        initial_arrays=ArrayRecord(workload.module().state_dict()),
        num_rounds=workload.ROUNDS + 1,
    )


if __name__ == "__main__":
    run_simulation(
        server_app,
        client_app,
        workload.CLIENTS,
        backend_config={"client_resources": {"num_cpus": 1, "num_gpus": 0.0}},
    )
    workload.tell(ENDS)
