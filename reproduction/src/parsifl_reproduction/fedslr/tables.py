"""Tables 1 and 2 of FedSLR's paper: accuracy, communication and parameters of all methods."""

from __future__ import annotations

from collections.abc import Sequence

from parsifl.nn import models
from parsifl_reproduction.comparison import compare
from parsifl_reproduction.fedslr.setup import (
    METHODS,
    PAPER,
    Cell,
    column,
    federations,
    gigabytes,
    plan,
)
from parsifl_reproduction.recipe import Claim, Context, Job, Recipe, Result, by_label, spread

SPLITS = ("Non-IID", "IID")
GLOBAL = ("scaffold", "feddyn", "fedavg")
PERSONAL = ("perfedavg", "lgfedavg", "fedrep", "ditto", "apfl", "local", "fedspa")
TABLE_2 = ("fedavg", "scaffold", "fedslr", "apfl", "fedspa", "lgfedavg", "fedrep")
EXCHANGES = 10 * 1000  # clients a round, rounds

PUBLISHED: dict[str, dict[str, tuple[float, ...]]] = {
    "Non-IID": {
        "scaffold": (82.91, 59.48, 34.11), "feddyn": (90.14, 64.29, 38.02),
        "fedavg": (82.89, 55.78, 30.56), "gkr": (87.52, 64.22, 35.13),
        "perfedavg": (91.55, 63.73, 37.52), "lgfedavg": (81.35, 49.90, 35.68),
        "fedrep": (93.41, 60.42, 46.42), "ditto": (94.39, 78.67, 58.30),
        "apfl": (87.11, 61.14, 48.02), "local": (82.17, 47.99, 34.28),
        "fedspa": (93.19, 73.87, 53.76), "mixed": (95.30, 82.19, 59.13),
    },
    "IID": {
        "scaffold": (91.33, 66.68, 43.13), "feddyn": (92.61, 68.68, 43.52),
        "fedavg": (90.25, 61.92, 35.17), "gkr": (91.73, 66.40, 41.32),
        "perfedavg": (89.57, 57.10, 34.41), "lgfedavg": (38.32, 12.96, 5.34),
        "fedrep": (89.28, 15.36, 5.48), "ditto": (89.16, 59.36, 34.78),
        "apfl": (75.11, 30.99, 20.16), "local": (38.30, 10.97, 3.86),
        "fedspa": (88.31, 48.00, 30.39), "mixed": (89.72, 64.95, 38.20),
    },
}  # fmt: skip
"""Table 1: CIFAR-10, CIFAR-100, Tiny ImageNet."""


def plan_table1(context: Context) -> list[Job]:
    """Train every method on every data set and split."""
    cells = [
        Cell(row, split, name)
        for row, federation in federations(context).items()
        for split in federation.splits
        for name in METHODS
    ]
    return plan(cells, context)


def _numbers(split: str, left: str, right: str) -> str:
    pairs = zip(PUBLISHED[split][left], PUBLISHED[split][right], strict=True)
    return ", ".join(f"{a:.2f} against {b:.2f}" for a, b in pairs)


def _conclude_table1(context: Context, results: Sequence[Result]) -> list[Claim]:
    grouped = by_label(results)
    claims: list[Claim] = []
    for row, federation in federations(context).items():
        for split in federation.splits:
            mixed = column(grouped, f"{row} {split} fedslr", "personal")
            gkr = column(grouped, f"{row} {split} fedslr", "global")
            claims += [
                compare(
                    f"{row}, {split}: FedSLR's mixed model is ahead of {name}",
                    _numbers(split, "mixed", name),
                    mixed,
                    column(grouped, f"{row} {split} {name}", "personal"),
                )
                for name in PERSONAL
            ]
            claims.append(
                compare(
                    f"{row}, {split}: FedSLR's global model is ahead of FedAvg's",
                    _numbers(split, "gkr", "fedavg"),
                    gkr,
                    column(grouped, f"{row} {split} fedavg", "global"),
                )
            )
        claims += [*_targets(row, grouped), _resilience(row, grouped)]
    return claims


