from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.sparse import csr_matrix

from parsifl.core.errors import ConfigError, DataError
from parsifl.core.keys import Key
from parsifl.data.client_rows import stack_rows
from parsifl.data.clients import ClientData, as_tensor
from parsifl.data.dataset import Dataset
from parsifl.data.ragged import Ragged

PAIR = (np.arange(8.0).reshape(4, 2), np.array([0, 1, 0, 2]))
OTHER = (np.arange(4.0).reshape(2, 2), np.array([1, 1]))


def tensor(data: ClientData) -> torch.Tensor:
    assert isinstance(data.x, torch.Tensor)
    return data.x


def test_own_arrays_are_pooled_in_the_order_of_the_clients() -> None:
    data = ClientData.of([PAIR, OTHER], test=0.0)
    assert np.array_equal(tensor(data).numpy(), np.concatenate([PAIR[0], OTHER[0]]))
    assert data.y.tolist() == [0, 1, 0, 2, 1, 1]
    assert [sorted(part.tolist()) for part in data.train] == [[0, 1, 2, 3], [4, 5]]
    assert len(data) == 2
    assert data.classes == 3
    assert list(data.profiles) == [{}, {}]


def test_validation_and_test_rows_are_disjoint_from_training_rows() -> None:
    data = ClientData.of([PAIR, OTHER], test=0.25, validation=0.25)
    assert [len(part) for part in data.train] == [2, 1]
    assert [len(part) for part in data.validation] == [1, 0]
    assert [len(part) for part in data.test] == [1, 1]


def test_the_seed_decides_the_split() -> None:
    clients = [(np.zeros((50, 1)), np.zeros(50, dtype=np.int64))]
    rows = [ClientData.of(clients, seed=seed).train[0].tolist() for seed in (0, 0, 1)]
    assert rows[0] == rows[1] != rows[2]


@pytest.mark.parametrize(
    ("x", "dtype", "expected"),
    [
        (np.zeros((4, 2)), None, torch.float64),
        (np.zeros((4, 2), dtype=np.float32), None, torch.float32),
        (np.zeros((4, 2), dtype=np.uint8), None, torch.float32),
        (np.zeros((4, 2)), torch.float32, torch.float32),
        (np.zeros((4, 2), dtype=np.int32), torch.int64, torch.int64),
        (torch.zeros((4, 2)), None, torch.float32),
        (torch.zeros((4, 2), dtype=torch.float64, requires_grad=True), None, torch.float64),
    ],
)
def test_floats_stay_what_they_are_and_integers_become_float32(
    x: Any, dtype: torch.dtype | None, expected: torch.dtype
) -> None:
    data = ClientData.of([(x, np.array([0, 1, 0, 1]))], dtype=dtype)
    assert tensor(data).dtype == expected
    assert data.y.dtype == torch.int64


def test_a_regression_target_takes_the_dtype_of_the_features() -> None:
    x, y = np.zeros((4, 2), dtype=np.float32), np.arange(4.0)
    data = ClientData.of([(x, y)])
    assert data.y.dtype == torch.float32
    assert data.classes is None
    survival = ClientData.of([(x.astype(np.float64), np.ones((4, 2)))])
    assert survival.y.shape == (4, 2)
    assert survival.y.dtype == torch.float64
    with pytest.raises(DataError, match="no classes"):
        data.shares()


def test_sparse_clients_stay_sparse() -> None:
    pairs = [(csr_matrix(x), y) for x, y in (PAIR, OTHER)]
    data = ClientData.of(pairs)
    assert isinstance(data.x, csr_matrix)
    assert np.array_equal(data.x.toarray(), np.concatenate([PAIR[0], OTHER[0]]))
    narrow = ClientData.of(pairs, dtype=torch.float32)
    assert isinstance(narrow.x, csr_matrix)
    assert narrow.x.dtype == np.float32
    assert narrow.flattened().x is narrow.x


