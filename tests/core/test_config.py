from __future__ import annotations

import dataclasses
import inspect
import json
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parsifl.algorithms.fedavg import FedAvg
from parsifl.core import config, registry, renamed
from parsifl.core.config import Count, Fraction, Momentum, NonNegative, Positive, Size
from parsifl.core.errors import ConfigError
from parsifl.engine.settings import ExperimentSettings


@dataclass(frozen=True)
class Settings:
    positive: Positive = 1.0
    non_negative: NonNegative = 0.0
    fraction: Fraction = 0.5
    momentum: Momentum = 0.0
    count: Count = 1
    size: Size = 0
    maybe: Count | None = None
    steps: tuple[int, ...] = ()
    kind: Literal["a", "b"] = "a"
    flag: bool = False
    name: str = ""

    def __post_init__(self) -> None:
        config.check(self)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("positive", 0.0), ("positive", float("inf")), ("positive", float("nan")),
        ("positive", "1"), ("positive", True), ("non_negative", -1e-9), ("fraction", 1.1),
        ("momentum", 1.0), ("count", 0), ("count", 1.5), ("count", True), ("size", -1),
        ("maybe", 0), ("steps", [1]), ("steps", (1.5,)), ("kind", "c"), ("flag", "yes"),
        ("name", 3),
    ],
)  # fmt: skip
def test_a_wrong_value_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"^Settings.{field} = "):
        Settings(**{field: value})


def test_text_says_none_and_several_values_where_a_field_may_have_them() -> None:
    assert config.build(Settings, {"maybe": "none"}).maybe is None
    assert config.build(Settings, {"steps": "10+20"}).steps == (10, 20)
    assert config.build(Settings, {"steps": "10"}).steps == (10,)
    with pytest.raises(ConfigError, match=r"^Settings.steps = '1,2': .* valid integer"):
        config.build(Settings, {"steps": "1,2"})
    assert config.build(Settings, {"name": "none"}).name == "none"
    with pytest.raises(ConfigError, match=r"^Settings.count = 'none': .* valid integer"):
        config.build(Settings, {"count": "none"})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("positive", 1), ("fraction", 0), ("fraction", 1), ("momentum", 0.999), ("maybe", None),
        ("positive", np.int64(2)), ("maybe", 3), ("steps", (1, 2)), ("kind", "b"), ("flag", True),
        ("name", "x"),
    ],
)  # fmt: skip
def test_a_right_value_is_taken_as_it_is(field: str, value: Any) -> None:
    assert getattr(Settings(**{field: value}), field) == value


@pytest.mark.parametrize(
    ("field", "value", "stored"),
    [
        ("count", np.int64(5), 5), ("maybe", np.int32(3), 3), ("size", np.uint8(0), 0),
        ("positive", np.float64(0.25), 0.25), ("positive", np.float32(0.25), 0.25),
        ("steps", (np.int64(1), 2), (1, 2)),
        ("flag", np.bool_(True), True), ("name", np.str_("x"), "x"),
    ],
)  # fmt: skip
def test_numbers_of_numpy_are_stored_as_those_of_python(
    field: str, value: Any, stored: Any
) -> None:
    for settings in (Settings(**{field: value}), config.build(Settings, {field: value})):
        found = getattr(settings, field)
        assert found == stored
        assert type(found) is type(stored)
        parts = zip(found, stored, strict=True) if isinstance(stored, tuple) else ()
        assert all(type(part) is type(plain) for part, plain in parts)
        assert config.build(Settings, json.loads(json.dumps(config.to_json(settings)))) == settings


@pytest.mark.parametrize(
    ("field", "value"),
    [("count", np.float64(5.0)), ("count", np.int64(0)), ("count", np.bool_(True)),
     ("positive", np.float32("nan")), ("steps", (np.float64(1.5),))],
)  # fmt: skip
def test_numbers_of_numpy_meet_the_same_checks(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"^Settings.{field} = (?!np)"):
        Settings(**{field: value})


@pytest.mark.parametrize(
    ("text", "field", "value"),
    [
        ("0.5", "positive", 0.5), ("1e-3", "positive", 1e-3), ("7", "count", 7),
        ("true", "flag", True), ("b", "kind", "b"), ([1, 2], "steps", (1, 2)),
    ],
)  # fmt: skip
def test_text_and_json_values_are_read(text: Any, field: str, value: Any) -> None:
    assert getattr(config.build(Settings, {field: text}), field) == value


def test_an_unknown_field_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(
        ConfigError, match="unknown setting of FedAvg 'momentun'; did you mean 'momentum'"
    ):
        config.build(FedAvg, {"momentun": 0.9})


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("batch", "batch_size"), ("decay", "weight_decay"), ("partial", "last_batch"),
        ("steps", "local_steps"),
    ],
)  # fmt: skip
def test_a_former_name_raises_with_the_new_one(old: str, new: str) -> None:
    with pytest.raises(ConfigError, match=f"^FedAvg: `{old}` was renamed to `{new}`$"):
        config.build(FedAvg, {old: 1})


@pytest.mark.parametrize(
    ("algorithm", "word", "field"),
    [
        ("fedavg", "learning_rate", "lr"), ("fedavg", "local_epochs", "epochs"),
        ("fedprox", "lam", "mu"), ("fedprox", "lambda", "mu"), ("ditto", "mu", "lam"),
        ("ditto", "lambda_", "lam"), ("pfedme", "mu", "lam"), ("fedht", "k", "tau"),
        ("fedavg", "K", "local_steps"), ("scaffold", "server_learning_rate", "server_lr"),
    ],
)  # fmt: skip
def test_a_common_word_suggests_the_field_of_this_algorithm(
    algorithm: str, word: str, field: str
) -> None:
    with pytest.raises(ConfigError, match=f"'{word}'; did you mean '{field}'"):
        config.build(registry.find(algorithm), {word: 1})
    with pytest.raises(ConfigError, match=f"'{word}'; did you mean '{field}'"):
        registry.find(algorithm)(**{word: 1})


def test_a_name_that_a_class_has_is_taken_though_others_renamed_it() -> None:
    assert config.build(Settings, {"steps": (3,)}).steps == (3,)
    assert config.build(FedAvg, {"weight_decay": 0.1}).weight_decay == 0.1
    with pytest.raises(ConfigError, match=r"^unknown setting of Settings 'batch'"):
        config.build(Settings, {"batch": 1})


def test_every_new_name_and_every_synonym_belongs_to_some_algorithm() -> None:
    kinds = registry.algorithms().values()
    fields = {name for kind in kinds for name in inspect.signature(kind).parameters}
    fields |= {field.name for field in dataclasses.fields(ExperimentSettings)}
    assert {*renamed.SETTINGS.values(), *sum(config.SYNONYMS.values(), ())} <= fields
    assert not renamed.SETTINGS.keys() & fields


def test_text_that_is_no_number_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"FedAvg.lr = 'fast'"):
        config.build(FedAvg, {"lr": "fast"})


@given(
    st.builds(
        Settings,
        positive=st.floats(1e-300, 1e300),
        fraction=st.floats(0, 1),
        count=st.integers(1, 10**9),
        maybe=st.none() | st.integers(1, 9),
        steps=st.lists(st.integers(-5, 5), max_size=3).map(tuple),
        kind=st.sampled_from(["a", "b"]),
        flag=st.booleans(),
        name=st.text(max_size=5),
    )
)
def test_settings_survive_json(settings: Settings) -> None:
    text = json.dumps(config.to_json(settings))
    assert config.build(Settings, json.loads(text)) == settings
