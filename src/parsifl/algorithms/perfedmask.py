"""PerFedMask: every device trains the layers that fit its budget, chosen by an exact plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, final

import numpy as np

from parsifl.algorithms._bases.mask_plan import (
    Design,
    Masks,
    Objective,
    compressed,
    design_masks,
    tell_gaps,
)
from parsifl.algorithms._bases.submodel import Fleet, Form, FormedMean
from parsifl.algorithms._bases.width_members import members_for
from parsifl.algorithms._bases.width_slices import layered, narrowed, width_of
from parsifl.core.algorithm import ClientInfo
from parsifl.core.config import Count, NonNegative
from parsifl.core.keys import Key
from parsifl.core.problem import Layered, Problem


@final
@dataclass(frozen=True)
class PerFedMask(FormedMean):
    r"""Masked local training of the body under a frozen head, then fine-tuning.

    .. math:: w_n \leftarrow w_n - \eta\, m_n \odot \nabla_w f_n(w_n, \phi_0), \qquad
              w \leftarrow \sum_n k_n \odot w_n, \qquad
              (k_n)_j = \frac{p_n (m_n)_j}{\sum_{n'} p_{n'} (m_{n'})_j}

    with eta = `lr` and p_n by `weighting`, the sums over the devices of the round. The masks m_n
    freeze whole blocks (a weight with its bias and norm). They are planned once, from the
    "budget" in each device's profile: psi_n, as a fraction of the body (at most 1) or a number
    of parameters; no budget means everything. Frozen blocks get no weight gradient and are not
    uploaded; a block that nobody trained keeps its value. A device is judged after it fine-tuned
    everything, head included, for `tune_epochs` at the learning rate of the round. Sent: the body
    down, the trained blocks up. Kept: the head phi_0, which every device draws from the seed.

    Parameters
    ----------
    design
        "optimal": `parsifl.masks.optimal`, limited by nodes and not by time, so that the plan
        repeats; "sequential" takes blocks from the front until the next does not fit; "random"
        takes them in random order.
    objective
        What "optimal" minimises: J = bias + unused budgets (equation (9)), or the bias alone.
    head
        "trained": the head is trained by everybody and shared, as in Table 9.
    base
        What is masked: the model; "heterofl": the slice by the "width" of the device's profile;
        "splitmix": `bases` narrow networks, dealt out by width, under one mask a device. Budgets
        then speak of the body of one slice or network.
    """

    cites: ClassVar[str] = (
        "Setayesh, Li and Wong, PerFedMask: Personalized Federated Learning with Optimized "
        "Masking Vectors, ICLR 2023"
    )
    requires: ClassVar[tuple[type[Any], ...]] = (Layered,)

    tune_epochs: NonNegative | None = 5.0
    design: Design = "optimal"
    objective: Objective = "J"
    head: Literal["frozen", "trained"] = "frozen"
    base: Literal["model", "heterofl", "splitmix"] = "model"
    bases: Count = 8

    def profile_fields(self) -> tuple[str, ...]:
        """Read the budget of a device, and its width where there are several."""
        own = ("budget",) if self.base == "model" else ("budget", "width")
        return (*own, *super().profile_fields())

    def networks(self) -> int:
        """Return how many networks there are in Split-Mix."""
        return self.bases if self.base == "splitmix" else 0

    def freezes_head(self) -> bool:
        """Freeze the head unless it is to be trained."""
        return self.head == "frozen"

    def slices(self) -> bool:
        """Average slices of unequal size in HeteroFL."""
        return self.base == "heterofl"

    def init_server(self, problem: Problem, clients: Sequence[ClientInfo], key: Key) -> Fleet:
        """Draw the model and plan the masks."""
        masks, chosen = compressed(self._masks(problem, clients, key))
        return Fleet(self._start(problem, key), masks, chosen)

    def form(self, server: Fleet, info: ClientInfo, key: Key) -> Form:
        """Look the device's mask up, and its slice or its networks."""
        mask = server.masks[server.chosen[info.id]]
        if self.base == "splitmix":
            return Form(1 / self.bases, members_for(info, self.bases, key), mask)
        return Form(width_of(info) if self.base == "heterofl" else 1.0, (), mask)

    def _masks(self, problem: Problem, clients: Sequence[ClientInfo], key: Key) -> Masks:
        """Plan for the devices of each width by themselves: their blocks have other sizes."""
        widths = np.array([self._width(info) for info in clients])
        parts = []
        for width in np.unique(widths):
            one = problem if width == 1.0 else narrowed(problem, float(width))
            members = np.flatnonzero(widths == width)
            named = [clients[int(index)] for index in members]
            here = key.replace(purpose=f"masks/{width}")
            found = design_masks(
                layered(one).layer_groups, named, self.design, self.objective, here
            )
            parts.append((members, found))
        masks = np.zeros((len(clients), parts[0][1].shape[1]), dtype=np.bool_)
        for members, found in parts:
            masks[members] = found
        tell_gaps(masks, clients, [block.name for block in layered(problem).layer_groups])
        return masks

    def _width(self, info: ClientInfo) -> float:
        if self.base == "splitmix":
            return 1 / self.bases
        return width_of(info) if self.base == "heterofl" else 1.0
