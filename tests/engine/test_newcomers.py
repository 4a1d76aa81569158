"""What a newcomer sees: representations that fit on a screen, and errors with a remedy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from scipy.sparse import csr_matrix
from torch import Tensor, nn

import parsifl
from parsifl.core.errors import CapabilityError, DataError
from parsifl.core.keys import Key
from parsifl.core.problem import Model
from parsifl.nn import models

X = np.random.default_rng(0).normal(size=(12, 3)).astype(np.float32)
LABELS = np.arange(12) % 2
ONE_HOT = np.eye(2, dtype=np.float32)[LABELS]


def test_representations_fit_on_a_screen() -> None:
    resnet = parsifl.NeuralProblem(lambda: models.build("resnet18"))
    mlp = parsifl.NeuralProblem(lambda: models.build("mlp", inputs=784, classes=10))
    glm = parsifl.GLM(5000, keep=range(4000), dictionary=torch.eye(5000))
    shown: list[Any] = [
        resnet,
        mlp,
        parsifl.NeuralProblem(nn.BatchNorm1d(3), "mse", buffers="local", dtype=torch.float64),
        glm,
        Model(mlp, mlp.init(Key(0))),
        Model(glm, glm.init(Key(0))),
        parsifl.data.prepare("digits", clients=30),
        parsifl.ClientData.of([(X, LABELS), (X[:8], LABELS[:8])]),
        parsifl.ClientData.of([(csr_matrix(X), X[:, 0])] * 2),
    ]
    for value in shown:
        lines = repr(value).splitlines()
        assert len(lines) <= 3
        assert max(map(len, lines)) <= 300, lines
    assert repr(resnet) == "NeuralProblem(ResNet, loss='cross-entropy'; 11,173,952 parameters)"
    assert "buffers='local', dtype=torch.float64" in repr(shown[2])
    assert "2 clients, 20 rows of shape [3] and float32, 2 classes" in repr(shown[7])
    assert "sparse rows" in repr(shown[8])
    assert "real targets" in repr(shown[8])


def test_problems_that_differ_are_told_apart() -> None:
    first, second = (parsifl.GLM(50, keep=range(at, at + 20)) for at in (0, 1))
    assert repr(first) != repr(second)


@pytest.mark.parametrize(
    ("problem", "y", "text"),
    [
        (parsifl.NeuralProblem(nn.Linear(3, 2)), ONE_HOT, r"one-hot.*pass y\.argmax\(1\)"),
        (parsifl.NeuralProblem(nn.Linear(3, 2)), ONE_HOT.astype(int), r"one-hot.*y\.argmax\(1\)"),
        (parsifl.NeuralProblem(nn.Linear(3, 2)), X[:, 0], r"real targets.*y\.astype\(int\)"),
        (parsifl.GLM(3, "softmax", classes=2), ONE_HOT, r"one-hot.*y\.argmax\(1\)"),
        (parsifl.GLM(3, "logistic"), ONE_HOT, r"one-hot.*y\.argmax\(1\)"),
    ],
)
def test_one_hot_targets_are_rejected_before_training(problem: Any, y: Any, text: str) -> None:
    seen: list[Any] = []
    with pytest.raises(DataError, match=text):
        parsifl.simulate(
            parsifl.get("fedavg", local_steps=1), problem, [(X, y)] * 2, 1, callbacks=[seen.append]
        )
    assert not seen


def test_a_module_with_several_inputs_is_rejected_with_the_remedy() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, image: Tensor, table: Tensor) -> Tensor:
            out: Tensor = self.layer(image) + self.layer(table)
            return out

    with pytest.raises(CapabilityError, match=r"takes 2 inputs \(image, table\).*split them"):
        parsifl.NeuralProblem(Two)
    rows: Any = [np.zeros(1, np.int64)]
    parts: Any = {"x": [X, X], "y": torch.as_tensor(LABELS)}
    with pytest.raises(DataError, match=r"x must be one tensor, array or CSR matrix.*got a list"):
        parsifl.ClientData(**parts, train=rows, validation=rows, test=rows, profiles=[{}])
