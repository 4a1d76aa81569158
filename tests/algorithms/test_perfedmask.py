from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tests.algorithms import unequal
from tests.algorithms.test_heterofl import shapes
from tests.algorithms.unequal import DATA, PROBLEM, SEED, Engine
from tests.masks.test_local_search import brute_force
from tests.reference_unequal import BODY, HEAD, descend, masked_rounds, sliced_rounds
from torch import nn

from parsifl.algorithms.fedbabu import FedBABU
from parsifl.algorithms.perfedmask import PerFedMask, budget_of, design_masks
from parsifl.core import config, tree
from parsifl.core.algorithm import ClientInfo
from parsifl.core.errors import ConfigError, ParsiflWarning
from parsifl.core.keys import Key
from parsifl.core.registry import get
from parsifl.engine.simulate import simulate
from parsifl.masks import from_flops, layer_groups, optimal
from parsifl.masks.costs import Probe
from parsifl.masks.instance import instance_of, value
from parsifl.nn.neural import NeuralProblem

FIRST, SECOND = (block.size for block in PROBLEM.layer_groups)  # 56 and 36 parameters
BUDGETS: tuple[Any, ...] = (0.4, 1.0, 0.4, FIRST, None)
PROFILES = [{} if budget is None else {"budget": budget} for budget in BUDGETS]
SETTINGS: dict[str, Any] = {
    "lr": 0.1,
    "batch_size": 4,
    "local_steps": 3,
    "momentum": 0.5,
    "weight_decay": 0.01,
}


def names(server: Any, client: int) -> list[str]:
    blocks = [*BODY, HEAD]
    return [name for block in server.masks[server.chosen[client]] for name in blocks[block]]


@pytest.mark.parametrize("engine", unequal.ENGINES)
@pytest.mark.parametrize("head", ["frozen", "trained"])
def test_rounds_match_the_papers_equations(head: Any, engine: Engine) -> None:
    method = PerFedMask(**SETTINGS, head=head, tune_epochs=2.0)
    done = unequal.run(method, PROFILES, engine)
    masks = [names(done.server, n) for n in range(len(BUDGETS))]
    expected = masked_rounds(
        unequal.start(), masks, unequal.cohorts(), unequal.sizes(),
        unequal.draws(method, PROFILES), 0.1, momentum=0.5, decay=0.01,
    )  # fmt: skip
    unequal.assert_same(done.server.params, expected)
    for client in range(len(BUDGETS)):
        tuned = descend(expected, unequal.tuning(method, client), 0.1, momentum=0.5, decay=0.01)
        unequal.assert_same(done.personal(client).params, tuned)


@pytest.mark.bits
@pytest.mark.parametrize("profiles", [None, [{"budget": 1}, {"budget": 92}, {}, {}, {}]])
def test_with_full_budgets_it_is_fedbabu_bit_for_bit(profiles: Any) -> None:
    babu = unequal.run(FedBABU(**SETTINGS), evaluate=True)
    masked = unequal.run(PerFedMask(**SETTINGS), profiles, evaluate=True)
    assert tree.same(masked.server.params, babu.server.params)
    for client in range(len(BUDGETS)):
        assert tree.same(masked.personal(client).params, babu.personal(client).params)
    for ours, theirs in zip(masked.metrics, babu.metrics, strict=True):
        for what in ("global", "personal", "flops", "parameters_up", "parameters_down"):
            assert ours[what] == theirs[what]


def test_masks_keep_the_budgets_and_give_everybody_something() -> None:
    done = unequal.run(PerFedMask(**SETTINGS), PROFILES, rounds=1)
    sizes = (FIRST, SECOND)
    for client, budget in enumerate((0.4 * 92, 92, 0.4 * 92, 56, 92)):
        mask = done.server.masks[done.server.chosen[client]]
        assert 0 < sum(sizes[block] for block in mask) <= budget


def test_weak_devices_spend_fewer_operations_and_send_less() -> None:
    done = unequal.run(PerFedMask(**SETTINGS), PROFILES, participation=1.0)
    (full,) = [row for row in done.metrics[0]["devices"] if row["trainable"] == 92]
    weak = [row for row in done.metrics[0]["devices"] if row["trainable"] != 92]
    assert weak
    for row in weak:
        assert row["sent"] == row["trainable"]
        assert row["forward"] == full["forward"]
        assert row["backward"] < full["backward"]
    assert full["sent"] == 92


