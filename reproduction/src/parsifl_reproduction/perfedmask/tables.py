"""Tables 1, 3, 4, 7 and 9 of PerFedMask's paper: accuracies after training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

from parsifl_reproduction.comparison import agreed, compare
from parsifl_reproduction.perfedmask import deviations
from parsifl_reproduction.perfedmask.claims import (
    COMPARABLE,
    Grouped,
    after,
    before,
    column,
    number,
    replaced,
    rises,
    sent,
    spent,
    train_loss,
    trained,
    untrained,
    verdict,
)
from parsifl_reproduction.perfedmask.costs import PARAMETERS, cost, cost_job, trainable
from parsifl_reproduction.perfedmask.setup import (
    FEDERATIONS,
    PAPER,
    SEVEN,
    TITLES,
    Cell,
    plan,
)
from parsifl_reproduction.recipe import (
    OURS,
    Claim,
    Context,
    Job,
    Recipe,
    Result,
    by_label,
    spread,
)

FOUR = ("perfedmask", "fedbabu", "heterofl", "fedavg")


@dataclass(frozen=True)
class Row:
    """A row of a table: a federation that runs it, its methods, and the paper's numbers."""

    federation: str
    participation: float
    methods: tuple[str, ...]
    source: str
    published: dict[str, float]

    @property
    def cells(self) -> list[Cell]:
        """The runs of the row."""
        return [self.cell(method) for method in self.methods]

    def cell(self, method: str) -> Cell:
        """Return the run of a method."""
        return Cell(self.federation, method, self.participation)

    def pair(self, other: str) -> tuple[Cell, Cell]:
        """Return the runs of PerFedMask and of another method."""
        return self.cell("perfedmask"), self.cell(other)

    def numbers(self, first: str, second: str) -> str:
        """Return the paper's two numbers."""
        return f"{self.published[first]:g} against {self.published[second]:g} on {self.source}"

    @property
    def name(self) -> str:
        """How claims begin."""
        return f"{self.federation.partition(',')[0]}, c = {self.participation:g}"


def _row(name: str, c: float, source: str, numbers: Sequence[float]) -> Row:
    return Row(name, c, SEVEN, source, dict(zip(SEVEN, numbers, strict=True)))


_PAPER_1 = (
    _row("CIFAR-10", 1.0, "CIFAR-10", (88.43, 88.20, 84.96, 84.26, 87.33, 85.56, 84.99)),
    _row("CIFAR-10", 0.1, "CIFAR-10", (83.60, 84.27, 74.55, 71.88, 73.34, 77.76, 71.19)),
    _row("CIFAR-100", 1.0, "CIFAR-100", (72.40, 69.01, 64.63, 65.24, 68.65, 65.95, 65.27)),
    _row("CIFAR-100", 0.1, "CIFAR-100", (67.47, 66.32, 59.36, 60.42, 65.87, 62.35, 59.12)),
)
_STAND_INS_1 = (
    replace(_PAPER_1[0], federation="MLP"),
    replace(_PAPER_1[1], federation="MLP, 40 devices"),
)
_CONVOLUTIONS = (
    replace(_PAPER_1[0], federation="CNN", methods=FOUR),
    replace(_PAPER_1[1], federation="CNN, 40 devices", methods=FOUR),
)
_PAPER_7 = (_row("DomainNet", 1.0, "DomainNet", (70.68, 72.29, 71.95, 72.85, 67.68, 68.44, 72.24)),)
_STAND_INS_7 = (replace(_PAPER_7[0], federation="looks"),)


def rows_1(context: Context) -> tuple[Row, ...]:
    """Return the rows of Table 1 at a scale."""
    return _PAPER_1 if context.scale == "full" else _STAND_INS_1


def rows_7(context: Context) -> tuple[Row, ...]:
    """Return the rows of Table 7 at a scale."""
    return _PAPER_7 if context.scale == "full" else _STAND_INS_7


