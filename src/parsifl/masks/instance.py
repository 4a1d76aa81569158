"""An instance of the mask problem: layers, devices and budgets.

A mask selects the layers that a device trains. With c_j the number of devices that train layer j,
the bias of PerFedMask's convergence bound (problem P^mask, equations (9a) to (9d)) is

    bias = d * sum_n gamma_n - sum of |pi_j| over covered layers j,
    gamma_n = 1 / (the least c_j among the layers that n trains),

because the normalised masks of a covered layer add up to one. The paper's objective is
J = bias + sum_n epsilon_n, where epsilon_n is the part of its budget that device n leaves unused.
If the server weights device n by p_n, c_j is the sum of the p_n that train layer j, and
gamma_n = p_n / (the least such sum).

A third objective is not in the paper: V = sum_j |pi_j| (sum_n k_nj^2 - sum_n p_n^2), with
k_nj = p_n / c_j for the devices that train j; for equal weights sum_j |pi_j| (1/c_j - 1/N). It is
the increase in variance of layers that are averaged over fewer devices. It predicts the training
loss if most devices are weak and can train half of the model; J predicts it if half of the
devices are strong.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from parsifl.core.config import is_number
from parsifl.core.errors import ConfigError

Masks = NDArray[np.bool_]
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Objective = Literal["J", "bias", "V"]

_TOLERANCE = 1e-9


@runtime_checkable
class NamedLayer(Protocol):
    """Anything with a name and a number of parameters, such as `masks.LayerGroup`."""

    @property
    def name(self) -> str:
        """The name of the layer."""
        ...

    @property
    def size(self) -> int:
        """How many parameters the layer has."""
        ...


Layers = Mapping[str, int] | Sequence[int] | Sequence[NamedLayer]


@dataclass(frozen=True, eq=False)
class Instance:
    """Layers and devices; a set S of layers costs `sum(add[S]) + tail[first of S]`.

    For a budget of parameters `add` is the size and `tail` is zero. For FLOPs and memory `tail`
    is the cost of backpropagating to the earliest trained layer. `reach` is the number of
    parameters against which the slack of a device is measured. `weights` are the p_n of the
    server's mean (None: equal). `asked` is the original instance, if layers had to be dropped.
    """

    names: tuple[str, ...]
    sizes: Floats  # [L]
    add: Floats  # [L]
    tail: Floats  # [L]
    limits: Floats  # [N]
    reach: Floats  # [N]
    weights: Floats | None = None  # [N]
    asked: Instance | None = None

    @property
    def total(self) -> float:
        """Return d_w, the number of parameters of all layers."""
        return float(self.sizes.sum())

    @property
    def devices(self) -> int:
        """Return the number of devices."""
        return len(self.limits)

    def affordable(self) -> Masks:
        """Return [N, L]: whether device n can train layer j alone."""
        return self.add + self.tail <= self._roof()[:, None]

    def active(self) -> Masks:
        """Return [N]: whether the device can train any layer."""
        return np.asarray(self.affordable().any(axis=1))

    def trainable(self) -> Masks:
        """Return [L]: whether some device can train the layer."""
        return np.asarray(self.affordable().any(axis=0))

    def cost(self, masks: Masks) -> Floats:
        """Return the cost of each mask, in the unit of `limits`."""
        first = np.where(masks.any(axis=1), self.tail[masks.argmax(axis=1)], 0.0)
        cost: Floats = masks @ self.add + first
        return cost

    def fits(self, masks: Masks, limits: Floats) -> Masks:
        """Return which masks are within their limits (both of the same length, or one limit)."""
        within: Masks = self.cost(masks) <= limits + _TOLERANCE * np.maximum(1.0, np.abs(limits))
        return within

    def _roof(self) -> Floats:
        roof: Floats = self.limits + _TOLERANCE * np.maximum(1.0, np.abs(self.limits))
        return roof

    def broken(self, masks: Masks) -> str | None:
        """Return why these masks are not feasible, or None."""
        if masks.shape != (self.devices, len(self.sizes)):
            return f"masks have shape {masks.shape}, not {(self.devices, len(self.sizes))}"
        over = np.flatnonzero(~self.fits(masks, self.limits))
        if len(over):
            return f"device {over[0]} spends more than its budget"
        idle = np.flatnonzero(self.active() & ~masks.any(axis=1))
        if len(idle):
            return f"device {idle[0]} could train a layer and trains none"
        bare = np.flatnonzero(self.trainable() & ~masks.any(axis=0))
        if len(bare):
            return f"layer {self.names[bare[0]]} is not trained although a device could train it"
        return None

    def without(self, layers: NDArray[np.intp]) -> Instance:
        """Return the instance in which no device can afford these layers."""
        add = self.add.copy()
        add[layers] = 2.0 * float(self.limits.max()) + 1.0
        return replace(self, add=add, asked=self)

    def take(self, devices: NDArray[np.intp]) -> Instance:
        """Return the instance with only these devices."""
        weights = None if self.weights is None else self.weights[devices]
        return replace(
            self, limits=self.limits[devices], reach=self.reach[devices], weights=weights
        )


def shares(instance: Instance, masks: Masks) -> Floats:
    """Return p_n, which add up to 1 over the devices that train something."""
    weights = np.ones(instance.devices) if instance.weights is None else instance.weights
    part: Floats = np.where(masks.any(axis=1), weights, 0.0)
    return part / part.sum() if part.any() else part


def gammas(masks: Masks, weights: Floats | None = None) -> Floats:
    """Return gamma_n = max_j k_nj = p_n / (least coverage among the layers that n trains)."""
    parts = np.ones(len(masks)) if weights is None else weights
    least = np.where(masks, parts @ masks, np.inf).min(axis=1)
    gamma: Floats = np.where(masks.any(axis=1), parts / least, 0.0)
    return gamma


def bias(sizes: Floats, masks: Masks, weights: Floats | None = None) -> float:
    """Return the bias term of the convergence bound for these masks and weights.

    >>> masks = np.array([[1, 0, 0, 0], [1, 0, 0, 0], [1, 1, 1, 1]], dtype=bool)
    >>> round(bias(np.ones(4), masks), 6)
    2.666667
    """
    covered = float(sizes[masks.any(axis=0)].sum())
    # never negative; rounding may give -1e-9
    return max(0.0, float(sizes.sum()) * float(gammas(masks, weights).sum()) - covered)


def floor(total: float, covered: float, trained: float) -> float:
    """Return a lower bound of the bias if devices train this many parameters on average.

    For each covered layer the gammas of those that train it add up to at least 1, and any other
    device has at least its p_n; the mean over the layers, weighted by size, is the floor. With
    all layers covered it is d - trained.
    """
    return max(0.0, total * (2.0 - trained / covered) - covered)  # a bias is never negative


def variance(instance: Instance, masks: Masks) -> float:
    """Return V.

    >>> masks = np.array([[1, 0], [1, 1]], dtype=bool)
    >>> variance(instance_of([3, 1], [3, 4]), masks)
    0.5
    """
    weight = shares(instance, masks)
    coverage = weight @ masks
    inverse = np.where(coverage > 0, 1.0 / np.where(coverage > 0, coverage, 1.0), 0.0)
    fewer = (weight**2) @ masks * inverse**2 - float((weight**2).sum())
    return float(np.where(coverage > 0, fewer, 0.0) @ instance.sizes)


def slack(instance: Instance, masks: Masks) -> float:
    """Return the sum of the epsilons: parameters that devices could train but do not."""
    return float((instance.reach - masks @ instance.sizes).sum())


def value(instance: Instance, masks: Masks, objective: Objective) -> float:
    """Return the objective of these masks."""
    if objective == "V":
        return variance(instance, masks)
    term = bias(instance.sizes, masks, instance.weights)
    return term + slack(instance, masks) if objective == "J" else term


def instance_of(
    layers: Layers, budgets: Iterable[float], weights: Iterable[float] | None = None
) -> Instance:
    """Check the input and return the instance of a parameter budget per device."""
    names, sizes = read_layers(layers)
    limits = read_budgets(budgets)
    reach = np.minimum(limits, sizes.sum())
    parts = None if weights is None else read_weights(weights, len(limits))
    return Instance(names, sizes, sizes, np.zeros_like(sizes), limits, reach, parts)


def read_weights(weights: Iterable[float], devices: int) -> Floats | None:
    """Return the weights of the devices in the server's mean; None if they are equal."""
    values = listed(weights, "weights", "one weight per device, such as its number of rows")
    good = all(is_number(one) and 0 < one < math.inf for one in values)
    if len(values) != devices or not good:
        raise ConfigError(
            f"weights must be {devices} positive numbers, one per device, got {values!r:.80}"
        )
    parts = np.array([float(one) for one in values])
    return None if (parts == parts[0]).all() else parts


