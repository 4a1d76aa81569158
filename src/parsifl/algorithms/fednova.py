"""FedNova: normalised averaging for devices that take different numbers of steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, final

from torch import Tensor

from parsifl.algorithms._bases.local_sgd import LocalSgd
from parsifl.core import tree
from parsifl.core.algorithm import AdditiveAlgorithm, ClientInfo, ClientUpdate
from parsifl.core.batching import ClientRoundData, DataRequest
from parsifl.core.keys import Key
from parsifl.core.problem import Model, Params, Problem
from parsifl.solvers.sgd import SgdConfig, sgd


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
class FedNova(LocalSgd, AdditiveAlgorithm[Problem, Params, None, Params, NovaUpload, NovaSum]):
    r"""Every device's change counts as if all had taken the same number of steps.

    .. math:: d_i = \frac{w - w_i}{\|a_i\|_1}, \qquad
              w \leftarrow w - \tau_{\mathrm{eff}} \sum_i p_i d_i, \qquad
              \tau_{\mathrm{eff}} = \sum_i p_i \|a_i\|_1

    with w_i after tau_i steps of SGD at `lr` (the "epochs" or "local_steps" of the
    device's profile), p_i by `weighting` over the devices that arrived, and, with rho = `momentum`,

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

    def weight(self, client: ClientInfo) -> float:
        """Weigh by training rows or equally."""
        return float(client.samples) if self.weighting == "samples" else 1.0

    def init_server(self, problem: Problem, clients: Sequence[ClientInfo], key: Key) -> Params:
        """Start from the problem's initial parameters."""
        return problem.init(key)

    def broadcast(self, problem: Problem, server: Params, client: ClientInfo, key: Key) -> Params:
        """Send the model."""
        return server

    def model(self, problem: Problem, server: Params) -> Model:
        """Return the global model."""
        return Model(problem, server)

    def init_client(self, problem: Problem, client: ClientInfo, received: Params, key: Key) -> None:
        """Keep nothing on the client."""
        return None

    def batches(self, client: ClientInfo, round: int) -> DataRequest:
        """Read the mini-batches of local SGD."""
        return DataRequest({"train": self.batch_spec(client)})

    def client_update(
        self, problem: Problem, received: Params, state: None, data: ClientRoundData
    ) -> ClientUpdate[None, NovaUpload]:
        """Run SGD and normalise the change by the length of the accumulation vector a_i."""
        batches, rate = data["train"], self.learning_rate(data.round)
        trained = sgd(problem, received, batches, SgdConfig(rate, self.momentum, self.weight_decay))
        steps = batches.active.sum().to(next(iter(received.values())).dtype)
        rho = self.momentum
        length = (steps - rho * (1 - rho**steps) / (1 - rho)) / (1 - rho)
        divisor = length.clamp(min=1)  # without steps there is no change to divide
        change = tree.map(lambda old, new: (old - new) / divisor, received, trained)
        return ClientUpdate(None, NovaUpload(change, length))

    def personalize(
        self, problem: Problem, received: Params, state: None, data: ClientRoundData
    ) -> Model:
        """Judge every client on the global model."""
        return Model(problem, received)

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
