"""Follows every link of the built site that stays inside it."""

from __future__ import annotations

from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class _Page(HTMLParser):
    """Collects where a page leads, and the places in it that can be led to."""

    def __init__(self) -> None:
        super().__init__()
        self.targets: list[str] = []
        self.places: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:  # noqa: ARG002 - the parser names it
        """Note the attributes that name places or targets."""
        for name, value in attrs:
            if name in ("href", "src") and value:
                self.targets.append(value)
            elif name in ("id", "name") and value:
                self.places.add(value)


@cache
def _read(path: Path) -> _Page:
    page = _Page()
    page.feed(path.read_text(encoding="utf-8"))
    return page


def broken(site: Path) -> list[str]:
    """Return the links of a site to files or places that do not exist."""
    found = []
    for path in sorted(site.rglob("*.html")):
        for target in _read(path).targets:
            parts = urlsplit(target)
            if parts.scheme or parts.netloc or path.name == "404.html":
                continue
            there = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            there = there / "index.html" if there.is_dir() else there
            place = unquote(parts.fragment)
            if not there.exists():
                found.append(f"{path.relative_to(site)}: {target} leads nowhere")
            elif place and there.suffix == ".html" and place not in _read(there).places:
                found.append(f"{path.relative_to(site)}: {target} names no place in the page")
    return found
