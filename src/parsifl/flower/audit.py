"""The site's own record of what left it; later requests are held against it."""

from __future__ import annotations

import fcntl
import hashlib
import io
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from parsifl.data.preprocessing import Array
from parsifl.engine.safe_files import replace_file
from parsifl.flower.client_state import make_private
from parsifl.flower.guards import Guards, Refusal, RowPairs, check_leverage, check_products

AUDIT_FILE = "audit.jsonl"
_UNREAD = ("runs", "agreement", "requests")


class Audit:
    """One line of JSON for every answer: when, to what, of which size; refusals with their rule.

    Parameters
    ----------
    folder
        The folder of one client in the node's folder for state; readable by its owner alone.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / AUDIT_FILE

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Let one request at a time be held against the record and be written to it."""
        make_private(self._path.parent)
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def entries(self) -> list[dict[str, Any]]:
        """Return what was written so far, oldest first."""
        if not self._path.exists():
            return []
        return [json.loads(line) for line in self._path.read_text().splitlines()]

    def write(self, entry: Mapping[str, Any]) -> None:
        """Add an entry; when this returns it survives a crash."""
        stamped = {"time": datetime.now(UTC).isoformat(timespec="seconds"), **entry}
        descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        with os.fdopen(descriptor, "a") as file:
            file.write(json.dumps(stamped) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def approved(self, name: str, kind: str, text: str) -> bool:
        """Return whether a reply was approved by hand: its file was renamed to `approved-...`.

        A reply that is new here is described in `pending-....json`.
        """
        place = self._path.with_name
        if place(f"approved-{name}.json").exists():
            return True
        content = json.dumps({"kind": kind, "reply": text}, indent=1)
        replace_file(place(f"pending-{name}.json"), content.encode())
        return False

    def release(
        self,
        table: str,
        weights: Array,
        guards: Guards,
        products: Callable[[Array], RowPairs] | None = None,
    ) -> None:
        """Check the row weights [2, rows] of sums against those of earlier sums, and keep them.

        They stay in a file of the site, for as long as the table is the same. With `products` the
        second kind is not weights, but what a matrix over pairs of rows is made from.
        """
        path = self._path.with_name(f"released-{table}.npy")
        past = np.load(path) if path.exists() else np.zeros((0, *weights.shape))
        if any(np.array_equal(weights, known) for known in past):
            return  # asked before: the answer is the same
        check_leverage(past[:, 0], weights[0], guards)
        if products is None:
            check_leverage(past[:, 1], weights[1], guards)
        else:
            check_products([products(row) for row in past[:, 1]], products(weights[1]), guards)
        data = io.BytesIO()
        np.save(data, np.concatenate([past, weights[None]]))
        replace_file(path, data.getvalue())
        path.chmod(0o600)


def digest(*values: Any) -> str:
    """Return a short name for JSON values and bytes: equal names, equal values."""
    state = hashlib.sha256()
    for value in values:
        data = value if isinstance(value, bytes) else json.dumps(value, sort_keys=True).encode()
        state.update(len(data).to_bytes(8) + data)
    return state.hexdigest()[:32]


def check_history(
    entries: list[dict[str, Any]], request: Mapping[str, Any], rounds: int, guards: Guards
) -> None:
    """Check that a request adds little to what the server knows already.

    A run has one agreement and one request for products; repeating a request is harmless, since
    the answer is the same. The number of runs about the same rows is bounded as well: the server
    names the runs, so it may invent new ones.

    Parameters
    ----------
    request
        Its `kind`, `table`, `run`, `agreement` and `request`: a kind, and digests.
    rounds
        How many training requests the run has.
    """
    past = [
        entry
        for entry in entries
        # a request that was refused after this check counts too: its refusal says something
        if "request" in entry
        and entry["table"] == request["table"]
        and entry.get("rule") not in _UNREAD
    ]
    runs = {entry["run"] for entry in past}
    if request["run"] not in runs and len(runs) >= guards.runs:
        raise Refusal("runs", f"{guards.runs} runs about these rows were answered (guard-runs)")
    same = [entry for entry in past if entry["run"] == request["run"]]
    if any(entry["agreement"] != request["agreement"] for entry in same):
        raise Refusal("agreement", "the agreement has changed within the run")
    known = {entry["request"] for entry in same if entry["kind"] == request["kind"]}
    most = 1 if request["kind"] == "products" else min(rounds, guards.rounds)
    if request["request"] not in known and len(known) >= most:
        raise Refusal("requests", f"the run has asked for {request['kind']} {most} times already")
