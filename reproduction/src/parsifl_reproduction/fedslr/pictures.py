"""What a model of FedSLR sees in a client's rows: Figure 4 of the paper."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from parsifl.core.errors import DataError
from parsifl.core.problem import Params
from parsifl.data import ClientData
from parsifl.engine.batch_sampler import BatchSampler
from parsifl.engine.run import Run
from parsifl.nn.neural import NeuralProblem
from parsifl_reproduction.recipe import Values


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


def visible(run: Run, data: ClientData) -> Values:
    """Embed a client's test rows with the global and with the personal extractor."""
    from sklearn.manifold import TSNE

    problem = run.model.problem
    if not isinstance(problem, NeuralProblem):
        raise DataError("Figure 4 needs a network")
    kinds = [len(set(data.y[rows].tolist())) for rows in data.test]
    client = int(np.argmax(kinds))
    rows = BatchSampler(data, problem).rows(data.test[client])
    found: Values = {"client": client, "labels": rows.y.tolist()}
    for name, model in (("global", run.model), ("personal", run.personal(client))):
        hidden = representations(problem, model.params, rows.x).numpy()
        embedding = TSNE(perplexity=min(15, len(hidden) - 1), random_state=0, init="pca")
        found[f"{name}_points"] = embedding.fit_transform(hidden).tolist()
        found[f"{name}_separation"] = separation(hidden, rows.y.numpy())
    return found