def against(grouped: Grouped, row: Row, other: str) -> Claim:
    """Compare PerFedMask with another method after fine-tuning."""
    pair = row.pair(other)
    left, right = (column(grouped, cell, after) for cell in pair)
    comparable = other == "fedbabu"
    where = (
        f"at most {COMPARABLE:g} points below FedBABU"
        if comparable
        else f"above {TITLES[other]} after fine-tuning"
    )
    chance = FEDERATIONS[row.federation].chance
    found = compare(
        f"{row.name}: PerFedMask is {where}",
        row.numbers("perfedmask", other),
        left,
        right,
        least=-COMPARABLE if comparable else 0.0,
        untrained=untrained(chance, {"PerFedMask": left, TITLES[other]: right}),
    )
    return replace(found, note=found.note + spent(grouped, *pair))


# ---------------------------------------------------------------------- Table 1
def _plan_1(context: Context) -> list[Job]:
    cells = [cell for row in rows_1(context) for cell in row.cells]
    costs = [cost_job(data, name) for data in ("CIFAR-10", "CIFAR-100") for name in SEVEN]
    return [*costs, *plan(cells, context)]


def _follow_1(context: Context, results: Sequence[Result]) -> list[Job]:
    """Replace the seeds at chance of claims that they leave undecided."""
    grouped = by_label(results)
    return [
        job
        for row in rows_1(context)
        for job in replaced(
            {row.pair(other): against(grouped, row, other) for other in row.methods[1:]},
            after,
            FEDERATIONS[row.federation].chance,
            context,
            results,
        )
    ]


def _plan_cnn(context: Context) -> list[Job]:
    return plan([cell for row in _CONVOLUTIONS for cell in row.cells], context)


def _conclude_cnn(context: Context, results: Sequence[Result]) -> list[Claim]:
    """Evaluate claims of Table 1 and Figure 4 a second time, with convolutions, at any scale."""
    del context
    grouped = by_label(results)
    claims = [
        replace(against(grouped, row, other), counted="perfedmask-table1")
        for row in _CONVOLUTIONS
        for other in row.methods[1:]
    ]
    return [*claims, replace(more_loss(grouped, _CONVOLUTIONS[0]), counted="perfedmask-figure4")]


def more_loss(grouped: Grouped, row: Row) -> Claim:
    """Masks cost something: the training loss of PerFedMask stays above that of FedBABU."""
    pair = [column(grouped, row.cell(name), train_loss) for name in ("perfedmask", "fedbabu")]
    statement = f"{row.name}: the training loss of PerFedMask ends above that of FedBABU"
    return compare(statement, "curves; the difference is the bias", *pair)


def _participation(context: Context) -> list[tuple[Cell, Cell]]:
    """Return pairs of runs that differ in c alone."""
    places = ("CIFAR-10", "CIFAR-100") if context.scale == "full" else ("MLP, 40 devices",)
    names = [(place, method) for place in places for method in SEVEN]
    return [(Cell(*name, 1.0), Cell(*name, 0.1)) for name in names]


def _plan_participation(context: Context) -> list[Job]:
    return plan([cell for pair in _participation(context) for cell in pair], context)


def _conclude_participation(context: Context, results: Sequence[Result]) -> list[Claim]:
    """Compare every method with itself at the two participations of Table 1."""
    grouped = by_label(results)
    claims = []
    for many, few in _participation(context):
        left, right = (column(grouped, cell, after) for cell in (many, few))
        one, tenth = _published(many), _published(few)
        numbers = f"{one.published[many.method]:g} against {tenth.published[few.method]:g}"
        claims.append(
            compare(
                f"{many.federation}: {TITLES[many.method]} is better at c = 1 than at c = 0.1 "
                "after fine-tuning",
                f"observation (2): {numbers} on {one.source}",
                left,
                right,
                untrained=untrained(
                    FEDERATIONS[many.federation].chance, {"c = 1": left, "c = 0.1": right}
                ),
            )
        )
    return claims


