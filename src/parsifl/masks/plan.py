"""The result of the mask solver: masks, their value, and a lower bound."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from parsifl.core.config import is_number
from parsifl.core.errors import ConfigError
from parsifl.core.keys import Key
from parsifl.masks.instance import (
    Floats,
    Instance,
    Ints,
    Masks,
    Objective,
    bias,
    floor,
    is_whole,
    shares,
    slack,
    value,
    variance,
)

_PROVEN = 1e-6  # fraction of d_w: HiGHS works with tolerances of this order
_EXACT = 20_000  # cohorts (counted by masks) that are summed exactly


@dataclass(frozen=True, eq=False)
class MaskPlan:
    """Which layers each device trains, with a certificate.

    `objective` names the objective, `value` is its value for these masks, `bound` is a lower bound
    over all feasible designs, and `proven` means that the two meet. `messages` names devices that
    cannot train any layer and layers that no device can train.
    """

    instance: Instance
    masks: Masks  # [N, L]
    objective: Objective
    bias: float
    slack: float
    bound: float
    method: str
    seconds: float
    devices: tuple[int, ...]
    messages: tuple[str, ...] = ()

    @property
    def J(self) -> float:
        """Return the paper's objective, bias + sum of slacks."""
        return self.bias + self.slack

    @property
    def V(self) -> float:
        """Return V, the increase in variance of layers that are averaged over fewer devices."""
        return variance(self.instance, self.masks)

    @property
    def floor(self) -> float:
        """Return a lower bound of the bias of all designs that train as much as this one.

        It is d minus the mean number of trained parameters, if every layer is covered.
        """
        sizes, weight = self.instance.sizes, shares(self.instance, self.masks)
        covered = float(sizes[self.masks.any(axis=0)].sum())
        return floor(self.instance.total, covered, float(weight @ (self.masks @ sizes)))

    @property
    def value(self) -> float:
        """Return the objective that was minimised."""
        return value(self.instance, self.masks, self.objective)

    @property
    def proven(self) -> bool:
        """Return whether no feasible design is better."""
        return self.value - self.bound <= _PROVEN * self.instance.total

    @property
    def gap(self) -> float:
        """Return (value - bound) / value, the largest possible relative improvement."""
        return 0.0 if self.proven else (self.value - self.bound) / abs(self.value)

    @property
    def layers(self) -> tuple[str, ...]:
        """Return the names of the layers."""
        return self.instance.names

    @property
    def trainable(self) -> float:
        """Return the average number of trained parameters per device."""
        return float((self.masks @ self.instance.sizes).mean())

    def trained(self, device: int) -> tuple[str, ...]:
        """Return the names of the layers that this device trains."""
        if device not in self.devices:
            raise ConfigError(f"device {device} is not in the plan; it has {len(self.devices)}")
        row = self.masks[self.devices.index(device)]
        return tuple(name for name, on in zip(self.layers, row, strict=True) if on)

    def named(self) -> tuple[tuple[str, ...], ...]:
        """Return the names of the layers that each device trains, device by device."""
        return tuple(self.trained(device) for device in self.devices)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        """Allow a plan as the value of a setting."""
        from pydantic_core import core_schema

        del source, handler
        return core_schema.is_instance_schema(cls)

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain data (JSON)."""
        return {
            "objective": self.objective,
            "value": self.value,
            "bound": self.bound,
            "gap": self.gap,
            "proven": self.proven,
            "bias": self.bias,
            "slack": self.slack,
            "J": self.J,
            "V": self.V,
            "floor": self.floor,
            "trainable": self.trainable,
            "method": self.method,
            "seconds": self.seconds,
            "layers": dict(zip(self.layers, self.instance.sizes.astype(int).tolist(), strict=True)),
            "devices": list(self.devices),
            "budgets": self.instance.limits.tolist(),
            "masks": self.masks.astype(int).tolist(),
            "messages": list(self.messages),
        }


def plan_of(
    instance: Instance,
    masks: Masks,
    objective: Objective,
    *,
    bound: float = -np.inf,
    method: str,
    seconds: float = 0.0,
    devices: Iterable[int] | None = None,
    messages: Iterable[str] = (),
) -> MaskPlan:
    """Evaluate masks and wrap them."""
    plan_bias, left = bias(instance.sizes, masks, instance.weights), slack(instance, masks)
    reached = value(instance, masks, objective)
    numbers = tuple(range(instance.devices)) if devices is None else tuple(devices)
    return MaskPlan(
        instance=instance,
        masks=masks,
        objective=objective,
        bias=plan_bias,
        slack=left,
        bound=min(bound, reached),  # rounding must not put the bound above the value
        method=method,
        seconds=seconds,
        devices=numbers,
        messages=tuple(messages) or messages_of(instance, numbers),
    )


def messages_of(instance: Instance, devices: Sequence[int] | None = None) -> tuple[str, ...]:
    """Name the devices that cannot train any layer and the layers that no device can train."""
    numbers = range(instance.devices) if devices is None else devices
    messages = []
    cheapest = (instance.add + instance.tail).min()
    idle = np.flatnonzero(~instance.active())
    if len(idle):
        named = _list([numbers[int(row)] for row in idle])
        messages.append(
            f"{named} cannot train any layer: the budget is below the smallest layer, "
            f"which costs {cheapest:,.0f}; raise the budget or remove the device"
        )
    bare = np.flatnonzero(~instance.trainable())
    if len(bare):
        names = ", ".join(instance.names[layer] for layer in bare)
        messages.append(f"no device can train layer {names}: it keeps its initial value")
    return tuple(messages)


def _list(devices: Sequence[int]) -> str:
    shown = ", ".join(str(device) for device in devices[:10])
    more = f" and {len(devices) - 10} more" if len(devices) > 10 else ""
    return f"device {shown}{more}"


@dataclass(frozen=True)
class ExpectedBias:
    """The mean over cohorts; `error` is its standard error, zero if all were summed."""

    mean: float
    error: float
    cohort: int


def expected_bias(plan: MaskPlan, participation: float, *, draws: int = 4000) -> ExpectedBias:
    """Return E[bias] when max(c N, 1) devices, drawn without replacement, form a round.

    Devices of equal mask and weight are interchangeable, so a cohort is described by the number of
    devices of each kind. Cohorts are summed exactly if they are few, else drawn `draws` times with
    a fixed key.

    >>> from parsifl.masks import optimal
    >>> round(expected_bias(optimal([1, 1], [1, 2]), 0.5).mean, 6)
    0.5
    """
    if not is_number(participation) or not 0.0 < participation <= 1.0:
        raise ConfigError(f"participation must be above 0 and at most 1, got {participation!r}")
    if not is_whole(draws, 2):
        raise ConfigError(f"draws must be at least 2, got {draws!r}")
    shared = plan.instance.weights
    weights = np.ones(len(plan.masks)) if shared is None else shared
    kinds, counts = np.unique(np.column_stack([plan.masks, weights]), axis=0, return_counts=True)
    cohort = max(1, round(participation * len(plan.masks)))  # as a round draws it
    if math.prod(int(count) + 1 for count in counts) <= _EXACT:
        return _summed(plan, kinds, counts, cohort)
    generator = Key(0, purpose="participation").numpy_generator()
    came = generator.multivariate_hypergeometric(counts, cohort, size=draws)
    biases = _biases(plan.instance.sizes, kinds, came)
    return ExpectedBias(float(biases.mean()), float(biases.std(ddof=1) / math.sqrt(draws)), cohort)


def _summed(plan: MaskPlan, kinds: Floats, counts: Ints, cohort: int) -> ExpectedBias:
    listed = np.array(list(_cohorts([int(count) for count in counts], cohort)))
    ways = [
        sum(math.log(math.comb(int(n), int(k))) for n, k in zip(counts, came, strict=True))
        for came in listed
    ]
    chance = np.exp(np.array(ways) - math.log(math.comb(int(counts.sum()), cohort)))
    biases = _biases(plan.instance.sizes, kinds, listed)
    return ExpectedBias(float(chance @ biases), 0.0, cohort)


def _cohorts(counts: list[int], cohort: int) -> Iterator[tuple[int, ...]]:
    if len(counts) == 1:
        if cohort <= counts[0]:
            yield (cohort,)
        return
    for came in range(min(counts[0], cohort) + 1):
        for rest in _cohorts(counts[1:], cohort - came):
            yield (came, *rest)


def _biases(sizes: Floats, kinds: Floats, came: Ints) -> Floats:
    """Return the bias of each cohort, given its number of devices of each kind: [cohorts, kinds].

    A kind is a mask followed by a weight.
    """
    masks, weights = kinds[:, :-1] > 0, kinds[:, -1]
    coverage = came @ (masks * weights[:, None])
    gamma = np.zeros(len(came))
    for kind, mask in enumerate(masks):
        if mask.any():
            least = coverage[:, mask].min(axis=1)
            here = came[:, kind] > 0
            gamma[here] += (came[:, kind] * weights[kind])[here] / least[here]
    biases: Floats = sizes.sum() * gamma - (came @ masks.astype(np.int64) > 0) @ sizes
    return biases
