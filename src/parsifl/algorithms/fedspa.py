"""FedSpa: a sparse model per client, with a mask that is searched during training."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from parsifl.algorithms._bases.local_sgd import LocalSgd
from parsifl.core import tree
from parsifl.core.algorithm import ClientInfo, ClientUpdate, ClientUpload, GatherAlgorithm
from parsifl.core.batching import BatchSpec, ClientRoundData, DataRequest
from parsifl.core.config import Count, Fraction
from parsifl.core.errors import ConfigError
from parsifl.core.keys import Key
from parsifl.core.leaves import Sparse, densify
from parsifl.core.problem import Model, Params, Problem
from parsifl.solvers.sgd import gradient, sgd
from parsifl.solvers.update_rules import Aux, Rule

Masked = dict[str, Tensor | Sparse]
Masks = dict[str, Tensor]


@dataclass(frozen=True)
class SpaServer:
    """The dense global model, and the last mask of every client that has trained, by id."""

    params: Params
    masks: dict[str, Masks]


@dataclass(frozen=True)
class SpaUpload:
    """The change of the entries under the old mask, in its order, and the new mask."""

    change: Params
    mask: Masks


@final
@dataclass(frozen=True)
class _OnMask(Rule):
    """Keep entries at zero that are zero in the mask, aux[0]."""

    def after_(self, w: Tensor, aux: Aux, lr: float) -> None:
        """Multiply by the mask."""
        w.mul_(aux[0])


@final
@dataclass(frozen=True)
class FedSpa(LocalSgd, GatherAlgorithm[Problem, SpaServer, None, Masked, SpaUpload]):
    r"""Clients train and exchange only the entries under their own mask m_i.

    .. math:: w_i \leftarrow w_i - \eta\, m_i \odot g_i(w_i), \quad w_i^0 = m_i \odot w, \qquad
              w \leftarrow w + \tfrac{1}{|S|} \textstyle\sum_{i \in S} (w_i - m_i \odot w)

    with eta = `lr`. After training, each layer drops the share
    alpha_t = (`prune` / 2)(1 + cos(pi t / `horizon`)) of its mask where \|w_i\| is smallest, and
    adds as many entries where the dense gradient of one batch is largest. The layers'
    densities follow the Erdos-Renyi kernel rule (ERK). Sent down: m_i and w under it; up: the
    change under m_i, and the next mask. Kept: the masks on the server.

    Parameters
    ----------
    density
        Share of the masked entries (those of layers with two axes or more) that are kept.
    prune
        Share of a mask that is replaced in the first round.
    horizon
        Rounds after which masks no longer change.
    """

    cites: ClassVar[str] = (
        "Huang et al., Achieving Personalized Federated Learning with Sparse Local Models, 2022"
    )

    density: Fraction = 0.5
    prune: Fraction = 0.5
    horizon: Count = 1000

    def check(self) -> None:
        """Reject an empty model."""
        if self.density == 0.0:
            raise ConfigError("FedSpa.density must be above 0, got 0.0: nothing would be trained")

    def weight(self, client: ClientInfo) -> float:
        """Count every client once, as in the paper."""
        return 1.0

    def init_server(self, problem: Problem, clients: Sequence[ClientInfo], key: Key) -> SpaServer:
        """Return the dense model; masks are drawn when a client is first selected."""
        return SpaServer(problem.init(key), {})

    def broadcast(
        self, problem: Problem, server: SpaServer, client: ClientInfo, key: Key
    ) -> Masked:
        """Send the entries under the client's mask."""
        masks = self._masks(server, client.id, key)
        return {
            name: _under(masks[name], value) if name in masks else value
            for name, value in server.params.items()
        }

    def _masks(self, server: SpaServer, client: int, key: Key) -> Masks:
        known = server.masks.get(str(client))
        first = Key(key.seed, client=client, purpose="fedspa/mask")
        return draw_masks(server.params, self.density, first) if known is None else known

    def model(self, problem: Problem, server: SpaServer) -> Model:
        """Return the dense mean of the clients' models."""
        return Model(problem, server.params)

    def batches(self, client: ClientInfo, round: int) -> DataRequest:
        """Request the mini-batches of local SGD, and one more for the mask."""
        probe = BatchSpec(self.batch_size, steps=1, last_batch=self.last_batch)
        return DataRequest({"train": self.batch_spec(client), "probe": probe})

    def client_update(
        self, problem: Problem, received: Masked, state: None, data: ClientRoundData
    ) -> ClientUpdate[None, SpaUpload]:
        """Train under the mask, then search the next one."""
        start: Params = densify(received)
        masks = {name: _mask(value) for name, value in received.items()}
        config = self.sgd(data.round)
        trained = sgd(problem, start, data["train"], config, rule=_OnMask(), aux=(masks,))
        change = tree.subtract(trained, start)
        sent = {name: _entries(change[name], value) for name, value in received.items()}
        mask = self._search(problem, received, trained, data)
        return ClientUpdate(None, SpaUpload(sent, mask))

    def _search(
        self, problem: Problem, received: Masked, trained: Params, data: ClientRoundData
    ) -> Masks:
        if len(data["probe"]) == 0:
            return {n: _mask(v) > 0 for n, v in received.items() if isinstance(v, Sparse)}
        share = self.replaced(data.round) if len(data["train"]) else 0.0
        gradients = gradient(problem, trained, data["probe"].batch(0))
        return {
            name: next_mask(value, trained[name], gradients[name], share)
            for name, value in received.items()
            if isinstance(value, Sparse)
        }

    def replaced(self, round: int) -> float:
        """Return the share of a mask that is replaced in a round."""
        passed = min(round / self.horizon, 1.0)
        return self.prune / 2 * (1 + math.cos(math.pi * passed))

    def personalize(
        self, problem: Problem, received: Masked, state: None, data: ClientRoundData
    ) -> Model:
        """Evaluate every client on its sparse part of the global model."""
        return Model(problem, densify(received))

    def aggregate(
        self,
        problem: Problem,
        server: SpaServer,
        uploads: Sequence[ClientUpload[SpaUpload]],
        key: Key,
    ) -> SpaServer:
        """Add the mean change, and store the new masks."""
        total = tree.map(torch.clone, server.params)
        masks = dict(server.masks)
        for upload in uploads:
            used = self._masks(server, upload.client.id, key)
            for name, change in upload.value.change.items():
                part = change / len(uploads)
                if name in used:
                    index = used[name].reshape(-1).nonzero().squeeze(1)
                    total[name].view(-1).index_add_(0, index, part)
                else:
                    total[name].add_(part)
            masks[str(upload.client.id)] = upload.value.mask
        return SpaServer(total, masks)