def read_layers(layers: Layers) -> tuple[tuple[str, ...], Floats]:
    """Return names and sizes; a layer without a name gets its index."""
    if isinstance(layers, Mapping):
        pairs: list[tuple[str, Any]] = [(str(name), size) for name, size in layers.items()]
    else:
        listed_layers = listed(
            layers, "layers", "one size per layer, or masks.layer_groups(module)"
        )
        pairs = [_pair(index, layer) for index, layer in enumerate(listed_layers)]
    if not pairs:
        raise ConfigError("there are no layers to mask; pass at least one layer size")
    names = [name for name, _ in pairs]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ConfigError(f"two layers are called '{twice[0]}'; layer names must be unique")
    for name, size in pairs:
        if not is_number(size) or not 0 < size < math.inf:
            raise ConfigError(f"layer {name} has size {size!r}; a size is a positive number")
    return tuple(names), np.array([float(size) for _, size in pairs])


def read_budgets(budgets: Iterable[float]) -> Floats:
    """Return the budgets as an array, naming the device whose budget is not a number."""
    listed_budgets = listed(budgets, "budgets", "one budget per device, such as [0.5e6, 1e6]")
    if not listed_budgets:
        raise ConfigError("there are no devices; pass one budget per device")
    for device, budget in enumerate(listed_budgets):
        if not is_number(budget):
            raise ConfigError(f"the budget of device {device} is {budget!r}; a budget is a number")
        if not budget >= 0:
            raise ConfigError(f"the budget of device {device} is {budget}; it must not be negative")
    return np.array([min(float(budget), 1e300) for budget in listed_budgets])


def read_objective(objective: str) -> Objective:
    """Check the name of the objective."""
    if objective == "J":
        return "J"
    if objective == "bias":
        return "bias"
    if objective == "V":
        return "V"
    raise ConfigError(f"unknown objective {objective!r}; use 'J' (bias + slack), 'bias' or 'V'")


def _pair(index: int, layer: Any) -> tuple[str, Any]:
    return (layer.name, layer.size) if isinstance(layer, NamedLayer) else (str(index), layer)


def listed(things: Any, what: str, wanted: str) -> list[Any]:
    """Return the items of an iterable, array or tensor; text and mappings are rejected."""
    if hasattr(things, "tolist"):
        things = things.tolist()
    if isinstance(things, str | bytes | Mapping) or not isinstance(things, Iterable):
        raise ConfigError(f"{what} is {things!r:.80}; expected {wanted}")
    return list(things)


def is_whole(thing: Any, least: int) -> bool:
    """Return whether something is a whole number of at least this size."""
    is_integer = isinstance(thing, int | np.integer) and not isinstance(thing, bool)
    return is_integer and int(thing) >= least
