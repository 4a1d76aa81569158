"""Pages with the verdicts, written from records: one per paper, and an overview."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from parsifl.core.errors import DataError
from parsifl.engine.safe_files import replace_file
from parsifl_reproduction.papers import PAPERS, Item, Paper
from parsifl_reproduction.recipe import recipes
from parsifl_reproduction.record import Record, read_all

Records = Mapping[str, Record]
UNKNOWN = "no run is recorded yet"
_VERDICTS = ("held", "tie", "undecided", "did not hold", "not run")
_MARKS = {
    "tie": "**tie**",
    "undecided": "**undecided**",
    "did not hold": "**did not hold**",
}
_BACK = "[All papers](index.md)"
_OTHER = Paper("other", "Beyond the papers", ())

_OPENING = """# Reproduction

Every table and figure of the five papers, with the recipe that runs it and its outcome. A claim
*held*, is a *tie*, is *undecided*, *did not hold*, or was *not run*. Claims are compared seed by
seed. Where the seeds disagree, the 95 % interval of the mean difference is used: with five seeds or
more, an interval that excludes zero (or the margin that a claim names) decides; with three or more,
an interval within 1 % of the larger mean around zero is a tie; with twenty or more, any interval
that includes zero is. Otherwise the claim is undecided. The resolution is the difference that the
seeds would have shown with a probability of 80 %.
Each page shows the paper's number beside ours and lists where a protocol is not the paper's. ± is
the standard deviation over seeds.

| scale | protocol | verdicts |
|-|-|-|
| `smoke` | every code path, within 10 minutes per paper | none |
| `faithful` | the paper's protocol, at a size that a CPU can run | yes |
| `full` | the paper's own datasets, models and rounds | yes |

These pages are written from the files `*.json` beside them:

```sh
parsifl reproduce fedslr --scale smoke                            # every recipe of a paper
parsifl reproduce NAME --seeds 3 --record docs/reproduction       # one recipe, with its record
parsifl reproduce NAME --seeds 3 --max-seeds 20 --record docs/reproduction   # until decided
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
    check_folder(folder)
    written = []
    for name, text in pages(read_all(folder)).items():
        replace_file(folder / name, text.encode())
        written.append(folder / name)
    return written


def check_folder(folder: Path) -> None:
    """Raise DataError if records and pages cannot be written to a folder without loss."""
    if folder.exists() and not folder.is_dir():
        raise DataError(f"{folder} is not a directory; records need one")
    read_all(folder)
    for name in pages({}):
        _check_own(folder / name)


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
    named = {name for paper in PAPERS for name in paper.recipes}
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
        names = paper.recipes
        counts = _counts(names, records)
        idle = sum(not records.get(name, {}).get("claims") for name in names)
        cells = " | ".join(str(counts[verdict]) for verdict in _VERDICTS)
        lines.append(f"| [{paper.title}]({paper.key}.md) | {cells} | {idle} of {len(names)} |")
    names = [name for paper in papers for name in paper.recipes]
    open_ones = _counts(names, records, counted=True)["undecided"]
    note = (
        "Further readings of a claim, and claims of our own, stand with their recipes and are not "
        f"in this table; {open_ones} of them are undecided."
    )
    return "\n".join(["Claims:", "", *lines, "", note])


def _counts(names: Sequence[str], records: Records, *, counted: bool = False) -> Counter[str]:
    """Count the verdicts of claims, or of those that are counted elsewhere."""
    return Counter(
        claim["verdict"]
        for name in names
        for claim in records.get(name, {}).get("claims", ())
        if bool(claim.get("counted")) == counted
    )


def _row(paper: Paper, item: Item, records: Records) -> str:
    links = ", ".join(f"[{name}]({paper.key}.md#{name})" for name in item.recipes) or "none"
    counts = _counts(item.recipes, records)
    said = [f"{counts[verdict]} {verdict}" for verdict in _VERDICTS if counts[verdict]]
    if not said:
        claims = [c for name in item.recipes for c in records.get(name, {}).get("claims", ())]
        said = [f"counted in {place}" for place in dict.fromkeys(c["counted"] for c in claims)]
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
    if paper.findings:
        parts.append(paper.findings.strip())
    for name in paper.recipes:
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
            _MARKS.get(claim["verdict"], claim["verdict"]), _remark(claim),
        )) + " |"
        for claim in found["claims"]
    ]  # fmt: skip
    yield "\n".join(lines)
    if found.get("deviations"):
        yield "Deviations from the paper:\n\n" + "\n".join(f"- {d}" for d in found["deviations"])
    yield f"```sh\n{found['command']}\n```"
    yield _provenance(found)


def _remark(claim: Mapping[str, str]) -> str:
    counted = f"counted in {claim['counted']}" if claim.get("counted") else ""
    return "; ".join(part for part in (claim.get("note", ""), counted) if part)


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
        text += f"\n\nSkipped: {label} ({why})."
    return text


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _cell(text: str) -> str:
    return str(text).replace("|", "\\|").replace("\n", " ")