def test_profiles_are_carried() -> None:
    data = ClientData.of([PAIR, OTHER], profiles=[{"width": 0.5}, {"width": 1.0}])
    assert data.profiles[0] == {"width": 0.5}
    data = ClientData.of([PAIR, OTHER], profiles=[{"mask": np.array([True, False])}, {}])
    assert data.profiles[0] == {"mask": [True, False]}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"y": torch.zeros(3)}, "6 rows but y has 3"),
        ({"profiles": ({},)}, "profiles has 1 clients but train has 2"),
        ({"train": Ragged.of([[0], [6]])}, "train names rows 0 to 6, but x has rows 0 to 5"),
        ({"test": [np.array([-1]), np.array([0])]}, "test names rows -1"),
        ({"profiles": (None, {})}, "a profile must be a mapping, .*got NoneType"),
    ],
)
def test_fields_that_contradict_each_other_are_refused(
    changes: dict[str, Any], message: str
) -> None:
    fields = {**vars(ClientData.of([PAIR, OTHER])), **changes}
    with pytest.raises(DataError, match=message):
        ClientData(**fields)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"test": "most"}, "test must be a fraction of each client's rows, got 'most'"),
        ({"validation": None}, "validation must be a fraction"),
        ({"dtype": "float32"}, "dtype must be a torch dtype such as torch.float32, got 'float32'"),
        ({"profiles": [{"flops_per_second": "fast"}, {}]}, "a number above 0, got 'fast'"),
        ({"profiles": [{"flops_per_second": 0}, {}]}, "flops_per_second .* above 0, got 0"),
    ],
)
def test_arguments_of_the_wrong_kind_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ClientData.of([PAIR, OTHER], **arguments)


def test_a_read_only_memory_map_is_shared_and_not_copied(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.ones((5, 2), dtype=np.float32))
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    pooled = as_tensor(mapped)
    assert pooled.data_ptr() == mapped.ctypes.data


def test_a_million_clients_with_two_rows_each() -> None:
    rows = Ragged.from_sizes(np.arange(2_000_000), np.full(1_000_000, 2))
    labels = np.tile(np.array([0, 1]), 1_000_000)
    dataset = Dataset("big", np.zeros((2_000_000, 1), dtype=np.float32), labels, classes=2)
    data = ClientData.from_dataset(dataset, rows, test=0.5)
    assert len(data) == 1_000_000
    assert len(data.train[999_999]) == len(data.test[999_999]) == 1


DATASET = Dataset(
    "toy",
    np.arange(12, dtype=np.uint8).reshape(6, 1, 1, 2),
    np.array([0, 0, 1, 1, 1, 0]),
    classes=2,
    test_x=np.full((2, 1, 1, 2), 7, dtype=np.uint8),
    test_y=np.array([1, 0]),
)
PARTS = [np.array([0, 2, 3]), np.array([1, 4, 5])]


def test_from_a_data_set_with_a_fraction_for_testing() -> None:
    data = ClientData.from_dataset(DATASET, PARTS, test=0.3, key=Key(1))
    assert [sorted([*a, *b]) for a, b in zip(data.train, data.test, strict=True)] == [
        [0, 2, 3],
        [1, 4, 5],
    ]
    assert tensor(data).dtype == torch.float32
    assert data.name == "toy"
    assert data.flattened().x.shape == (6, 2)


def test_from_a_data_set_with_rows_of_the_official_test_split() -> None:
    data = ClientData.from_dataset(DATASET, PARTS, test=[np.array([0]), np.array([0, 1])])
    assert [part.tolist() for part in data.test] == [[6], [6, 7]]
    assert data.y[data.test[1]].tolist() == [1, 0]
    assert [len(part) for part in data.train] == [3, 3]
    assert data.shares().tolist() == [[1 / 3, 2 / 3], [2 / 3, 1 / 3]]


def test_statistics_come_from_training_rows_alone() -> None:
    data = ClientData.from_dataset(DATASET, PARTS, test=[np.array([0])] * 2, normalize="feature")
    assert torch.allclose(tensor(data)[:6].mean(dim=0), torch.zeros(1, 1, 2), atol=1e-6)
    doubled = ClientData.from_dataset(
        DATASET, PARTS, test=0.3, normalize="feature", dtype=torch.float64
    )
    rows = np.concatenate(list(doubled.train))
    assert torch.allclose(
        tensor(doubled)[rows].mean(dim=0).float(), torch.zeros(1, 1, 2), atol=1e-6
    )


def test_empty_clients_and_impossible_shares_are_refused() -> None:
    with pytest.raises(DataError, match=r"1 of 2 clients have no rows .*client 1"):
        ClientData.from_dataset(DATASET, [np.array([0]), np.zeros(0, dtype=np.int64)])
    with pytest.raises(DataError, match="no clients"):
        ClientData.from_dataset(DATASET, [])
    with pytest.raises(ConfigError, match="add up"):
        ClientData.from_dataset(DATASET, PARTS, test=1.5)


