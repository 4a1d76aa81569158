"""The template of an app for a sparse regression over tables (`parsifl flower init`)."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Any

from parsifl.core.keys import Key
from parsifl.flower.app_template import Template

DEFAULT = "fedbestsubset"


def defaults(algorithm: str | None) -> dict[str, Any]:
    """Return the settings of a regression."""
    settings: dict[str, Any] = {"tau": "5"}
    if algorithm not in (None, DEFAULT):
        settings["batch_size"] = "none"  # every iteration reads all rows, so nothing is random
    return {"algorithm": DEFAULT, "rounds": 60, "evaluate_every": 0, "settings": settings}


def write_examples(folder: Path) -> None:
    """Write synthetic tables of three hospitals of unequal size, with words and missing values."""
    folder.mkdir()
    for hospital, rows in enumerate((120, 80, 200)):
        draw = Key(0, client=hospital, purpose="flower/example").numpy_generator()
        age, pulse = draw.normal(55 + 3 * hospital, 12, rows), draw.normal(75, 9, rows)
        noise = draw.normal(size=(rows, 12))
        ward = draw.choice(["general", "heart", "surgery"], rows)
        days = 2 + 0.08 * age + 1.5 * (ward == "surgery") - 0.9 * noise[:, 3]
        days += 0.2 * draw.normal(size=rows)
        lost = draw.random((rows, 2)) < 0.05
        names = ["age", "pulse", "ward", *(f"marker{i}" for i in range(12)), "days"]
        lines = [",".join(names)]
        for i in range(rows):
            known = [
                "" if lost[i, 0] else f"{age[i]:.1f}",
                f"{pulse[i]:.1f}",
                "NA" if lost[i, 1] else str(ward[i]),
            ]
            numbers = [f"{value:.4f}" for value in (*noise[i], days[i])]
            lines.append(",".join([*known, *numbers]))
        (folder / f"hospital{hospital}.csv").write_text("\n".join(lines) + "\n")


TEMPLATE = Template(
    resources.files("parsifl.sites.deployment") / "template_files",
    defaults,
    write_examples=write_examples,
)