def test_backward_operations_are_weight_gradients_and_input_gradients_down_to_the_mask() -> None:
    """Batches of 4 rows, one step: 2 * 4 * (products), by hand."""
    expected = {
        FIRST: 8 * (unequal.FIRST * 6 + unequal.SECOND * 8 + 3 * 4),  # W0; inputs of W2 and W4
        SECOND: 8 * (unequal.SECOND * 8 + 3 * 4),  # W2; inputs of W4
    }
    for size, operations in expected.items():
        profiles = [{"budget": size}] + [{}] * 4
        method = PerFedMask(batch_size=4, local_steps=1, design="sequential")
        if size == SECOND:
            method = PerFedMask(batch_size=4, local_steps=1)
        done = unequal.run(method, profiles, rounds=1, participation=1.0)
        found = {row["trainable"]: row["backward"] for row in done.metrics[0]["devices"]}
        assert found[size] == operations


@pytest.mark.parametrize("engine", unequal.ENGINES)
def test_on_heterofl_slices_are_masked(engine: Engine) -> None:
    widths = (0.5, 1.0, 0.5, 0.5, 1.0)
    profiles = [{"width": width, "budget": 0.5 if n < 3 else 1} for n, width in enumerate(widths)]
    method = PerFedMask(lr=0.05, batch_size=4, local_steps=3, base="heterofl", tune_epochs=0)
    done = unequal.run(method, profiles, engine)
    masks = [names(done.server, n) for n in range(5)]
    expected = sliced_rounds(
        unequal.start(), widths, shapes, unequal.cohorts(), unequal.sizes(),
        unequal.draws(method, profiles), 0.05, masks,
    )  # fmt: skip
    unequal.assert_same(done.server.params, expected)


@pytest.mark.parametrize("engine", unequal.ENGINES)
def test_on_splitmix_every_network_of_a_device_has_its_mask(engine: Engine) -> None:
    profiles: list[Any] = [
        {"width": 0.5, "budget": 0.5},
        {"budget": 1},
        {"width": 0.5},
        {},
        {"width": 0.5},
    ]
    method = PerFedMask(lr=0.05, batch_size=4, local_steps=2, base="splitmix", bases=2)
    done = unequal.run(method, profiles, engine, participation=1.0, evaluate=True)
    blocks = [block.size for block in PROBLEM.narrow(0.5).layer_groups]
    sent = sorted(row["sent"] for row in done.metrics[0]["devices"] for _ in range(row["clients"]))
    mask = done.server.masks[done.server.chosen[0]]
    masked = sum(blocks[index] for index in mask)
    assert 0 < masked <= sum(blocks) / 2
    assert sent == [masked, sum(blocks), sum(blocks), 2 * sum(blocks), 2 * sum(blocks)]
    other = unequal.run(method, profiles, "loop", participation=1.0)
    unequal.assert_same(done.server.params, unequal.arrays(other.server.params))


def test_combinations_without_masks_or_narrow_devices_are_fedbabu() -> None:
    babu = unequal.run(FedBABU(**SETTINGS))
    hetero = unequal.run(PerFedMask(**SETTINGS, base="heterofl"))
    split = unequal.run(PerFedMask(**SETTINGS, base="splitmix", bases=1))
    assert tree.same(hetero.server.params, babu.server.params)
    assert tree.same({f"0/{n}": v for n, v in babu.server.params.items()}, split.server.params)


def infos(budgets: Sequence[Any]) -> list[ClientInfo]:
    return [ClientInfo(n, 10, {"budget": budget}) for n, budget in enumerate(budgets)]


@pytest.mark.parametrize("design", ["optimal", "sequential", "random"])
def test_every_design_keeps_budgets_and_repeats(design: Any) -> None:
    blocks = NeuralProblem(lambda: nn.Sequential(*[nn.Linear(3, 3) for _ in range(6)])).layer_groups
    clients = infos([0.2, 0.5, 0.7, 1, 25, 0.5])
    first = design_masks(blocks, clients, [1.0] * 6, design, "J", Key(1))[0]
    again = design_masks(blocks, clients, [1.0] * 6, design, "J", Key(1))[0]
    assert np.array_equal(first, again)
    total = sum(block.size for block in blocks)
    spent = first @ np.array([block.size for block in blocks])
    assert all(cost <= budget_of(info, total) for cost, info in zip(spent, clients, strict=True))
    if design == "sequential":
        assert all((np.diff(row.astype(int)) <= 0).all() for row in first)
    if design == "random":
        assert not np.array_equal(
            first, design_masks(blocks, clients, [1.0] * 6, design, "J", Key(2))[0]
        )


