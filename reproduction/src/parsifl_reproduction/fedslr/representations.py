"""How a FedSLR model represents and classifies the rows of its clients: Figure 4 of the paper."""

from __future__ import annotations

from statistics import fmean
from typing import Any

import numpy as np
import torch

from parsifl.core.batching import Rows
from parsifl.core.errors import CapabilityError
from parsifl.core.problem import Params
from parsifl.data import ClientData
from parsifl.engine.batch_sampler import BatchSampler
from parsifl.engine.run import Run
from parsifl.nn.neural import NeuralProblem
from parsifl_reproduction.recipe import Values

PARTS = ("global", "personal")


def representations(problem: NeuralProblem, params: Params, x: torch.Tensor) -> torch.Tensor:
    """Return what the head reads: the last hidden layer."""
    module, head = problem.module, problem.head[0].rpartition(".")[0]
    caught: list[torch.Tensor] = []
    layer = module.get_submodule(head)
    hook = layer.register_forward_pre_hook(lambda _, inputs: caught.append(inputs[0]))
    try:
        torch.func.functional_call(module, params, (x,))
    finally:
        hook.remove()
    return caught[0]


def separation(points: np.ndarray[Any, Any], labels: np.ndarray[Any, Any]) -> float:
    """Return the silhouette of the labels: 1 for well separated classes, 0 for mixed ones."""
    from sklearn.metrics import silhouette_score

    return float(silhouette_score(points, labels))


def swap_head(problem: NeuralProblem, extractor: Params, classifier: Params) -> Params:
    """Return the layers of one model with the head of another."""
    return {
        name: classifier[name] if name in problem.head else value
        for name, value in extractor.items()
    }


def visible(run: Run, data: ClientData) -> Values:
    """Return the mean over all clients of the separation of their classes and of their accuracy.

    Each of the two extractors is combined with each of the two classifiers. Clients whose test rows
    have one label only have no separation.
    """
    problem = run.model.problem
    if not isinstance(problem, NeuralProblem):
        raise CapabilityError(f"Figure 4 needs a network, got a {type(problem).__name__}")
    sampler = BatchSampler(data, problem)
    apart: dict[str, list[float]] = {part: [] for part in PARTS}
    right: dict[str, list[float]] = {f"{e} {c}": [] for e in PARTS for c in PARTS}
    for client, places in enumerate(data.test):
        rows = sampler.rows(places)
        models = {"global": run.model.params, "personal": run.personal(client).params}
        for extractor, params in models.items():
            apart[extractor] += _separation(problem, params, rows)
            for classifier, other in models.items():
                mixed = swap_head(problem, params, other)
                accuracy = problem.metrics(mixed, rows)["accuracy"]
                right[f"{extractor} {classifier}"].append(100 * float(accuracy.mean()))
    return {
        "separation": {part: fmean(found) for part, found in apart.items() if found},
        "accuracy": {pair: fmean(found) for pair, found in right.items()},
    }


def _separation(problem: NeuralProblem, params: Params, rows: Rows) -> list[float]:
    labels = rows.y.numpy()
    if not 2 <= len(set(labels.tolist())) < len(labels):
        return []
    return [separation(representations(problem, params, rows.x).numpy(), labels)]