def _conclude_1(context: Context, results: Sequence[Result]) -> list[Claim]:
    grouped = by_label(results)
    rows = rows_1(context)
    claims = [against(grouped, row, other) for row in rows for other in row.methods[1:]]
    claims += [_inconsistency(grouped, row) for row in rows]
    claims += [_sent(grouped, row) for row in rows if row.participation == 1.0]
    for data in ("CIFAR-10", "CIFAR-100"):
        claims += _parameters(grouped, data)
    return claims


def _inconsistency(grouped: Grouped, row: Row) -> Claim:
    """Compare FedNova, which corrects unequal numbers of local steps, with FedAvg."""
    left, right = (column(grouped, row.cell(name), after) for name in ("fednova", "fedavg"))
    found = compare(
        f"{row.name}: FedNova, which corrects unequal numbers of local steps, leads FedAvg",
        f"observation (4): inconsistent objectives may degrade FedAvg; "
        f"{row.numbers('fednova', 'fedavg')}",
        left,
        right,
        untrained=untrained(FEDERATIONS[row.federation].chance, {"FedNova": left, "FedAvg": right}),
    )
    return replace(found, counted=OURS)


def _sent(grouped: Grouped, row: Row) -> Claim:
    """Compare what devices send with what they train, for every method."""
    statement = f"{row.name}: devices send as many parameters as they train (seven methods)"
    paper = "6.1: the trainable parameters are those transmitted"
    pairs = [(column(grouped, cell, sent), column(grouped, cell, trained)) for cell in row.cells]
    known = [(a, b) for up, own in pairs if up and own for a, b in zip(up, own, strict=True)]
    if not all(up and own for up, own in pairs):
        return Claim(statement, paper, "", "not run")
    worst = max(abs(a / b - 1) for a, b in known)
    return Claim(statement, paper, f"they differ by at most {worst:.3%}", verdict(worst < 1e-3))


def _published(cell: Cell) -> Row:
    """Return the row of the paper for a run; CIFAR-10 where another federation stands for it."""
    same = [row for row in _PAPER_1 if row.participation == cell.participation]
    return next((row for row in same if row.source == cell.federation), same[0])


def _parameters(grouped: Grouped, data: str) -> list[Claim]:
    """Compare the trainable parameters of a network of the paper, counted on the meta device."""
    counted = {"CIFAR-10": "perfedmask-table2", "CIFAR-100": "perfedmask-table8"}
    repeated = ("perfedmask", "fedbabu", "heterofl", "splitmix")
    published = PARAMETERS[data]
    claims = [
        replace(
            trainable(grouped, data, method, published[method]),
            counted=counted.get(data, "") if method in repeated else "",
        )
        for method in SEVEN
    ]
    found = {method: cost(grouped, data, method, "trainable") for method in SEVEN}
    statement = (
        f"{data}: PerFedMask, HeteroFL and Split-Mix train fewer parameters than the others, and "
        "Split-Mix the fewest"
    )
    known = {method: value for method, value in found.items() if value is not None}
    if len(known) < len(found):
        return [*claims, Claim(statement, "the rows above", "", "not run")]
    few = {name: known.pop(name) for name in ("perfedmask", "heterofl", "splitmix")}
    held = max(few.values()) < min(known.values()) and min(few.values()) == few["splitmix"]
    return [*claims, Claim(statement, "the rows above", "the rows above", verdict(held))]


# ---------------------------------------------------------------------- Table 3
_STEPS = (0, 2, 4, 6, 8, 10)
_PAPER_3 = {
    Cell("CIFAR-10", "perfedmask"): (70.14, 88.78, 88.69, 88.35, 88.25, 88.30),
    Cell("CIFAR-10", "fedbabu"): (69.27, 88.63, 88.38, 88.43, 88.12, 87.92),
    Cell("CIFAR-100", "perfedmask"): (32.04, 72.62, 72.84, 72.48, 72.11, 72.40),
    Cell("CIFAR-100", "fedbabu"): (29.70, 69.03, 69.15, 68.86, 68.83, 68.81),
}
_STAND_INS_3 = {
    replace(cell, federation="MLP"): row
    for cell, row in _PAPER_3.items()
    if cell.federation == "CIFAR-10"
}


