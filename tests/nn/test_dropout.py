from __future__ import annotations

import pytest
import torch
from torch import Tensor

from parsifl.core.errors import ConfigError
from parsifl.core.keys import Key
from parsifl.nn.models import KeyedDropout, dropout_key


def keys(count: int) -> Tensor:
    return torch.stack([Key(seed, purpose="dropout").tensor() for seed in range(count)])


def test_training_without_a_key_is_an_error_and_eval_is_the_identity() -> None:
    layer = KeyedDropout(0.5)
    x = torch.ones(4, 4)
    with pytest.raises(ConfigError, match="without a key"):
        layer(x)
    assert layer.eval()(x) is x


def test_the_key_alone_decides_and_ends_with_the_context() -> None:
    layer = KeyedDropout(0.5, salt=3)
    x = torch.ones(50, 20)
    first, second = keys(2)
    with dropout_key(first):
        once, again = layer(x), layer(x)
        other_salt = KeyedDropout(0.5, salt=4)(x)
        with dropout_key(second):
            other_key = layer(x)
        back = layer(x)
    assert torch.equal(once, again)
    assert torch.equal(once, back)
    assert not torch.equal(once, other_key)
    assert not torch.equal(once, other_salt)
    with pytest.raises(ConfigError):
        layer(x)


def test_mean_is_kept_and_the_rate_is_right() -> None:
    x = torch.ones(400, 400)
    with dropout_key(keys(1)[0]):
        out = KeyedDropout(0.3)(x)
    assert (out == 0).float().mean().item() == pytest.approx(0.3, abs=0.01)
    assert out.mean().item() == pytest.approx(1.0, abs=0.01)


def test_channels_are_dropped_whole() -> None:
    with dropout_key(keys(1)[0]):
        out = KeyedDropout(0.5, channels=True)(torch.ones(8, 16, 3, 3))
    per_channel = out.flatten(2)
    assert (per_channel == per_channel[..., :1]).all()
    assert 0 < (per_channel[..., 0] == 0).sum() < 128


def test_vmap_draws_what_the_loop_draws() -> None:
    layer = KeyedDropout(0.5, salt=1)
    x = torch.rand(3, 6, 5, dtype=torch.float64)
    many = keys(3)

    def one(key: Tensor, rows: Tensor) -> Tensor:
        with dropout_key(key):
            total: Tensor = layer(rows).square().sum()
        return total

    values = torch.func.vmap(one)(many, x)
    slopes = torch.func.vmap(torch.func.grad(one, argnums=1))(many, x)
    for index in range(3):
        torch.testing.assert_close(values[index], one(many[index], x[index]))
        slope = torch.func.grad(one, argnums=1)(many[index], x[index])
        torch.testing.assert_close(slopes[index], slope)
    assert slopes.dtype == torch.float64


@pytest.mark.parametrize(("p", "expected"), [(0.0, 1.0), (1.0, 0.0)])
def test_extreme_rates(p: float, expected: float) -> None:
    with dropout_key(keys(1)[0]):
        assert (KeyedDropout(p)(torch.ones(5)) == expected).all()


def test_bad_rate_is_refused_and_settings_are_shown() -> None:
    with pytest.raises(ConfigError, match=r"dropout probability is 1\.5"):
        KeyedDropout(1.5)
    assert "p=0.5, salt=2" in repr(KeyedDropout(0.5, 2))
