from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType
from typing import Any, final

import pytest
from tests.support.fixtures import TinyFedAvg

from parsifl.algorithms.fedavg import FedAvg
from parsifl.core import plugins, registry
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


@pytest.fixture
def outside(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Pretend that other packages have entry points."""
    entries: list[Any] = []
    monkeypatch.setattr(plugins, "entry_points", lambda group: entries if group else [])
    registry.algorithms.cache_clear()
    yield entries
    registry.algorithms.cache_clear()


def module(monkeypatch: pytest.MonkeyPatch, name: str, *kinds: type) -> Any:
    made = ModuleType(name)
    for kind in kinds:
        kind.__module__ = name
        setattr(made, kind.__name__, kind)
    monkeypatch.setitem(sys.modules, name, made)
    return EntryPoint(name, name, plugins.ALGORITHMS)


def test_every_final_method_in_the_package_is_found() -> None:
    found = registry.algorithms()
    assert {"ditto", "fedavg", "fedprox", "local", "scaffold"} <= set(found)
    assert list(found) == sorted(found)
    assert all("__final__" in vars(kind) for kind in found.values())
    folder = Path(registry.__file__).parents[1] / "algorithms"
    text = "".join(path.read_text() for path in folder.glob("*.py"))
    assert text.count("\n@final\n@dataclass(frozen=True)\nclass ") >= len(found)


@pytest.mark.parametrize("name", ["fedavg", "FedAvg", "fed-avg", "FED_AVG"])
def test_case_and_dashes_do_not_matter(name: str) -> None:
    assert registry.find(name) is FedAvg


def test_a_method_is_built_with_its_settings() -> None:
    method = registry.get("fedavg", lr="0.25", epochs=2)
    assert method == FedAvg(lr=0.25, epochs=2.0)


def test_an_unknown_name_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(ConfigError, match="unknown algorithm 'FEDAVGG'; did you mean 'fedavg'"):
        registry.get("FEDAVGG")
    with pytest.raises(ConfigError, match=r"known: .*ditto.*scaffold"):
        registry.get("zzzzzz")


def test_another_package_adds_its_methods(
    outside: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    @final
    @dataclass(frozen=True)
    class Stranger(TinyFedAvg):
        pass

    @dataclass(frozen=True)
    class Abstract(TinyFedAvg):
        pass

    outside.append(module(monkeypatch, "stranger_package", Stranger, Abstract))
    assert registry.find("stranger") is Stranger
    assert "abstract" not in registry.algorithms()
    assert "toy" not in registry.algorithms()


def test_a_subclass_of_a_final_class_is_not_registered(
    outside: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    heir: Any = type("Heir", (FedAvg,), {})
    outside.append(module(monkeypatch, "heir_package", heir))
    assert "heir" not in registry.algorithms()


def test_a_package_that_cannot_be_imported_is_named_and_left_out(outside: list[Any]) -> None:
    outside.append(EntryPoint("broken", "package_that_is_not_there", plugins.ALGORITHMS))
    with pytest.warns(UserWarning, match="'package_that_is_not_there' .* cannot be imported"):
        assert "fedavg" in registry.algorithms()


def test_two_methods_of_one_name_are_refused(
    outside: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    twin: Any = final(dataclass(frozen=True)(type("FedAvg", (TinyFedAvg,), {})))
    outside.append(module(monkeypatch, "twin_package", twin))
    with pytest.raises(ConfigError, match=r"two algorithms are called 'fedavg': .*fedavg.*twin"):
        registry.algorithms()


def test_a_name_that_is_no_string_is_refused() -> None:
    unfit: Any = 3
    with pytest.raises(ConfigError, match="named by a string"):
        registry.get(unfit)