def _cells_3(context: Context) -> Mapping[Cell, tuple[float, ...]]:
    return _PAPER_3 if context.scale == "full" else _STAND_INS_3


def _plan_3(context: Context) -> list[Job]:
    return plan(list(_cells_3(context)), context)


def _conclude_3(context: Context, results: Sequence[Result]) -> list[Claim]:
    """Say whether few epochs of fine-tuning are worth nearly as much as ten."""
    grouped, published = by_label(results), _cells_3(context)
    columns = {
        cell: [column(grouped, cell, partial(after, epochs=epochs)) for epochs in _STEPS]
        for cell in published
    }
    claims = []
    for cell, row in published.items():
        none, two, *_, ten = columns[cell]
        who = f"{cell.federation}, {TITLES[cell.method]}"
        gained = None if not none or not two else [b - a for a, b in zip(none, two, strict=True)]
        later = None if not two or not ten else [abs(b - a) for a, b in zip(two, ten, strict=True)]
        claims.append(
            compare(
                f"{who}: 2 epochs of fine-tuning change more than the next 8",
                f"{row[1] - row[0]:.2f} against {abs(row[-1] - row[1]):.2f}",
                gained,
                later,
            )
        )
        claims += [
            replace(
                compare(
                    f"{who}: {epochs} epochs are at most 1 point below 10",
                    f"{printed:g} against {row[-1]:g}",
                    found,
                    ten,
                    least=-1.0,
                ),
                counted="" if epochs == _STEPS[1] else "the line with 2 epochs",
            )
            for epochs, printed, found in list(zip(_STEPS, row, columns[cell], strict=True))[1:-1]
        ]
    for cell in published:
        if cell.method == "perfedmask":
            other = replace(cell, method="fedbabu")
            claims += [
                replace(
                    compare(
                        f"{cell.federation}: after {epochs} epochs PerFedMask is at most "
                        f"{COMPARABLE:g} points below FedBABU",
                        f"{published[cell][at]:g} against {published[other][at]:g}",
                        columns[cell][at],
                        columns[other][at],
                        least=-COMPARABLE,
                    ),
                    counted="perfedmask-table1",
                )
                for at, epochs in enumerate(_STEPS)
                if epochs
            ]
    return claims


# ---------------------------------------------------------------------- Table 4
_TABLE_4 = {
    0.2: (29.29, 72.07, 0.941, 617.0),
    0.4: (32.31, 74.33, 1.518, 675.0),
    0.6: (32.79, 72.82, 2.095, 741.0),
    0.8: (33.59, 72.64, 2.647, 803.0),
    1.0: (34.73, 73.76, 3.207, 863.0),
}
"""By nu: accuracy before and after fine-tuning; parameters and backward FLOPs in millions."""
_WORK = ("trainable", "backward")
_SLOPE = "the line with the slope"


def _cells_4(context: Context) -> list[Cell]:
    name = "CIFAR-100" if context.scale == "full" else "MLP"
    return [Cell(name, "perfedmask", nu=nu) for nu in _TABLE_4]


def _plan_4(context: Context) -> list[Job]:
    return [cost_job("CIFAR-100", "perfedmask"), *plan(_cells_4(context), context)]


