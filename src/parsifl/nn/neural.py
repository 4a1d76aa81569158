"""Any `nn.Module` as a problem."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Sequence
from functools import cached_property, partial, wraps
from threading import RLock
from typing import Any, Literal, final

import torch
from torch import Tensor, nn

from parsifl.core.batching import Batch, Rows
from parsifl.core.errors import CapabilityError, ConfigError
from parsifl.core.keys import Key
from parsifl.core.layer_group import LayerGroup
from parsifl.core.metrics import Metric, checked_metrics
from parsifl.core.problem import FEW, ExecutionHints, LayerChain, Params
from parsifl.nn.adapt import adapt
from parsifl.nn.dropout import dropout_key
from parsifl.nn.fixed import (
    FixedParts,
    check_repeatable,
    check_unchanged,
    fixed_parts,
    without_fixed,
)
from parsifl.nn.flops import note_trained
from parsifl.nn.functional import Functional
from parsifl.nn.layer_chain import find_chain
from parsifl.nn.layer_groups import head_parameters, layer_groups
from parsifl.nn.losses import Loss, LossFunction, loss_of
from parsifl.nn.metrics import row_metrics
from parsifl.nn.models.width import add_scalers
from parsifl.nn.module_checks import (
    BATCH_NORMS,
    CONVOLUTIONS,
    COUNTER,
    check_data,
    check_module,
    drop_counters,
)

Factory = Callable[..., nn.Module]
BufferPolicy = Literal["average", "local", "batch"]
_CHUNK = 1024
_BLOCK = 10  # clients per batch: larger blocks exceed the cache and are slower
_DENSE_BLOCK = 20  # fused MLPs: fewer handovers of Python's lock (docs/adr/0004)
_TINY = 1 << 15  # below this many parameters one thread is faster than two (docs/adr/0004)
_FUSED_CONVOLUTIONS = 2  # a chain with more convolutions is slower fused (docs/adr/0003)
_BUILDING = RLock()  # building a module uses torch's global generator: one thread at a time


@final
class NeuralProblem:
    """A module with a loss, called functionally: parameters are always passed in.

    Parameters
    ----------
    module
        A module, whose parameters are the initial ones for every seed; or a factory such as
        ``lambda: nn.Linear(4, 2)``, which is initialized by each seed. A factory that takes
        ``width`` makes the problem `Scalable`.
    loss
        "cross-entropy" for class labels, "mse" for real targets, a loss module of PyTorch such as
        ``nn.CrossEntropyLoss(weight=..., label_smoothing=0.1)``, or a function of outputs and
        targets that returns one number per row or the mean of the rows.
    head
        The name of the last layer; found automatically if not given.
    dtype
        Of the parameters.
    scale
        The width that HeteroFL's scaler compensates for in training (see `narrow`); 1 for none.
    buffers
        What happens to running statistics (BatchNorm). "average": they are part of the parameters,
        the forward pass updates them, and the server averages them. "local": the same, but they
        stay on the clients. "batch": every batch is normalised by its own statistics, as by
        `parsifl.models.adapt`. None: a module with running statistics is rejected. Other buffers
        and frozen parameters (``requires_grad=False``) are constants: they are never sent.
    metrics
        Further metrics, such as ``[parsifl.nn.metrics.top(3)]`` (see `parsifl.Metric`).

    Examples
    --------
    >>> problem = NeuralProblem(lambda: nn.Linear(3, 2))
    >>> sorted(problem.init(Key(0)))
    ['bias', 'weight']
    """

    def __init__(
        self,
        module: nn.Module | Factory,
        loss: Loss | nn.Module | LossFunction = "cross-entropy",
        *,
        head: str | None = None,
        dtype: torch.dtype = torch.float32,
        scale: float = 1.0,
        buffers: BufferPolicy | None = None,
        metrics: Sequence[Metric] = (),
    ) -> None:
        self._loss_argument, self.row_loss = loss, loss_of(loss, dtype)
        self.extra_metrics = checked_metrics(metrics)
        self.dtype = dtype
        self._head_name = head
        if buffers not in (None, "average", "local", "batch"):
            raise ConfigError(f"buffers must be 'average', 'local' or 'batch', got {buffers!r:.80}")
        self.buffers: BufferPolicy | None = buffers
        if not callable(module):
            raise ConfigError(f"expected an nn.Module or a factory of one, got {module!r:.80}")
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise ConfigError(f"dtype must be torch.float32 or torch.float64, got {dtype!r:.80}")
        self._source = _without_statistics(module) if buffers == "batch" else module
        with torch.random.fork_rng(devices=[]):
            built = self._built()
            if not isinstance(built, nn.Module):
                raise ConfigError(
                    f"expected an nn.Module or a factory of one, got {type(built).__name__}"
                )
            check_module(built, buffers=buffers in ("average", "local"))
            self.fixed = self._fixed_parts(built)
            meta = copy.deepcopy(built).to("meta").train().requires_grad_(False)
        self._training = without_fixed(drop_counters(meta), self.fixed)
        names = {name for name, _ in meta.named_buffers()} - self.fixed.constants.keys()
        self.buffer_names = frozenset(names)
        if scale != 1.0:
            add_scalers(self._training, scale, head)
        self._train = Functional(self._training, self.fixed)
        self._evaluate = Functional(copy.deepcopy(self._training).eval(), self.fixed)
        named = self.row_loss.kind
        plain = scale == 1.0 and not self.buffer_names and not self.fixed
        chain = find_chain(self._training) if plain and named is not None else None
        self.layer_chain = None if chain is None or named is None else LayerChain(chain, named)
        self._narrow: dict[tuple[float, bool], NeuralProblem] = {}

    def __repr__(self) -> str:
        """Return the module, its size and the loss in one line."""
        count = self._size()
        options = "".join(
            f", {name}={value}"
            for name, value, default in (
                ("buffers", repr(self.buffers), "None"),
                ("dtype", self.dtype, torch.float32),
            )
            if value != default
        )
        return (
            f"NeuralProblem({type(self._training).__name__}, loss={self.row_loss.name}{options}; "
            f"{count:,} parameters)"
        )

    @property
    def primary_metric(self) -> str:
        """The metric that is reported first."""
        if self.row_loss.of_labels:
            return "accuracy"
        return "mse" if self.row_loss.kind == "mse" else "loss"

    @property
    def higher_is_better(self) -> bool:
        """True for accuracy, False for a loss."""
        return self.row_loss.of_labels

    @property
    def supports_vmap(self) -> bool:
        """True: modules that passed the checks run under vmap."""
        return True

    @cached_property
    def uses_batch_statistics(self) -> bool:
        """Whether a layer normalises by statistics of the batch."""
        return self._count(BATCH_NORMS) > 0

    @cached_property
    def execution(self) -> ExecutionHints:
        """Chains run fused, deep convolutions and LSTMs one client per thread."""
        convolutions = self._count(CONVOLUTIONS)
        # Deep convolutions are no faster in batches. Clients on separate cores do not wait for each
        # other, whereas the threads of one product would wait for a busy core.
        most = _FUSED_CONVOLUTIONS if self.layer_chain is not None else 0
        # torch has no batched LSTM: vmap runs clients sequentially, on one core
        alone = convolutions > most or self._count((nn.LSTM,)) > 0
        dense = self.layer_chain is not None and not convolutions
        return ExecutionHints(
            per_client_threads=alone,
            block_size=_DENSE_BLOCK if dense else _BLOCK,
            # waiting for a second thread takes longer than so small a product
            single_threaded=not convolutions and self._size() < _TINY,
            expensive_rows=convolutions > 0,
        )

    def _size(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes().values())

    def _count(self, kinds: tuple[type[nn.Module], ...]) -> int:
        return sum(isinstance(layer, kinds) for layer in self._training.modules())

    @property
    def local_buffers(self) -> bool:
        """Whether buffers stay on the clients."""
        return self.buffers == "local"

    def trainable(self, name: str) -> bool:
        """Return whether gradients update a leaf of the parameters, not the forward pass."""
        return name not in self.buffer_names

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
        """The blocks below the head (a weight with its bias and norm), in forward order."""
        return layer_groups(self._training, self._head_name)

    def init(self, key: Key) -> Params:
        """Return the initial parameters for this seed."""
        with torch.random.fork_rng(devices=[]):
            if not isinstance(self._source, nn.Module):
                _seed(Key(key.seed, purpose="init").word() >> 1)
            module = self._built()
        values = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        return {
            name: value.detach().to("cpu", self.dtype, copy=True)
            for name, value in values.items()
            if name.rpartition(".")[2] != COUNTER and name not in self.fixed.constants
        }

    def _fixed_parts(self, built: nn.Module) -> FixedParts:
        """Return constants and ties, which must not depend on the seed."""
        federated = self.buffers in ("average", "local")
        fixed = fixed_parts(built, self.dtype, federated=federated)
        if fixed.constants and built is not self._source:
            _seed(1)
            check_repeatable(fixed, fixed_parts(self._built(), self.dtype, federated=federated))
        return fixed

    def _built(self) -> nn.Module:
        source = self._source
        return source if isinstance(source, nn.Module) else source()

    def predict(self, params: Params, x: Any) -> Tensor:
        """Return the module's output in evaluation mode; arrays are accepted too."""
        if isinstance(x, Tensor):
            return self._evaluate(params, x)
        rows = torch.as_tensor(x)
        try:
            return self._evaluate(params, rows.to(self.dtype))
        except RuntimeError:
            if rows.is_floating_point():
                raise
            return self._evaluate(params, rows)  # tokens

    def loss(self, params: Params, batch: Batch) -> Tensor:
        """Return the weighted mean loss of a batch, in training mode."""
        return self.loss_and_buffers(params, batch)[0]

    def loss_and_buffers(self, params: Params, batch: Batch) -> tuple[Tensor, Params]:
        """Return the loss, and the buffers after the forward pass."""
        note_trained(params)
        # the forward pass writes to buffers, so it gets copies
        buffers = {n: params[n].clone() for n in self.buffer_names} if self.buffer_names else {}
        with dropout_key(batch.key):
            output = self._train({**params, **buffers} if buffers else params, batch.x)
        return self.row_loss.mean(output, batch.y, batch.weight), buffers

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
        return self.output_metrics(self.predict(params, x), y)

    def output_metrics(self, output: Tensor, y: Tensor) -> dict[str, Tensor]:
        """Return the metrics of each row from its output."""
        return row_metrics(self.row_loss, output, y)

    def check_data(self, params: Params, x: Any, y: Tensor) -> None:
        """Raise DataError for rows or targets that the model cannot train on."""
        check_data(self, self.row_loss, params, x, y)
        if self.fixed.constants and isinstance(x, Tensor):
            check_unchanged(self._training, self.fixed, params, x[:FEW])

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every parameter and buffer."""
        named = {
            **dict(self._training.named_parameters()),
            **dict(self._training.named_buffers()),
        }
        leaves = {n: value for n, value in named.items() if n not in self.fixed.constants}
        return {name: tuple(value.shape) for name, value in leaves.items()}

    def narrow(self, width: float, *, scaled: bool = True) -> NeuralProblem:
        """Return the same model at a fraction of its width, built once.

        `scaled` adds HeteroFL's scaler: in training, the outputs of all layers except the head
        are divided by the width.
        """
        with _BUILDING:
            return self._narrowed(width, scaled)

    def _narrowed(self, width: float, scaled: bool) -> NeuralProblem:
        if (width, scaled) not in self._narrow:
            source: Any = self._source
            if isinstance(source, nn.Module) or "width" not in inspect.signature(source).parameters:
                raise CapabilityError(
                    "this problem has only one width; build NeuralProblem with a factory that "
                    "takes width=, for example lambda width=1.0: models.build('vgg', width=width)"
                )
            self._narrow[width, scaled] = NeuralProblem(
                partial(source, width=width),
                self._loss_argument,
                head=self._head_name,
                dtype=self.dtype,
                scale=width if scaled else 1.0,
                buffers=self.buffers,
                metrics=self.extra_metrics,
            )
        return self._narrow[width, scaled]


def _seed(word: int) -> None:
    """Seed the generators that a factory may draw from."""
    if torch.accelerator.is_available():
        torch.manual_seed(word)
    else:  # `torch.manual_seed` would keep a stack trace for every kind of device that is absent
        torch.default_generator.manual_seed(word)


def _without_statistics(source: Any) -> Any:
    """Return a module, or a factory with the same arguments, that uses batch statistics."""
    if isinstance(source, nn.Module):
        return adapt(source)

    @wraps(source)
    def build(**options: Any) -> nn.Module:
        built = source(**options)
        return adapt(built) if isinstance(built, nn.Module) else built

    return build
