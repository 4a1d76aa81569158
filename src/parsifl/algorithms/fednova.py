"""FedNova: normalised averaging for devices that take different numbers of steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, final

from torch import Tensor

from parsifl import tree
from parsifl.algorithm import Algorithm, ClientInfo, Local
from parsifl.algorithms.settings import LocalSGD
from parsifl.keys import Key
from parsifl.problem import Model, Params, Problem
from parsifl.solvers.sgd import sgd
from parsifl.work import Shard, Work


@dataclass(frozen=True)
class NovaUpload:
    """The normalised change d_i of one device, and ||a_i||_1, the length that it stands for."""

    change: Params
    length: Tensor


@dataclass(frozen=True)
class NovaSum:
    """The weighted sums of changes and lengths, and the weight."""

    change: Params
    length: Tensor
    weight: Tensor


@final
@dataclass(frozen=True)
class FedNova(LocalSGD, Algorithm[Problem, Params, None, Params, NovaUpload, NovaSum]):
    r"""Every device's change counts as if all had taken the same number of steps.

    .. math:: d_i = \frac{w - w_i}{\|a_i\|_1}, \qquad
              w \leftarrow w - \tau_{\mathrm{eff}} \sum_i p_i d_i, \qquad
              \tau_{\mathrm{eff}} = \sum_i p_i \|a_i\|_1

    with w_i after tau_i steps of SGD at `lr` (the "epochs" or "steps" of the device's profile),
    p_i by `weighting` over the devices that arrived, and, with rho = `momentum`,

    .. math:: \|a_i\|_1 = \frac{1}{1 - \rho}
              \left(\tau_i - \rho \frac{1 - \rho^{\tau_i}}{1 - \rho}\right),

    which is tau_i without momentum. With equal steps it is FedAvg. Sent: the model down, d_i and
    one number up.
    """

    cites: ClassVar[str] = (
        "Wang et al., Tackling the Objective Inconsistency Problem in Heterogeneous Federated "
        "Optimization, NeurIPS 2020"
    )

    weighting: Literal["samples", "uniform"] = "samples"

    def weight(self, info: ClientInfo) -> float:
        """Weigh by training rows or equally."""
        return float(info.samples) if self.weighting == "samples" else 1.0

    def init_server(self, problem: Problem, clients: Sequence[ClientInfo], key: Key) -> Params:
        """Start from the problem's initial parameters."""
        return problem.init(key)

    def broadcast(self, problem: Problem, server: Params, info: ClientInfo, key: Key) -> Params:
        """Send the model."""
        return server

    def model(self, problem: Problem, server: Params) -> Model:
        """Return the global model."""
        return Model(problem, server)

    def init_client(self, problem: Problem, info: ClientInfo, down: Params, key: Key) -> None:
        """Keep nothing on the client."""
        return None

    def work(self, info: ClientInfo, round: int) -> Work:
        """Read the mini-batches of local SGD."""
        return Work({"train": self.draw(info)})

    def local(
        self, problem: Problem, down: Params, client: None, shard: Shard
    ) -> Local[None, NovaUpload]:
        """Run SGD and normalise the change by the length of the accumulation vector a_i."""
        batches, rate = shard["train"], self.rate(shard.round)
        trained = sgd(problem, down, batches, rate, momentum=self.momentum, decay=self.decay)
        steps = batches.active.sum().to(next(iter(down.values())).dtype)
        rho = self.momentum
        length = (steps - rho * (1 - rho**steps) / (1 - rho)) / (1 - rho)
        divisor = length.clamp(min=1)  # without steps there is no change to divide
        change = tree.map(lambda old, new: (old - new) / divisor, down, trained)
        return Local(None, NovaUpload(change, length))

    def personalize(self, problem: Problem, down: Params, client: None, shard: Shard) -> Model:
        """Judge every client on the global model."""
        return Model(problem, down)

    def contribute(self, problem: Problem, upload: NovaUpload, weight: float) -> NovaSum:
        """Weigh the change and its length."""
        return NovaSum(
            tree.scale(weight, upload.change),
            weight * upload.length,
            upload.length.new_tensor(weight),
        )

    def aggregate(self, problem: Problem, server: Params, total: NovaSum, key: Key) -> Params:
        """Move by the mean normalised change, times the effective number of steps."""
        factor = total.length / total.weight / total.weight
        return tree.map(lambda w, change: w - factor * change, server, total.change)
