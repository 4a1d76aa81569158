"""PerFedMask: devices train the layers that fit their budgets, chosen by optimization."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, final

import numpy as np
from numpy.typing import NDArray

from parsifl.algorithms._bases.submodel import (
    SubmodelAveraging,
    SubmodelServer,
    SubmodelSpec,
    members_for,
    narrowed,
    width_of,
)
from parsifl.core.algorithm import ClientInfo, Preset, check_profile
from parsifl.core.config import Count, NonNegative, is_number
from parsifl.core.errors import ConfigError, ParsiflWarning
from parsifl.core.keys import Key
from parsifl.core.layer_group import LayerGroup
from parsifl.core.problem import Layered, Problem
from parsifl.masks import MaskPlan, heuristics, optimal
from parsifl.masks.instance import Objective, instance_of
from parsifl.masks.plan import plan_of

Design = Literal["optimal", "sequential", "random"]
Masks = NDArray[np.bool_]

_NODES = 50  # limits of a program: a plan within seconds, and the same plan in every run


@final
class _PlannedLayers(tuple[tuple[str, ...], ...]):
    """A plan by name that remembers for which sizes and weights it was made, and its values."""

    sizes: NDArray[np.float64]
    weights: NDArray[np.float64]
    numbers: dict[str, float]

    @classmethod
    def of(cls, plan: MaskPlan) -> _PlannedLayers:
        """Return the names of the layers that each device of a plan trains."""
        planned, weights = cls(plan.named()), plan.instance.weights
        planned.weights = np.ones(len(planned)) if weights is None else weights
        planned.sizes, planned.numbers = plan.instance.sizes, _numbers(plan)
        return planned

    def fits(self, weights: NDArray[np.float64], part: Masks) -> bool:
        """Return whether devices that take part have the weights of the plan, up to a factor."""
        shares, planned = weights[part], self.weights[part]
        return not shares.any() or np.allclose(planned / planned.sum(), shares / shares.sum())


@final
@dataclass(frozen=True)
class PerFedMask(SubmodelAveraging):
    r"""Masked local training of the body under a frozen head, then fine-tuning.

    .. math:: w_n \leftarrow w_n - \eta\, m_n \odot \nabla_w f_n(w_n, \phi_0), \qquad
              w \leftarrow \sum_n k_n \odot w_n, \qquad
              (k_n)_j = \frac{p_n (m_n)_j}{\sum_{n'} p_{n'} (m_{n'})_j}

    with eta = `lr` and p_n by `weighting`, the sums over the devices of the round. The masks m_n
    freeze whole blocks (a weight with its bias and norm). They are planned once, from the
    "budget" in each device's profile: psi_n, as a fraction of the body (at most 1) or a number
    of parameters; no budget means everything. The plan is made for the weights p_n of all devices
    that may take part. Pass your own plan (`parsifl.masks`) as `plan`, or as the "mask" in each
    profile, a list of 0 and 1 by layer. Frozen blocks get no weight gradient and are not uploaded;
    a block that no device trained keeps its value. Before evaluation a device fine-tunes all
    parameters, including the head, for `tune_epochs` at the learning rate of the round. Sent: the
    body down, the trained blocks up. Kept: the head phi_0, which every device draws from the seed.

    Parameters
    ----------
    design
        "optimal": `parsifl.masks.optimal`, limited by nodes and not by time, so that the plan is
        reproducible; "sequential" takes blocks from the front until the next does not fit;
        "random" takes them in random order.
    objective
        What "optimal" minimizes: J = bias + unused budgets (equation (9)), the bias alone, or V,
        the increase in variance of layers averaged over fewer devices (`parsifl.masks`).
    plan
        The masks: a `parsifl.masks.MaskPlan`, or for each device the names of the layers that it
        trains. None: planned from the budgets. A plan made for other weights than those of
        `weighting` causes a warning.
    head
        "trained": the head is shared and trained, as in Table 9. It then counts as a layer in
        budgets and masks.
    base
        What is masked: the model; "heterofl": the slice by the "width" of the device's profile;
        "splitmix": `bases` narrow networks, assigned by width, under one mask per device. Budgets
        then refer to the body of one slice or network.
    bases
        The number of narrow networks for base="splitmix".
    deploy
        What a device is evaluated on with base="heterofl": its "slice", or the "full" model, as in
        the paper, which it then receives as a whole.
    """

    cites: ClassVar[str] = (
        "Setayesh, Li and Wong, PerFedMask: Personalized Federated Learning with Optimized "
        "Masking Vectors, ICLR 2023"
    )
    requires: ClassVar[tuple[type[Any], ...]] = (Layered,)

    presets: ClassVar[Mapping[str, Preset]] = {
        f"paper:{data}": Preset(
            {
                "lr": lr, "milestones": (rounds // 2, 3 * rounds // 4), "momentum": 0.9,
                "weight_decay": 5e-4, "batch_size": 50, "epochs": 4.0, "weighting": "uniform",
            },
            f"{where}; momentum and weight decay from the authors' code",
            f"{clients} devices, half with budget 0.125, {rounds} rounds, {model}",
        )
        for data, lr, rounds, clients, model, where in (
            ("cifar10", 0.1, 80, 100, "preresnet18", "Section 6.1"),
            ("cifar100", 0.1, 80, 100, "mobilenet", "Section 6.1"),
            ("domainnet", 0.01, 100, 30, "alexnet", "Appendix I"),
        )
    }  # fmt: skip

    tune_epochs: NonNegative | None = 5.0
    design: Design = "optimal"
    objective: Objective = "J"
    head: Literal["frozen", "trained"] = "frozen"
    base: Literal["model", "heterofl", "splitmix"] = "model"
    bases: Count = 8
    deploy: Literal["slice", "full"] = "slice"
    plan: MaskPlan | tuple[tuple[str, ...], ...] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.plan, MaskPlan):  # by name: settings are written as JSON
            if self.plan.devices != tuple(range(len(self.plan.devices))):
                raise ConfigError("the plan lacks devices that left; plan for all clients")
            object.__setattr__(self, "plan", _PlannedLayers.of(self.plan))
        super().__post_init__()

    def profile_fields(self) -> tuple[str, ...]:
        """Return the entries with the budget of a device and, for slices or networks, its width."""
        names = ("budget", "mask") if self.base == "model" else ("budget", "mask", "width")
        return (*names, *super().profile_fields())

    def networks(self) -> int:
        """Return the number of networks in Split-Mix."""
        return self.bases if self.base == "splitmix" else 0

    def freezes_head(self) -> bool:
        """Freeze the head unless `head` is "trained"."""
        return self.head == "frozen"

    def slices(self) -> bool:
        """Average slices of unequal size in HeteroFL."""
        return self.base == "heterofl"

    def deploys_full(self) -> bool:
        """Evaluate the full model if `deploy` is "full"."""
        return self.slices() and self.deploy == "full"

    def init_server(
        self, problem: Problem, clients: Sequence[ClientInfo], key: Key
    ) -> SubmodelServer:
        """Draw the model and plan the masks."""
        for client in clients:
            check_profile(client.id, client.profile, self.profile_fields())
        designed, plan = self._masks(problem, clients, key)
        masks, chosen = compressed(designed)
        return SubmodelServer(self._start(problem, key), masks, chosen, plan)

    def start_metrics(self, server: SubmodelServer) -> Mapping[str, float]:
        """Return the values and bounds of the plan: J, bias, V, floor, bound, proven (0 or 1).

        Masks that are not from a `MaskPlan` have no budgets, hence no J, and no bound.
        """
        return {f"plan_{name}": value for name, value in server.plan.items()}

    def submodel(self, server: SubmodelServer, client: ClientInfo, key: Key) -> SubmodelSpec:
        """Return the mask of the device, and its slice or its networks."""
        mask = server.masks[server.chosen[client.id]]
        split = self.base == "splitmix"
        members = members_for(client, self.bases, key) if split else ()
        return SubmodelSpec(self._width(client), members, mask)

    def _masks(
        self, problem: Problem, clients: Sequence[ClientInfo], key: Key
    ) -> tuple[Masks, dict[str, float]]:
        """Plan the masks for each width separately, because block sizes depend on it.

        Given masks are used unchanged. The values of the plan are returned with the masks if all
        devices have the same width.
        """
        names = [block.name for block in self.blocks(problem)]
        widths = np.array([self._width(client) for client in clients])
        if self.plan is not None or any("mask" in client.profile for client in clients):
            masks = given_masks(self.plan, clients, names)
            warn_of_gaps(masks, clients, names)
            self._warn_of_weights(masks, clients)
            if len(set(widths)) > 1:
                return masks, {}
            one = problem if widths[0] == 1.0 else narrowed(problem, float(widths[0]))
            return masks, self._given_numbers(self.blocks(one), clients, masks)
        parts = []
        for width in np.unique(widths):
            one = problem if width == 1.0 else narrowed(problem, float(width))
            members = np.flatnonzero(widths == width)
            named = [clients[int(index)] for index in members]
            here = key.replace(purpose=f"masks/{width}")
            weights = [self.weight(client) for client in named]
            blocks = self.blocks(one)
            design = design_masks(blocks, named, weights, self.design, self.objective, here)
            parts.append((members, *design))
        masks = np.zeros((len(clients), len(names)), dtype=np.bool_)
        for members, rows, _ in parts:
            masks[members] = rows
        warn_of_gaps(masks, clients, names)
        return masks, _numbers(parts[0][2]) if len(parts) == 1 else {}

    def _warn_of_weights(self, masks: Masks, clients: Sequence[ClientInfo]) -> None:
        """Warn if the plan was made for other weights than those of the server's mean."""
        if not isinstance(self.plan, _PlannedLayers) or masks.all():
            return
        part = np.array([client.takes_part for client in clients])
        if not self.plan.fits(self._weights(clients), part):
            planned = self.plan.weights[part]
            equal = "equal weights" if (planned == planned[0]).all() else "other weights"
            warnings.warn(
                f"the plan was made for {equal}, but the server's mean weights devices by "
                f"{'rows' if self.weighting == 'samples' else 'equal shares'}, so that its "
                "objective and its bound do not hold: pass weights= to the function that plans"
                + (", or set weighting='uniform'" if equal == "equal weights" else ""),
                ParsiflWarning,
                stacklevel=2,
            )

    def _given_numbers(
        self, blocks: Sequence[LayerGroup], clients: Sequence[ClientInfo], masks: Masks
    ) -> dict[str, float]:
        """Return the values of given masks; J and a bound only of a plan made for these devices.

        Other masks have no budgets, hence no slack.
        """
        part = np.array([client.takes_part for client in clients])
        if not masks[part].any():
            return {}
        weights, sizes = self._weights(clients), [block.size for block in blocks]
        budgets = [sum(sizes)] * int(part.sum())
        plan = plan_of(
            instance_of(blocks, budgets, weights[part]), masks[part], "bias", method="given"
        )
        numbers = {name: value for name, value in _numbers(plan).items() if name != "J"}
        planned = self.plan
        if not isinstance(planned, _PlannedLayers) or not part.all():
            return numbers
        same = np.array_equal(planned.sizes, sizes) and planned.fits(weights, part)
        return {**planned.numbers, **numbers} if same else numbers

    def _weights(self, clients: Sequence[ClientInfo]) -> NDArray[np.float64]:
        return np.array([self.weight(client) for client in clients])

    def _width(self, client: ClientInfo) -> float:
        if self.base == "splitmix":
            return 1 / self.bases
        return width_of(client) if self.base == "heterofl" else 1.0


def budget_of(client: ClientInfo, total: int) -> float:
    """Return psi_n, the number of parameters that a device may train.

    A budget up to 1 is a fraction of the `total` parameters of the body, a larger one a number
    of parameters; without a budget a device trains everything.

    >>> budget_of(ClientInfo(0, 10, {"budget": 0.25}), 400)
    100.0
    >>> budget_of(ClientInfo(0, 10, {"budget": 300}), 400), budget_of(ClientInfo(0, 10), 400)
    (300.0, 400.0)
    """
    budget = client.profile.get("budget")
    if budget is None:
        return float(total)
    if not is_number(budget) or budget < 0:
        raise ConfigError(
            f"the budget of client {client.id} is {budget!r}; a budget is a fraction of the body "
            "(0 to 1) or a number of parameters (above 1)"
        )
    return float(budget * total if budget <= 1 else min(budget, total))


def given_masks(plan: Any, clients: Sequence[ClientInfo], names: Sequence[str]) -> Masks:
    """Return the masks of a plan of names, or those in the profiles."""
    if plan is not None:
        return np.array(planned(plan, clients, names))
    return np.array([mask_of(client, len(names)) for client in clients])


def planned(plan: Any, clients: Sequence[ClientInfo], names: Sequence[str]) -> list[list[bool]]:
    """Return which layers each device trains by a plan of names."""
    if len(plan) != len(clients):
        raise ConfigError(f"the plan has {len(plan)} devices, but there are {len(clients)} clients")
    for client, layers in zip(clients, plan, strict=True):
        if "mask" in client.profile or "budget" in client.profile:
            raise ConfigError(
                f"client {client.id} has a mask or a budget in its profile, and there is a plan: "
                "remove one of them"
            )
        if foreign := sorted(set(layers) - set(names)):
            raise ConfigError(
                f"the plan lets client {client.id} train '{foreign[0]}'; the layers of this model "
                f"are {', '.join(names)}"
            )
    return [[name in layers for name in names] for layers in plan]


def mask_of(client: ClientInfo, layers: int) -> list[bool]:
    """Return the mask in the profile of a device, layer by layer.

    >>> mask_of(ClientInfo(0, 10, {"mask": [1, 0, True]}), 3)
    [True, False, True]
    """
    mask = client.profile.get("mask")
    if mask is None:
        raise ConfigError(f"client {client.id} has no mask, but others do: give all or none")
    if "budget" in client.profile:
        raise ConfigError(f"client {client.id} has a mask and a budget: remove one of them")
    listed = isinstance(mask, list | tuple) and len(mask) == layers
    if not listed or any(not isinstance(on, int) or on not in (0, 1) for on in mask):
        raise ConfigError(
            f"the mask of client {client.id} is {mask!r}; a mask is one 0 or 1 for each of "
            f"{layers} layers"
        )
    return [bool(on) for on in mask]


def design_masks(
    blocks: Sequence[LayerGroup],
    clients: Sequence[ClientInfo],
    weights: Sequence[float],
    design: Design,
    objective: Objective,
    key: Key,
) -> tuple[Masks, MaskPlan | None]:
    """Return which blocks each device trains [N, L], within its budget, and the plan.

    The plan covers the devices that may take part; the others could train everything that fits.
    There is no plan if no device can train a block.
    """
    able = np.array([client.takes_part for client in clients])
    masks = np.ones((len(clients), len(blocks)), dtype=np.bool_)
    if not able.any():
        return masks, None
    total = sum(block.size for block in blocks)
    budgets = [budget_of(client, total) for client in clients if client.takes_part]
    part = [weight for weight, on in zip(weights, able, strict=True) if on]
    instance = instance_of(blocks, budgets, part)
    if not instance.active().any():
        masks[able] = False
        return masks, None
    if min(budgets) >= total:
        plan = plan_of(instance, masks[able], objective, bound=0.0, method="everything")
    elif design == "sequential":
        plan = plan_of(instance, heuristics.sequential(instance), objective, method=design)
    elif design == "random":
        plan = plan_of(instance, heuristics.random(instance, key), objective, method=design)
    else:
        plan = optimal(blocks, budgets, objective, weights=part, nodes=_NODES)
    masks[able] = plan.masks
    return masks, plan


def _numbers(plan: MaskPlan | None) -> dict[str, float]:
    """Return the values of a plan; only an optimal one has a bound."""
    if plan is None:
        return {}
    numbers = {"J": plan.J, "bias": plan.bias, "V": plan.V, "floor": plan.floor}
    if math.isfinite(plan.bound):
        numbers |= {"bound": plan.bound, "proven": float(plan.proven)}
    return numbers


def warn_of_gaps(masks: Masks, clients: Sequence[ClientInfo], names: Sequence[str]) -> None:
    """Warn about devices without a layer and layers without a device; reject empty masks."""
    if not masks.any():
        raise ConfigError(
            "no device trains any layer: all budgets are below the smallest layer, or the given "
            "masks are empty; raise the budgets or mark a layer"
        )
    idle = [str(clients[int(row)].id) for row in np.flatnonzero(~masks.any(axis=1))]
    if idle:
        warnings.warn(
            f"clients that train no layer and only fine-tune: {', '.join(idle[:10])}"
            f"{' and others' if len(idle) > 10 else ''}; their budgets are below the smallest "
            "layer, or the given plan has none for them",
            ParsiflWarning,
            stacklevel=2,
        )
    bare = [names[int(column)] for column in np.flatnonzero(~masks.any(axis=0))]
    if bare:
        warnings.warn(
            f"no device trains layer {', '.join(bare)}, which keeps its initial value: raise the "
            "largest budgets, or add the layer to the given plan",
            ParsiflWarning,
            stacklevel=2,
        )


def compressed(masks: Masks) -> tuple[tuple[tuple[int, ...], ...], tuple[int, ...]]:
    """Return the distinct masks as tuples of block numbers, and the index of each device's mask.

    >>> compressed(np.array([[True, False], [True, True], [True, False]]))
    (((0,), (0, 1)), (0, 1, 0))
    """
    numbers: dict[tuple[int, ...], int] = {}
    chosen = []
    for row in masks:
        mask = tuple(int(index) for index in np.flatnonzero(row))
        chosen.append(numbers.setdefault(mask, len(numbers)))
    return tuple(numbers), tuple(chosen)
