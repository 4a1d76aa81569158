from __future__ import annotations

import torch
from torch import Tensor

from parsifl.solvers.eager import eager


def test_a_block_comes_whole_and_a_single_client_as_a_block_of_one() -> None:
    seen: list[tuple[int, ...]] = []

    def look(values: Tensor, shared: Tensor) -> tuple[Tensor, Tensor]:
        seen.append(tuple(values.shape))
        assert bool((values == values).all())  # looking is allowed
        return values * shared, values.sum(1)

    batch, shared = torch.arange(6.0).reshape(3, 2), torch.tensor([2.0, 3.0])
    together = torch.func.vmap(lambda v: eager(look, v, shared))(batch)
    alone = zip(*(eager(look, v, shared) for v in batch), strict=True)
    for whole, parts in zip(together, alone, strict=True):
        assert torch.equal(whole, torch.stack(parts))
    assert seen == [(3, 2), (1, 2), (1, 2), (1, 2)]
