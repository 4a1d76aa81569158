"""Client state between rounds: in memory up to a limit, the rest on disk."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
import weakref
import zlib
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, final

from safetensors import safe_open
from safetensors.torch import save

from parsifl.core import tree, tree_schema
from parsifl.engine.safe_files import make_directory, reject_links, sync_directory
from parsifl.engine.settings import STATE_LIMIT

PART_BYTES = 64 << 20
PART_LEAVES = 1024  # per file: reading a state reads the header of its file
PART_CLIENTS = 1 << 16
_META = "parsifl"
_NAME = re.compile(r"part-(\d{8,})\.safetensors")
_LONGEST_HEADER = 100 << 20  # what safetensors itself accepts
_LEFT = 0.75  # of the limit stays in memory when states move to disk: they move many at a time


class Segment(NamedTuple):
    """A file, and how many states were written to it."""

    name: str
    states: int


@final
class SegmentStore(Mapping[int, Any]):
    """The states in a folder. Reading a state copies it, so memory holds only states in use."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._places: dict[int, tuple[Segment, tree.Structure]] = {}
        self._living: Counter[Segment] = Counter()
        self._forms: dict[tree.Structure, tree.Structure] = {}  # one object for equal ones
        self._number: int | None = None
        self._checksums: dict[str, str] = {}  # of files that are surely on the disk
        self._written: dict[str, str] = {}  # of other files
        self._made: set[str] = set()  # written here, or named by the checkpoint that was read

    @classmethod
    def open(cls, folder: Path, parts: Iterable[Sequence[Any]], hint: Any) -> SegmentStore:
        """Read the locations of states, oldest file first. Damaged files raise ValueError."""
        shelf = cls(folder)
        for name, expected, states in parts:
            part = Segment(str(name), int(states))
            if not _NAME.fullmatch(part.name):
                raise ValueError(f"{part.name!r:.80} is not the name of a file of client states")
            reject_links(folder / part.name)
            if checksum(folder / part.name) != expected:
                raise ValueError(f"the checksum of {part.name} does not match")
            shelf._checksums[part.name] = expected
            shelf._made.add(part.name)
            with safe_open(folder / part.name, "pt") as file:
                header = json.loads(file.metadata()[_META])
            forms = [shelf._form(tree_schema.from_json(form, hint)) for form in header["forms"]]
            for client, form in header["clients"].items():
                shelf._place(int(client), part, forms[form])
        return shelf

    @property
    def parts(self) -> list[Segment]:
        """The files that hold the current state of some client, oldest first."""
        return sorted(self._living)

    def __getitem__(self, client: int) -> Any:
        part, structure = self._places[client]
        with safe_open(self.folder / part.name, "pt") as file:
            # copies: memory that is aligned as in a run that was not interrupted
            count = len(tree.names(structure))
            leaves = [file.get_tensor(f"{client}/{i}").clone() for i in range(count)]
        return tree.unflatten(leaves, structure)

    def __contains__(self, client: object) -> bool:
        return client in self._places

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(self._places))

    def __len__(self) -> int:
        return len(self._places)

    def write(self, states: Iterable[tuple[int, Any]]) -> None:
        """Write states, as many per file as fit; they own their memory."""
        batch: dict[int, tuple[list[Any], tree.Structure]] = {}
        size = leaves = 0
        for client, state in states:
            batch[client] = tree.flatten(state)
            size += sum(leaf.nbytes for leaf in batch[client][0])
            leaves += len(batch[client][0])
            if size >= PART_BYTES or leaves >= PART_LEAVES or len(batch) >= PART_CLIENTS:
                self._write(batch)
                batch, size, leaves = {}, 0, 0
        if batch:
            self._write(batch)

    def _write(self, batch: Mapping[int, tuple[list[Any], tree.Structure]]) -> None:
        forms: dict[tree.Structure, int] = {}
        members = {
            client: forms.setdefault(form, len(forms)) for client, (_, form) in batch.items()
        }
        tensors = {
            f"{client}/{i}": leaf
            for client, (leaves, _) in batch.items()
            for i, leaf in enumerate(leaves)
        }
        header = {"forms": [tree_schema.to_json(form) for form in forms], "clients": members}
        part = Segment(f"part-{self._next():08d}.safetensors", len(batch))
        reject_links(self.folder)
        make_directory(self.folder)
        meta = {_META: json.dumps(header, separators=(",", ":"))}
        self._made.add(part.name)
        data = save(tensors, meta)
        (self.folder / part.name).write_bytes(data)
        # computed before writing, so that corruption by the disk is detected
        self._written[part.name] = checksum(data)
        for client, (_, form) in batch.items():
            self._place(client, part, self._form(form))

    def _next(self) -> int:
        """Return a number that no file has, including files that an interrupted run left behind."""
        if self._number is None:
            self._number = max((number for _, number in self._numbered()), default=0)
        self._number += 1
        return self._number

    def _form(self, structure: tree.Structure) -> tree.Structure:
        return self._forms.setdefault(structure, structure)

    def _place(self, client: int, part: Segment, structure: tree.Structure) -> None:
        if client in self._places:
            before = self._places[client][0]
            self._living[before] -= 1
            if not self._living[before]:
                del self._living[before]
        self._places[client] = part, structure
        self._living[part] += 1

    def compact(self) -> None:
        """Rewrite the current states of the oldest files once most states on disk are outdated."""
        if sum(part.states for part in self._living) <= 2 * len(self._places):
            return
        stale = {part for part, living in self._living.items() if 2 * living <= part.states}
        moving = [client for client, (part, _) in self._places.items() if part in stale]
        self.write((client, self[client]) for client in moving)

    def sync(self) -> list[tuple[str, str, int]]:
        """Sync all files to disk; return what `open` needs: names, checksums, counts."""
        for part in self._living:
            if part.name not in self._checksums:
                path = self.folder / part.name
                with path.open("rb") as file:
                    os.fsync(file.fileno())
                self._checksums[part.name] = self._written.pop(part.name)
        if self.folder.exists():
            sync_directory(self.folder)
        return [(part.name, self._checksums[part.name], part.states) for part in self.parts]

    def delete_stale(self, keep: Container[str] = ()) -> None:
        """Remove files without current states, except those to `keep`.

        Files that an interrupted run left behind are removed too; foreign files never are.
        """
        needed = {part.name for part in self._living}
        for path, _ in self._numbered():
            if path.name in needed or path.name in keep:
                continue
            if path.name in self._made or _is_part(path):
                path.unlink()
                self._checksums.pop(path.name, None)
                self._written.pop(path.name, None)
                self._made.discard(path.name)

    def _numbered(self) -> list[tuple[Path, int]]:
        """Return the files whose names have our form, with their numbers."""
        if not self.folder.is_dir():
            return []
        matches = ((path, _NAME.fullmatch(path.name)) for path in self.folder.iterdir())
        return [(path, int(match[1])) for path, match in matches if match]


