from __future__ import annotations

from typing import Any

import pytest

from parsifl.core.config import bind, grid, option_defaults, parse
from parsifl.core.errors import ConfigError


def sample(
    _first: int,
    *,
    alpha: float = 0.5,
    count: int = 3,
    flag: bool = False,
    word: str = "a",
    sizes: tuple[int, ...] = (),
) -> None: ...


def needs(_first: int, *, path: str) -> None: ...


def nothing(_first: int) -> None: ...


def test_text_becomes_the_declared_type() -> None:
    given = {"alpha": "0.1", "count": "7", "flag": "yes", "word": "b", "sizes": "1+2"}
    expected = {"alpha": 0.1, "count": 7, "flag": True, "word": "b", "sizes": (1, 2)}
    assert bind("x", sample, given) == expected


def test_values_of_the_declared_type_pass_through() -> None:
    given = {"alpha": 1, "count": 7.0, "flag": False, "sizes": [3]}
    assert bind("x", sample, given) == {"alpha": 1.0, "count": 7, "flag": False, "sizes": (3,)}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"alpa": "1"}, "did you mean 'alpha'"),
        ({"alpha": "many"}, "alpha' of x = 'many': Input should be a valid number"),
        ({"count": "1.5"}, "Input should be a valid integer"),
        ({"count": 1.5}, "Input should be a valid integer"),
        ({"count": True}, "Input should be a valid integer"),
        ({"flag": "perhaps"}, "Input should be a valid boolean"),
        ({"sizes": "1+x"}, "sizes' of x = '1\\+x'"),
        ({"word": 3}, "Input should be a valid string"),
    ],
)
def test_wrong_options_are_named(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        bind("x", sample, given)


def test_missing_and_superfluous_options() -> None:
    with pytest.raises(ConfigError, match="needs the option 'path'"):
        bind("x", needs, {})
    with pytest.raises(ConfigError, match="takes no options, got 'a'"):
        bind("x", nothing, {"a": 1})
    assert option_defaults(needs) == {"path": None}


@pytest.mark.parametrize("text", ["d:alpha", "d:=1"])
def test_unreadable_text_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="name:option=value"):
        parse(text)


def test_a_name_alone_has_no_options() -> None:
    assert parse("iid") == ("iid", {})
    assert parse("libsvm:path=C:/a.txt,columns=4") == (
        "libsvm",
        {"path": "C:/a.txt", "columns": "4"},
    )


def test_a_grid_lists_the_values_of_each_setting_once() -> None:
    assert grid(["lr=0.1,0.5,0.1", "batch_size=none"]) == {
        "lr": ["0.1", "0.5"],
        "batch_size": ["none"],
    }
    with pytest.raises(ConfigError, match="write setting=value"):
        grid(["lr"])
    with pytest.raises(ConfigError, match=r"'lr' twice: write all its values .*lr=0\.1,0\.2"):
        grid(["lr=0.1", "lr=0.2"])
