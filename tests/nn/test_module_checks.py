from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from tests.support.fixtures import clients
from torch import nn

import parsifl
from parsifl import masks
from parsifl.algorithms.fedavg import FedAvg
from parsifl.algorithms.scaffold import Scaffold
from parsifl.core.errors import CapabilityError, ConfigError
from parsifl.nn.module_checks import check_module
from parsifl.nn.neural import NeuralProblem


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> Any:
        return self.second(self.first(x))


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (nn.BatchNorm1d(4), r"layer '1' \(BatchNorm1d\) keeps buffers \(running_mean.*adapt"),
        (nn.InstanceNorm1d(4, track_running_stats=True), r"'1' \(InstanceNorm1d\) keeps buffers"),
        (nn.Dropout(0.1), r"layer '1' \(Dropout\) draws unkeyed random numbers; .*adapt"),
        (nn.AlphaDropout(0.1), r"layer '1' \(AlphaDropout\) draws unkeyed"),
        (nn.LSTM(4, 4, num_layers=2, dropout=0.2), r"'1' \(LSTM\) draws .* set its dropout to 0"),
        (nn.MultiheadAttention(4, 2, dropout=0.2), r"\(MultiheadAttention\) draws unkeyed"),
        (nn.RReLU(), r"layer '1' \(RReLU\) draws unkeyed"),
        (nn.LazyLinear(3), r"layer '1' \(LazyLinear\) has lazy parameters; run the module once"),
    ],
)
@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
def test_what_cannot_run_functionally_is_refused_by_the_name_of_the_layer(
    layer: nn.Module, message: str
) -> None:
    module = nn.Sequential(nn.Linear(4, 4), layer)
    with pytest.raises(CapabilityError, match=message):
        NeuralProblem(module)
    with pytest.raises(CapabilityError):
        NeuralProblem(lambda: module)


CALL = re.compile(r"parsifl\.models\.adapt\(module[^)]*\)")


@pytest.mark.parametrize("layer", [nn.BatchNorm1d(4), nn.Dropout(0.1), nn.Dropout1d(0.1)], ids=repr)
def test_the_remedy_of_a_rejected_module_can_be_called_as_printed(layer: nn.Module) -> None:
    module = nn.Sequential(nn.Linear(4, 4), layer)
    with pytest.raises(CapabilityError) as error:
        NeuralProblem(module)
    (call,) = CALL.findall(str(error.value))
    NeuralProblem(eval(call, {"parsifl": parsifl, "module": module}))


def test_the_remedy_of_tied_layer_groups_can_be_called_as_printed() -> None:
    module = nn.Sequential(nn.Linear(4, 4), Tied(), nn.Linear(4, 2))
    with pytest.raises(ConfigError) as error:
        masks.layer_groups(module)
    (call,) = CALL.findall(str(error.value))
    assert masks.layer_groups(eval(call, {"parsifl": parsifl, "module": module}))


def test_the_remedies_of_an_algorithm_without_statistics_can_be_called_as_printed() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    problem = NeuralProblem(module, buffers="average")
    with pytest.raises(CapabilityError) as error:
        Scaffold().check_capabilities(problem)
    names = {"parsifl": parsifl, "module": module, "NeuralProblem": NeuralProblem}
    (call,) = CALL.findall(str(error.value))
    Scaffold().check_capabilities(NeuralProblem(eval(call, names)))
    (call,) = re.findall(r"NeuralProblem\(module[^)]*\)", str(error.value))
    Scaffold().check_capabilities(eval(call, names))


def test_the_remedy_of_a_padded_batch_can_be_called_as_printed() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    data = clients(dtype=torch.float32)
    with pytest.raises(CapabilityError, match="last_batch to 'wrap'") as error:
        parsifl.simulate(FedAvg(), NeuralProblem(module, buffers="average"), data, 1)
    (call,) = CALL.findall(str(error.value))
    adapted = eval(call, {"parsifl": parsifl, "module": module})
    assert parsifl.simulate(FedAvg(), NeuralProblem(adapted), data, 1).records[0].trained


@pytest.mark.parametrize(
    "layer",
    [
        nn.Dropout(0.0), nn.LayerNorm(4), nn.GroupNorm(2, 4), nn.MultiheadAttention(4, 2),
        nn.BatchNorm1d(4, track_running_stats=False), nn.LSTM(4, 4), nn.GELU(),
    ],
)  # fmt: skip
def test_what_keeps_nothing_and_draws_nothing_is_fine(layer: nn.Module) -> None:
    check_module(nn.Sequential(nn.Linear(4, 4), layer))


def test_a_module_that_is_itself_the_culprit_is_named_by_its_class() -> None:
    with pytest.raises(CapabilityError, match=r"^Dropout draws"):
        check_module(nn.Dropout(0.5))
