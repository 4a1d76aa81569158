from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from parsifl.core.errors import ConfigError
from parsifl.core.keys import Key
from parsifl.nn.models import KeyedDropout, adapt, dropout_key


def test_batch_norm_uses_its_batch_and_the_original_is_untouched() -> None:
    norm = nn.BatchNorm1d(4)
    nn.init.normal_(norm.weight)
    net = nn.Sequential(nn.Linear(3, 4), norm)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    adapted = adapt(net)
    x = torch.randn(6, 3)
    torch.testing.assert_close(adapted.eval()(x), adapted.train()(x))
    assert list(adapted.buffers()) == []
    torch.testing.assert_close(adapted(x), net.train()(x))
    net.load_state_dict(before)
    assert len(list(net.buffers())) == 3


def test_group_norm_keeps_the_affine_parameters() -> None:
    old = nn.BatchNorm2d(6)
    nn.init.normal_(old.weight)
    net = nn.Sequential(nn.Conv2d(1, 6, 3), old)
    adapted = adapt(net, "group", groups=4)
    norm = adapted.get_submodule("1")
    assert isinstance(norm, nn.GroupNorm)
    assert norm.num_groups == 2
    assert torch.equal(norm.weight, old.weight)
    assert isinstance(adapt(nn.BatchNorm1d(4, affine=False), "group"), nn.GroupNorm)


def test_instance_norm_loses_its_running_statistics() -> None:
    adapted = adapt(nn.Sequential(nn.InstanceNorm2d(3, track_running_stats=True)))
    assert list(adapted.buffers()) == []
    assert adapted(torch.rand(2, 3, 4, 4)).shape == (2, 3, 4, 4)


def test_dropout_layers_get_keys_and_salts_of_their_own() -> None:
    net = nn.Sequential(nn.Dropout(0.5), nn.Sequential(nn.Dropout2d(0.2)), nn.Dropout(0.5))
    adapted = adapt(net.eval())
    found = [layer for layer in adapted.modules() if isinstance(layer, KeyedDropout)]
    assert [(layer.p, layer.channels) for layer in found] == [
        (0.5, False),
        (0.2, True),
        (0.5, False),
    ]
    assert len({layer.salt for layer in found}) == 3
    assert not any(layer.training for layer in found)
    with dropout_key(Key(0).tensor()):
        out = adapted.train()(torch.ones(2, 3, 4, 4))
    assert (out == 0).any()


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.out = nn.Linear(3, 5, bias=False)
        self.out.weight = self.embed.weight
        self.again = self.embed

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.out(self.embed(x) + self.again(x))
        return logits


def test_ties_are_cut_and_the_function_stays() -> None:
    net = Tied()
    adapted = adapt(net)
    values = dict(adapted.named_parameters(remove_duplicate=False))
    assert len({id(value) for value in values.values()}) == len(values) == 3
    x = torch.tensor([1, 4])
    torch.testing.assert_close(adapted(x), net(x))


@pytest.mark.parametrize(
    ("net", "words"),
    [
        (nn.Sequential(nn.LazyLinear(3)), "parameter '0.weight' is lazy"),
        (nn.Sequential(nn.AlphaDropout(0.1)), "AlphaDropout, which has no keyed form"),
        (nn.Sequential(nn.MultiheadAttention(4, 2, dropout=0.1)), "cannot be keyed"),
    ],
)
@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_what_cannot_be_adapted_is_refused_by_name(net: nn.Module, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        adapt(net)


def test_unknown_norm_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown norm 'layer'"):
        adapt(nn.Linear(1, 1), "layer")  # type: ignore[arg-type]  # what a user may type