def test_memory_maps_are_taken_as_they_are(tmp_path: Path) -> None:
    values = np.arange(24, dtype=np.float32).reshape(8, 3)
    np.save(tmp_path / "x.npy", values)
    mapped: Any = np.load(tmp_path / "x.npy", mmap_mode="r")
    parts = Ragged.from_sizes(np.arange(8), np.array([5, 3]))
    nobody = Ragged.empty(2)
    y: Any = np.zeros(8, np.int64)
    data = ClientData(mapped, y, parts, nobody, nobody, ({}, {}))
    assert isinstance(data.x, torch.Tensor)
    assert data.x.data_ptr() == mapped.ctypes.data  # not copied
    assert data.x[parts[1]].tolist() == values[5:].tolist()


@pytest.mark.parametrize("dtype", [None, torch.float64])
def test_data_pooled_on_disk_are_those_pooled_in_memory(
    tmp_path: Path, dtype: torch.dtype | None
) -> None:
    random = np.random.default_rng(0)
    sizes = (9, 5)
    own = [(random.normal(size=(n, 3)).astype("f4"), random.integers(0, 4, n)) for n in sizes]
    memory = ClientData.of(own, dtype=dtype)
    disk = ClientData.of(own, dtype=dtype, folder=tmp_path / "pooled")
    assert torch.equal(disk.x, memory.x)  # type: ignore[arg-type]  # dense
    assert disk.x.dtype == memory.x.dtype
    assert torch.equal(disk.y, memory.y)
    assert np.load(tmp_path / "pooled" / "x.npy").shape == (14, 3)
    assert [part.tolist() for part in disk.test] == [part.tolist() for part in memory.test]


def test_pooling_on_disk_names_the_client_that_does_not_fit(tmp_path: Path) -> None:
    good = (np.zeros((4, 2)), np.arange(4) % 2)
    bad = (np.array([[0.0, np.nan]] * 4), np.arange(4) % 2)
    with pytest.raises(DataError, match="client 1: X has NaN"):
        ClientData.of([good, bad], folder=tmp_path)
    with pytest.raises(DataError, match="remove the folder"):
        ClientData.of([(csr_matrix(np.eye(4)), np.arange(4))] * 2, folder=tmp_path)


@pytest.mark.parametrize("label", [2**40, 2**63 - 1, 10**6])
def test_numbers_that_are_no_labels_are_rejected_before_a_model_is_built(label: int) -> None:
    x, y = np.zeros((3, 2), np.float32), np.array([0, 1, label])
    with pytest.raises(DataError, match=r"classes, more than 1000000; convert numeric targets"):
        ClientData.of([(x, y), (x, y)])


X, Y = np.ones((3, 2)), np.array([0, 1, 1])
GOOD = (X, Y)
HOLE = np.where(np.arange(6).reshape(3, 2) == 3, np.nan, 1.0)


def test_clients_of_different_kinds_of_container_are_pooled() -> None:
    pooled = stack_rows([GOOD, (torch.zeros(1, 2, dtype=torch.float64), [1]), (X.tolist(), Y > 0)])
    assert pooled.x.shape == (7, 2)
    assert pooled.y.tolist() == [0, 1, 1, 1, 0, 1, 1]
    assert pooled.sizes.tolist() == [3, 1, 3]
    assert pooled.classes == 2


