from __future__ import annotations

import time

import numpy as np

from parsifl.core.keys import Key
from parsifl.masks import heuristics
from parsifl.masks.feasible_sets import Catalogue
from parsifl.masks.instance import Objective, instance_of, value
from parsifl.masks.local_search import improve


def test_search_improves_random_designs_and_keeps_them_feasible() -> None:
    instance = instance_of([9, 7, 5, 3, 1], [12, 12, 12, 8, 25, 25])
    objectives: tuple[Objective, ...] = ("J", "bias")
    for objective in objectives:
        masks = heuristics.repaired(instance, heuristics.random(instance, Key(4)))
        stop = time.perf_counter() + 2.0
        better = improve(instance, masks, objective, Catalogue(instance), stop)
        assert instance.broken(better) is None
        assert value(instance, better, objective) < value(instance, masks, objective)


def test_search_leaves_an_optimum_alone() -> None:
    instance = instance_of([1, 1, 1, 1], [4, 4])
    masks = np.ones((2, 4), dtype=bool)
    stop = time.perf_counter() + 1.0
    assert improve(instance, masks, "J", Catalogue(instance), stop) is masks
