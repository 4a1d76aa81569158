"""The metrics of networks, row by row.

A metric is a function of outputs and targets that returns one number per row. Pass your own to
`NeuralProblem(..., metrics={"top3": top(3)})`; records, tables and the report then show it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from parsifl.core.errors import ConfigError, DataError, reason
from parsifl.nn.losses import RowLoss

RowMetric = Callable[[Tensor, Tensor], Tensor]


def accuracy(output: Tensor, y: Tensor) -> Tensor:
    """Return 1 for each row whose largest output is its label, else 0."""
    return (output.argmax(-1) == y).to(output.dtype)


def top(count: int) -> RowMetric:
    """Return the metric that is 1 if a row's label is among its `count` largest outputs.

    >>> import torch
    >>> top(2)(torch.tensor([[3.0, 2.0, 1.0]] * 3), torch.tensor([0, 1, 2]))
    tensor([1., 1., 0.])
    """
    if count < 1:
        raise ConfigError(f"count must be at least 1, got {count}")

    def metric(output: Tensor, y: Tensor) -> Tensor:
        most = output.topk(min(count, output.shape[-1]), -1).indices
        return (most == y.unsqueeze(-1)).any(-1).to(output.dtype)

    return metric


def row_metrics(
    loss: RowLoss, output: Tensor, y: Tensor, more: Mapping[str, RowMetric] | None = None
) -> dict[str, Tensor]:
    """Return loss and accuracy (or squared error) of each row, and additional metrics."""
    losses = loss.rows(output, y)
    values = {"mse": losses} if loss.kind == "mse" else {"loss": losses}
    if loss.of_labels:
        values = {"accuracy": accuracy(output, y), **values}
    if more:
        values |= {name: _per_row(name, metric, output, y) for name, metric in more.items()}
    return values


def _per_row(name: str, metric: RowMetric, output: Tensor, y: Tensor) -> Tensor:
    """Return a user's metric; raise an error that names it unless it is one number per row."""
    try:
        values = metric(output, y)
    except Exception as error:
        raise DataError(f"metric '{name}' fails ({reason(error)})") from error
    if not isinstance(values, Tensor) or values.shape != y.shape[:1]:
        shape = list(values.shape) if isinstance(values, Tensor) else type(values).__name__
        raise DataError(
            f"metric '{name}' must return one number per row, a tensor of shape {[len(y)]}, got "
            f"{shape}: do not average over rows, Parsifl does"
        )
    return values


def check_metrics(loss: RowLoss, metrics: Mapping[str, RowMetric]) -> dict[str, RowMetric]:
    """Return the user's metrics; raise ConfigError for invalid ones."""
    reserved = {"mse"} if loss.kind == "mse" else {"loss", *(["accuracy"] * loss.of_labels)}
    if not isinstance(metrics, Mapping):
        raise ConfigError(
            "metrics must be a dictionary of names and functions, such as "
            f"{{'top3': top(3)}}, got a {type(metrics).__name__}"
        )
    for name, metric in metrics.items():
        if not isinstance(name, str) or not name.isidentifier():
            raise ConfigError(
                f"a metric's name must be an identifier such as 'top3', got {name!r:.80}"
            )
        if name in reserved:
            raise ConfigError(f"the metric '{name}' is always recorded; choose another name")
        if not callable(metric):
            raise ConfigError(f"metric '{name}' must be a function (output, y), got {metric!r:.80}")
    return dict(metrics)
