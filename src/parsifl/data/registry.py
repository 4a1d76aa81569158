"""The datasets by name: what they are, where they come from, and the function that reads them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

from parsifl.core.registry import Registry
from parsifl.data.spec import bind, defaults

if TYPE_CHECKING:
    from pathlib import Path

    from parsifl.data.dataset import Dataset

    Loader = Callable[..., Dataset]


@final
@dataclass(frozen=True)
class Remote:
    """A file to fetch.

    Parameters
    ----------
    path
        Where it lies below a data folder.
    urls
        The official address first, then mirrors. One without TLS (http) needs a sha256 checksum.
    checksum
        "sha256:..." or "md5:..."; "" if none was ever published.
    members
        For an archive: what is in it, as (path below the data folder, checksum).
    """

    path: str
    urls: tuple[str, ...]
    checksum: str = ""
    members: tuple[tuple[str, str], ...] = ()


@final
@dataclass(frozen=True)
class About:
    """What a user should know of a dataset, and the defaults that `prepare` uses."""

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
    """Look a dataset up; hyphens, underscores and case do not matter.

    >>> entry("CIFAR10").name
    'cifar-10'
    """
    return _DATASETS.find(name)


def load(
    name: str, data_dir: str | Path | None = None, *, verify: bool = True, **options: Any
) -> Dataset:
    """Read a dataset, from a local folder if it is there, else from its official address.

    Parameters
    ----------
    data_dir
        A folder with one sub-folder per dataset; searched first, then the folder in the
        environment variable PARSIFL_DATA, then the download cache.
    verify
        Check the checksum of every file, also of local ones.
    options
        What the dataset declares; see `describe`.

    >>> load("digits").shape
    (1, 8, 8)
    """
    return read(entry(name), data_dir, options, verify=verify)


def read(
    found: Entry,
    data_dir: str | Path | None,
    options: Mapping[str, Any],
    *,
    verify: bool = True,
) -> Dataset:
    """Read a registered dataset; options may be text, as they come from the command line."""
    from parsifl.data.download import Files

    bound = bind(f"dataset '{found.name}'", found.loader, options)
    return found.loader(Files(found, data_dir, verify), **bound)


def fetch(name: str, data_dir: str | Path | None = None) -> list[Path]:
    """Make sure that every file of a dataset is on this machine, and return where they are."""
    from parsifl.data.download import Files

    found = entry(name)
    return Files(found, data_dir, verify=True).everything()


def describe(name: str) -> dict[str, Any]:
    """Return what is known of a dataset, as JSON values."""
    found = entry(name)
    about = found.about
    return {
        "name": found.name,
        "title": about.title,
        "size": about.size,
        "citation": about.citation,
        "licence": about.licence,
        "addresses": [remote.urls[0] for remote in about.remotes if remote.urls],
        "files": [remote.path for remote in about.remotes],
        "needs": about.needs,
        "options": defaults(found.loader),
        "normalize": about.normalize,
        "partition": about.partition,
        "dtype": about.dtype,
        "augment": about.augment,
        "notes": (found.loader.__doc__ or "").strip(),
    }
