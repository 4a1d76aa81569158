"""Old names of modules and members: an error that names the new one."""

from __future__ import annotations

import importlib
import re

import pytest

from parsifl.core import registry, renamed


@pytest.mark.parametrize(("old", "new"), renamed.MODULES.items())
def test_an_old_module_names_the_new_one(old: str, new: str) -> None:
    with pytest.raises(ModuleNotFoundError, match=re.escape(f"{old} is now {new}")):
        importlib.import_module(old)
    assert importlib.import_module(new)


@pytest.mark.parametrize(("old", "new"), [*renamed.MEMBERS.items(), *renamed.MODULES.items()])
def test_an_old_attribute_names_the_new_one(old: str, new: str) -> None:
    package, _, name = old.rpartition(".")
    error = renamed.missing(package, name)
    assert str(error) == f"module '{package}' has no attribute '{name}': it is now {new}"


@pytest.mark.parametrize(("old", "new"), renamed.MEMBERS.items())
def test_a_package_names_the_new_place_of_what_it_had(old: str, new: str) -> None:
    package, _, name = old.rpartition(".")
    with pytest.raises(AttributeError, match=re.escape(f"it is now {new}")):
        getattr(importlib.import_module(package), name)
    assert registry.load_object(":".join(new.rsplit(".", 1)))


def test_a_module_that_never_was_is_an_ordinary_error() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"No module named .parsifl\.nothing"):
        importlib.import_module("parsifl.nothing")
