from __future__ import annotations

import torch
from torch.func import grad, vmap

from parsifl.nn.metrics import row_loss


def test_cross_entropy_is_the_same_under_vmap_and_outside() -> None:
    draw = torch.Generator().manual_seed(0)
    output = torch.randn(3, 5, 4, generator=draw, dtype=torch.float64)
    y = torch.randint(0, 4, (3, 5), generator=draw)
    expected = -output.log_softmax(-1).gather(2, y[..., None])[..., 0]
    alone = torch.stack([row_loss("cross-entropy", *pair) for pair in zip(output, y, strict=True)])
    batched = vmap(lambda o, t: row_loss("cross-entropy", o, t))(output, y)
    assert torch.allclose(alone, expected, rtol=0, atol=1e-15)
    assert torch.equal(batched, alone)


def test_its_slope_is_softmax_minus_the_label() -> None:
    output = torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    y = torch.tensor([[0, 1, 2, 3, 0], [3, 3, 1, 0, 2]])
    found = vmap(grad(lambda o, t: row_loss("cross-entropy", o, t).sum()))(output, y)
    assert torch.allclose(found, output.softmax(-1) - torch.eye(4, dtype=torch.float64)[y])
