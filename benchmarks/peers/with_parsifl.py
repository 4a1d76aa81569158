"""A workload in Parsifl: whole rounds with records and byte counts, without evaluation."""

from __future__ import annotations

import time

import parsifl  # first: it makes idle OpenMP threads sleep

import workload  # isort: skip


def main() -> None:
    """Run FedAvg."""
    ends: list[float] = []
    parsifl.simulate(
        parsifl.get(
            "fedavg", lr=workload.RATE, batch_size=workload.BATCH, local_steps=workload.STEPS
        ),
        parsifl.NeuralProblem(workload.module),
        parsifl.ClientData.of([(x, y) for x, y in workload.data()], test=0.0),
        workload.ROUNDS + 1,
        participation=workload.COHORT / workload.CLIENTS,
        evaluate_every=0,
        callbacks=[lambda _: ends.append(time.perf_counter())],
    )
    workload.tell(ends)


if __name__ == "__main__":
    main()
