from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from parsifl.core.errors import ConfigError
from parsifl.nn import models
from parsifl.nn.models.preresnet import PreActBlock

IMAGES = {"alexnet": (3, 224, 224), "mlp": (784,), "resnet18_tiny": (3, 64, 64)}


def count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize(
    ("name", "classes", "parameters"),
    [
        ("alexnet", 10, 57_063_498),
        ("mlp", 10, 79_510),
        ("mobilenet", 100, 3_309_476),
        ("preresnet18", 10, 11_172_170),
        ("resnet18", 10, 11_173_952),
        ("resnet18", 100, 11_220_032),
        ("resnet18_tiny", 200, 11_279_112),
        ("vgg", 10, 246_314),
    ],
)
def test_parameter_counts_are_those_of_the_papers(name: str, classes: int, parameters: int) -> None:
    with torch.device("meta"):
        assert count(models.build(name, classes=classes)) == parameters


@pytest.mark.parametrize("name", models.names())
def test_forward_gives_logits_without_buffers(name: str) -> None:
    module = models.build(name, classes=7, width=0.125)
    images = torch.rand(3, *IMAGES.get(name, (3, 32, 32)))
    assert module(images).shape == (3, 7)
    assert list(module.buffers()) == []


@pytest.mark.parametrize("name", models.names())
@pytest.mark.parametrize("width", [0.5, 0.3])
def test_a_narrow_model_is_a_corner_of_the_wide_one(name: str, width: float) -> None:
    with torch.device("meta"):
        wide = dict(models.build(name).named_parameters())
        narrow = dict(models.build(name, width=width).named_parameters())
    assert wide.keys() == narrow.keys()
    for key, value in narrow.items():
        assert all(small <= big for small, big in zip(value.shape, wide[key].shape, strict=True))
    first, last = next(iter(wide)), list(wide)[-1]
    # input channels and classes stay
    assert narrow[first].shape[1:2] == wide[first].shape[1:2]
    assert narrow[last].shape[0] == wide[last].shape[0]
    assert sum(v.numel() for v in narrow.values()) < sum(v.numel() for v in wide.values())


def test_width_takes_the_ceiling_of_every_hidden_layer() -> None:
    module = models.MLP(5, (10, 7), 3, width=0.25)
    assert [
        tuple(layer.weight.shape) for layer in module.modules() if isinstance(layer, nn.Linear)
    ] == [
        (3, 5),
        (2, 3),
        (3, 2),
    ]


@pytest.mark.parametrize("width", [0.0, -1.0, 1.5])
def test_bad_widths_are_refused(width: float) -> None:
    with pytest.raises(ConfigError, match="width is"):
        models.build("mlp", width=width)


def test_unknown_models_and_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match="did you mean 'mobilenet'"):
        models.build("mobilnet")
    with pytest.raises(ConfigError, match="unknown setting of MLP 'depth'"):
        models.build("mlp", depth=3)
    with pytest.raises(ConfigError, match=r"MLP.hidden = \('x',\): .* a valid integer"):
        models.build("mlp", hidden=("x",))
    with pytest.raises(ConfigError, match=r"VGG.norm = 'layer': Input should be 'none' or 'batch'"):
        models.build("vgg", norm="layer")


def test_preactivation_shortcut_starts_after_the_first_activation() -> None:
    module = models.PreResNet18(width=0.0625)
    block = module.blocks[2]
    assert isinstance(block, PreActBlock)
    assert block.shortcut is not None
    x = torch.randn(2, 4, 8, 8)
    active = block.n1(x).relu()
    expected = block.conv2(block.n2(block.conv1(active)).relu()) + block.shortcut(active)
    torch.testing.assert_close(block(x), expected)


def test_vgg_with_norm_has_blocks_of_convolution_and_norm() -> None:
    module = models.VGG(norm="batch", width=0.25)
    assert module(torch.rand(2, 3, 32, 32)).shape == (2, 10)
    assert module.mask_blocks()[0] == ("convs.0", "norms.0")


@pytest.mark.filterwarnings("ignore:Initializing zero-element")
@pytest.mark.parametrize("settings", [{"hidden": (0,)}, {"hidden": (-3,)}, {"classes": 0}])
def test_a_layer_without_units_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"at least one|negative"):
        models.build("mlp", **settings)
