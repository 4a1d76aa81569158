from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from parsifl.core.errors import ConfigError, DataError
from parsifl.data.preparation import prepare, prepare_arrays
from parsifl.data.ragged import Ragged


def test_the_defaults_are_those_of_the_data_set() -> None:
    data = prepare("digits")
    assert len(data) == 20
    assert isinstance(data.x, torch.Tensor)
    assert data.x.dtype == torch.float32
    assert data.x.max() == 1  # normalize=unit
    assert np.count_nonzero(data.shares(), axis=1).max() == 2


def test_options_of_the_data_set_and_of_the_partition_reach_their_place() -> None:
    data = prepare(
        "digits:normalize=none,dtype=float64,augment=flip",
        clients=5,
        partition="dirichlet:alpha=1",
        options={"min_size": 50},
        test=0.5,
        validation=0.1,
    )
    assert isinstance(data.x, torch.Tensor)
    assert data.x.dtype == torch.float64
    assert data.x.max() == 16
    assert data.augment == "flip"
    sizes = sum(Ragged.of(part).sizes for part in (data.train, data.validation, data.test))
    assert np.min(sizes) >= 50


def test_the_same_seed_gives_the_same_clients() -> None:
    first, again, other = (prepare("digits", clients=5, seed=seed) for seed in (3, 3, 4))
    assert all(np.array_equal(a, b) for a, b in zip(first.train, again.train, strict=True))
    assert not np.array_equal(first.train[0], other.train[0])


