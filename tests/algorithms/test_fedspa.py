from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.algorithms import lowrank
from tests.algorithms.lowrank import Engine
from tests.reference_lowrank import spa_rounds

from parsifl import wire
from parsifl.algorithms.fedavg import FedAvg
from parsifl.algorithms.fedspa import FedSpa, draw_masks, erk_counts
from parsifl.core.errors import ConfigError
from parsifl.core.keys import Key


def first_masks(density: float) -> list[dict[str, np.ndarray]]:
    params = lowrank.PROBLEM.init(Key(lowrank.SEED))
    found = []
    for client in range(len(lowrank.SIZES)):
        key = Key(lowrank.SEED, client=client, purpose="fedspa/mask")
        masks = draw_masks(params, density, key)
        found.append(
            {n: masks.get(n, torch.ones_like(v)).double().numpy() for n, v in params.items()}
        )
    return found


@pytest.mark.parametrize("engine", lowrank.ENGINES)
def test_rounds_match_the_papers_equations(engine: Engine) -> None:
    method = FedSpa(density=0.5, prune=0.4, horizon=6, lr=0.2, batch_size=4, local_steps=5)
    masks = first_masks(0.5)
    w, masks = spa_rounds(
        lowrank.start(), masks, 0.2, 0.4, 6, lowrank.cohorts(), lowrank.draws(method)
    )
    done = lowrank.run(method, engine)
    lowrank.assert_same(done.server.params, w)
    for client in range(len(lowrank.SIZES)):
        sparse = {name: w[name] * masks[client][name] for name in w}
        lowrank.assert_same(done.personal(client).params, sparse)


def test_masks_change_but_keep_their_size() -> None:
    method = FedSpa(density=0.4, prune=0.5, lr=0.2, batch_size=4, local_steps=5)
    first, done = first_masks(0.4), lowrank.run(method)
    for client, masks in done.server.masks.items():
        for name, mask in masks.items():
            before = first[int(client)][name]
            assert int(mask.sum()) == int(before.sum())
    changed = [
        not np.array_equal(mask.numpy(), first[int(client)][name] > 0)
        for client, masks in done.server.masks.items()
        for name, mask in masks.items()
    ]
    assert any(changed)


def test_full_density_is_fedavg() -> None:
    ours = lowrank.run(FedSpa(density=1.0, lr=0.2, batch_size=4, local_steps=5))
    theirs = lowrank.run(FedAvg(weighting="uniform", lr=0.2, batch_size=4, local_steps=5))
    lowrank.assert_same(ours.server.params, lowrank.arrays(theirs.server))


def test_half_density_halves_both_directions() -> None:
    params = {"w": torch.randn(300, 200, generator=torch.Generator().manual_seed(0))}
    method = FedSpa(density=0.5)
    masks = draw_masks(params, 0.5, Key(0))
    dense = wire.size(params)
    index = masks["w"].reshape(-1).nonzero().squeeze(1)
    sent = wire.size({"change": params["w"].reshape(-1)[index], "mask": masks["w"]})
    assert sent < (0.5 + 1 / 32) * dense * 1.01
    assert method.replaced(0) == 0.5
    assert method.replaced(method.horizon) == pytest.approx(0.0)


@given(
    st.dictionaries(
        st.text("abc", min_size=1, max_size=2),
        st.lists(st.integers(1, 12), min_size=2, max_size=4).map(tuple),
        min_size=1,
        max_size=4,
    ),
    st.floats(0.05, 1.0),
)
def test_layer_densities_add_up_and_favour_thin_layers(
    shapes: dict[str, tuple[int, ...]], density: float
) -> None:
    counts = erk_counts(shapes, density)
    sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    assert all(1 <= counts[name] <= sizes[name] for name in shapes)
    assert abs(sum(counts.values()) - density * sum(sizes.values())) <= len(shapes)
    free = [name for name in shapes if counts[name] < sizes[name]]
    # one scale fits all layers that are not full, up to rounding (and a floor of one entry)
    lower = [(counts[n] - 0.5) / sum(shapes[n]) for n in free if counts[n] > 1]
    upper = [(counts[n] + 0.5) / sum(shapes[n]) for n in free]
    assert max(lower, default=0.0) <= min(upper, default=1.0) + 1e-9


def test_an_empty_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="density"):
        FedSpa(density=0.0)
