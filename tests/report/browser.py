"""A page in the system's Chromium, driven by Playwright."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import pytest

PATIENCE = 30_000  # milliseconds


def find_chromium() -> str | None:
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    return next((found for name in names if (found := shutil.which(name))), None)


class Page:
    """One tab: runs JavaScript, presses keys, and remembers what went wrong."""

    def __init__(self, page: Any) -> None:
        self._page = page
        self.problems: list[str] = []
        self.requests: list[str] = []
        page.set_default_timeout(PATIENCE)
        page.on("pageerror", lambda error: self.problems.append(str(error)))
        page.on("console", self._note)
        page.on("request", lambda request: self.requests.append(request.url))

    def _note(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.problems.append(message.text)

    def leave(self) -> None:
        self._page.goto("about:blank")

    def visit(self, url: str) -> None:
        self.leave()
        self._page.goto(url, wait_until="commit")

    def open(self, url: str) -> None:
        self.visit(url)
        self.wait("document.documentElement?.classList.contains('ready')")

    def run(self, script: str) -> Any:
        """Evaluate an expression and return its (awaited) value."""
        return self._page.evaluate(script)

    def wait(self, condition: str) -> None:
        self._page.wait_for_function(f"() => {condition}", polling=50)

    def resize(self, width: int, height: int = 900) -> None:
        self._page.set_viewport_size({"width": width, "height": height})

    def prefer(self, scheme: Literal["light", "dark"]) -> None:
        self._page.emulate_media(color_scheme=scheme)

    def press(self, key: str) -> None:
        self._page.keyboard.press(key)

    def save(self, script: str, folder: Path) -> bytes:
        """Run a script that saves a file; return the file's content."""
        with self._page.expect_download() as download:
            self.run(script)
        file: Path = folder / download.value.suggested_filename
        download.value.save_as(file)
        return file.read_bytes()

    def screenshot(self, file: Path, selector: str = "body") -> None:
        self._page.locator(selector).first.screenshot(path=file)


@contextmanager
def browse() -> Iterator[Page]:
    chromium = find_chromium()
    if chromium is None:
        pytest.skip("needs a browser: install chromium")
    sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=chromium, args=["--no-sandbox", "--disable-dev-shm-usage"]
        )
        try:
            yield Page(browser.new_page())
        finally:
            browser.close()