@pytest.mark.parametrize("budget", [-1, -0.1, "much", True, float("nan"), [1]])
def test_a_budget_that_is_none_is_refused_with_its_client(budget: Any) -> None:
    profiles = [{}, {"budget": budget}, {}, {}, {}]
    with pytest.raises(ConfigError, match="budget of client 1"):
        unequal.run(PerFedMask(), profiles)


def test_a_device_below_the_smallest_layer_is_told_and_left_alone() -> None:
    profiles: list[Any] = [{"budget": 0.1}] + [{}] * 4
    with pytest.warns(UserWarning, match="no layer and only fine-tune: 0;"):
        done = unequal.run(PerFedMask(**SETTINGS), profiles, participation=1.0)
    row = next(row for row in done.metrics[0]["devices"] if row["trainable"] == 0)
    assert (row["clients"], row["forward"], row["sent"]) == (1, 0, 0)
    assert done.personal(0).params.keys() == done.server.params.keys()


def test_a_layer_that_nobody_can_train_is_named_and_keeps_its_value() -> None:
    profiles = [{"budget": SECOND}] * 5
    with pytest.warns(UserWarning, match="no device trains layer 0"):
        done = unequal.run(PerFedMask(**SETTINGS), profiles)
    first = PROBLEM.init(Key(SEED))
    assert torch.equal(done.server.params["0.weight"], first["0.weight"])
    assert not torch.equal(done.server.params["2.weight"], first["2.weight"])


def test_idle_devices_of_one_width_do_not_stop_the_others() -> None:
    profiles: list[Any] = [{"width": 0.5, "budget": 0.1}] * 2 + [{}] * 3
    method = PerFedMask(**SETTINGS, base="heterofl")
    with pytest.warns(UserWarning, match="no layer and only fine-tune: 0, 1;"):
        unequal.run(method, profiles)


def test_no_device_with_any_layer_is_refused() -> None:
    with pytest.raises(ConfigError, match="no device trains any layer"):
        unequal.run(PerFedMask(), [{"budget": 0}] * 5)


@pytest.mark.parametrize("method", [PerFedMask(), FedBABU()])
def test_a_model_without_a_head_is_refused(method: Any) -> None:
    alone = NeuralProblem(lambda: nn.Linear(6, 3), dtype=torch.float64)
    with pytest.raises(ConfigError, match="cannot find the head"):
        simulate(method, alone, DATA, 1)


@pytest.mark.parametrize("kind", [PerFedMask, FedBABU])
def test_steps_of_fine_tuning_are_heard_beside_the_default_epochs(kind: Any) -> None:
    info = ClientInfo(0, 20)
    spec = kind(tune_steps=3).personalization_batches(info).batches["tune"]
    assert (spec.steps, spec.epochs) == (3, None)
    spec = kind().personalization_batches(info).batches["tune"]
    assert (spec.steps, spec.epochs) == (None, 5.0)


@pytest.mark.parametrize("entry", ["budgets", "Budget", "bugdet", "masks"])
def test_a_misspelt_entry_of_a_profile_is_refused(entry: str) -> None:
    infos = [ClientInfo(0, 10), ClientInfo(1, 10, {entry: 0.4})]
    with pytest.raises(ConfigError, match=f"client 1 .*'{entry}'; did you mean"):
        PerFedMask().init_server(PROBLEM, infos, Key(0))


def test_entries_for_other_methods_are_left_alone() -> None:
    profile = {"flops_per_second": 1e9, "width": 0.5, "importance": 2.0, "site": "A"}
    infos = [ClientInfo(0, 10, profile), ClientInfo(1, 10, {"local_steps": 2})]
    PerFedMask().init_server(PROBLEM, infos, Key(0))


def test_a_plan_is_trained_as_it_was_made() -> None:
    plan = optimal(PROBLEM.layer_groups, [FIRST, SECOND, FIRST + SECOND, SECOND, FIRST])
    profiles = [{"mask": row.tolist()} for row in plan.masks]
    done = unequal.run(PerFedMask(**SETTINGS), profiles)
    found = [done.server.masks[chosen] for chosen in done.server.chosen]
    assert found == [tuple(np.flatnonzero(row).tolist()) for row in plan.masks]


def test_a_plan_is_a_setting() -> None:
    """By name: plans for FLOPs list layers in the order in which they run."""
    budgets = [SECOND, FIRST, FIRST + SECOND, SECOND, FIRST]
    plan = optimal(PROBLEM.layer_groups[::-1], budgets, weights=unequal.sizes())
    method = get("perfedmask", plan=plan, **SETTINGS)
    done = unequal.run(method)
    found = [done.server.masks[chosen] for chosen in done.server.chosen]
    assert found == [tuple(np.flatnonzero(row[::-1]).tolist()) for row in plan.masks]
    again = get("perfedmask", **config.to_json(method))
    assert again == method


