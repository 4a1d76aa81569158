"""Estimators as ONNX graphs, through scikit-learn."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
from tests.sites.estimators.test_frames import NAMES, ROWS, SITE, fits, frame

from parsifl.core.errors import ConfigError
from parsifl.data.table_encoding import RARE, Preprocessing, summarise
from parsifl.data.tables import as_columns
from parsifl.sites import FederatedSparseRegressor

skl2onnx = pytest.importorskip("skl2onnx", reason="skl2onnx is not installed")
onnxruntime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")


def predicted(exported: Any, example: Any, feed: dict[str, Any]) -> Any:
    """Return what the runtime computes: the last output has values, or chances."""
    options = {"zipmap": False} if hasattr(exported, "predict_proba") else None
    kind = {"X": example} if isinstance(example, np.ndarray) else {"initial_types": example}
    graph = skl2onnx.to_onnx(exported, options=options, **kind).SerializeToString()
    session = onnxruntime.InferenceSession(graph, providers=["CPUExecutionProvider"])
    return session.run(None, feed)[-1]


def expected(model: Any, x: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of an unknown level
        return model.predict_proba(x) if hasattr(model, "classes_") else model.predict(x)


def typed(table: Any) -> tuple[list[Any], dict[str, Any]]:
    """Return the types of the inputs and the values: a missing word is an empty text."""
    from skl2onnx.common.data_types import FloatTensorType, StringTensorType

    types, feed = [], {}
    for name, column in as_columns(table).items():
        words = column.dtype.kind == "U"
        types.append((name, (StringTensorType if words else FloatTensorType)([None, 1])))
        feed[name] = column.astype(object if words else np.float32)[:, None]
    return types, feed


@pytest.mark.parametrize("case", range(4), ids=NAMES)
def test_arrays(case: int) -> None:
    x = np.random.default_rng(0).normal(size=(ROWS, 4))
    model, y = fits()[case]
    model.fit(x, y, SITE)
    found = predicted(model.to_sklearn(), x[:1], {"X": x})
    wanted = expected(model, x)
    assert np.allclose(found.reshape(wanted.shape), wanted, rtol=1e-6)


@pytest.mark.parametrize("case", range(4), ids=NAMES)
def test_tables_with_words_missing_values_and_new_levels(case: int) -> None:
    model, y = fits()[case]
    model.fit(frame(), y, SITE)
    new = frame().assign(ward=["isolation", None, "ICU"] * 100)
    types, feed = typed(new)
    found = predicted(model.to_sklearn(missing="empty"), types, feed)
    wanted = expected(model, new)
    assert np.allclose(found.reshape(wanted.shape), wanted, rtol=1e-4, atol=1e-5)


def test_merged_levels() -> None:
    model, y = fits()[0]
    model.fit(frame(), y, SITE)
    merged = frame().assign(ward=lambda t: t.ward.replace("ICU", RARE))
    model.preprocessing_ = Preprocessing.of([summarise(as_columns(merged))])
    new = frame().head(4).assign(ward=["isolation", "surgery", RARE, "general"])
    types, feed = typed(new)
    found = predicted(model.to_sklearn(missing="empty"), types, feed)
    assert np.allclose(found[:, 0], expected(model, new), rtol=1e-4, atol=1e-5)


def test_an_unknown_mark_of_missing_words_is_named() -> None:
    x = np.random.default_rng(0).normal(size=(30, 3))
    model: Any = FederatedSparseRegressor(1).fit(x, x[:, 0], np.arange(30) % 3)
    with pytest.raises(ConfigError, match="missing"):
        model.to_sklearn(missing="NA")
