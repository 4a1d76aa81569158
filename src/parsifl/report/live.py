"""Serve the page of a growing run directory to the browser on this machine."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, final

from parsifl.core.errors import CheckpointError
from parsifl.engine.run_dir import find_runs, read_runs
from parsifl.report.page import render

_HOST = "127.0.0.1"
_FILES = ("config.toml", "metrics.jsonl", "clients.json", "environment.json", "target.json")
_MOST_REQUESTS = 16  # at a time
_PATIENCE = 10.0  # seconds for a request to arrive


@final
class LivePage:
    """A page that is rebuilt only when the files behind it have changed."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders = list(folders)
        self._lock = threading.Lock()
        self._version = ""
        self._page = ""
        self.current()

    def version(self) -> str:
        """Return a digest of the current state of the directories."""
        digest = hashlib.sha256()
        for folder in find_runs(self._folders):
            for name in _FILES:
                digest.update(f"{folder / name} {_stamp(folder / name)}\n".encode())
        return digest.hexdigest()[:16]

    def current(self) -> str:
        """Return the current page, or the last good one if a directory was removed."""
        with self._lock:
            version = self.version()
            if version != self._version:
                try:
                    left_out: list[str] = []
                    runs = read_runs(self._folders, left_out)
                    self._page = render(runs, version, left_out)
                except CheckpointError:
                    if not self._page:
                        raise
                self._version = version
            return self._page


def _stamp(file: Path) -> str:
    try:
        status = file.stat()
    except OSError:
        return "absent"
    return f"{status.st_size} {status.st_mtime_ns}"


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, page: LivePage, port: int) -> None:
        self.page = page
        self._free = threading.BoundedSemaphore(_MOST_REQUESTS)
        super().__init__((_HOST, port), _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._free.acquire(timeout=_PATIENCE):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = _PATIENCE

    def do_GET(self) -> None:  # the name that http.server calls
        # another site could point its own name at this address; only our names are answered
        host = (self.headers.get("Host") or "").rpartition(":")[0]
        if host not in (_HOST, "localhost"):
            self.send_error(HTTPStatus.FORBIDDEN)
        elif self.path == "/":
            self._answer(self.server.page.current(), "text/html")
        elif self.path == "/version":
            self._answer(self.server.page.version(), "text/plain")
        else:
            self.send_error(HTTPStatus.NOT_FOUND)

    def _answer(self, text: str, kind: str) -> None:
        body = text.encode()
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: the terminal belongs to the command."""


def serve(
    folders: Sequence[Path],
    announce: Callable[[str], None],
    port: int = 0,
    stop: threading.Event | None = None,
) -> None:
    """Serve until interrupted.

    Parameters
    ----------
    folders
        Run directories, or directories that contain some.
    announce
        Called with the address once the page is available.
    port
        The port to listen on, on this machine only; 0: any free port.
    stop
        Stops the service when set; None: it stops with Ctrl-C.
    """
    page = LivePage(folders)
    stop = stop or threading.Event()
    with _Server(page, port) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            announce(f"http://{_HOST}:{server.server_address[1]}/")
            stop.wait()
        except KeyboardInterrupt:
            pass
        finally:
            server.shutdown()
            thread.join()