def test_the_labels_of_a_classifier_may_be_minus_and_plus_one() -> None:
    pooled = stack_rows(
        [(X, np.array([-1, 1, 1])), (X, np.array([-1, -1, -1])), (X, np.ones(3, int))]
    )
    assert pooled.y.tolist() == [0, 1, 1, 0, 0, 0, 1, 1, 1]
    assert pooled.classes == 2


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ((HOLE, Y), "client 1: X has NaN"),
        ((csr_matrix(X), Y), "client 1: X must be sparse for all clients or for none"),
        ((X, np.array([0.0, 1.0, 1.0])), "client 1: y is float64 but client 0 has int64"),
        ((X.astype(np.int64), Y), "client 1: X is int64"),
        ((np.ones((3, 4)), Y), r"client 1: rows of X have shape \(4,\)"),
        ((X, Y[:2]), "client 1: X has 3 rows but y has 2"),
        ((X[:0], Y[:0]), "client 1 has no rows"),
        ((X, np.array([0, -1, 1])), r"labels from 0, or -1 and \+1, got -1"),
        ((np.ones(3), Y), "client 1: X must have rows and columns"),
        ((X, np.int64(3)), "client 1: y must be a dense array"),
        ((np.array([["a"]]), np.array([0])), "client 1: X must contain numbers"),
        (X, r"client 1: expected a pair \(X, y\)"),
    ],
)
def test_the_client_whose_data_do_not_fit_is_named(bad: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        stack_rows([GOOD, bad, GOOD])


def test_a_hole_in_a_sparse_matrix_or_in_a_target_is_found() -> None:
    sparse = csr_matrix(X)
    with pytest.raises(DataError, match="client 2: X has NaN"):
        stack_rows([(sparse, Y), (csr_matrix((3, 2)), Y), (csr_matrix(HOLE), Y)])
    with pytest.raises(DataError, match="client 1: y has NaN"):
        stack_rows([(X, Y.astype(float)), (X, np.array([0, np.inf, 1]))])


def test_values_whose_sum_is_not_finite_are_taken_and_those_that_cancel_are_not() -> None:
    large = np.full((3, 2), 3e38, dtype=np.float32)
    assert np.array_equal(stack_rows([(large, Y), (large, Y)]).x, np.concatenate([large, large]))
    both = np.where(np.arange(6).reshape(3, 2) < 3, np.inf, -np.inf)
    with pytest.raises(DataError, match="client 1: X has NaN"):
        stack_rows([GOOD, (both, Y)])


def test_no_clients_and_labels_with_two_axes_are_refused() -> None:
    with pytest.raises(DataError, match="no clients"):
        stack_rows([])
    with pytest.raises(DataError, match=r"one per row.*y.argmax\(1\)"):
        stack_rows([(X, np.zeros((3, 2), dtype=np.int64))])


@pytest.mark.parametrize(
    ("client", "text"),
    [
        (([X, np.ones((len(X), 7))], Y), r"client 0: X must be one array, got 2 parts.*np.hstack"),
        (((X, X), Y), r"client 0: X has 2 rows but y has \d+: a model takes one input"),
        (({"a": X, "b": X}, Y), "client 0: X must be one array, got a mapping: a model takes one"),
        ((X, X, Y), r"client 0: expected a pair \(X, y\), got 3 items: a model takes one input"),
        (([[1.0, 2.0], [3.0]], [0, 1]), "X must be one array, got 2 parts of unequal lengths"),
        ((X, [[0], [0, 1]]), "y must be one array, got 2 parts of unequal lengths"),
    ],
)
def test_several_inputs_and_ragged_lists_are_explained(client: Any, text: str) -> None:
    with pytest.raises(DataError, match=text):
        stack_rows([client])


# ------------------------------------------------------------------ other forms of a client
def lengths(parts: Any) -> list[int]:
    return [len(part) for part in parts]


def own_split(seed: int) -> tuple[Any, Any, Any, Any]:
    draw = np.random.default_rng(seed)
    return draw.normal(size=(6, 2)), np.arange(6) % 3, draw.normal(size=(4, 2)), np.arange(4) % 3


def test_clients_may_bring_their_own_test_rows() -> None:
    clients = [own_split(0), own_split(1)]
    data = ClientData.of(clients)
    assert lengths(data.validation) == [0, 0]
    for number, (x, y, test_x, test_y) in enumerate(clients):
        for part, features, targets in ((data.train, x, y), (data.test, test_x, test_y)):
            rows = torch.from_numpy(part[number])
            np.testing.assert_array_equal(data.x[rows], features)
            np.testing.assert_array_equal(data.y[rows], targets)


def test_clients_may_name_their_splits() -> None:
    x, y, other, labels = own_split(0)
    client = {"train": (x, y), "validation": (other[:1], labels[:1]), "test": (other, labels)}
    data = ClientData.of([client, {"train": (x, y)}])
    sizes = [lengths(part) for part in (data.train, data.validation, data.test)]
    assert sizes == [[6, 6], [1, 0], [4, 0]]
    np.testing.assert_array_equal(data.x[torch.from_numpy(data.validation[0])], other[:1])


def test_a_split_of_their_own_takes_no_validation_share() -> None:
    with pytest.raises(ConfigError, match=r"validation=0.2 does not apply"):
        ClientData.of([own_split(0)] * 2, validation=0.2)


@pytest.mark.parametrize(
    ("client", "said"),
    [
        ({"train": (X, [0, 1, 0]), "eval": (X, [0, 1, 0])}, "got 'train', 'eval'"),
        ({"test": (X, [0, 1, 0])}, "'train' is required"),
        ((X, [0, 1, 0], np.ones((2, 5)), [0, 1]), "those of the training rows of client 1"),
        ((X, [0, 1, 0], np.ones((2, 2)), [0]), "client 1: X has 2 rows but y has 1"),
    ],
)
def test_a_malformed_split_is_named(client: Any, said: str) -> None:
    with pytest.raises(DataError, match=said):
        ClientData.of([(X, np.array([0, 1, 0])), client])


def test_a_dataset_stands_for_a_pair() -> None:
    x, y, *_ = own_split(0)
    whole = torch.utils.data.TensorDataset(torch.from_numpy(x), torch.from_numpy(y))
    subsets = [torch.utils.data.Subset(whole, [0, 2]), torch.utils.data.Subset(whole, [5, 3, 1])]
    data = ClientData.of(subsets, test=0.0)
    np.testing.assert_array_equal(data.x, x[[0, 2, 5, 3, 1]])
    assert data.y.tolist() == y[[0, 2, 5, 3, 1]].tolist()
    assert lengths(data.train) == [2, 3]


class Lazy:
    """A map-style dataset that is not a list."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, position: int) -> Any:
        return self.items[position]


@pytest.mark.parametrize(
    ("items", "said"),
    [
        ([(np.ones(2), 0), (np.ones(3), 1)], r"item 1 of its Lazy has shape \[3\], but item 0"),
        ([(np.ones(2), 0, 1)], r"item 0 of its Lazy must be a pair \(x, y\), got a tuple of 3"),
        ([("a.png", 0)], "give the dataset a transform to tensors"),
        ([], "client 0 has no rows"),
        ([(np.ones(2), 0), (np.ones(2), [0, 1])], "targets of its items have unequal shapes"),
    ],
)
def test_an_item_that_does_not_fit_is_named(items: list[Any], said: str) -> None:
    with pytest.raises(DataError, match=said):
        ClientData.of([Lazy(items)])


@pytest.mark.parametrize("kind", [list, np.array, lambda words: np.array(words, object)])
def test_labels_may_be_words(kind: Any) -> None:
    clients = [(X, kind(["no", "yes", "no"])), (X, kind(["maybe", "no", "yes"]))]
    data = ClientData.of(clients, test=0.0)
    assert data.y.tolist() == [1, 2, 1, 0, 1, 2]
    assert (data.classes, data.source["labels"]) == (3, ["maybe", "no", "yes"])
    ordered = ClientData.of(clients, test=0.0, labels=("no", "maybe", "yes", "never"))
    assert ordered.y.tolist() == [0, 2, 0, 1, 0, 2]
    assert ordered.classes == 4


def test_words_that_do_not_fit_are_named() -> None:
    words = (X, np.array(["no", "yes", "no"]))
    with pytest.raises(DataError, match="client 1: y has the label 'yes', which is not among"):
        ClientData.of([(X, np.array(["no"] * 3)), words], labels=["no"])
    with pytest.raises(DataError, match="client 1: y has numbers, and that of other clients"):
        ClientData.of([words, (X, np.array([0, 1, 0]))])
    with pytest.raises(DataError, match=r"labels=\['no', 'no'\] has a label twice"):
        ClientData.of([words], labels=["no", "no"])
    with pytest.raises(DataError, match="y has numbers: remove labels, or pass words"):
        ClientData.of([(X, np.array([0, 1, 0]))], labels=["no", "yes"])
    with pytest.raises(DataError, match=r"one per row, got shape \[3, 1\]: flatten them"):
        ClientData.of([(X, np.array([["no"], ["yes"], ["no"]]))])


@pytest.mark.parametrize("other", [None, float("nan"), pd.NA, 3])
def test_a_row_without_a_word_is_named(other: Any) -> None:
    client = (X, np.array(["no", other, "yes"], dtype=object))
    with pytest.raises(DataError, match=f"client 0: y has words, but {other} in row 1: remove"):
        ClientData.of([client])
