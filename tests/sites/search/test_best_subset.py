from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from parsifl.sites.search.best_subset import advance
from parsifl.sites.search.subset_model import SubsetModel
from parsifl.sites.search.subset_state import Phase, Rules, Search, Sums, begin


def _model(
    seed: int, features: int = 10, rows: int = 40, groups: list[list[int]] | None = None
) -> SubsetModel:
    draw = np.random.default_rng(seed)
    x = draw.standard_normal((rows, features)) @ draw.standard_normal((features, features))
    y = x[:, 0] + x[:, -1] + draw.standard_normal(rows)
    units = [np.array(group) for group in (groups or [[i] for i in range(features)])]
    inside = {place for unit in units for place in unit}
    always = np.array([i for i in range(features) if i not in inside], np.int64)
    return SubsetModel(x.T @ x, x.T @ y, units, always)


def _best(model: SubsetModel, count: int) -> float:
    return min(model.fit(c).value for c in itertools.combinations(range(len(model.units)), count))


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("seed", range(5))
def test_the_thorough_search_finds_the_best_subset(seed: int, count: int) -> None:
    model = _model(seed)
    found = model.search(count, thorough=True)
    assert model.fit(found).value == pytest.approx(_best(model, count), rel=1e-9)


@pytest.mark.parametrize("seed", range(3))
def test_branch_and_bound_proves_the_best_value(seed: int) -> None:
    model = _model(seed)
    start = model.forward((), 3)
    lowest, best, nodes = model.bound(start, 3)
    assert lowest == pytest.approx(_best(model, 3), rel=1e-9)
    assert model.fit(best).value == pytest.approx(lowest, rel=1e-9)
    assert nodes < 200
    assert model.bound(start, 3, nodes=1)[0] <= lowest + 1e-9


def test_groups_enter_whole_and_always_columns_stay() -> None:
    groups = [[0, 1], [2], [3, 4, 5], [6, 7]]
    model = _model(1, groups=groups)
    assert model.always.tolist() == [8, 9]
    found = model.search(2, thorough=True)
    assert model.fit(found).value == pytest.approx(_best(model, 2), rel=1e-9)
    fit = model.fit(found)
    assert {8, 9} <= set(fit.columns.tolist())
    costs = model.costs(fit, found)
    for unit, cost in zip(found, costs, strict=True):
        rest = tuple(other for other in found if other != unit)
        assert model.fit(rest).value - fit.value == pytest.approx(cost)


def test_the_table_of_exchanges_is_exact() -> None:
    model = _model(2)
    chosen = (1, 4, 7)
    fit = model.fit(chosen)
    change = model._exchange_table(fit, chosen)
    for row, out in enumerate(chosen):
        for new in set(range(10)) - set(chosen):
            other = tuple(sorted((*(u for u in chosen if u != out), new)))
            assert model.fit(other).value - fit.value == pytest.approx(change[row, new])


def test_dependent_columns_gain_nothing_and_take_the_shortest_solution() -> None:
    draw = np.random.default_rng(0)
    x = draw.standard_normal((30, 4))
    x[:, 3] = 2 * x[:, 0]
    y = x[:, 0] + 0.1 * draw.standard_normal(30)
    model = SubsetModel(x.T @ x, x.T @ y, [np.array([i]) for i in range(4)], np.zeros(0, np.int64))
    assert model.gains(model.fit((0,)))[3] == 0.0
    both = model.fit((0, 3))
    assert not both.full_rank
    assert both.value == pytest.approx(model.fit((0,)).value, rel=1e-9)
    assert model.costs(both, (0, 3)) == pytest.approx([0.0, 0.0], abs=1e-8)
    assert 0 in model.search(2, thorough=True) or 3 in model.search(2, thorough=True)


def _squares(x: Any, y: Any) -> Any:
    def sums(search: Search) -> Sums:
        residual = x @ search.asked - y
        part = x[:, search.candidates]
        full = part.T @ part
        upper = full[np.triu_indices(len(full))]
        loss = float(residual @ residual) / 2
        return Sums(len(y), loss, x.T @ residual, (x * x).sum(0), upper)

    return sums


