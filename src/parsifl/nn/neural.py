"""Any `nn.Module` as a problem."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from functools import cached_property, partial
from threading import RLock
from typing import Any, final

import torch
from torch import Tensor, nn

from parsifl.core.batching import Batch, Rows
from parsifl.core.errors import CapabilityError, ConfigError
from parsifl.core.keys import Key
from parsifl.core.layer_group import LayerGroup
from parsifl.core.problem import Params
from parsifl.nn.chain_layers import Chain
from parsifl.nn.dropout import dropout_key
from parsifl.nn.functional import Functional
from parsifl.nn.layer_chain import find_chain
from parsifl.nn.layer_groups import head_parameters, layer_groups
from parsifl.nn.models.flops import note_trained
from parsifl.nn.models.scaler import add_scalers
from parsifl.nn.module_checks import refuse_unbatchable
from parsifl.nn.row_losses import Loss, row_loss, row_metrics

Factory = Callable[..., nn.Module]
_CHUNK = 1024
_BUILDING = RLock()  # to build a module, torch's own generator is borrowed: one thread at a time


@final
class NeuralProblem:
    """A module with a loss, called functionally: parameters are always passed in.

    Parameters
    ----------
    module
        A module, whose own parameters are then the initial ones for every seed; or a factory such
        as ``lambda: nn.Linear(4, 2)``, so that every seed draws its own. A factory that takes
        ``width`` makes the problem `Scalable`.
    loss
        "cross-entropy" for class labels, "mse" for real targets.
    head
        The name of the last layer; found if not given.
    dtype, device
        Of the parameters.
    scale
        The width that HeteroFL's scaler makes up for in training (see `narrow`); 1 for none.

    Examples
    --------
    >>> problem = NeuralProblem(lambda: nn.Linear(3, 2))
    >>> sorted(problem.init(Key(0)))
    ['bias', 'weight']
    """

    def __init__(
        self,
        module: nn.Module | Factory,
        loss: Loss = "cross-entropy",
        *,
        head: str | None = None,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        scale: float = 1.0,
    ) -> None:
        if loss not in ("cross-entropy", "mse"):
            raise ConfigError(f"loss must be 'cross-entropy' or 'mse', got {loss!r}")
        self.kind: Loss = loss
        self.dtype, self.device = dtype, torch.device(device)
        self._head_name = head
        self._source = module
        if not callable(module):
            raise ConfigError(f"expected an nn.Module or a factory of one, got {module!r}")
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise ConfigError(f"dtype must be torch.float32 or torch.float64, got {dtype!r}")
        with torch.random.fork_rng(devices=[]):
            built = module if isinstance(module, nn.Module) else module()
            if not isinstance(built, nn.Module):
                raise ConfigError(
                    f"expected an nn.Module or a factory of one, got {type(built).__name__}"
                )
            refuse_unbatchable(built)
            self._training = copy.deepcopy(built).to("meta").train().requires_grad_(False)
        if scale != 1.0:
            add_scalers(self._training, scale, head)
        self._train = Functional(self._training)
        self._judge = Functional(copy.deepcopy(self._training).eval())
        self.chain: Chain | None = find_chain(self._training) if scale == 1.0 else None
        self._narrow: dict[tuple[float, bool], NeuralProblem] = {}

    @property
    def primary_metric(self) -> str:
        """The metric that is reported first."""
        return "accuracy" if self.kind == "cross-entropy" else "mse"

    @property
    def higher_is_better(self) -> bool:
        """Accuracy is to be large, the squared error small."""
        return self.kind == "cross-entropy"

    @property
    def supports_vmap(self) -> bool:
        """Modules that passed the inspection run under vmap."""
        return True

    @cached_property
    def uses_batch_statistics(self) -> bool:
        """Whether a layer normalises by statistics of the batch."""
        kind = nn.modules.batchnorm._BatchNorm
        return any(isinstance(layer, kind) for layer in self._training.modules())

    @property
    def module(self) -> nn.Module:
        """The module on `meta`, in training mode: structure without values."""
        return self._training

    @cached_property
    def head(self) -> tuple[str, ...]:
        """The names of the parameters of the last layer."""
        return head_parameters(self._training, self._head_name)

    @cached_property
    def layer_groups(self) -> tuple[LayerGroup, ...]:
        """The blocks below the head: a weight with its bias and norm each, in forward order."""
        return layer_groups(self._training, self._head_name)

    def init(self, key: Key) -> Params:
        """Return the initial parameters for this seed."""
        module = self._source
        if not isinstance(module, nn.Module):
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(Key(key.seed, purpose="init").word() >> 1)
                module = module()
        return {
            name: value.detach().to(self.device, self.dtype, copy=True)
            for name, value in module.named_parameters()
        }

    def predict(self, params: Params, x: Any) -> Tensor:
        """Return the module's output, in evaluation mode; arrays are taken too."""
        if isinstance(x, Tensor):
            return self._judge(params, x)
        given = torch.as_tensor(x)
        try:
            return self._judge(params, given.to(self.dtype))
        except RuntimeError:
            if given.is_floating_point():
                raise
            return self._judge(params, given)  # tokens

    def loss(self, params: Params, batch: Batch) -> Tensor:
        """Return the weighted mean loss of a batch, in training mode."""
        note_trained(params)
        with dropout_key(batch.key):
            output = self._train(params, batch.x)
        losses = row_loss(self.kind, output, batch.y)
        weight = batch.weight.to(losses.dtype)
        # each row's share first: autograd then records one step instead of three
        return losses.dot(weight / weight.sum().clamp(min=1))

    def metrics(self, params: Params, rows: Rows) -> dict[str, Tensor]:
        """Return loss and accuracy (or squared error) of each row."""
        if self.uses_batch_statistics or len(rows.y) <= _CHUNK:
            return self._row_metrics(params, rows.x, rows.y)
        starts = range(0, len(rows.y), _CHUNK)
        parts = [
            self._row_metrics(params, rows.x[at : at + _CHUNK], rows.y[at : at + _CHUNK])
            for at in starts
        ]
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

    def _row_metrics(self, params: Params, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        return row_metrics(self.kind, self.predict(params, x), y)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every parameter."""
        return {name: tuple(value.shape) for name, value in self._training.named_parameters()}

    def narrow(self, width: float, *, scaled: bool = True) -> NeuralProblem:
        """Return the same model at a fraction of its width, built once.

        `scaled` puts HeteroFL's scaler into it: in training, the outputs of all layers but the
        head are divided by the width.
        """
        with _BUILDING:
            return self._narrowed(width, scaled)

    def _narrowed(self, width: float, scaled: bool) -> NeuralProblem:
        if (width, scaled) not in self._narrow:
            source: Any = self._source
            if isinstance(source, nn.Module) or "width" not in inspect.signature(source).parameters:
                raise CapabilityError(
                    "this problem has one width only; build NeuralProblem with a factory that "
                    "takes width=, for example lambda width=1.0: models.build('vgg', width=width)"
                )
            self._narrow[width, scaled] = NeuralProblem(
                partial(source, width=width),
                self.kind,
                head=self._head_name,
                dtype=self.dtype,
                device=str(self.device),
                scale=width if scaled else 1.0,
            )
        return self._narrow[width, scaled]
