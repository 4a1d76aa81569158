"""Find the files of a dataset: in local directories first, then at the official address."""

from __future__ import annotations

import hashlib
import os
import shutil
import tarfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, final

from parsifl.core.errors import DataError, MissingDataError
from parsifl.data.registry import Entry, Remote

FOLDER_VARIABLE = "PARSIFL_DATA"
_TIMEOUT_SECONDS = 30
_SPARE = 256 << 20
"""Bytes that must remain free on a disk when an archive is unpacked."""


@final
@dataclass(frozen=True)
class Files:
    """The files of one dataset, local or remote."""

    entry: Entry
    data_dir: str | Path | None = None
    verify: bool = True

    def roots(self) -> list[Path]:
        """Return the folders that are searched, in this order."""
        candidates = [self.data_dir, os.environ.get(FOLDER_VARIABLE), _cache()]
        return [Path(folder).expanduser() for folder in candidates if folder]

    def path(self, *alternatives: str) -> Path:
        """Return the first alternative that exists in a data directory; else download it."""
        path = self.local(*alternatives)
        if path is None:
            self._fetch(self._remote(alternatives))
            path = self.local(*alternatives)
        if path is None:
            raise DataError(f"'{self.entry.name}': the archive does not hold {alternatives[0]}")
        return path

    def local(self, *alternatives: str) -> Path | None:
        """Return the first alternative that exists in a data directory, or None."""
        for root in self.roots():
            for name in alternatives:
                if (root / name).exists():
                    self._check(root / name, self._checksum(name))
                    return root / name
        return None

    def everything(self) -> list[Path]:
        """Download missing files; return one path for each file of the dataset."""
        paths = []
        for remote in self.entry.about.remotes:
            wanted = [name for name, _ in remote.members] or [remote.path]
            paths += [self.path(name) for name in wanted]
        return paths

    def missing(self, what: str, where: str) -> MissingDataError:
        """Return the error for a file that cannot be fetched automatically."""
        return MissingDataError(f"'{self.entry.name}': {what}; put it into {self._home()}/{where}")

    def _home(self) -> Path:
        return self.roots()[0]

    def _remote(self, alternatives: tuple[str, ...]) -> Remote:
        for remote in self.entry.about.remotes:
            provided = {remote.path, *(name for name, _ in remote.members)}
            if provided & set(alternatives):
                return remote
        raise self.missing(f"{alternatives[0]} was not found", str(Path(alternatives[0]).parent))

    def _checksum(self, name: str) -> str:
        for remote in self.entry.about.remotes:
            known = {remote.path: remote.checksum, **dict(remote.members)}
            for path, checksum in known.items():
                # a member may be in another directory than in the archive: its name decides
                if PurePosixPath(path).name == PurePosixPath(name).name:
                    return checksum
        return ""

    def _check(self, path: Path, checksum: str) -> None:
        if not self.verify or not checksum or not path.is_file():
            return
        kind, _, expected = checksum.partition(":")
        with path.open("rb") as stream:
            actual = hashlib.file_digest(stream, kind).hexdigest()
        if actual != expected:
            raise DataError(
                f"'{self.entry.name}': {path} has {kind} {actual}, expected {expected}; the file "
                "is damaged or another version: remove it to download it again, or load with "
                "verify=False"
            )

    def _fetch(self, remote: Remote) -> None:
        archive = self.local(remote.path)
        if archive is None:
            archive = self._download(remote)
        if remote.members:
            _unpack(archive, archive.parent)

    def _download(self, remote: Remote) -> Path:
        import pooch

        # $PARSIFL_DATA may be shared and is only read; a directory named in the call may be written
        target = Path(self.data_dir or _cache()).expanduser() / remote.path
        reasons = []
        for url in remote.urls:
            try:
                pooch.retrieve(
                    url,
                    known_hash=remote.checksum or None,
                    fname=target.name,
                    path=target.parent,
                    downloader=pooch.HTTPDownloader(timeout=_TIMEOUT_SECONDS),
                )
            except (OSError, ValueError) as error:
                reasons.append(f"{url}: {_short(error)}")
            else:
                return target
        raise MissingDataError(
            f"dataset '{self.entry.name}' is not on this machine and could not be downloaded.\n"
            + "\n".join(f"  tried {reason}" for reason in reasons)
            + f"\nDownload {remote.urls[0]} ({remote.checksum or 'no published checksum'}) on a "
            f"machine with a network and put it at {self._home() / remote.path}, "
            f"or set {FOLDER_VARIABLE} to a directory that contains {remote.path}"
        )


def _cache() -> Path:
    import pooch

    return Path(pooch.os_cache("parsifl"))


def _short(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 160 else text[:157] + "..."


def _unpack(archive: Path, folder: Path) -> None:
    """Extract the regular files of a zip or tar archive to `folder`, and nothing outside it."""
    inside = folder.resolve()
    for name, size, stream in _members(archive):
        target = (folder / name).resolve()
        if not target.is_relative_to(inside):
            raise DataError(f"{archive} holds '{name}', which points outside its folder")
        if size > (free := shutil.disk_usage(folder).free - _SPARE):
            raise DataError(
                f"{archive} holds '{name}' of {size:,} bytes; {folder} has room for "
                f"{max(free, 0):,}"
            )
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(target.name + ".part")
        with stream, partial.open("wb") as out:
            shutil.copyfileobj(stream, out)
        partial.replace(target)


def _members(archive: Path) -> Iterator[tuple[str, int, IO[bytes]]]:
    """Yield name, unpacked size and content of every file; reading stops at that size."""
    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as packed:
            for item in packed.infolist():
                if not item.is_dir():
                    yield item.filename, item.file_size, packed.open(item)
        return
    with tarfile.open(archive) as tar:
        for member in tar:
            stream = tar.extractfile(member) if member.isfile() else None
            if stream is not None:
                yield member.name, member.size, stream
