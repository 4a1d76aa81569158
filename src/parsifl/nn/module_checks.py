"""Checks that a module can run functionally, and that data match it."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from parsifl.core.errors import CapabilityError, DataError, RowError
from parsifl.core.problem import FEW, HasModule, Params, check_metrics, try_predict, unreadable
from parsifl.nn.losses import RowLoss

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
CONVOLUTIONS = (
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
)
DROPOUTS = (
    nn.Dropout,
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
    nn.AlphaDropout,
    nn.FeatureAlphaDropout,
)
COUNTER = "num_batches_tracked"
"""Counter of forward passes. With a fixed momentum it is not used, so it is dropped."""
_REMEDY = "parsifl.models.adapt(module) returns a copy without it"


def check_module(module: nn.Module, *, buffers: bool = False) -> None:
    """Reject modules with their own state or randomness; the error names the layer.

    With `buffers`, running statistics are allowed: they are federated.
    """
    for name, layer in module.named_modules():
        described = f"layer '{name}' ({type(layer).__name__})" if name else type(layer).__name__
        if isinstance(layer, nn.modules.lazy.LazyModuleMixin):
            raise CapabilityError(
                f"{described} has lazy parameters; run the module once on a sample first"
            )
        if isinstance(layer, nn.AlphaDropout | nn.FeatureAlphaDropout) and layer.p > 0:
            raise CapabilityError(
                f"{described} draws unkeyed random numbers; replace it by nn.Dropout"
            )
        if isinstance(layer, DROPOUTS) and layer.p > 0:
            raise CapabilityError(f"{described} draws unkeyed random numbers; {_REMEDY}")
        inner = getattr(layer, "dropout", 0.0)  # of attention and recurrent layers, a number
        if isinstance(layer, nn.RReLU) or (isinstance(inner, float) and inner > 0):
            raise CapabilityError(
                f"{described} draws unkeyed random numbers; set its dropout to 0, or replace it"
            )
        _check_buffers(described, layer, allowed=buffers)
    _check_inputs(module)


def has_statistics(layer: nn.Module) -> bool:
    """Return whether the buffers of a layer are running statistics."""
    return isinstance(layer, BATCH_NORMS + INSTANCE_NORMS)


def _check_buffers(described: str, layer: nn.Module, *, allowed: bool) -> None:
    buffers = dict(layer.named_buffers(recurse=False))
    if not buffers:
        return
    statistics = has_statistics(layer)
    if statistics and not allowed:
        raise CapabilityError(
            f"{described} keeps buffers ({', '.join(buffers)}); NeuralProblem(module, "
            "buffers='average') averages them over clients, 'local' keeps them on the clients, "
            "'batch' avoids them; parsifl.models.adapt(module, norm='group') returns a copy "
            "without them"
        )
    if statistics and getattr(layer, "momentum", 0.1) is None:
        raise CapabilityError(
            f"{described} averages over all batches (momentum=None), which is not supported; "
            "set its momentum to a number, such as 0.1"
        )


def _check_inputs(module: nn.Module) -> None:
    """Reject a forward pass that needs more than one argument."""
    try:
        signature = inspect.signature(module.forward)
    except (TypeError, ValueError):
        return
    required = [
        parameter.name
        for parameter in signature.parameters.values()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    if len(required) > 1:
        raise CapabilityError(
            f"{type(module).__name__}.forward takes {len(required)} inputs "
            f"({', '.join(required)}), but a problem passes one tensor: join the inputs along "
            "the columns of X and split them in forward"
        )


def drop_counters(module: nn.Module) -> nn.Module:
    """Remove the batch counters in place, because a forward pass would write to them."""
    for layer in module.modules():
        if COUNTER in dict(layer.named_buffers(recurse=False)):
            setattr(layer, COUNTER, None)
    return module


def restore_counters(module: nn.Module) -> None:
    """Restore the counters in place, so that the state dict has the keys of a new module."""
    for layer in module.modules():
        if isinstance(layer, BATCH_NORMS) and layer.running_var is not None:
            layer.num_batches_tracked = torch.tensor(0)


def check_data(problem: HasModule, loss: RowLoss, params: Params, x: Any, y: Tensor) -> None:
    """Raise DataError for rows that a module cannot read, or targets that its loss cannot use."""
    output = try_predict(problem, params, x[:FEW])
    if isinstance(output, Exception):
        raise unreadable(x, output, _expected(problem, params, x[:FEW])) from output
    if loss.kind == "cross-entropy":
        _check_labels(y, output)
    if loss.kind is None:
        loss.check(output, y[:FEW])
    check_metrics(problem, params, x, y, output)


def _check_labels(y: Tensor, output: Tensor) -> None:
    if y.is_floating_point():
        shape = list(y.shape[1:])
        one_hot = y.ndim == 2 and y.shape[1] == output.shape[-1] and y.shape[1] > 1
        remedy = "pass y.argmax(1)" if one_hot else "pass y.astype(int), or set loss='mse'"
        kind = "one-hot targets or probabilities" if one_hot else "real targets"
        raise DataError(
            f"cross-entropy needs one integer label per row (int64), got {kind} of shape {shape} "
            f"and {y.dtype}: {remedy}"
        )
    if output.ndim < 2:
        return
    classes = output.shape[1]
    outside = (y < 0) | (y >= classes)
    wrong = outside.reshape(len(y), -1).any(1).nonzero()[:, 0]
    if len(wrong):

        def describe(row: int) -> str:
            label = int(y[row][outside[row]][0])
            if classes == 1:
                return (
                    f"label {label}, but the model has 1 output: cross-entropy needs one output "
                    "per class and no sigmoid or softmax after it, so give the model 2 outputs for "
                    "labels 0 and 1"
                )
            return (
                f"label {label}, but the model has {classes} outputs: labels must be in "
                f"[0, {classes})"
            )

        raise RowError(wrong.tolist(), describe)


def _expected(problem: HasModule, params: Params, rows: Any) -> str:
    """Describe the input that the module expects, and how to convert these rows."""
    if not isinstance(rows, Tensor):
        return "pass dense rows, X.toarray(), or use parsifl.GLM, which supports sparse ones"
    if isinstance(try_predict(problem, params, rows.to(torch.int64)), Tensor):
        return (
            "it expects integers, which ClientData.of(clients, dtype=torch.int64) keeps, and "
            "prepare_arrays(X, y, dtype=torch.int64)"
        )
    dtype = next(iter(params.values())).dtype
    if rows.ndim == 4:
        first = rows.to(dtype).movedim(-1, 1)
        if isinstance(try_predict(problem, params, first), Tensor):
            return "it expects channels first: pass np.moveaxis(X, -1, 1)"
    if isinstance(try_predict(problem, params, rows.to(dtype)), Tensor):
        return "it expects real numbers; ClientData.of(clients) converts integers"
    return f"its first layer is {first_layer(problem.module)}"


def first_layer(module: nn.Module) -> str:
    """Return the first layer with parameters, with its name."""
    layers = module.named_modules()
    weighted = (
        f"{name}: {layer!r}" for name, layer in layers if [*layer.parameters(recurse=False)]
    )
    return next(weighted, type(module).__name__).removeprefix(": ")