def _resilience(row: str, grouped: dict[str, list[dict[str, float]]]) -> Claim:
    """Compare with the best of the other personal methods where personalisation does not help."""
    others = {name: column(grouped, f"{row} IID {name}", "personal") for name in PERSONAL}
    found = {name: scores for name, scores in others.items() if scores}
    best = max(found, key=lambda name: sum(found[name]), default=PERSONAL[0])
    return compare(
        f"{row}, IID: the mixed model is the most resilient personal method (next: {best})",
        _numbers("IID", "mixed", best),
        column(grouped, f"{row} IID fedslr", "personal"),
        others[best],
    )


def _targets(row: str, grouped: dict[str, list[dict[str, float]]]) -> list[Claim]:
    """Judge by how much the mixed model leads where data are skewed."""
    mixed = column(grouped, f"{row} Non-IID fedslr", "personal")
    others = (
        ("fedavg", "global", 5.0, "FedAvg's global model"),
        ("local", "personal", 2.0, "Local"),
    )
    return [
        compare(
            f"{row}, Non-IID: the mixed model leads {title} by {least:g} points or more",
            _numbers("Non-IID", "mixed", name),
            mixed,
            column(grouped, f"{row} Non-IID {name}", model),
            least=least,
        )
        for name, model, least, title in others
    ]


def plan_table2(context: Context) -> list[Job]:
    """Train the methods of Table 2 where data are skewed."""
    cells = [Cell(row, "Non-IID", name) for row in federations(context) for name in TABLE_2]
    return plan(cells, context)


def dense_total() -> float:
    """Return the dense total of Table 2 in decimal gigabytes, from our own ResNet18.

    >>> round(dense_total(), 2)
    893.92
    """
    parameters = sum(value.numel() for value in models.build("resnet18").parameters())
    return gigabytes(parameters, parameters, EXCHANGES)


def _conclude_table2(context: Context, results: Sequence[Result]) -> list[Claim]:
    grouped = by_label(results)
    total = dense_total()
    claims = [
        Claim(
            "a dense exchange of ResNet18 takes 893.92 GB in all",
            "893.92",
            f"{total:.2f}",
            "held" if round(total, 2) == 893.92 else "did not hold",
            "4 bytes x 2 directions x 10 clients x 1000 rounds; no training is needed",
        )
    ]
    for row in federations(context):
        sent = {
            name: [
                (values["bytes_down"] + values["bytes_up"]) / 1e9
                for values in grouped.get(f"{row} Non-IID {name}", ())
            ]
            for name in TABLE_2
        }
        claims += [
            compare(f"{row}: FedSLR sends less than FedAvg, in real bytes (GB)",
                  "893.92 against 626.89", sent["fedavg"], sent["fedslr"]),
            compare(f"{row}: FedSLR sends less than FedAvg, by the paper's count (GB)",
                  "893.92 against 626.89",
                  column(grouped, f"{row} Non-IID fedavg", "paper_gigabytes"),
                  column(grouped, f"{row} Non-IID fedslr", "paper_gigabytes")),
            compare(f"{row}: FedSpa sends less than FedAvg, in real bytes (GB)",
                  "893.92 against 446.96", sent["fedavg"], sent["fedspa"]),
            compare(f"{row}: SCAFFOLD sends more than FedAvg, in real bytes (GB)",
                  "1787.83 against 893.92", sent["scaffold"], sent["fedavg"]),
            _sizes(row, grouped),
        ]  # fmt: skip
    return claims


def _sizes(row: str, grouped: dict[str, list[dict[str, float]]]) -> Claim:
    statement = f"{row}: the mixed model has fewer parameters than a dense one"
    label = f"{row} Non-IID fedslr"
    mixed = column(grouped, label, "mixed_parameters")
    dense = column(grouped, label, "dense_parameters")
    claim = compare(statement, "3.96 M of 11.17 M (CIFAR-10)", dense, mixed)
    alone = column(grouped, label, "parameters")
    note = f"the global model alone: {spread(alone, 0)}" if alone else ""
    return Claim(claim.statement, claim.paper, claim.ours, claim.verdict, note)


RECIPES = (
    Recipe("fedslr-table1", "Accuracy of all methods", PAPER, plan_table1, _conclude_table1),
    Recipe("fedslr-table2", "Communication and parameters", PAPER, plan_table2, _conclude_table2),
)
