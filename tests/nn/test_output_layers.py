from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parsifl.core.errors import ConfigError
from parsifl.nn.layer_groups import find_head, layer_groups, output_layers

Forward = Callable[["Net", Tensor], Any]


class Net(nn.Module):
    """The head is declared first; what runs is told from outside."""

    def __init__(self, run: Forward) -> None:
        super().__init__()
        self.head, self.body, self.other = nn.Linear(4, 2), nn.Linear(4, 4), nn.Linear(4, 2)
        self.norm, self.kept = nn.LayerNorm(2), None
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.run(self, x)
        return logits


def plain(net: Net, x: Tensor) -> Any:
    return torch.log_softmax(net.norm(net.head(net.body(x).relu())), -1)


def sized(net: Net, x: Tensor) -> Any:
    """Read lengths, unpack shapes and loop, as transformers do."""
    rows, features = x.shape
    assert features == 4
    x = x.view(len(x), features).expand(rows, -1)
    for _ in range(x.size(1)):
        x = net.body(x)
    return net.head(x) / float(features) ** 0.5


def functional(net: Net, x: Tensor) -> Any:
    return nn.functional.linear(net.body(x), net.head.weight) + net.head.bias


def deciding_alike(net: Net, x: Tensor) -> Any:
    if x.mean() > 0:
        x = -x
    return net.head(net.body(x))


def deciding(net: Net, x: Tensor) -> Any:
    return net.head(x) if x.mean() > 0 else net.other(x)


def both(net: Net, x: Tensor) -> Any:
    return net.head(net.body(x)) + net.other(x)


def endless(net: Net, x: Tensor) -> Any:
    while x.norm() > 1:
        x = net.body(x)
    return net.head(x)


def foreign(net: Net, x: Tensor) -> Any:
    return net.head(torch.from_numpy(x.numpy()))


@pytest.mark.parametrize("run", [plain, sized, functional, deciding_alike, endless])
def test_head_is_the_layer_that_the_output_comes_from(run: Forward) -> None:
    net = Net(run)
    assert find_head(net) == "head"
    assert "head" not in [block.name for block in layer_groups(net)]


@pytest.mark.parametrize("run", [both, deciding])
def test_outputs_of_several_layers_are_named(run: Forward) -> None:
    with pytest.raises(ConfigError, match=r"output comes from 'head' \(Linear\) and 'other'"):
        find_head(Net(run))
    assert find_head(Net(run), "other") == "other"


def test_a_forward_that_cannot_be_traced_leaves_the_order_of_declaration() -> None:
    assert output_layers(Net(foreign)) is None
    assert find_head(Net(foreign)) == "other"


def test_a_model_that_ends_with_attention_has_no_head() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    with pytest.raises(ConfigError, match=r"comes from '1' \(TransformerEncoderLayer"):
        find_head(nn.Sequential(nn.Linear(8, 8), layer))


def test_other_modules_run_as_ever_while_one_is_traced() -> None:
    stranger = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    seen = []

    def meanwhile(net: Net, x: Tensor) -> Any:
        seen.append(stranger(torch.ones(1, 4)))
        return net.head(x)

    net = Net(meanwhile)
    assert find_head(net) == "head"
    assert torch.equal(seen[0], stranger(torch.ones(1, 4)))


def test_tracing_leaves_nothing_on_the_module() -> None:
    def keeping(net: Net, x: Tensor) -> Any:
        net.kept = net.body(x)
        return net.head(net.kept)

    net = Net(keeping)
    before = copy.deepcopy(net.state_dict())
    assert find_head(net) == "head"
    assert net.kept is None
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())