def checksum(*contents: Path | bytes) -> str:
    """Return the checksum of a sequence of bytes and contents of files."""
    value = 0
    for content in contents:
        if isinstance(content, bytes):
            value = zlib.crc32(content, value)
            continue
        with content.open("rb") as file:
            while piece := file.read(1 << 20):
                value = zlib.crc32(piece, value)
    return f"{value:08x}"


def _is_part(path: Path) -> bool:
    """Return whether a file has our mark in its header, even if it is truncated after it."""
    if path.is_symlink() or not path.is_file():
        return False
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = file.read(min(size, _LONGEST_HEADER))
    try:
        return _META in json.loads(header)["__metadata__"]
    except (ValueError, LookupError, TypeError):
        return False


class StateStore:
    """Keeps the state of every client that has trained; the others are created on first use.

    The most recently written states are in memory. Reading does not count as use: an evaluation
    reads every client once, and would evict those that train.

    Parameters
    ----------
    limit
        Maximum bytes of states in memory.
    folder
        Where the others are stored; None for a temporary folder (see `tempfile.gettempdir`).
    """

    def __init__(self, limit: int = STATE_LIMIT, folder: Path | None = None) -> None:
        self._limit, self._folder = limit, folder
        self._recent: dict[int, Any] = {}
        self._held = 0
        self._changed: set[int] = set()  # newer in memory than on disk
        self._shelf: SegmentStore | None = None

    @property
    def held(self) -> int:
        """The bytes of the states that are in memory."""
        return self._held

    def load(self, client: int, make: Callable[[], Any]) -> Any:
        """Return a client's state, or create its first one without storing it."""
        if client in self._recent:
            return self._recent[client]
        if self._shelf is not None and client in self._shelf:
            return self._shelf[client]
        return make()

    def save(self, client: int, state: Any) -> None:
        """Store a copy, because results of a batch are views of a larger allocation.

        Copies are contiguous, like states from a checkpoint: the layout can affect the last bit.
        """
        if state is None and self._recent.get(client, self) is None:
            return  # nothing to store: it is not written again
        self._forget(client)
        self._recent[client] = tree.copy(state)
        self._held += _bytes(state)
        self._changed.add(client)
        if self._held > self._limit:
            self._spill()

    def _forget(self, client: int) -> None:
        if client in self._recent:
            self._held -= _bytes(self._recent.pop(client))
        self._changed.discard(client)

    def _spill(self) -> None:
        """Move the least recently written states to disk."""
        left, moving = self._held, []
        for client, state in self._recent.items():
            if left <= _LEFT * self._limit:
                break
            left -= _bytes(state)
            moving.append(client)
        if self._shelf is None:
            self._shelf = SegmentStore(self._folder or self._temporary())
        self._shelf.write((i, self._recent[i]) for i in moving if i in self._changed)
        for client in moving:
            self._forget(client)
        if self._folder is None:  # no checkpoint needs outdated states
            self._shelf.compact()
            self._shelf.delete_stale()

    def _temporary(self) -> Path:
        folder = Path(tempfile.mkdtemp(prefix="parsifl-"))
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        return folder

    def restore(self, states: Mapping[int, Any]) -> None:
        """Replace all states; states on disk stay there until they are needed."""
        self._recent, self._held, self._changed, self._shelf = {}, 0, set(), None
        if isinstance(states, SegmentStore):
            self._shelf, self._folder = states, states.folder
        else:
            for client, state in states.items():
                self.save(client, state)

    def flush_to(self, folder: Path) -> SegmentStore:
        """Write all states that a folder does not have yet, and use that folder from now on."""
        if self._shelf is None or self._shelf.folder != folder:
            shelf = SegmentStore(folder)
            shelf.write(iter(self))
            self._shelf, self._folder = shelf, folder
        else:
            self._shelf.write((client, self._recent[client]) for client in sorted(self._changed))
        self._changed.clear()
        self._shelf.compact()
        return self._shelf

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        return ((i, self.load(i, lambda: None)) for i in sorted(self._ids()))

    def __len__(self) -> int:
        return len(self._ids())

    def _ids(self) -> set[int]:
        return {*self._recent, *(self._shelf or ())}


def _bytes(state: Any) -> int:
    return sum(leaf.nbytes for leaf in tree.leaves(state))
