"""Structure of a run's last state: density and rank by layer, overlap between clients."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Leaf = npt.NDArray[Any]
SERVER = "server"
_LATEST = re.compile(r"round-\d{8,}\b(?![^ ])")
_MOST_BYTES = 256_000_000  # maximum bytes of a state file
_MOST_CLIENTS = 40
_MOST_LEAVES = 24
_MOST_ENTRIES = 65_536  # maximum entries of a matrix whose rank is computed
_RANK_TOLERANCE = 1e-3  # singular values below this fraction of the largest count as zero
_DENSE = 0.995


@dataclass(frozen=True)
class Anatomy:
    """Fractions for every holder of state (the server, then clients) and every leaf.

    Attributes
    ----------
    density
        The fraction of non-zero entries; None if a holder has no such leaf.
    rank
        The numerical rank over the full rank of a matrix; None for vectors and large matrices.
    overlap
        The Jaccard index of the supports of each pair of clients; empty if nothing is sparse.
    masks
        For every device 1 for a block that it trains, 0 for a frozen one; empty without a plan.
    """

    round: int
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    density: tuple[tuple[float | None, ...], ...]
    rank: tuple[tuple[float | None, ...], ...]
    overlap: tuple[tuple[float, ...], ...]
    masks: tuple[tuple[float, ...], ...] = ()

    @property
    def parsimonious(self) -> bool:
        """Whether anything is sparse, of low rank or absent."""
        cells = [value for row in (*self.density, *self.rank, *self.masks) for value in row]
        return any(value is not None and value < _DENSE for value in cells)


def read_anatomy(path: Path) -> Anatomy | None:
    """Read the latest checkpoint of a run directory; None if it cannot be read."""
    try:
        folder = path / "checkpoint"
        match = _LATEST.match((folder / "LATEST").read_text())
        if match is None:
            return None
        checkpoint = folder / match[0]
        state = json.loads((checkpoint / "state.json").read_text(encoding="utf-8"))
        holders = _holders(checkpoint, state)
        anatomy = _anatomy(int(state["round"]), holders)
        return None if anatomy is None else replace(anatomy, masks=_masks(state["server"]))
    # a running engine may replace the checkpoint while it is read; a second attempt succeeds
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None


def _holders(checkpoint: Path, state: Mapping[str, Any]) -> dict[str, dict[str, Leaf]]:
    """Return the named leaves of the server and of each client."""
    server = _tensors(checkpoint / "server.safetensors")
    holders: dict[str, dict[str, Leaf]] = {SERVER: {}}
    for at, (name, client) in enumerate(_names(state["server"], "", "")):
        holders.setdefault(client or SERVER, {})[name] = server[str(at)]
    client_leaves: dict[str, dict[str, Leaf]] = {}
    names = [
        Path(part).name for part, *_ in state["pool"].get("segments", [])
    ]  # nothing outside the directory
    files = [checkpoint.parent / "clients" / name for name in names]
    if sum(file.stat().st_size for file in files) > _MOST_BYTES:
        raise ValueError(f"the states in {checkpoint.parent} are too large to be drawn")
    for file in files:  # the oldest first: a later file replaces a client's state
        tensors, metadata = _tensors(file), _metadata(file)
        for client, form in metadata["clients"].items():
            names = [name for name, _ in _names(metadata["forms"][form], "", "")]
            client_leaves[client] = {n: tensors[f"{client}/{at}"] for at, n in enumerate(names)}
    for client, leaves in client_leaves.items():
        holders.setdefault(client, {}).update(leaves)
    return holders


def _masks(server: Any) -> tuple[tuple[float, ...], ...]:
    """Return which blocks each device trains, if the server has a plan."""
    fields = server.get("f", {}) if isinstance(server, Mapping) else {}
    if not {"masks", "chosen"} <= set(fields):
        return ()
    plans = [{int(b["s"]) for b in mask["u"]} for mask in fields["masks"]["u"]]
    chosen = [plans[int(device["s"])] for device in fields["chosen"]["u"]]
    count = max((block for plan in plans for block in plan), default=-1) + 1
    rows = chosen[:_MOST_CLIENTS]
    return tuple(tuple(float(block in plan) for block in range(count)) for plan in rows)


def _tensors(file: Path) -> dict[str, Leaf]:
    # importing the tensor reader takes time, and most of this package does not need it
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    if file.stat().st_size > _MOST_BYTES:
        raise ValueError(f"{file} is too large to be drawn")
    try:
        return dict(load_file(file))
    except SafetensorError as error:
        raise ValueError(str(error)) from error


def _metadata(file: Path) -> dict[str, Any]:
    from safetensors import safe_open

    with safe_open(file, "numpy") as opened:
        return dict(json.loads(opened.metadata()["parsifl"]))


def _names(node: Any, prefix: str, client: str) -> Iterator[tuple[str, str]]:
    """Yield the name of each leaf, and the client that it belongs to if it is kept by client."""
    if isinstance(node, str):
        yield prefix or "state", client
        return
    if "s" in node:
        return
    parts = node.get("d") or node.get("f") or dict(enumerate(node.get("u", ())))
    by_client = "d" in node and len(parts) > 1 and all(key.isdigit() for key in parts)
    for key, part in parts.items():
        if by_client:
            yield from _names(part, prefix, key)
        else:
            yield from _names(part, f"{prefix} {key}".strip(), client)


def _anatomy(round: int, holders: Mapping[str, Mapping[str, Leaf]]) -> Anatomy | None:
    clients = sorted((name for name in holders if name != SERVER), key=int)[:_MOST_CLIENTS]
    rows = [name for name in (SERVER, *clients) if holders[name]]
    leaves = dict.fromkeys(
        name for row in rows for name, leaf in holders[row].items() if leaf.size > 1
    )
    columns = list(leaves)[:_MOST_LEAVES]
    if not columns:
        return None
    return Anatomy(
        round=round,
        rows=tuple(rows),
        columns=tuple(columns),
        density=tuple(tuple(_density(holders[r].get(c)) for c in columns) for r in rows),
        rank=tuple(tuple(_rank(holders[r].get(c)) for c in columns) for r in rows),
        overlap=_overlap([holders[client] for client in clients if holders[client]]),
    )


def _density(leaf: Leaf | None) -> float | None:
    return None if leaf is None else round(int(np.count_nonzero(leaf)) / leaf.size, 4)


def _rank(leaf: Leaf | None) -> float | None:
    if leaf is None or leaf.ndim < 2 or leaf.size > _MOST_ENTRIES or leaf.dtype.kind != "f":
        return None
    matrix = leaf.reshape(len(leaf), -1).astype(np.float64)
    if min(matrix.shape) < 2 or not np.isfinite(matrix).all():
        return None
    values = np.linalg.svd(matrix, compute_uv=False)
    return round(float(np.sum(values > _RANK_TOLERANCE * values[0])) / min(matrix.shape), 4)


def _overlap(clients: list[Mapping[str, Leaf]]) -> tuple[tuple[float, ...], ...]:
    """Compare the supports of clients over the leaves that all have and that are sparse."""
    if len(clients) < 2:
        return ()
    shared = [
        name
        for name, leaf in clients[0].items()
        if all(name in other and other[name].shape == leaf.shape for other in clients)
        and any(_sparse(other[name]) for other in clients)
    ]
    if not shared:
        return ()
    supports = np.stack(
        [np.concatenate([(c[name] != 0).ravel() for name in shared]) for c in clients]
    ).astype(np.float32)
    both = supports @ supports.T
    sizes = supports.sum(axis=1)
    either = sizes[:, None] + sizes[None, :] - both
    index = np.divide(both, either, out=np.ones_like(both), where=either > 0)
    return tuple(tuple(round(float(value), 4) for value in row) for row in index)


def _sparse(leaf: Leaf) -> bool:
    return leaf.size > 1 and bool(np.count_nonzero(leaf) < _DENSE * leaf.size)
