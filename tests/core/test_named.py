from __future__ import annotations

import pytest

from parsifl.core.errors import ConfigError
from parsifl.core.registry import Registry


def test_a_registry_forgives_spelling_but_neither_typos_nor_two_of_one_name() -> None:
    colors = Registry("color", {"dark-red": 1, "blue": 2})
    assert colors.find("DarkRed") == colors.find("dark_red") == 1
    assert colors.names() == ["blue", "dark-red"]
    with pytest.raises(ConfigError, match="unknown color 'blu'; did you mean 'blue'"):
        colors.find("blu")
    with pytest.raises(ConfigError, match="unknown color '3'"):
        colors.find(3)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="two colors are called 'blue'"):
        colors.add("blue", 3)