def planned(weights: Sequence[float] | None) -> PerFedMask:
    budgets = [FIRST, SECOND, FIRST + SECOND, SECOND, FIRST]
    return PerFedMask(plan=optimal(PROBLEM.layer_groups, budgets, weights=weights), **SETTINGS)


def test_a_plan_for_other_weights_causes_a_warning() -> None:
    sizes = [float(size) for size in unequal.sizes()]
    infos = [ClientInfo(i, int(size)) for i, size in enumerate(sizes)]
    for method in (planned(None), replace(planned(None), lr=0.2), planned([2, 1, 1, 1, 1])):
        with pytest.warns(ParsiflWarning, match="plan was made for .* pass weights="):
            method.init_server(PROBLEM, infos, Key(0))
    # proportional weights are the same, and the head count of the uniform mean is none
    planned([2 * size for size in sizes]).init_server(PROBLEM, infos, Key(0))
    replace(planned(None), weighting="uniform").init_server(PROBLEM, infos, Key(0))
    planned(None).init_server(PROBLEM, [ClientInfo(i, 10) for i in range(5)], Key(0))
    everything = optimal(PROBLEM.layer_groups, [FIRST + SECOND] * 5)
    PerFedMask(plan=everything).init_server(PROBLEM, infos, Key(0))


def test_a_plan_for_flops_is_trained() -> None:
    sample = torch.empty(10, unequal.FEATURES)
    module = unequal.network()
    limits = [0.4 * module_flops(module, sample)] * 4 + [1e9]
    plan = from_flops(module, sample, limits, weights=unequal.sizes())
    done = unequal.run(PerFedMask(plan=plan, **SETTINGS))
    named = [group.name for group in PROBLEM.layer_groups]
    for device, chosen in enumerate(done.server.chosen):
        layers = tuple(named[block] for block in done.server.masks[chosen])
        assert set(layers) == set(plan.trained(device))


def module_flops(module: Any, sample: torch.Tensor) -> float:
    return float(Probe.of(module, sample, layer_groups(module)).backward_flops([0, 1]))


@pytest.mark.parametrize(
    ("plan", "profile", "message"),
    [
        ((("0",),), {}, "the plan has 1 devices, but there are 2 clients"),
        ((("0",), ("x",)), {}, "client 1 train 'x'; the layers of this model are 0, 2"),
        ((("0",), ("2",)), {"budget": 0.5}, "has a mask or a budget in its profile"),
    ],
)
def test_a_plan_that_does_not_fit_is_rejected(plan: Any, profile: Any, message: str) -> None:
    infos = [ClientInfo(i, 10, profile) for i in range(2)]
    with pytest.raises(ConfigError, match=message):
        PerFedMask(plan=plan).init_server(PROBLEM, infos, Key(0))


def test_masks_are_planned_for_the_weights_of_the_mean() -> None:
    """The budgets are equal, so that only the weights tell the devices apart."""
    sizes, budgets = [40, 10, 10, 10], [1.0, 0.6, 0.6, 0.6]
    infos = [
        ClientInfo(i, n, {"budget": b}) for i, (n, b) in enumerate(zip(sizes, budgets, strict=True))
    ]
    blocks = PROBLEM.layer_groups
    for weighting in ("samples", "uniform"):
        server = PerFedMask(weighting=weighting).init_server(PROBLEM, infos, Key(0))
        masks = np.zeros((4, len(blocks)), dtype=bool)
        for row, chosen in enumerate(server.chosen):
            masks[row, list(server.masks[chosen])] = True
        weights = sizes if weighting == "samples" else None
        limits = [budget_of(info, FIRST + SECOND) for info in infos]
        instance = instance_of(blocks, limits, weights)
        assert value(instance, masks, "J") == pytest.approx(brute_force(instance, "J"))


def test_a_trained_head_is_inside_the_budget() -> None:
    """Appendix M: the head is one more layer."""
    head = sum(PROBLEM.init(Key(0))[name].numel() for name in HEAD)
    infos = [ClientInfo(i, 10, {"budget": FIRST + 1}) for i in range(4)] + [ClientInfo(4, 10)]
    server = PerFedMask(head="trained").init_server(PROBLEM, infos, Key(0))
    sizes = [FIRST, SECOND, head]
    spent = [sum(sizes[block] for block in server.masks[chosen]) for chosen in server.chosen]
    assert max(spent[:4]) <= FIRST + 1
    assert spent[4] == sum(sizes)


