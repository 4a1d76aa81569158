"""What the server learns of data that it never sees: their shape, not their values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, final

import numpy as np
import torch
from scipy.sparse import csr_matrix
from torch import Tensor

from parsifl.core.errors import DataError, WireError
from parsifl.data.clients import ClientData
from parsifl.data.ragged import Ragged

_DTYPES = {"float32": torch.float32, "float64": torch.float64, "int64": torch.int64}
_MOST_ENTRIES = 1 << 31


@final
@dataclass(frozen=True)
class DataSchema:
    """The form of one client's rows.

    Attributes
    ----------
    shape, dtype
        Of one row of features.
    target_shape, target_dtype
        Of one target.
    classes
        The number of classes; None for a real target.
    sparse
        Whether the features are a CSR matrix.
    """

    shape: tuple[int, ...]
    dtype: str
    target_shape: tuple[int, ...]
    target_dtype: str
    classes: int | None
    sparse: bool
    augment: str = ""
    name: str = ""

    @classmethod
    def of(cls, data: ClientData) -> DataSchema:
        """Describe data."""
        sparse = not isinstance(data.x, Tensor)
        return cls(
            shape=tuple(int(size) for size in data.x.shape[1:]),
            dtype=str(data.x.dtype).removeprefix("torch."),
            target_shape=tuple(data.y.shape[1:]),
            target_dtype=str(data.y.dtype).removeprefix("torch."),
            classes=data.classes,
            sparse=sparse,
            augment=data.augment,
            name=data.name,
        )

    @classmethod
    def read(cls, values: Any) -> DataSchema:
        """Read what came over the network; raise WireError where it makes no sense."""
        if not isinstance(values, Mapping) or values.keys() != cls.__dataclass_fields__.keys():
            raise WireError("facts: expected the form of a client's rows")
        shapes = {name: _shape(name, values[name]) for name in ("shape", "target_shape")}
        for name in ("dtype", "target_dtype"):
            if values[name] not in _DTYPES:
                raise WireError(f"facts.{name}: expected one of {', '.join(_DTYPES)}")
        classes = values["classes"]
        if classes is not None and not (type(classes) is int and 0 < classes < _MOST_ENTRIES):
            raise WireError("facts.classes: expected a positive number or nothing")
        if type(values["sparse"]) is not bool or not all(
            isinstance(values[name], str) and len(values[name]) < 200
            for name in ("augment", "name")
        ):
            raise WireError("facts: expected a flag and two short texts")
        return cls(**{**values, **shapes})

    def to_json(self) -> dict[str, Any]:
        """Return JSON values."""
        return asdict(self)

    def example(self) -> ClientData:
        """Return data of this form with a single row of zeros: enough to build a problem."""
        x: Any = torch.zeros((1, *self.shape), dtype=_DTYPES[self.dtype])
        if self.sparse:
            x = csr_matrix((1, self.shape[0]), dtype=np.dtype(self.dtype))
        y = torch.zeros((1, *self.target_shape), dtype=_DTYPES[self.target_dtype])
        one, none = Ragged.of([[0]]), Ragged.empty(1)
        return ClientData(x, y, one, none, none, ({},), self.name, self.classes, self.augment)

    def features(self, rows: int) -> Tensor:
        """Return features without data; a sparse matrix is stood in for by a dense one."""
        return torch.empty((rows, *self.shape), dtype=_DTYPES[self.dtype], device="meta")

    def targets(self, rows: int) -> Tensor:
        """Return targets without data."""
        return torch.empty(
            (rows, *self.target_shape), dtype=_DTYPES[self.target_dtype], device="meta"
        )


def agree(facts: Sequence[DataSchema]) -> DataSchema:
    """Return the common form; a client may lack classes that others have."""
    known = [found.classes for found in facts]
    if (None in known) and any(classes is not None for classes in known):
        raise DataError("some clients have class labels and others real targets; they must agree")
    classes = None if None in known else max(count for count in known if count is not None)
    common = replace(facts[0], classes=classes)
    for client, found in enumerate(facts):
        if replace(found, classes=classes) != common:
            raise DataError(
                f"the data of client {client} have another form than those of client 0: "
                f"{replace(found, classes=classes)} instead of {common}"
            )
    return common


def _shape(name: str, value: Any) -> tuple[int, ...]:
    good = isinstance(value, list | tuple) and len(value) <= 8
    if not good or not all(type(size) is int and 0 < size < _MOST_ENTRIES for size in value):
        raise WireError(f"facts.{name}: expected a short list of sizes")
    if int(np.prod([float(size) for size in value])) > _MOST_ENTRIES:
        raise WireError(f"facts.{name}: a row of {value} is too large")
    return tuple(value)
