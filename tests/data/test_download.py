from __future__ import annotations

import hashlib
import io
import tarfile
import threading
import zipfile
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from parsifl.core.errors import DataError, MissingDataError
from parsifl.data.dataset import Dataset
from parsifl.data.download import Files
from parsifl.data.registry import About, Entry, Remote

CONTENT = b"1,2\n3,4\n"
DIGEST = "sha256:" + hashlib.sha256(CONTENT).hexdigest()


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None: ...


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """A web server on this machine, and the folder that it serves."""
    folder = tmp_path / "served"
    folder.mkdir()
    handler = partial(Quiet, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as host:
        thread = threading.Thread(target=host.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{host.server_address[1]}/", folder
        host.shutdown()
        thread.join()


def no_loader(_files: Files) -> Dataset:
    raise AssertionError("these tests never load")


def files(home: Path, remote: Remote, verify: bool = True) -> Files:
    about = About(title="t", size="s", citation="c", remotes=(remote,))
    return Files(Entry("toy", about, no_loader), home, verify)


def archive(kind: str, members: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    if kind == "zip":
        with zipfile.ZipFile(buffer, "w") as packed:
            for name, content in members.items():
                packed.writestr(name, content)
        return buffer.getvalue()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def test_a_local_file_is_used_before_any_address(home: Path) -> None:
    (home / "toy").mkdir()
    (home / "toy/a.csv").write_bytes(CONTENT)
    remote = Remote("toy/a.csv", ("http://127.0.0.1:9/a.csv",), DIGEST)
    assert files(home, remote).path("toy/a.csv") == home / "toy/a.csv"


def test_the_environment_variable_names_a_second_folder(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "env/toy").mkdir(parents=True)
    (tmp_path / "env/toy/a.csv").write_bytes(CONTENT)
    monkeypatch.setenv("PARSIFL_DATA", str(tmp_path / "env"))
    found = files(home, Remote("toy/a.csv", ("http://127.0.0.1:9/a",), DIGEST)).path("toy/a.csv")
    assert found == tmp_path / "env/toy/a.csv"


def test_a_missing_file_is_fetched_into_the_data_folder(
    home: Path, server: tuple[str, Path]
) -> None:
    address, folder = server
    (folder / "a.csv").write_bytes(CONTENT)
    remote = Remote("toy/a.csv", (f"{address}gone.csv", f"{address}a.csv"), DIGEST)
    assert files(home, remote).path("toy/a.csv").read_bytes() == CONTENT
    assert files(home, remote).everything() == [home / "toy/a.csv"]


@pytest.mark.parametrize("kind", ["zip", "tar"])
def test_an_archive_is_fetched_and_unpacked(
    home: Path, server: tuple[str, Path], kind: str
) -> None:
    address, folder = server
    (folder / "a.pack").write_bytes(archive(kind, {"inner/a.csv": CONTENT}))
    remote = Remote("toy/a.pack", (f"{address}a.pack",), "", (("toy/inner/a.csv", DIGEST),))
    assert files(home, remote).everything() == [home / "toy/inner/a.csv"]
    assert (home / "toy/inner/a.csv").read_bytes() == CONTENT


def test_an_archive_that_is_already_there_is_only_unpacked(home: Path) -> None:
    (home / "toy").mkdir()
    (home / "toy/a.zip").write_bytes(archive("zip", {"a.csv": CONTENT}))
    remote = Remote("toy/a.zip", ("http://127.0.0.1:9/a.zip",), "", (("toy/a.csv", DIGEST),))
    assert files(home, remote).path("toy/a.csv").read_bytes() == CONTENT


@pytest.mark.parametrize("kind", ["zip", "tar"])
def test_an_archive_cannot_write_outside_its_folder(home: Path, kind: str) -> None:
    (home / "toy").mkdir()
    (home / "toy/a.pack").write_bytes(archive(kind, {"../../evil.csv": CONTENT}))
    remote = Remote("toy/a.pack", ("http://127.0.0.1:9/",), "", (("toy/a.csv", ""),))
    with pytest.raises(DataError, match="outside its folder"):
        files(home, remote).path("toy/a.csv")
    assert not (home.parent / "evil.csv").exists()


@pytest.mark.parametrize("kind", ["zip", "tar"])
def test_an_archive_does_not_fill_the_disk(
    home: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home / "toy").mkdir()
    (home / "toy/a.pack").write_bytes(archive(kind, {"a.csv": bytes(10_000)}))
    usage = SimpleNamespace(free=(256 << 20) + 9_999)
    monkeypatch.setattr("parsifl.data.download.shutil.disk_usage", lambda _: usage)
    remote = Remote("toy/a.pack", ("http://127.0.0.1:9/",), "", (("toy/a.csv", ""),))
    with pytest.raises(DataError, match=r"'a.csv' of 10,000 bytes; .* has room for 9,999"):
        files(home, remote).path("toy/a.csv")
    assert not (home / "toy" / "a.csv").exists()


def test_an_archive_without_the_promised_file_is_named(home: Path) -> None:
    (home / "toy").mkdir()
    (home / "toy/a.zip").write_bytes(archive("zip", {"b.csv": CONTENT}))
    remote = Remote("toy/a.zip", ("http://127.0.0.1:9/",), "", (("toy/a.csv", ""),))
    with pytest.raises(DataError, match=r"does not hold toy/a\.csv"):
        files(home, remote).path("toy/a.csv")


def test_without_a_network_the_error_says_what_from_where_and_whither(home: Path) -> None:
    remote = Remote("toy/a.csv", ("http://127.0.0.1:9/a.csv",), DIGEST)
    with pytest.raises(MissingDataError) as caught:
        files(home, remote).path("toy/a.csv")
    text = str(caught.value)
    assert "http://127.0.0.1:9/a.csv" in text
    assert DIGEST in text
    assert str(home / "toy/a.csv") in text
    assert "PARSIFL_DATA" in text


def test_a_download_with_another_checksum_is_refused(home: Path, server: tuple[str, Path]) -> None:
    address, folder = server
    (folder / "a.csv").write_bytes(b"something else")
    remote = Remote("toy/a.csv", (f"{address}a.csv",), DIGEST)
    with pytest.raises(DataError, match="could not be downloaded"):
        files(home, remote).path("toy/a.csv")
    assert not (home / "toy/a.csv").exists()


def test_a_damaged_local_file_is_refused_unless_asked_not_to_verify(home: Path) -> None:
    (home / "toy").mkdir()
    (home / "toy/a.csv").write_bytes(b"damaged")
    remote = Remote("toy/a.csv", ("http://127.0.0.1:9/",), DIGEST)
    with pytest.raises(DataError, match=r"expected .*remove it to download it again") as caught:
        files(home, remote).path("toy/a.csv")
    assert not isinstance(caught.value, MissingDataError)
    assert files(home, remote, verify=False).path("toy/a.csv").exists()


def test_a_file_that_nobody_provides_says_where_to_put_it(home: Path) -> None:
    remote = Remote("toy/a.csv", ("http://127.0.0.1:9/",), DIGEST)
    with pytest.raises(MissingDataError, match=r"other/b\.csv was not found; put it into"):
        files(home, remote).path("other/b.csv")
