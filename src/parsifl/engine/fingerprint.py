"""The configuration of a run: everything that changes a result."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from torch import Tensor

from parsifl import startup
from parsifl.core.algorithm import AnyAlgorithm
from parsifl.core.keys import Key
from parsifl.core.problem import Problem
from parsifl.data.clients import ClientData, Ragged

FORMAT = 2
"""Format of run directories; versions before 0.2 wrote format 1."""


def identity(
    method: AnyAlgorithm,
    problem: Problem,
    data: ClientData,
    run: Mapping[str, Any],
    *,
    checksum: bool = True,
) -> dict[str, Any]:
    """Describe a run by its settings and by checksums of its data and initial parameters.

    Without `checksum` the rows are not read.
    """
    described = {
        "name": data.name,
        "clients": len(data),
        "rows": len(data.y),
        "augment": data.augment,
        **({"checksum": _checksum(*_arrays(data))} if checksum else {}),
        "profiles": profiles_checksum(data.profiles),
        "source": dict(data.source),
    }
    return identity_of(method, problem, described, run)


def identity_of(
    method: AnyAlgorithm, problem: Problem, data: Mapping[str, Any], run: Mapping[str, Any]
) -> dict[str, Any]:
    """Describe a run whose data are on other machines, by their known properties."""
    initial = problem.init(Key(int(run["seed"])))
    parameters = sum(value.numel() for value in initial.values())
    return {
        "format": FORMAT,
        "algorithm": method.describe(),
        "problem": {
            "kind": type(problem).__name__,
            "score": problem.primary_metric,
            "maximize": problem.higher_is_better,
            "parameters": parameters,
            "form": _checksum_of_text(_form(problem)),
            "checksum": _checksum(*(initial[name].numpy() for name in sorted(initial))),
        },
        "data": dict(data),
        # arithmetic that other runs do not use: other bits
        "run": {**run, **({"reproducible": True} if startup.reproducible() else {})},
    }


def _form(problem: Problem) -> str:
    """Return the repr of a problem, but not the default repr, which contains an address."""
    described = getattr(problem, "module", problem)
    form = "" if type(described).__repr__ is object.__repr__ else repr(described)
    if constants := getattr(getattr(problem, "fixed", None), "constants", None):
        form += " " + _checksum(*(constants[name].numpy() for name in sorted(constants)))
    loss = getattr(problem, "row_loss", None)  # one that has no name is not in the score
    return form if loss is None or loss.kind is not None else f"{form} {loss.name}"


def profiles_checksum(profiles: Iterable[Mapping[str, Any]]) -> str:
    """Return a checksum of the clients' device profiles."""
    return _checksum_of_text(json.dumps([dict(profile) for profile in profiles]))


def _arrays(data: ClientData) -> list[Any]:
    if isinstance(data.x, Tensor):
        x = [data.x.numpy()]
    else:
        x = [data.x.data, data.x.indices, data.x.indptr]
    splits = [Ragged.of(split) for split in (data.train, data.validation, data.test)]
    # includes the sizes: moving rows from one client to the next changes the data
    sizes = np.stack([split.sizes for split in splits])
    return [*x, data.y.numpy(), sizes, *(split.values for split in splits)]


def _checksum(*arrays: Any) -> str:
    value = 0
    for array in arrays:
        value = zlib.crc32(np.ascontiguousarray(array).view(np.uint8).reshape(-1).data, value)
    return f"{value:08x}"


def _checksum_of_text(text: str) -> str:
    return f"{zlib.crc32(text.encode()):08x}"
