"""The metrics of networks, row by row.

Pass further ones to `simulate(metrics=[top(3)])` or to `NeuralProblem(..., metrics=[top(3)])`.
"""

from __future__ import annotations

from torch import Tensor

from parsifl.core.errors import ConfigError
from parsifl.core.metrics import Metric
from parsifl.nn.losses import RowLoss


def accuracy(output: Tensor, y: Tensor) -> Tensor:
    """Return 1 for each row whose largest output is its label, else 0."""
    return (output.argmax(-1) == y).to(output.dtype)


def top(count: int) -> Metric:
    """Return the metric `top3` (for 3): whether a row's label is among its largest outputs.

    >>> import torch
    >>> top(2).rows(torch.tensor([[3.0, 2.0, 1.0]] * 3), torch.tensor([0, 1, 2]))
    tensor([1., 1., 0.])
    """
    if count < 1:
        raise ConfigError(f"count must be at least 1, got {count}")

    def metric(output: Tensor, y: Tensor) -> Tensor:
        most = output.topk(min(count, output.shape[-1]), -1).indices
        return (most == y.unsqueeze(-1)).any(-1).to(output.dtype)

    return Metric(f"top{count}", higher_is_better=True, per_row=metric)


def row_metrics(loss: RowLoss, output: Tensor, y: Tensor) -> dict[str, Tensor]:
    """Return loss and accuracy (or squared error) of each row."""
    losses = loss.rows(output, y)
    values = {"mse": losses} if loss.kind == "mse" else {"loss": losses}
    if loss.of_labels:
        values = {"accuracy": accuracy(output, y), **values}
    return values
