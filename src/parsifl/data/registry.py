"""Datasets by name: description, source, and the function that reads them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

from parsifl.core import config
from parsifl.core.registry import Registry

if TYPE_CHECKING:
    from pathlib import Path

    from parsifl.data.dataset import Dataset

    Loader = Callable[..., Dataset]


@final
@dataclass(frozen=True)
class Remote:
    """A file to download.

    Parameters
    ----------
    path
        Its path below a data directory.
    urls
        The official address first, then mirrors. An http address needs a sha256 checksum.
    checksum
        "sha256:..." or "md5:..."; "" if none was ever published.
    members
        For an archive: its files, as (path below the data directory, checksum).
    """

    path: str
    urls: tuple[str, ...]
    checksum: str = ""
    members: tuple[tuple[str, str], ...] = ()


@final
@dataclass(frozen=True)
class About:
    """Description of a dataset, and the defaults that `prepare` uses."""

    title: str
    size: str
    citation: str
    licence: str = "not stated by the source; fetch it, do not redistribute it"
    needs: str = ""
    remotes: tuple[Remote, ...] = ()
    normalize: str = "none"
    partition: str = "pathological"
    dtype: str = "float32"
    augment: str = ""


@final
@dataclass(frozen=True)
class Entry:
    """A registered dataset."""

    name: str
    about: About
    loader: Loader


_DATASETS = Registry[Entry]("dataset", package="parsifl.data.datasets")


def dataset(name: str, about: About) -> Callable[[Loader], Loader]:
    """Register a loader: a function of `Files` whose keyword-only parameters are its options."""

    def register(loader: Loader) -> Loader:
        _DATASETS.add(name, Entry(name, about, loader))
        return loader

    return register


def names() -> list[str]:
    """Return the names of all datasets, sorted."""
    return _DATASETS.names()


def entry(name: str) -> Entry:
    """Return a dataset by name; hyphens, underscores and case do not matter.

    >>> entry("CIFAR10").name
    'cifar-10'
    """
    return _DATASETS.find(name)


def load(
    name: str, data_dir: str | Path | None = None, *, verify: bool = True, **options: Any
) -> Dataset:
    """Read a dataset from a local directory, or download it from its official address.

    Parameters
    ----------
    data_dir
        A directory with one subdirectory per dataset. It is searched first, then the directory in
        the environment variable PARSIFL_DATA, then the download cache.
    verify
        Check the checksum of every file, including local ones.
    options
        Options of the dataset; see `describe`.

    >>> load("digits").shape
    (1, 8, 8)
    """
    return read(entry(name), data_dir, options, verify=verify)


def read(
    registered: Entry,
    data_dir: str | Path | None,
    options: Mapping[str, Any],
    *,
    verify: bool = True,
) -> Dataset:
    """Read a registered dataset; options may be text from the command line."""
    from parsifl.data.download import Files

    bound = config.bind(f"dataset '{registered.name}'", registered.loader, options)
    return registered.loader(Files(registered, data_dir, verify), **bound)


def fetch(name: str, data_dir: str | Path | None = None) -> list[Path]:
    """Download missing files of a dataset, and return the paths of all files."""
    from parsifl.data.download import Files

    registered = entry(name)
    return Files(registered, data_dir, verify=True).everything()


def describe(name: str) -> dict[str, Any]:
    """Return the description of a dataset as JSON values."""
    registered = entry(name)
    about = registered.about
    return {
        "name": registered.name,
        "title": about.title,
        "size": about.size,
        "citation": about.citation,
        "licence": about.licence,
        "addresses": [remote.urls[0] for remote in about.remotes if remote.urls],
        "files": [remote.path for remote in about.remotes],
        "needs": about.needs,
        "options": config.option_defaults(registered.loader),
        "normalize": about.normalize,
        "partition": about.partition,
        "dtype": about.dtype,
        "augment": about.augment,
        "notes": (registered.loader.__doc__ or "").strip(),
    }
