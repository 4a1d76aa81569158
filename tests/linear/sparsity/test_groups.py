from __future__ import annotations

import pytest
import torch

from parsifl.core.errors import ConfigError
from parsifl.linear.sparsity.constraint import labels, largest_groups


def test_groups_are_judged_by_their_norm() -> None:
    values = torch.tensor([[3.0, 0.0, 2.0, 2.9], [1.0, 1.0, 0.0, 1.3]])
    kept = largest_groups(values, 1, labels((0, 1, 1, 0), 4))
    assert kept.tolist() == [[True, False, False, True], [True, False, False, True]]
    blocks = largest_groups(values, 1, labels(2, 4))
    assert blocks.tolist() == [[False, False, True, True], [True, True, False, False]]


def test_groups_of_one_are_coordinates() -> None:
    values = torch.tensor([1.0, -5.0, 2.0])
    assert largest_groups(values, 2, labels(1, 3)).tolist() == [False, True, True]


@pytest.mark.parametrize("groups", [0, (0, 1), (0, -1, 2)])
def test_groups_that_do_not_fit_are_refused(groups: int | tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="groups must"):
        labels(groups, 3)