def _conclude_4(context: Context, results: Sequence[Result]) -> list[Claim]:
    """More strong devices give a better global model."""
    grouped, cells = by_label(results), _cells_4(context)
    early = [column(grouped, cell, before) for cell in cells]
    late = [column(grouped, cell, after) for cell in cells]
    published = list(zip(*_TABLE_4.values(), strict=True))
    listed = ", ".join(f"{value:g}" for value in published[0])
    claims = [
        rises(
            "the accuracy before fine-tuning rises with nu (slope over 0.2 to 1)",
            listed,
            list(_TABLE_4),
            early,
        ),
        _every_step(
            "before fine-tuning the accuracy rises from each nu to the next", listed, early
        ),
        compare(
            "before fine-tuning nu = 1 is above nu = 0.2",
            f"{published[0][-1]:g} against {published[0][0]:g}",
            early[-1],
            early[0],
        ),
        compare(
            f"after fine-tuning nu = 0.2 is at most {COMPARABLE:g} points below nu = 1",
            f"{published[1][0]:g} against {published[1][-1]:g}",
            late[0],
            late[-1],
            least=-COMPARABLE,
        ),
        _more_work(grouped),
    ]
    full = cost(grouped, "CIFAR-100", "perfedmask", "strong_backward")
    for nu, (_, _, millions, flops) in _TABLE_4.items():
        found = _mixed(grouped, nu, "trainable")
        claims.append(
            number(
                f"MobileNet, nu = {nu:g}: trainable parameters per device, in millions",
                millions,
                None if found is None else found / 1e6,
            )
        )
        if nu < 1:
            work = _mixed(grouped, nu, "backward")
            claims.append(
                number(
                    f"MobileNet, nu = {nu:g}: backward operations, relative to nu = 1",
                    flops / _TABLE_4[1.0][3],
                    None if work is None or full is None else work / full,
                )
            )
    return claims


def _every_step(statement: str, paper: str, rows: Sequence[Sequence[float] | None]) -> Claim:
    """Say whether the values of each seed rise at every step; the slope is what counts."""
    present = [row for row in rows if row]
    if len(present) < len(rows):
        return Claim(statement, paper, "", "not run", counted=_SLOPE)
    risen = [all(a < b for a, b in pairwise(seed)) for seed in zip(*present, strict=True)]
    ours = ", ".join(spread(row) for row in present)
    note = f"on {sum(risen)} of {len(risen)} seeds"
    return Claim(statement, paper, ours, agreed(risen), note, counted=_SLOPE)


def _more_work(grouped: Grouped) -> Claim:
    """Say whether strong devices train more, with more operations, than weak ones."""
    statement = "MobileNet: trainable parameters and backward operations rise with nu"
    paper = "an increase in both: 0.941 to 3.207 M, 0.617 to 0.863 G"
    ends = [(_mixed(grouped, 0.2, key), _mixed(grouped, 1.0, key)) for key in _WORK]
    known = [(low, high) for low, high in ends if low is not None and high is not None]
    if len(known) < len(ends):
        return Claim(statement, paper, "", "not run")
    (few, many), (less, more) = known
    ours = f"{few / 1e6:.3f} to {many / 1e6:.3f} M, {less / 1e9:.2f} to {more / 1e9:.2f} G"
    note = "both are linear in nu: means over strong and weak devices"
    return Claim(statement, paper, ours, verdict(few < many and less < more), note)


def _mixed(grouped: Grouped, nu: float, key: str) -> float | None:
    """Return the mean over strong and weak devices."""
    strong, weak = (
        cost(grouped, "CIFAR-100", "perfedmask", f"{kind}_{key}") for kind in ("strong", "weak")
    )
    return None if strong is None or weak is None else nu * strong + (1 - nu) * weak


# ---------------------------------------------------------------------- Table 7
_AHEAD = ("fedbabu", "fedprox", "fednova", "fedavg")


def _plan_7(context: Context) -> list[Job]:
    cells = [cell for row in rows_7(context) for cell in row.cells]
    return [*(cost_job("DomainNet", name) for name in SEVEN), *plan(cells, context)]


def _conclude_7(context: Context, results: Sequence[Result]) -> list[Claim]:
    grouped = by_label(results)
    claims = []
    for row in rows_7(context):
        claims += [against(grouped, row, other) for other in ("heterofl", "splitmix")]
        claims += [_behind(grouped, row, other) for other in _AHEAD]
    return [*claims, *_parameters(grouped, "DomainNet")]


