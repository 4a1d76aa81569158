"""Find the best masks with a certificate: closed form, bucketed programs, local search."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from parsifl.core.config import is_number
from parsifl.core.errors import ConfigError
from parsifl.core.keys import Key
from parsifl.masks import heuristics
from parsifl.masks.feasible_sets import Catalogue, DeviceGroup, groups_of
from parsifl.masks.heuristics import widest
from parsifl.masks.instance import (
    Instance,
    Layers,
    Masks,
    Objective,
    gammas,
    instance_of,
    is_whole,
    listed,
    read_objective,
    value,
)
from parsifl.masks.local_search import enumerated, exchange, improve, lower_bound
from parsifl.masks.milp import MilpColumns, Program, knapsack_columns, set_columns
from parsifl.masks.plan import MaskPlan, messages_of, plan_of

_MOST_GROUPS = 24  # distinct budgets that enter one program; more are rounded
_SMALL_PROGRAM = 400  # number of columns up to which many buckets at once are worthwhile
_RANDOM_STARTS = 1000  # as many as the paper's initialisation draws
_EXCHANGE_STARTS = 12  # random designs that the exchange starts from, besides others
_PROGRAMS: tuple[Objective, ...] = ("J", "bias")  # the objectives of the programs


def optimal(
    layers: Layers,
    budgets: Iterable[float],
    objective: str = "J",
    *,
    weights: Iterable[float] | None = None,
    seconds: float = 15.0,
    nodes: int | None = None,
) -> MaskPlan:
    """Find which layers each device should train, with a bound on the optimum.

    Feasible designs respect every budget, train every layer that some device can afford, and leave
    no device idle that can afford a layer. Without the last two conditions the objective would
    reward training nothing.

    Parameters
    ----------
    layers
        Sizes in parameters, with names (a mapping, or `masks.layer_groups(module)`) or without.
    budgets
        psi_n, the number of parameters that device n may train. They may all differ.
    objective
        "J", the paper's objective (9): bias + sum of slacks; "bias" alone; or "V", the increase in
        variance of layers that are averaged over fewer devices (see `parsifl.masks.instance`).
    weights
        p_n, the weight of device n in the server's mean, such as its number of rows; None: equal.
        For unequal weights and "V" all designs are compared if there are at most 100,000, which
        proves the plan. More are searched device by device, and the bound rarely proves the plan.
    seconds
        Time limit of the search for better masks or a better bound.
    nodes
        Limit of branch-and-bound nodes per program, instead of the time limit: the same input then
        gives the same plan in every run.

    Examples
    --------
    >>> plan = optimal([1, 1, 1, 1], [1, 1, 4])
    >>> round(plan.J, 4), plan.proven
    (2.6667, True)
    """
    instance, goal = instance_of(layers, budgets, weights), read_objective(objective)
    return solve(instance, goal, seconds=seconds, nodes=nodes)


def solve(
    instance: Instance, objective: Objective, *, seconds: float = 15.0, nodes: int | None = None
) -> MaskPlan:
    """Find the best masks of an instance (see `optimal`)."""
    _check_limits(seconds, nodes)
    if objective == "V" or instance.weights is not None:
        return _exchanged(instance, objective, seconds, nodes)
    begin = time.perf_counter()
    end = begin + seconds if nodes is None else math.inf
    if not instance.active().any():
        cheapest = float((instance.add + instance.tail).min())
        raise ConfigError(
            f"no device can train any layer: the largest budget is {instance.limits.max():,.0f} "
            f"and the smallest layer costs {cheapest:,.0f}; raise the budgets"
        )
    messages = messages_of(instance)
    state = _Search(instance, objective, begin, end, nodes)
    state.closed_form()
    state.starts()
    if not state.feasible():
        masks, left = widest(instance)
        if len(left):
            names = ", ".join(instance.names[layer] for layer in left)
            messages += (
                f"the layers cannot all be trained at once; left out: {names} (the devices that "
                "could afford it are needed for others); raise the largest budgets",
            )
            instance = instance.without(left)
            state = _Search(instance, objective, begin, end, nodes)
            state.closed_form()
        state.offer(masks, "widest cover")
        state.polish(0.15)
    if not state.done():
        state.programs()
    if not state.done():
        state.polish(1.0)
    return plan_of(
        instance,
        state.masks,
        objective,
        bound=state.bound,
        method=state.method,
        seconds=time.perf_counter() - begin,
        messages=messages,
    )


def _exchanged(
    instance: Instance, objective: Objective, seconds: float, nodes: int | None
) -> MaskPlan:
    """Compare all designs if they are few.

    Otherwise search device by device, from the best plans for equal weights and simple designs.
    """
    begin = time.perf_counter()
    plain = replace(instance, weights=None)
    plans = [solve(plain, goal, seconds=seconds / 4, nodes=nodes) for goal in _PROGRAMS]
    if plans[0].instance.asked is not None:  # layers had to be left out
        instance = replace(plans[0].instance, weights=instance.weights, asked=instance)
    catalogue = Catalogue(instance)
    end = begin + seconds if nodes is None else math.inf
    best = enumerated(instance, objective, catalogue, end)
    if best is not None:
        return plan_of(
            instance,
            best,
            objective,
            bound=value(instance, best, objective),
            method="enumeration",
            seconds=time.perf_counter() - begin,
            messages=plans[0].messages,
        )
    drawn = heuristics.random_family(instance, Key(0, purpose="masks"), _EXCHANGE_STARTS)
    simple = [heuristics.spread(instance), heuristics.sequential(instance), *drawn]
    starts = [heuristics.repaired(instance, masks) for masks in simple]
    starts = [*(plan.masks for plan in plans), *starts]
    exchanged = [
        exchange(instance, masks, objective, catalogue, end)
        for masks in starts
        if instance.broken(masks) is None
    ]
    search = _Search(instance, objective, begin, end, nodes)
    least = search.least_slack_of() if objective == "J" else 0.0
    return plan_of(
        instance,
        min(exchanged, key=lambda masks: value(instance, masks, objective)),
        objective,
        bound=lower_bound(instance, objective, least),
        method="exchange",
        seconds=time.perf_counter() - begin,
        messages=plans[0].messages,
    )


def _check_limits(seconds: float, nodes: int | None) -> None:
    if not is_number(seconds) or seconds < 0:
        raise ConfigError(f"seconds must be a number of at least 0, got {seconds!r}")
    if nodes is not None and not is_whole(nodes, 1):
        raise ConfigError(f"nodes must be an integer of at least 1, got {nodes!r}")


def replan(plan: MaskPlan, leave: Iterable[int], *, seconds: float = 15.0) -> MaskPlan:
    """Plan again after devices left; keep old masks that are as good as the new ones."""
    gone = set(listed(leave, "leave", "the numbers of the devices that leave"))
    if unknown := gone - set(plan.devices):
        raise ConfigError(f"device {min(unknown)} cannot leave: it is not in the plan")
    rows = np.array([row for row, device in enumerate(plan.devices) if device not in gone])
    if not len(rows):
        raise ConfigError("all devices have left; there is nothing to plan")
    rest = (plan.instance.asked or plan.instance).take(rows)
    fresh = solve(rest, plan.objective, seconds=seconds)
    devices = tuple(plan.devices[row] for row in rows)
    previous = plan.masks[rows]
    if rest.broken(previous) is None and value(rest, previous, plan.objective) <= fresh.value:
        return plan_of(
            rest,
            previous,
            plan.objective,
            bound=fresh.bound,
            method="kept",
            seconds=fresh.seconds,
            devices=devices,
        )
    # messages refer to rows; the remaining devices keep their own numbers
    more = fresh.messages[len(messages_of(rest)) :]
    return replace(fresh, devices=devices, messages=(*messages_of(rest, devices), *more))


class _Search:
    """Best masks and best bound so far, and the steps that improve them."""

    def __init__(
        self,
        instance: Instance,
        objective: Objective,
        begin: float,
        end: float,
        nodes: int | None,
    ) -> None:
        self.instance, self.objective = instance, objective
        self.begin, self.end, self.nodes = begin, end, nodes
        self.catalogue = Catalogue(instance)
        self.masks: Masks = np.zeros((instance.devices, len(instance.sizes)), dtype=bool)
        self.value, self.bound = np.inf, -np.inf
        self.method = ""
        self.least_slack = 0.0

    def done(self) -> bool:
        """Return whether bound and value have met, or the time limit is reached."""
        met = self.value - self.bound <= 1e-6 * self.instance.total
        return met or (self.feasible() and time.perf_counter() > self.end)

    def feasible(self) -> bool:
        """Return whether any feasible design is known."""
        return bool(np.isfinite(self.value))

    def offer(self, masks: Masks | None, method: str) -> None:
        """Keep these masks if they are feasible and better."""
        if masks is None or self.instance.broken(masks) is not None:
            return
        objective_value = value(self.instance, masks, self.objective)
        if objective_value < self.value:
            self.masks, self.value, self.method = masks, objective_value, method

    def closed_form(self) -> None:
        """Bound by the layer that the fewest devices can train; attained by one mask for the rest.

        The devices that train that layer have gammas adding up to at least 1, every other device
        at least 1/N, and each device leaves at least the slack of its fullest set.
        """
        active = self.instance.active()
        able = self.instance.affordable().sum(axis=0)
        trainable = able > 0
        count = int(active.sum())
        unable = count - int(able[trainable].min())
        covered = float(self.instance.sizes[trainable].sum())
        bound = self.instance.total * (1.0 + unable / count) - covered
        if self.objective == "J":
            self.least_slack = self.least_slack_of()
            bound += self.least_slack
        self.bound = max(self.bound, bound)
        masks = heuristics.common(self.instance, self.catalogue)
        self.offer(heuristics.repaired(self.instance, masks), "closed form")

    def least_slack_of(self) -> float:
        """Return the slack that every design leaves."""
        groups = groups_of(self.instance)
        least = float(self.instance.reach[~self.instance.active()].sum())
        if not self.catalogue.exact and len(groups) > _MOST_GROUPS:
            return least
        for group in groups:
            most = min(self.catalogue.fullest(group.limit)[0], group.reach)
            least += len(group.members) * (group.reach - most)
        return least

    def starts(self) -> None:
        """Collect simple designs and improve the best by local search."""
        if self.done():
            return
        instance = self.instance
        repaired = heuristics.repaired
        self.offer(repaired(instance, heuristics.sequential(instance)), "sequential")
        self.offer(repaired(instance, heuristics.spread(instance)), "spread")
        key = Key(0, purpose="masks")
        chosen = heuristics.best_of_random(instance, key, _RANDOM_STARTS, self.objective)
        self.offer(chosen, "random")
        if self.feasible():
            self.polish(0.15)

    def polish(self, share: float) -> None:
        """Run the local search from the best masks for a fraction of the time."""
        now = time.perf_counter()
        stop = min(self.end, now + share * (self.end - self.begin))
        better = improve(self.instance, self.masks, self.objective, self.catalogue, stop)
        self.offer(better, f"{self.method.removesuffix(' + local search')} + local search")

    def programs(self) -> None:
        """Solve bucketed programs, splitting the buckets where the last answer was optimistic."""
        low = _coarse(self.instance, up=False)
        exact = self.catalogue.exact and len(low.groups) == len(groups_of(self.instance))
        if not exact:
            self._design(low)
        high = _coarse(self.instance, up=True)
        columns = self._columns(high)
        if not exact and self.objective == "J":
            # rounding budgets up distorts the slack: bound bias and slack separately
            program = Program(high.instance, columns, (1,), "bias")
            answer = program.solve(0.1 * (self.end - self.begin), self.nodes, integral=False)
            self.bound = max(self.bound, answer.bound + self.least_slack)
        starts: tuple[int, ...] = (1,)
        programs: Iterable[int] = itertools.count()
        if self.nodes is not None:  # the first one may miss the optimum of a small fleet
            programs = range(2 if columns.count.shape[1] <= _SMALL_PROGRAM else 1)
        for _ in programs:
            if self.done():
                return
            width = columns.count.shape[1]
            integral = exact and (width * len(starts) <= 6 * _SMALL_PROGRAM or len(starts) == 1)
            left = self.end - time.perf_counter()
            share = 0.25 if len(starts) == 1 else 1.0
            program = Program(high.instance, columns, starts, self.objective)
            answer = program.solve(left * share, self.nodes, integral=integral)
            self.bound = max(self.bound, answer.bound)
            levels = self._take(high.groups, answer.masks, "program")
            finer = self._finer(starts, levels, width)
            if finer == starts:
                return
            starts = finer

    def _columns(self, coarse: _Coarse) -> MilpColumns:
        if self.catalogue.exact:
            return set_columns(coarse.groups, self.catalogue)
        return knapsack_columns(coarse.instance, coarse.groups)

    def _design(self, low: _Coarse) -> None:
        """Choose among listed sets with rounded-down budgets: a design, not a bound."""
        columns = set_columns(low.groups, self.catalogue)
        program = Program(low.instance, columns, (1,), self.objective)
        answer = program.solve(0.25 * (self.end - self.begin), self.nodes, integral=True)
        self._take(low.groups, answer.masks, "program")

    def _take(
        self, groups: Sequence[DeviceGroup], group_masks: list[Masks] | None, method: str
    ) -> list[int]:
        """Offer the masks of a program and return the coverages that its devices pay for."""
        if group_masks is None:
            return []
        masks = np.zeros_like(self.masks)
        for group, rows in zip(groups, group_masks, strict=True):
            masks[group.members] = rows
        masks = heuristics.topped_up(self.instance, heuristics.repaired(self.instance, masks))
        before = self.value
        self.offer(masks, method)
        if self.value < before and not self.done():
            self.polish(0.15)
        paid = gammas(masks)
        return sorted({round(1.0 / gamma) for gamma in paid[paid > 0]})

    def _finer(self, starts: tuple[int, ...], levels: list[int], width: int) -> tuple[int, ...]:
        """Split the buckets at the coverages in use; at first also above them."""
        top = int(self.instance.affordable().sum(axis=0).max())
        best = gammas(self.masks)
        least = [round(1.0 / best.max())]
        cuts = {level + 1 for level in (levels or least) if level < top}
        if len(starts) == 1:
            cuts = {min(cuts, default=top)}
            if width <= _SMALL_PROGRAM:
                cuts |= {int(cut) for cut in np.geomspace(min(cuts), top, 5).round()}
        return tuple(sorted(set(starts) | {cut for cut in cuts if cut <= top}))


@dataclass(frozen=True, eq=False)
class _Coarse:
    """An instance with few distinct budgets; its groups partition the active devices."""

    instance: Instance
    groups: list[DeviceGroup]


def _coarse(instance: Instance, *, up: bool) -> _Coarse:
    """Round budgets up (a relaxation) or down (a restriction) to at most `_MOST_GROUPS` values."""
    groups = groups_of(instance)
    if len(groups) <= _MOST_GROUPS:
        return _Coarse(instance, groups)
    merged = []
    for part in np.array_split(np.arange(len(groups)), _MOST_GROUPS):
        members = np.concatenate([groups[index].members for index in part])
        pick = groups[int(part[-1] if up else part[0])]
        merged.append(DeviceGroup(members, pick.limit, pick.reach))
    if not up:
        return _Coarse(instance, merged)
    limits = instance.limits.copy()
    for group in merged:
        limits[group.members] = group.limit
    return _Coarse(replace(instance, limits=limits), merged)