@pytest.mark.parametrize("candidates", [8, 60])
def test_a_quadratic_loss_needs_one_answer_if_all_is_known_and_few_otherwise(
    candidates: int,
) -> None:
    draw = np.random.default_rng(3)
    x = draw.standard_normal((100, 60))
    y = x[:, 5] - 2 * x[:, 50] + 0.5 * draw.standard_normal(100)
    rules = Rules(60, 2, np.arange(60), np.zeros(60), candidates, quadratic=True)
    search, answers = begin(rules, np.zeros(60)), 0
    ask = _squares(x, y)
    while not search.done:
        search, answers = advance(search, ask(search), rules), answers + 1
    assert answers == 1 if candidates == 60 else answers <= 5
    assert search.phase == Phase.CONVERGED
    assert np.flatnonzero(search.support).tolist() == [5, 50]
    pooled = np.linalg.lstsq(x[:, [5, 50]], y, rcond=None)[0]
    np.testing.assert_allclose(search.coefficients[[5, 50]], pooled, rtol=1e-10)
    residual = x @ search.coefficients - y
    assert search.loss == pytest.approx(float(residual @ residual) / 2)
    assert advance(search, ask(search), rules) is search


def test_a_refused_support_is_not_tried_again_and_the_loss_never_rises() -> None:
    draw = np.random.default_rng(4)
    x = draw.standard_normal((80, 12))
    u = 2 * x[:, 0] - 2 * x[:, 1] + x[:, 2]
    y = (draw.random(80) < 1 / (1 + np.exp(-u))).astype(float)
    rules = Rules(12, 3, np.arange(12), np.zeros(12), 6, quadratic=False)
    search, losses, asked = begin(rules, np.zeros(12)), [], []
    for _ in range(60):
        e = x @ search.asked
        mean = 1 / (1 + np.exp(-e))
        bend = mean * (1 - mean)
        part = x[:, search.candidates]
        full = part.T @ (part * bend[:, None])
        loss = float((np.logaddexp(0, e) - y * e).sum())
        upper = full[np.triu_indices(len(full))]
        search = advance(search, Sums(80, loss, x.T @ (mean - y), (x * x).T @ bend, upper), rules)
        losses.append(search.loss)
        if search.phase == Phase.EXCHANGE:
            asked.append(tuple(np.flatnonzero(search.asked_support)))
        if search.done:
            break
    assert search.phase == Phase.CONVERGED
    assert all(later <= before + 1e-9 for before, later in itertools.pairwise(losses))
    refused = [tuple(row) for row in search.refused.tolist()]
    assert len(set(refused)) == len(refused)


@pytest.mark.parametrize("seed", range(5))
def test_rounding_does_not_decide_between_columns_that_cost_nothing(seed: int) -> None:
    draw = np.random.default_rng(seed)
    x = np.repeat(draw.normal(size=(9, 26)), 3, axis=0)  # fewer rows than columns
    y = np.repeat(draw.normal(size=9), 3)
    units, none = [np.array([i]) for i in range(26)], np.zeros(0, np.int64)
    model = SubsetModel(x.T @ x, x.T @ y, units, none)
    noise = 1 + 1e-15 * np.triu(draw.normal(size=(26, 26)))
    nearly = SubsetModel(
        model.curvature * (np.triu(noise) + np.triu(noise, 1).T) / 3, model.target / 3, units, none
    )
    assert model.backward(3) == nearly.backward(3)
    assert model.search(3, thorough=True) == nearly.search(3, thorough=True)


def test_a_perfect_fit_ends_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    x = np.random.default_rng(0).normal(size=(10, 20))
    model = SubsetModel(
        x.T @ x, x.T @ np.arange(10.0), list(np.arange(20)[:, None]), np.zeros(0, np.int64)
    )
    fits, fit = [], SubsetModel.fit

    def counted(*given: Any) -> Any:
        fits.append(1)
        return fit(*given)

    monkeypatch.setattr(SubsetModel, "fit", counted)
    assert len(model.search(15, thorough=True)) == 15
    assert len(fits) < 30
