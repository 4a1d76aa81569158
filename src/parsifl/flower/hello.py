"""The report of a client that joins: versions, clock, disk, and data schema."""

from __future__ import annotations

import json
import math
import os
import platform
import shutil
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, cast, final

import numpy as np
import torch
from annotated_types import Ge, Gt, Le, MaxLen
from pydantic import AfterValidator, BaseModel, ConfigDict, StringConstraints, TypeAdapter
from torch import Tensor

from parsifl.core.errors import DataError, WireError
from parsifl.data.clients import MOST_CLASSES, ClientData
from parsifl.data.ragged import Ragged

Version = Annotated[str, StringConstraints(pattern=r"^[0-9A-Za-z.+-]{1,60}$")]

CLOCK_SECONDS = 60.0
"""A clock that differs by more is reported; certificates and Flower's heartbeats depend on it."""
LEAST_FREE = 256 << 20
_DTYPES = {"float32": torch.float32, "float64": torch.float64, "int64": torch.int64}
_MOST_ENTRIES = 1 << 28
_ODD = 1000
"""Maximum number of classes of a client, as a multiple of the median."""
Dtype = Literal["float32", "float64", "int64"]
Text = Annotated[str, StringConstraints(pattern=r"^[^\p{C}]{0,200}$")]


class Machine(BaseModel):
    """Versions, clock (seconds since 1970) and free bytes where client state is kept."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)
    parsifl: Version
    python: Version
    torch: Version
    clock: Annotated[float, Ge(0), Le(1e11)]
    free: Annotated[int, Ge(0), Le(1 << 62)]


def this_machine(state: Path) -> Machine:
    """Return the report of this process; `state` need not exist yet."""
    from importlib.metadata import version

    import parsifl

    folder = next(path for path in (state, *state.absolute().parents) if path.exists())
    return Machine(
        parsifl=parsifl.__version__,
        python=platform.python_version(),
        torch=version("torch"),
        clock=time.time(),
        free=shutil.disk_usage(folder).free if os.access(folder, os.R_OK) else 0,
    )


def mismatch(machine: Machine | None) -> str:
    """Return why a node cannot take part, or "": server and nodes must run the same version."""
    import parsifl

    installed = parsifl.__version__
    if machine is None:
        return f"the node does not report its version of Parsifl; install {installed} on it"
    if machine.parsifl != installed:
        return (
            f"the node runs Parsifl {machine.parsifl}, the server {installed}; install the same one"
        )
    return ""


def concerns(machine: Machine, arrived: float) -> list[str]:
    """Return problems for the operator: a wrong clock, a full disk.

    `arrived` is when the report arrived, by the server's clock.
    """
    texts = []
    ahead = machine.clock - arrived
    if abs(ahead) > CLOCK_SECONDS:
        side = "ahead of" if ahead > 0 else "behind"
        texts.append(f"its clock is {abs(ahead):,.0f} s {side} the server's")
    if machine.free < LEAST_FREE:
        texts.append(f"only {machine.free / (1 << 20):,.0f} MiB are free for its state")
    return texts


def _check_entries(shape: tuple[int, ...]) -> tuple[int, ...]:
    if math.prod(shape) > _MOST_ENTRIES:
        raise ValueError(f"a row has more than {_MOST_ENTRIES} entries")
    return shape


Shape = Annotated[
    tuple[Annotated[int, Gt(0), Le(_MOST_ENTRIES)], ...], MaxLen(8), AfterValidator(_check_entries)
]


@final
@dataclass(frozen=True)
class DataSchema:
    """The schema of one client's rows.

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

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(strict=True, extra="forbid")
    shape: Shape
    dtype: Dtype
    target_shape: Shape
    target_dtype: Dtype
    classes: Annotated[int, Gt(0), Le(MOST_CLASSES)] | None
    sparse: bool
    augment: Text = ""
    name: Text = ""

    @classmethod
    def of(cls, data: ClientData) -> DataSchema:
        """Describe data."""
        sparse = not isinstance(data.x, Tensor)
        return cls(
            shape=tuple(int(size) for size in data.x.shape[1:]),
            dtype=_dtype(data.x.dtype),
            target_shape=tuple(data.y.shape[1:]),
            target_dtype=_dtype(data.y.dtype),
            classes=data.classes,
            sparse=sparse,
            augment=data.augment,
            name=data.name,
        )

    @classmethod
    def read(cls, values: Any) -> DataSchema:
        """Read what `to_json` wrote; raise WireError for anything else."""
        try:
            return TypeAdapter(cls).validate_json(json.dumps(values))
        except (TypeError, ValueError, RecursionError) as error:
            raise WireError(f"data_schema: {type(error).__name__}") from None

    def to_json(self) -> dict[str, Any]:
        """Return JSON values."""
        return asdict(self)

    def example(self) -> ClientData:
        """Return data of this schema with a single row of zeros, to build a problem."""
        x: Any = torch.zeros((1, *self.shape), dtype=_DTYPES[self.dtype])
        if self.sparse:
            from scipy.sparse import csr_matrix  # few clients need it

            x = csr_matrix((1, self.shape[0]), dtype=np.dtype(self.dtype))
        y = torch.zeros((1, *self.target_shape), dtype=_DTYPES[self.target_dtype])
        one, none = Ragged.of([[0]]), Ragged.empty(1)
        return ClientData(x, y, one, none, none, ({},), self.name, self.classes, self.augment)

    def zeros(self) -> Tensor:
        """Return one row of dense features."""
        return torch.zeros((1, *self.shape), dtype=_DTYPES[self.dtype])

    def features(self, rows: int) -> Tensor:
        """Return features without data; a dense matrix replaces a sparse one."""
        return torch.empty((rows, *self.shape), dtype=_DTYPES[self.dtype], device="meta")

    def targets(self, rows: int) -> Tensor:
        """Return targets without data."""
        return torch.empty(
            (rows, *self.target_shape), dtype=_DTYPES[self.target_dtype], device="meta"
        )


def _dtype(dtype: Any) -> Dtype:
    name: Any = str(dtype).removeprefix("torch.")
    if name not in _DTYPES:
        raise DataError(f"values of {name} cannot be used; convert them to {' or '.join(_DTYPES)}")
    return cast(Dtype, name)


def agree(schemas: Mapping[int, DataSchema]) -> DataSchema:
    """Return the schema of most clients; a client may lack classes that others have."""
    known = {client: schema.classes for client, schema in schemas.items()}
    if None in known.values() and any(classes is not None for classes in known.values()):
        raise DataError("some clients have class labels and others real targets; they must agree")
    counts = [count for count in known.values() if count is not None]
    classes = max(counts, default=None)
    _check_classes(known)
    forms = {client: replace(schema, classes=classes) for client, schema in schemas.items()}
    ((common, _),) = Counter(forms.values()).most_common(1)
    first = next(client for client, form in forms.items() if form == common)
    for client, form in forms.items():
        if form != common:
            raise DataError(
                f"the data of client {client} have another schema than those of client {first}: "
                f"{form} instead of {common}"
            )
    return common


def _check_classes(known: Mapping[int, int | None]) -> None:
    counts = sorted(count for count in known.values() if count is not None)
    if not counts or counts[-1] <= _ODD * counts[(len(counts) - 1) // 2]:
        return
    most = next(client for client, count in known.items() if count == counts[-1])
    raise DataError(
        f"client {most} reports {counts[-1]} classes, but most clients at most "
        f"{counts[(len(counts) - 1) // 2]}: correct its labels, or set deployment.classes"
    )
