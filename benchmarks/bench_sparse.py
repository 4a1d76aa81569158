"""Sparse learning: FedGradMP and a NumPy loop, a CSR round and its bare products.

FedGradMP: recovery of 10 of 1000 coefficients, the whole run and local work alone. CSR: Fed-HT
with K steps for each of 100 clients; a round may take five times as long as its sparse products
(0.2 times as fast). A round includes local work and measuring uploads, but not encoding them. The
bound is the time of reading every mini-batch once (FedGradMP), or twice (X v and X' r).

``python benchmarks/bench_sparse.py [fedgradmp] [csr] [FIGURES.json]``
"""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import torch
from timing import Row, at_most, chosen, interleaved, marked, moved, progress, report, row

from parsifl import GLM, ClientData, simulate, wire
from parsifl.algorithms.fedgradmp import FedGradMP
from parsifl.algorithms.fedht import FedHT
from parsifl.core.keys import Key
from parsifl.data import load
from parsifl.engine import executors
from parsifl.engine.batch_sampler import BatchSampler, Infos
from parsifl.engine.executors import Task, choose_executor
from parsifl.engine.pool import ClientProgram
from parsifl.engine.threads import single_threaded

FASTER, ERROR = 2.5, 1e-14  # targets of FedGradMP
PRODUCTS, MEMORY = 5, 2  # at most, of a round on CSR data: times its products, times its data
CLIENTS, ROWS, WIDTH, TAU, BATCH, STEPS, ROUNDS = 30, 100, 1000, 10, 40, 3, 4


def numpy_loop(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Run FedGradMP as a plain loop over clients, with lstsq."""
    model, draw = np.zeros(WIDTH), np.random.default_rng(0)
    for _ in range(ROUNDS):
        mean = np.zeros(WIDTH)
        for i in range(CLIENTS):
            mine = model.copy()
            for _ in range(STEPS):
                rows = draw.permutation(ROWS)[:BATCH]
                proxy = x[i][rows].T @ (x[i][rows] @ mine - y[i][rows])
                best = np.argsort(-np.abs(proxy))[: 2 * TAU]
                merged = np.union1d(best, np.flatnonzero(mine))
                z = np.linalg.lstsq(x[i][:, merged], y[i], rcond=None)[0]
                top = np.argsort(-np.abs(z))[:TAU]
                mine = np.zeros(WIDTH)
                mine[merged[top]] = z[top]
            mean += mine / CLIENTS
        top = np.argsort(-np.abs(mean))[:TAU]
        model = np.zeros(WIDTH)
        model[top] = mean[top]
    return model


def pursuit(turns: int = 9) -> list[Row]:
    """Compare the recovery of section V-C with the NumPy loop."""
    made: Any = load("fedgradmp", alpha=1.0, clients=CLIENTS)
    x, y = made.x.reshape(CLIENTS, ROWS, WIDTH), made.y.reshape(CLIENTS, ROWS)
    data = ClientData.of(list(zip(x, y, strict=True)), test=0.0)
    problem = GLM(WIDTH, "squared-half")

    method = FedGradMP(tau=TAU, local_steps=STEPS, batch_size=BATCH)
    shards, infos = BatchSampler(data, problem), Infos(data)
    down = {"coef": torch.from_numpy(made.truth) * 0.9}
    tasks = [
        [
            Task(i.id, (down, None, shards.draw(i.id, method.batches(i, at), Key(0, at))))
            for i in infos
        ]
        for at in range(ROUNDS)
    ]
    executor, block = choose_executor("auto", problem)

    def local() -> None:
        for round_tasks in tasks:
            executors.run(ClientProgram(method, problem), round_tasks, executor, block)

    def whole() -> np.ndarray:
        found = simulate(method, problem, data, ROUNDS, evaluate_every=0)
        return found.model.params["coef"].numpy()

    error = float(np.linalg.norm(whole() - made.truth) / np.linalg.norm(made.truth))
    candidates = {"NumPy loop": lambda: numpy_loop(x, y), "whole run": whole, "local work": local}
    found = interleaved(candidates, turns)
    loop = found.pop("NumPy loop")
    workload = f"FedGradMP, {CLIENTS} clients, {ROUNDS} rounds"
    bound = moved(ROUNDS * STEPS * CLIENTS * BATCH * x[0, 0].nbytes)
    against, note = "NumPy with lstsq", f"relative error {error:.1e}"
    rounds, training = (
        row(workload, found[name], loop.median, against, bound, note)
        for name in ("whole run", "local work")
    )
    return [marked(rounds, FASTER, at_most(ERROR, error, "relative error")), training]


def text(steps: int, turns: int = 3) -> list[Row]:
    """Compare a Fed-HT round on CSR data with the sparse products that it contains.

    Also prints how long measuring the uploads takes, and how long encoding them would take in a
    deployment.
    """
    dataset: Any = load("text-like-e2006")
    parts = np.array_split(np.arange(len(dataset.y)), 100)
    made = [(dataset.x[rows], dataset.y[rows]) for rows in parts]
    columns = dataset.x.shape[1]
    data: Any = ClientData.of(made, test=0.0)
    method, problem = FedHT(lr=1e-3, batch_size=20, local_steps=steps, tau=200), GLM(columns)
    shards, infos = BatchSampler(data, problem), Infos(data)
    drawn = [shards.draw(i.id, method.batches(i, 0), Key(0)) for i in infos]
    batches = [shard["train"] for shard in drawn]
    matrices = [[b.x.matrix[index.numpy()] for index in b.index] for b in batches]
    model = torch.zeros(columns, dtype=torch.float64)
    model[:200] = 1.0

    def bare() -> None:
        for client in matrices:
            for matrix in client:
                matrix.T @ (matrix @ model.numpy())

    def local() -> list[Any]:
        with single_threaded():  # as in a round
            return [
                method.client_update(problem, {"coef": model}, None, shard).upload
                for shard in drawn
            ]

    uploads = local()

    def sizes() -> None:
        for upload in uploads:
            wire.size(upload)

    def encoding() -> None:
        for upload in uploads:
            wire.encode(upload)

    def rounds() -> None:
        simulate(method, problem, data, 2, evaluate_every=0)

    candidates = {"bare": bare, "local work": local, "sizes of uploads": sizes}
    candidates |= {"encoding them": encoding, "two rounds": rounds}
    found = interleaved(candidates, turns)
    unit = found.pop("bare").median
    size = data.x.data.nbytes + data.x.indices.nbytes + data.x.indptr.nbytes
    tracemalloc.start()
    rounds()
    memory = tracemalloc.get_traced_memory()[1] / size
    tracemalloc.stop()
    workload = f"Fed-HT, {columns:,} CSR columns, K={steps}"
    drawn_bytes = sum(m.data.nbytes + m.indices.nbytes for client in matrices for m in client)
    rows, bound = [], moved(2 * drawn_bytes)
    for name, timing in found.items():
        count = 2 if name == "two rounds" else 1
        reads = name in ("local work", "two rounds")
        least = bound.times(count) if reads else None
        item = row(workload, timing, count * unit, "bare products", least)
        if name == "two rounds":
            less = at_most(MEMORY, memory, "bytes of NumPy for a byte of data")
            item = marked(item, 1 / PRODUCTS, less)
        rows.append(item)
    return rows


def main() -> int:
    """Measure the selected parts."""
    rows = []
    for part in chosen(("fedgradmp", "csr")):
        progress(part)
        rows += pursuit() if part == "fedgradmp" else [*text(3), *text(10)]
    return report(rows, __doc__)


if __name__ == "__main__":
    raise SystemExit(main())
