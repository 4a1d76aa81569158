"""The readable twin in docs/one_file.py is FedAvg."""

from __future__ import annotations

import torch
from tests.docs_module import docs_module

import parsifl
from parsifl.algorithms.fedavg import FedAvg


def test_the_readable_twin_gives_the_parameters_of_fedavg() -> None:
    one_file = docs_module("one_file")
    model, clients = one_file.example()
    trained = one_file.fedavg(model, clients, rounds=4, lr=0.5, steps=5)
    problem = parsifl.NeuralProblem(model, dtype=torch.float64)
    data = parsifl.ClientData.of([(x.numpy(), y.numpy()) for x, y in clients], test=0.0)
    algorithm = FedAvg(lr=0.5, local_steps=5, batch_size=len(clients[0][0]))
    run = parsifl.simulate(algorithm, problem, data, rounds=4, evaluate_every=0)
    for name, parameter in trained.named_parameters():
        assert torch.allclose(run.server[name], parameter.detach(), rtol=1e-12, atol=1e-14)
    assert one_file.accuracy(trained, clients) > one_file.accuracy(model, clients)