def _behind(grouped: Grouped, row: Row, other: str) -> Claim:
    """Compare PerFedMask with a method that the table has ahead of it."""
    pair = row.cell(other), row.cell("perfedmask")
    left, right = (column(grouped, cell, after) for cell in pair)
    chance = FEDERATIONS[row.federation].chance
    found = compare(
        f"{row.name}: {TITLES[other]} is above PerFedMask after fine-tuning",
        f"{row.numbers(other, 'perfedmask')}; not said in the text",
        left,
        right,
        untrained=untrained(chance, {TITLES[other]: left, "PerFedMask": right}),
    )
    return replace(found, note=found.note + spent(grouped, *pair))


# ---------------------------------------------------------------------- Table 9
_PAPER_9 = {
    Cell("CIFAR-10", "perfedmask", 1.0): (88.43, 85.76),
    Cell("CIFAR-10", "perfedmask", 0.1): (83.60, 71.56),
    Cell("CIFAR-100", "perfedmask", 1.0): (72.40, 67.89),
    Cell("CIFAR-100", "perfedmask", 0.1): (67.47, 54.85),
}
"""With and without a frozen head."""
_STAND_INS_9 = {
    Cell("MLP", "perfedmask", 1.0): (88.43, 85.76),
    Cell("MLP, 40 devices", "perfedmask", 0.1): (83.60, 71.56),
}


def _cells_9(context: Context) -> dict[Cell, tuple[float, float]]:
    return _PAPER_9 if context.scale == "full" else _STAND_INS_9


def _plan_9(context: Context) -> list[Job]:
    frozen = list(_cells_9(context))
    return plan([*frozen, *(replace(cell, method="perfedmask head") for cell in frozen)], context)


def _conclude_9(context: Context, results: Sequence[Result]) -> list[Claim]:
    grouped = by_label(results)
    claims = []
    for cell, (frozen, free) in _cells_9(context).items():
        left = column(grouped, cell, after)
        right = column(grouped, replace(cell, method="perfedmask head"), after)
        chance = FEDERATIONS[cell.federation].chance
        found = compare(
            f"{cell.federation}, c = {cell.participation:g}: PerFedMask is better with a frozen "
            "head than with a trained one, after fine-tuning",
            f"{frozen:g} against {free:g}",
            left,
            right,
            untrained=untrained(chance, {"the frozen head": left, "the trained head": right}),
        )
        claims.append(found)
    return claims


_SAME = "the same 40 devices and 80 rounds at both c"
RECIPES = (
    Recipe(
        "perfedmask-table1", "Seven methods on CIFAR-10 and CIFAR-100, unequal devices", PAPER,
        _plan_1, _conclude_1,
        deviations.of("MLP", more=(deviations.NO_CIFAR_100, deviations.FEDPROX)), _follow_1,
    ),
    Recipe(
        "perfedmask-table1-cnn", "Four methods with a convolutional network", PAPER, _plan_cnn,
        _conclude_cnn, deviations.of("CNN", more=(deviations.LOSS,)),
    ),
    Recipe(
        "perfedmask-table1-participation", "Every method with a tenth and with all devices", PAPER,
        _plan_participation, _conclude_participation,
        deviations.of("MLP", more=(deviations.NO_CIFAR_100, deviations.FEDPROX, _SAME)),
    ),
    Recipe(
        "perfedmask-table3", "Fine-tuning steps", PAPER, _plan_3, _conclude_3,
        deviations.of("MLP", more=(deviations.NO_CIFAR_100,), wide=False),
    ),
    Recipe(
        "perfedmask-table4", "More devices of full strength", PAPER, _plan_4, _conclude_4,
        deviations.of("MLP", more=(deviations.NO_CIFAR_100,), wide=False),
    ),
    Recipe(
        "perfedmask-table7", "Seven methods on DomainNet with AlexNet", PAPER, _plan_7,
        _conclude_7, deviations.of("looks", more=(deviations.FEDPROX,)),
    ),
    Recipe(
        "perfedmask-table9", "With and without a frozen head", PAPER, _plan_9, _conclude_9,
        deviations.of("MLP", more=(deviations.NO_CIFAR_100,), wide=False),
    ),
)  # fmt: skip
