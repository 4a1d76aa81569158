"""The comparison with the loop knows every model and every method that is shipped."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
from scipy.sparse import issparse

from parsifl.core import registry
from parsifl.engine.executors import choose_executor
from parsifl.nn import models

LINEAR = {"regression": "vmap", "sparse regression": "loop", "logistic": "vmap", "softmax": "vmap"}
FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def bench() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        yield importlib.import_module("bench_methods")


def test_every_shipped_model_is_among_the_subjects(bench: Any) -> None:
    shipped = {"perceptron" if name == "mlp" else name for name in models.names()}
    assert shipped | set(LINEAR) == set(bench.SUBJECTS)
    assert set(bench.ALL) == set(registry.algorithms())


def test_only_what_trains_client_by_client_is_spared_methods(bench: Any) -> None:
    for label, subject in bench.SUBJECTS.items():
        sparse = bool(subject.zeros)
        executor, _ = choose_executor("auto", subject.problem(), sparse=sparse)
        assert executor == LINEAR.get(label, "fused" if label == "perceptron" else "threads")
        assert subject.methods == bench.ALL or label != "perceptron"


def test_data_fit_the_problems(bench: Any) -> None:
    for label in ("perceptron", *LINEAR):
        subject = bench.SUBJECTS[label]
        data = bench.data_for(subject, subject.problem())
        assert (len(data), issparse(data.x)) == (subject.clients, label == "sparse regression")
        size = 8 if issparse(data.x) else 4  # a position beside every number
        share = 1 - subject.zeros
        assert bench.row_bytes(data.x) == pytest.approx(size * share * data.x.shape[1], rel=0.02)


def test_models_and_methods_are_chosen_by_words(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench", "vgg", "fedavg", "local"])
    assert {name: each.methods for name, each in bench.asked().items()} == {
        "vgg": ("fedavg", "local")
    }
    monkeypatch.setattr(sys, "argv", ["bench", "all"])
    assert all(each.methods == bench.ALL for each in bench.asked().values())
    monkeypatch.setattr(sys, "argv", ["bench"])
    assert bench.asked() == bench.SUBJECTS
