"""Pages about what held and what did not, written from records: one a paper, and an overview."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from parsifl.core.errors import DataError
from parsifl.engine.owned import replace_file
from parsifl_reproduction.findings import INVALID
from parsifl_reproduction.papers import PAPERS, Item, Paper
from parsifl_reproduction.recipe import recipes
from parsifl_reproduction.record import Record, read_all

Records = Mapping[str, Record]
UNKNOWN = "nobody has recorded a run yet"
_VERDICTS = ("held", "undecided", "did not hold", "invalid", "not run")
_MARKS = {
    "undecided": "**undecided**",
    "did not hold": "**did not hold**",
    "invalid": "**invalid**",
}
_JUDGED = "0.1.0"
"""The version whose records were found invalid."""
_BACK = "[All papers](index.md)"
_OTHER = Paper("other", "Beside the papers", ())

_OPENING = """# Reproduction

Every table and figure of the five papers, with the recipe that runs it and what came of it here.
A claim *held*, is *undecided* (the seeds disagree), *did not hold*, is *invalid* (the protocol of
the record is not the paper's), or was *not run*; each page says why, with the paper's number beside
ours. ± is the standard deviation over seeds. The scale *small* is our own cut of the experiment,
which ends within minutes on two cores: it tests the claim, not the last digit.

This page and those of the papers are written from the files `*.json` beside them:

```sh
parsifl reproduce NAME --seeds 3 --record docs/reproduction
parsifl reproduce NAME --seeds 3 --record docs/reproduction --collect   # from finished jobs only
```
"""


def write_pages(folder: Path) -> list[Path]:
    """Write the pages of a folder of records; those of an earlier call are replaced.

    Raises
    ------
    DataError
        If the folder holds a page of one of these names which was not written here.
    """
    written = []
    texts = pages(read_all(folder))
    for name in texts:
        _check_own(folder / name)
    for name, text in texts.items():
        replace_file(folder / name, text.encode())
        written.append(folder / name)
    return written


def _check_own(page: Path) -> None:
    """Raise DataError if a page exists that was not written here."""
    found = page.read_text(errors="replace") if page.exists() else _OPENING
    if _BACK not in found and not found.startswith(_OPENING.partition("\n")[0]):
        raise DataError(
            f"{page} was not written by `parsifl reproduce --record` and would be overwritten; "
            "choose another folder"
        )


def pages(records: Records) -> dict[str, str]:
    """Return the text of each page by file name."""
    papers = (*PAPERS, _others())
    texts = {f"{paper.key}.md": _paper(paper, records) for paper in papers if paper.items}
    return {"index.md": _index([paper for paper in papers if paper.items], records), **texts}


def _others() -> Paper:
    named = {name for paper in PAPERS for item in paper.items for name in item.recipes}
    items = tuple(Item(recipes()[name].title, (name,)) for name in recipes() if name not in named)
    return Paper(_OTHER.key, _OTHER.title, items)


def _index(papers: Sequence[Paper], records: Records) -> str:
    parts = [_OPENING, _tally(papers, records)]
    for paper in papers:
        rows = [_row(paper, item, records) for item in paper.items]
        parts += [
            f"## [{paper.title}]({paper.key}.md)",
            "\n".join(["| | recipe | claims | |", "|-|-|-|-|", *rows]),
        ]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _tally(papers: Sequence[Paper], records: Records) -> str:
    titles = ["", *_VERDICTS, "recipes without a run"]
    lines = [f"| {' | '.join(titles)} |", "|-" * len(titles) + "|"]
    for paper in papers:
        names = _names(paper)
        counts = _counts(names, records)
        idle = sum(not records.get(name, {}).get("claims") for name in names)
        cells = " | ".join(str(counts[verdict]) for verdict in _VERDICTS)
        lines.append(f"| [{paper.title}]({paper.key}.md) | {cells} | {idle} of {len(names)} |")
    return "Claims:\n\n" + "\n".join(lines)


def _names(paper: Paper) -> list[str]:
    return list(dict.fromkeys(name for item in paper.items for name in item.recipes))


def _counts(names: Sequence[str], records: Records) -> Counter[str]:
    return Counter(
        _verdict(name, records[name], claim)
        for name in names
        for claim in records.get(name, {}).get("claims", ())
    )


def _verdict(name: str, found: Record, claim: Mapping[str, str]) -> str:
    """Return what a claim says; records of a wrong protocol decide nothing."""
    return "invalid" if _why_invalid(name, found) else claim["verdict"]


def _why_invalid(name: str, found: Record) -> str:
    """Return why a record is invalid; one of a later version than the finding is not."""
    return INVALID.get(name, "") if found["version"] == _JUDGED else ""


def _row(paper: Paper, item: Item, records: Records) -> str:
    links = ", ".join(f"[{name}]({paper.key}.md#{name})" for name in item.recipes) or "none"
    counts = _counts(item.recipes, records)
    said = [f"{counts[verdict]} {verdict}" for verdict in _VERDICTS if counts[verdict]]
    idle = dict.fromkeys(
        _reason(records.get(name))
        for name in item.recipes
        if not records.get(name, {}).get("claims")
    )
    notes = "; ".join([*([item.note] if item.note else []), *(f"not run: {why}" for why in idle)])
    return f"| {item.name} | {links} | {', '.join(said)} | {_cell(notes)} |"


def _reason(found: Record | None) -> str:
    return UNKNOWN if found is None else str(found.get("reason", "it has no claims"))


def _paper(paper: Paper, records: Records) -> str:
    parts = [f"# {paper.title}", _BACK]
    if paper.note:
        parts.append(paper.note.strip())
    for name in _names(paper):
        where = [item.name for item in paper.items if name in item.recipes]
        parts += [f"## {name}", *_section(name, where, records.get(name))]
    return "\n\n".join(parts) + "\n"


def _section(name: str, where: Sequence[str], found: Record | None) -> Iterator[str]:
    recipe = recipes()[name]
    yield (
        f"{', '.join(where)}: {recipe.title}." if recipe.title not in where else recipe.title + "."
    )
    if found is None or not found["claims"]:
        yield f"Not run here: {_reason(found)}."
        yield f"```sh\nparsifl reproduce {name} --seeds 3\n```"
        return
    lines = ["| claim | the paper | ours | verdict | |", "|-|-|-|-|-|"]
    lines += [
        "| " + " | ".join(_cell(text) for text in (
            claim["statement"], claim["paper"], claim["ours"],
            _MARKS.get(verdict, verdict), claim.get("note", ""),
        )) + " |"
        for claim in found["claims"]
        for verdict in [_verdict(name, found, claim)]
    ]  # fmt: skip
    yield "\n".join(lines)
    if why := _why_invalid(name, found):
        yield f"Invalid, because the protocol is not the paper's: {why}."
    yield f"```sh\n{found['command']}\n```"
    yield _provenance(found)


def _provenance(found: Record) -> str:
    seeds = found["seeds"]
    machine = found["machine"]
    spent = "" if found["seconds"] is None else f", {_duration(found['seconds'])} of work"
    missing = found["jobs"] - found["collected"]
    state = "Finished" if not missing else f"**Unfinished, {missing} jobs are missing**; last job"
    text = (
        f"{state} {found['last'][:10]}; scale {found['scale']}; "
        f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}; "
        f"{found['finished']} of {found['jobs']} jobs{spent}; {machine['processor']}, "
        f"{machine['cores']} cores; Python {machine['python']}, torch {machine['torch']}, "
        f"Parsifl {found['version']}."
    )
    for label, why in found["skipped"].items():
        text += f"\n\nLeft out: {label} ({why})."
    return text


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _cell(text: str) -> str:
    return str(text).replace("|", "\\|").replace("\n", " ")