def erk_counts(shapes: Mapping[str, tuple[int, ...]], density: float) -> dict[str, int]:
    """Return how many entries each layer keeps: in proportion to the sum of its sizes, or all.

    >>> erk_counts({"a": (4, 4), "b": (10, 10)}, 0.5)
    {'a': 16, 'b': 42}
    """
    full: set[str] = set()
    while True:
        rest = {name: shape for name, shape in shapes.items() if name not in full}
        remaining = density * sum(map(math.prod, shapes.values()))
        remaining -= sum(math.prod(shapes[name]) for name in full)
        scale = remaining / sum(map(sum, rest.values())) if rest else 0.0
        over = {name for name, shape in rest.items() if scale * sum(shape) > math.prod(shape)}
        if not over:
            counts = {name: max(1, round(scale * sum(shape))) for name, shape in rest.items()}
            return {name: counts.get(name, math.prod(shape)) for name, shape in shapes.items()}
        full |= over


def draw_masks(params: Params, density: float, key: Key) -> Masks:
    """Draw a random mask for every layer with two axes or more."""
    shapes = {name: tuple(v.shape) for name, v in sorted(params.items()) if v.ndim > 1}
    generator = key.torch_generator()
    masks: Masks = {}
    for name, count in erk_counts(shapes, density).items():
        order = torch.randperm(math.prod(shapes[name]), generator=generator)[:count]
        flat = torch.zeros(math.prod(shapes[name]), dtype=torch.bool)
        flat[order] = True
        masks[name] = flat.reshape(shapes[name]).to(params[name].device)
    return masks


def next_mask(old: Sparse, trained: Tensor, gradient: Tensor, share: float) -> Tensor:
    """Drop the share of the mask with the smallest weights; add the largest gradients."""
    flat, count = trained.reshape(-1), old.index.shape[-1]
    dropped = round(share * count)
    inside = torch.zeros_like(flat).scatter(0, old.index, 1.0)
    # -1 is below every magnitude, so entries outside the mask are never kept
    stay = torch.where(inside > 0, flat.abs(), -1.0).topk(count - dropped).indices
    stayed = torch.zeros_like(flat).scatter(0, stay, 1.0)
    grown = torch.where(stayed > 0, -1.0, gradient.reshape(-1).abs()).topk(dropped).indices
    return (stayed.scatter(0, grown, 1.0) > 0).reshape(trained.shape)


def _under(mask: Tensor, value: Tensor) -> Sparse:
    index = mask.reshape(-1).nonzero().squeeze(1)
    return Sparse(index, value.reshape(-1)[index], tuple(value.shape))


def _mask(value: Tensor | Sparse) -> Tensor:
    if isinstance(value, Sparse):
        return Sparse(value.index, torch.ones_like(value.value), value.shape).dense()
    return torch.ones_like(value)


def _entries(change: Tensor, sent: Tensor | Sparse) -> Tensor:
    return change.reshape(-1).gather(0, sent.index) if isinstance(sent, Sparse) else change