def test_devices_that_never_take_part_are_not_planned_for() -> None:
    profiles = [{"budget": FIRST}, {"budget": SECOND}, {}]
    seen = [ClientInfo(i, 10, profile) for i, profile in enumerate(profiles)]
    unseen = [ClientInfo(3 + i, 10, {"budget": SECOND}, takes_part=False) for i in range(9)]
    alone = PerFedMask().init_server(PROBLEM, seen, Key(0))
    together = PerFedMask().init_server(PROBLEM, [*seen, *unseen], Key(0))
    assert [together.masks[i] for i in together.chosen[:3]] == [
        alone.masks[i] for i in alone.chosen
    ]


@pytest.mark.parametrize(
    ("profiles", "message"),
    [
        ([{"mask": [True, True]}, {}], "client 1 has no mask"),
        ([{"mask": [True]}, {"mask": [True, True]}], "client 0 .* one 0 or 1 for each of 2 layers"),
        ([{"mask": [2, 0]}, {"mask": [True, True]}], "client 0 .* one 0 or 1"),
        ([{"mask": "01"}, {"mask": [True, True]}], "client 0 .* one 0 or 1"),
        ([{"mask": [1, 0], "budget": 0.5}, {"mask": [1, 1]}], "client 0 has a mask and a budget"),
    ],
)
def test_a_mask_that_is_none_is_refused(profiles: Any, message: str) -> None:
    infos = [ClientInfo(i, 10, profile) for i, profile in enumerate(profiles)]
    with pytest.raises(ConfigError, match=message):
        PerFedMask().init_server(PROBLEM, infos, Key(0))


def test_the_numbers_of_the_plan_are_in_the_record() -> None:
    done = unequal.run(PerFedMask(**SETTINGS), PROFILES, "loop")
    total = sum(block.size for block in PROBLEM.layer_groups)
    budgets = [budget_of(ClientInfo(0, 1, profile), total) for profile in PROFILES]
    weights = [float(size) for size in unequal.sizes()]
    plan = optimal(PROBLEM.layer_groups, budgets, weights=weights)
    recorded = done.metrics[0]["metrics"]
    for name in ("J", "bias", "V", "floor", "bound"):
        assert recorded[f"plan_{name}"] == pytest.approx(getattr(plan, name))
    assert recorded["plan_proven"] == plan.proven
    assert recorded["plan_bias"] >= recorded["plan_floor"]
    assert not any("plan_bias" in record["metrics"] for record in done.metrics[1:])


@pytest.mark.parametrize("weighting", ["samples", "uniform"])
@pytest.mark.parametrize("form", ["plan", "profiles"])
def test_the_numbers_of_given_masks_are_in_the_record(form: str, weighting: Any) -> None:
    """J and a bound are there for a plan alone: a mask in a profile has no budget."""
    budgets = [FIRST, SECOND, FIRST + SECOND, SECOND, FIRST]
    weights = [float(size) for size in unequal.sizes()] if weighting == "samples" else None
    plan = optimal(PROBLEM.layer_groups, budgets, weights=weights)
    method = PerFedMask(**{**SETTINGS, "weighting": weighting})
    profiles: list[dict[str, Any]] | None = [{"mask": row.tolist()} for row in plan.masks]
    if form == "plan":
        method, profiles = replace(method, plan=plan), None
    recorded = unequal.run(method, profiles, "loop").metrics[0]["metrics"]
    of_plan = ("J", "bound", "proven")
    for name in ("bias", "V", "floor", *(of_plan if form == "plan" else ())):
        assert recorded[f"plan_{name}"] == pytest.approx(float(getattr(plan, name)))
    assert form == "plan" or not recorded.keys() & {f"plan_{name}" for name in of_plan}


@pytest.mark.filterwarnings("ignore:the plan was made for equal weights")
def test_a_plan_for_other_weights_or_sizes_has_no_bound_in_the_record() -> None:
    budgets = [FIRST, SECOND, FIRST + SECOND, SECOND, FIRST]
    larger = {block.name: 2 * block.size for block in PROBLEM.layer_groups}
    for weighting, sizes in (("samples", PROBLEM.layer_groups), ("uniform", larger)):
        plan = optimal(sizes, 2 * np.array(budgets))
        method = PerFedMask(**{**SETTINGS, "weighting": weighting, "plan": plan})
        recorded = unequal.run(method, None, "loop").metrics[0]["metrics"]
        assert "plan_bias" in recorded
        assert not recorded.keys() & {"plan_J", "plan_bound", "plan_proven"}