def test_generated_clients_are_their_own_groups() -> None:
    data = prepare("fedgradmp:clients=3,samples=8,dimension=20,sparsity=2")
    assert len(data) == 3
    assert data.y.dtype == torch.float64
    assert len(prepare("fedgradmp:clients=3,samples=8,dimension=20,sparsity=2", clients=2)) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "digits:dtype=int8"}, "unknown dtype"),
        ({"name": "digits:normalize=zca"}, "unknown normalization"),
        ({"name": "digits:verify=false"}, "takes no options"),
        ({"name": "digits", "test": "most"}, "unknown test rule 'most'"),
        ({"name": "digits", "partition": "dirchlet"}, "did you mean 'dirichlet'"),
        ({"name": "digits", "clients": 0}, "at least 1"),
        ({"name": "digits", "clients": "5"}, "clients must be a whole number, got '5'"),
        ({"name": "digits", "clients": 2.5}, "clients must be a whole number, got 2.5"),
        ({"name": "digits", "clients": True}, "clients must be a whole number, got True"),
        ({"name": "digits", "seed": "a"}, "seed must be a whole number, got 'a'"),
        ({"name": "digits", "partition": 3}, "expected a name with options"),
        ({"name": "digits", "test": 0.7, "validation": 0.7}, "add up"),
    ],
)
def test_settings_that_cannot_work_are_refused(arguments: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        prepare(**arguments)  # type: ignore[arg-type]  # the values are wrong on purpose


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "digits", "clients": 5000}, "1797 rows, too few for 5000 clients"),
        ({"name": "digits", "test": "all"}, "no official test split"),
        ({"name": "digits", "partition": "natural-id"}, "no natural groups"),
        ({"name": "fedgradmp:clients=2", "partition": "pathological"}, "needs class labels"),
    ],
)
def test_data_that_cannot_be_divided_so_are_refused(
    arguments: dict[str, str], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        prepare(**arguments)  # type: ignore[arg-type]  # the values are wrong on purpose


@pytest.mark.slow
def test_fraction_merges_and_official_tests_do_not(real: Path) -> None:
    merged = prepare("mnist", clients=10, data_dir=real)
    assert sum(len(part) for part in merged.train) + sum(len(part) for part in merged.test) == 70000
    shares = prepare(
        "mnist:normalize=unit",
        10,
        "inner-dirichlet:alpha=0.1,size=500",
        data_dir=real,
        test="shares",
    )
    assert all(len(part) == 500 for part in shares.train)
    assert all(80 < len(part) <= 100 and part.min() >= 60000 for part in shares.test)
    larger = prepare("mnist:normalize=unit", 10, "iid", data_dir=real, test="shares:size=400")
    assert all(380 < len(part) <= 400 for part in larger.test)
    everything = prepare("mnist:normalize=unit", clients=2, data_dir=real, test="all")
    assert [len(part) for part in everything.test] == [10000, 10000]
    with pytest.raises(DataError, match="has no groups"):
        prepare("mnist", clients=2, data_dir=real, test="groups")


def test_official_tests_by_group_belong_to_the_same_region(real: Path) -> None:
    data = prepare("fed-tcga-brca", data_dir=real, test="groups")
    assert [len(part) for part in data.train] == [248, 156, 164, 129, 129, 40]
    assert [len(part) for part in data.test] == [63, 40, 42, 33, 33, 11]
    with pytest.raises(DataError, match="one group each"):
        prepare("fed-tcga-brca", 4, "iid", data_dir=real, test="groups")
    with pytest.raises(DataError, match="no labels to take shares of"):
        prepare("fed-tcga-brca", data_dir=real, test="shares")


def test_text_stays_sparse_from_the_file_to_the_clients(real: Path) -> None:
    data = prepare("rcv1-sample", clients=10, data_dir=real)
    assert not isinstance(data.x, torch.Tensor)
    assert data.x.shape == (1500, 47236)
    assert len(data) == 10


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("shares:sise=500", "unknown option of test rule 'shares' 'sise'; did you mean 'size'"),
        (
            "shares:size=many",
            "option 'size' of test rule 'shares' = 'many': Input should",
        ),
        ("all:size=500", "test rule 'all' takes no options, got 'size'"),
    ],
)
def test_options_of_test_rules_are_checked(rule: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        prepare("digits", clients=2, test=rule)


def test_own_rows_are_divided_by_a_partition() -> None:
    draw = np.random.default_rng(0)
    x, y = draw.normal(3.0, 2.0, size=(120, 3)), np.repeat(["b", "a", "c"], 40)
    data = prepare_arrays(
        x, y, clients=4, partition="pathological:classes=1", normalize="feature", validation=0.1
    )
    assert data.source["labels"] == ["a", "b", "c"]
    assert data.source["partition"] == "pathological:classes=1"
    for split in (data.train, data.validation, data.test):
        assert all(len(set(data.y[torch.from_numpy(part)].tolist())) <= 1 for part in split)
    rows = np.concatenate([*data.train])
    np.testing.assert_allclose(data.x[torch.from_numpy(rows)].mean(0), 0, atol=1e-6)


def test_natural_groups_of_own_rows_may_be_words() -> None:
    x, y = np.ones((6, 2)), np.array([0, 1, 0, 1, 0, 1])
    wards = ["icu", "er", "icu", "er", "er", "icu"]
    data = prepare_arrays(x, y, partition="natural-id", groups=wards, test=0.0)
    assert [sorted(part.tolist()) for part in data.train] == [[1, 3, 4], [0, 2, 5]]


def test_own_rows_may_be_tokens() -> None:
    tokens = np.arange(40).reshape(8, 5)
    data = prepare_arrays(tokens, np.arange(8) % 2, clients=2, dtype=torch.int64)
    assert isinstance(data.x, torch.Tensor)
    assert (data.x.dtype, data.y.dtype) == (torch.int64, torch.int64)
    assert data.x.tolist() == tokens.tolist()


@pytest.mark.parametrize("missing", [None, float("nan"), pd.NA])
def test_natural_groups_are_needed_for_every_row(missing: object) -> None:
    x, y = np.ones((4, 2)), np.array([0, 1, 0, 1])
    with pytest.raises(ConfigError, match="needs the natural client of each row: pass groups="):
        prepare_arrays(x, y, partition="natural-id")
    wards = np.array(["icu", missing, "er", missing], dtype=object)
    with pytest.raises(DataError, match=r"no value in 2 rows \(the first is row 1\)"):
        prepare_arrays(x, y, partition="natural-id", groups=wards)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dtype": "int64"}, "dtype must be a torch dtype such as torch.float32, got 'int64'"),
        ({"dtype": torch.int64, "normalize": "feature"}, "which dtype=torch.int64 cannot hold"),
        ({"test": "0.2"}, "test must be a fraction of each client's rows, got '0.2'"),
    ],
)
def test_wrong_arguments_for_own_rows_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        prepare_arrays(np.ones((8, 2)), np.arange(8) % 2, clients=2, **arguments)
