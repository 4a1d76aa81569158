from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.algorithms import unequal
from tests.algorithms.test_heterofl import shapes
from tests.algorithms.unequal import PROBLEM, SEED, Engine
from tests.reference_unequal import average, cut, descend

from parsifl.algorithms._bases.submodel import members_for
from parsifl.algorithms.fedavg import FedAvg
from parsifl.algorithms.splitmix import SplitMix
from parsifl.core import tree
from parsifl.core.algorithm import ClientInfo
from parsifl.core.keys import Key
from parsifl.nn.ensemble import member_key, part

PROFILES = [{"width": 0.5}, {}, {"width": 0.25}, {"width": 0.25}, {"width": 0.5}]
BASES = 4


@pytest.mark.parametrize("engine", unequal.ENGINES)
def test_rounds_match_the_papers_equations(engine: Engine) -> None:
    method = SplitMix(lr=0.05, batch_size=4, local_steps=3, bases=BASES)
    draws, sizes = unequal.draws(method, PROFILES), unequal.sizes()
    bases = [cut(unequal.start(member_key(Key(SEED), b)), shapes(1 / BASES)) for b in range(BASES)]
    for t, cohort in enumerate(unequal.cohorts()):
        sent: list[list[Any]] = [[] for _ in range(BASES)]
        for n in cohort:
            for b in members_for(ClientInfo(n, 1, PROFILES[n]), BASES, Key(SEED, round=t)):
                after = descend(bases[b], draws(t, n), 0.05, r=1 / BASES)
                sent[b].append((sizes[n], after))
        bases = [average(w, parts) for w, parts in zip(bases, sent, strict=True)]
    done = unequal.run(method, PROFILES, engine, evaluate=True)
    for b in range(BASES):
        unequal.assert_same(part(done.server.params, b), bases[b])


@pytest.mark.bits
def test_with_one_base_it_is_fedavg_bit_for_bit() -> None:
    settings: dict[str, Any] = {"lr": 0.1, "batch_size": 4, "local_steps": 3, "momentum": 0.5}
    plain = unequal.run(FedAvg(**settings), evaluate=True)
    split = unequal.run(SplitMix(**settings, bases=1), evaluate=True)
    assert tree.same(part(split.server.params, 0), plain.server)
    assert split.metrics[-1]["global"] == plain.metrics[-1]["global"]


def test_the_model_predicts_with_the_mean_of_all_networks() -> None:
    done = unequal.run(SplitMix(lr=0.1, batch_size=4, local_steps=2, bases=2), rounds=1)
    x = torch.randn(5, unequal.FEATURES, dtype=torch.float64)
    narrow = PROBLEM.narrow(0.5)
    each = [narrow.predict(part(done.server.params, b), x) for b in range(2)]
    for model in (done.model, done.personal(0)):
        torch.testing.assert_close(model.problem.predict(model.params, x), (each[0] + each[1]) / 2)


def test_networks_are_dealt_so_that_each_is_trained_and_devices_see_them_all() -> None:
    weak = [ClientInfo(n, 1, {"width": 0.25}) for n in range(4)]
    for t in range(5):
        dealt = [members_for(info, BASES, Key(0, round=t)) for info in weak]
        assert sorted(dealt) == [(0,), (1,), (2,), (3,)]
    seen = {members_for(weak[0], BASES, Key(0, round=t)) for t in range(40)}
    assert len(seen) == BASES


def test_uploads_hold_the_trained_networks_alone() -> None:
    done = unequal.run(
        SplitMix(batch_size=4, local_steps=1, bases=BASES), PROFILES, participation=1.0
    )
    one = sum(v.numel() for v in PROBLEM.narrow(1 / BASES).init(Key(0)).values())
    found = {row["sent"]: (row["clients"], row["trainable"]) for row in done.metrics[0]["devices"]}
    assert found == {one: (2, one), 2 * one: (2, 2 * one), 4 * one: (1, 4 * one)}
