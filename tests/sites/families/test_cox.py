from __future__ import annotations

import torch
from tests.linear.test_sums import _rows, _same
from torch import Tensor

from parsifl.core.batching import Rows
from parsifl.sites.families.cox import Cox, cox_sums


def _cox_by_hand(b: Tensor, x: Tensor, time: Tensor, event: Tensor, weight: Tensor) -> Tensor:
    u = x @ b
    total = torch.zeros((), dtype=torch.float64)
    for i in range(len(time)):
        if event[i]:
            risk = (time >= time[i]).double() * weight
            total = total - weight[i] * (u[i] - torch.log((risk * torch.exp(u)).sum()))
    return total


def test_cox_sums_are_the_derivatives_of_breslow_s_likelihood() -> None:
    x, _, weight = _rows("poisson")
    draw = torch.Generator().manual_seed(5)
    time = torch.randint(1, 8, (30,), generator=draw).double()  # many ties
    event = (torch.rand(30, generator=draw) < 0.6).double()
    at, places = torch.tensor([0.3, -0.2, 0.1, 0.5], dtype=torch.float64), torch.tensor([1, 3])
    sums = cox_sums(x, time, event, weight, at, places)
    _same(sums, lambda b: _cox_by_hand(b, x, time, event, weight), at, places)
    problem = Cox(4, weighted=True)
    rows = Rows(x, torch.stack([time, event, weight], 1), torch.ones(30, dtype=torch.float64))
    losses = problem.metrics({"coef": at}, rows)["loss"]
    torch.testing.assert_close((weight * losses).sum(), sums.loss)
