from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from parsifl import algorithms
from parsifl.core import registry
from parsifl.core.algorithm import AnyAlgorithm, FederatedAlgorithm

OWN = {
    name: kind
    for name, kind in registry.algorithms().items()
    if kind.__module__.startswith("parsifl.algorithms.")
}


def from_bases(kind: type) -> list[type]:
    return [base for base in kind.__mro__ if base.__module__.startswith("parsifl.algorithms._")]


def test_every_algorithm_can_be_imported_from_the_package() -> None:
    # Composed wraps another algorithm, so no name stands for it
    own = ["Composed", *(kind.__name__ for kind in OWN.values())]
    assert sorted(own) == sorted(algorithms.__all__)
    for kind in OWN.values():
        assert getattr(algorithms, kind.__name__) is kind
    assert dir(algorithms) == sorted(algorithms.__all__)


def test_editors_see_the_same_names() -> None:
    tree = ast.parse(Path(str(algorithms.__file__)).read_text())
    found = {
        alias.name: node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("parsifl.algorithms.")
        for alias in node.names
    }
    assert found.pop("Composed") == "parsifl.algorithms.composed"
    assert found == {kind.__name__: kind.__module__ for kind in OWN.values()}


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match=r"'parsifl.algorithms' has no attribute 'FedAvgg'"):
        _ = algorithms.FedAvgg


def test_importing_the_package_loads_no_algorithm() -> None:
    code = "import sys, parsifl.algorithms; print([n for n in sys.modules if n == 'torch' or "
    code += "n.startswith('parsifl.algorithms.')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("kind", OWN.values(), ids=OWN)
def test_an_algorithm_has_at_most_one_base_above_the_contract(kind: type[AnyAlgorithm]) -> None:
    bases = [base for base in from_bases(kind) if issubclass(base, FederatedAlgorithm)]
    assert len(bases) <= 1


@pytest.mark.parametrize("kind", OWN.values(), ids=OWN)
def test_mixins_of_settings_derive_from_nothing(kind: type[AnyAlgorithm]) -> None:
    mixins = [base for base in from_bases(kind) if not issubclass(base, FederatedAlgorithm)]
    assert all(mixin.__bases__ == (object,) for mixin in mixins)


@pytest.mark.parametrize("kind", OWN.values(), ids=OWN)
def test_every_algorithm_documents_what_is_sent_and_kept(kind: type[AnyAlgorithm]) -> None:
    assert "Sent" in str(kind.__doc__)
    assert "Kept" in str(kind.__doc__)
