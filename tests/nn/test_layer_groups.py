from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parsifl.core.errors import ConfigError
from parsifl.nn import models
from parsifl.nn.layer_groups import find_head, layer_groups
from parsifl.nn.output_layers import output_layers

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


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        (
            "mobilenet",
            [928, 2528, 9152, 18048, 34688, 68864, 134912, *[268800] * 5, 531968, 1061888],
        ),
        (
            "preresnet18",
            [1728, 73984, 73984, 229760, 295424, 918272, 1180672, 3671552, 4720640, 1024],
        ),
        ("alexnet", [23424, 307776, 664704, 885504, 590592, 37761024, 16789504]),
    ],
)
def test_layers_of_the_paper(name: str, sizes: list[int]) -> None:
    with torch.device("meta"):
        module = models.build(name)
    found = layer_groups(module)
    assert [block.size for block in found] == sizes
    listed = [parameter for block in found for parameter in block.parameters]
    head = [n for n, _ in module.named_parameters() if n.startswith(f"{find_head(module)}.")]
    assert sorted(listed + head) == sorted(n for n, _ in module.named_parameters())


def test_every_model_splits_into_blocks_and_a_head() -> None:
    for name in models.names():
        with torch.device("meta"):
            module = models.build(name)
        assert len(layer_groups(module)) >= 1


def test_a_norm_joins_the_weight_before_it_and_a_first_norm_the_next() -> None:
    net = nn.Sequential(
        nn.BatchNorm1d(4), nn.Linear(4, 3), nn.BatchNorm1d(3), nn.ReLU(), nn.Linear(3, 2)
    )
    (block,) = layer_groups(net)
    assert block.parameters == ("0.weight", "0.bias", "1.weight", "1.bias", "2.weight", "2.bias")
    assert block.size == 8 + 15 + 6


class Token(nn.Module):
    """A parameter on the outer module, as in transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.zeros(3, 4))
        self.body = nn.Linear(4, 4)
        self.out = nn.Linear(4, 2)


def test_parameters_of_the_outer_module_form_a_block() -> None:
    assert [block.name for block in layer_groups(Token())] == ["position", "body"]


def test_head_may_be_named_and_groups_given() -> None:
    net = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 3), nn.Linear(3, 2))
    assert [block.name for block in layer_groups(net, head="0")] == ["1", "2"]
    assert [block.size for block in layer_groups(net, groups=[["0", "1"]])] == [15 + 12]


@pytest.mark.parametrize(
    ("net", "head", "words"),
    [
        (
            nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU()),
            None,
            "cannot find the head of the model.*Conv2d",
        ),
        (nn.Sequential(nn.ReLU()), None, "no layers with weights"),
        (nn.Linear(2, 2), None, "the whole model, which is one layer"),
        (nn.Sequential(nn.Linear(2, 2)), None, "nothing to mask"),
        (nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), "fc", "unknown head 'fc'"),
    ],
)
def test_models_without_a_head_are_refused(net: nn.Module, head: str | None, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        layer_groups(net, head)


def test_groups_must_be_a_partition() -> None:
    net = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 3), nn.Linear(3, 2))
    with pytest.raises(ConfigError, match="not in a block"):
        layer_groups(net, groups=[["0"]])
    with pytest.raises(ConfigError, match="in two blocks"):
        layer_groups(net, groups=[["0"], ["0", "1"]])
    with pytest.raises(ConfigError, match="unknown submodule"):
        layer_groups(net, groups=[["nine"]])


def test_tied_parameters_are_named() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2))
    net[1].weight = net[0].weight
    with pytest.raises(ConfigError, match=r"'1\.weight' is tied"):
        layer_groups(net)


def test_what_is_no_module_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"expected an nn\.Module, got list"):
        layer_groups([3, 4])  # type: ignore[arg-type]  # the mistake that is tested
