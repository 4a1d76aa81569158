"""Appendices A.2 and A.3 of FedSLR's paper: other solvers and other penalties."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from parsifl_reproduction.comparison import at_grid_end, compare
from parsifl_reproduction.fedslr.setup import (
    PAPER,
    Cell,
    cell,
    column,
    deviations,
    plan,
    swept,
)
from parsifl_reproduction.recipe import (
    OURS,
    SKIPPED,
    Claim,
    Context,
    Job,
    Recipe,
    Result,
    Values,
    by_label,
)

SOLVERS = {"FedSLR": "dual", "LPGD": "local", "GPGD": "global"}
SPARSE_LAM = (1e-6, 1e-5, 1e-4, 1e-3)
"""lambda of a sparse global model: a value for the nuclear norm is not one for the l1 norm."""
_COMMON_LAM = 1e-4
PENALTIES = {
    "LR+S": ("low-rank", "sparse"),
    "LR+LR": ("low-rank", "low-rank"),
    "S+S": ("sparse", "sparse"),
    "S+LR": ("sparse", "low-rank"),
}
_NOT_SHOWN = "argued in the text, without numbers"
_NOT_COMPARED = "not compared in the paper"


def _solver(name: str, context: Context) -> Cell:
    solver = SOLVERS[name]
    changes = {} if solver == "dual" else {"solver": solver}
    return cell(swept(context), "Non-IID", "fedslr", context, None, **changes)


def _plan_solvers(context: Context) -> list[Job]:
    return plan([_solver(name, context) for name in SOLVERS], context)


def _conclude_solvers(context: Context, results: Sequence[Result]) -> list[Claim]:
    grouped = by_label(results)
    runs = {name: grouped.get(_solver(name, context).label, []) for name in SOLVERS}

    def found(name: str, key: str, scale: float = 1.0) -> list[float]:
        return [scale * float(run[key]) for run in runs[name]]

    share = [
        run["bytes_down"] / (run["dense_bytes"] / 2)  # half of the dense bytes goes down
        for run in runs["LPGD"]
    ]
    usual = _solver("FedSLR", context).label
    longer, alike = (
        _longer(results, _solver(name, context).label, usual) for name in ("LPGD", "GPGD")
    )
    server = [run["seconds"]["aggregate"] / run["seconds"]["local"] for run in runs["FedSLR"]]
    ahead = (
        compare(f"FedSLR's global model is ahead of {name}'s", _NOT_COMPARED,
                found("FedSLR", "global"), found(name, "global"))
        for name in ("GPGD", "LPGD")
    )  # fmt: skip
    return [
        *(replace(claim, counted=OURS) for claim in ahead),
        compare("LPGD takes at least five times as long as FedSLR (ratio of the CPU seconds, "
                "against 5)", "computationally prohibitive", longer, 5.0),
        compare("GPGD takes at most twice as long as FedSLR (ratio of the CPU seconds, below 2)",
                "the same computation efficiency",
                alike, 2.0, above=False),
        compare("the server's step takes at most a tenth of the clients' seconds of training "
                "(ratio, below 0.1)", "section 1: minor extra computation on the server",
                server, 0.1, above=False),
        compare("LPGD's global model has no low rank: its downlink stays dense (share of dense "
                "bytes, at least 0.95)", "it cannot be compressed by factorization",
                share, 0.95),
        compare("LPGD's local models have a low rank: as factors, the last uploads take "
                "fewer numbers than dense ones (thousands)",
                "it might ensure a reduced uplink communication",
                found("LPGD", "dense_parameters", 1e-3), found("LPGD", "upload_parameters", 1e-3)),
        compare("FedSLR's global model is smaller than LPGD's (thousands)", _NOT_SHOWN,
                found("LPGD", "parameters", 1e-3), found("FedSLR", "parameters", 1e-3)),
        compare("GPGD's global model is at most 5 % larger than FedSLR's (thousands, against 1.05 "
                "times FedSLR's)", "the same communication efficiency",
                found("FedSLR", "parameters", 1.05e-3), found("GPGD", "parameters", 1e-3)),
    ]  # fmt: skip


def _longer(results: Sequence[Result], label: str, usual: str) -> list[float]:
    """Return, seed by seed, how many times the CPU seconds of `usual` a job takes.

    They depend less than the time on the clock on what else the machine does. A job that resumed
    an interrupted one does not count.
    """
    spent = {
        (result.label, result.seed): float(result.made["cpu_seconds"])
        for result in results
        if result.made is not None
        and SKIPPED not in result.values
        and not result.made.get("resumed", False)
    }
    seeds = sorted(seed for name, seed in spent if name == label and (usual, seed) in spent)
    return [spent[label, seed] / spent[usual, seed] for seed in seeds]


def _penalty(name: str, context: Context, lam: float | None = None) -> Cell:
    shared, personal = PENALTIES[name]
    changes: dict[str, float | str] = {}
    if shared != "low-rank":
        changes |= {"global_penalty": shared, "lam": _COMMON_LAM if lam is None else lam}
    if personal != "sparse":
        changes["personal_penalty"] = personal
    return cell(swept(context), "Non-IID", "fedslr", context, None, **changes)


def _plan_penalties(context: Context) -> list[Job]:
    cells = [_penalty(name, context) for name in PENALTIES]
    return plan([*cells, *(_penalty("S+S", context, lam) for lam in SPARSE_LAM)], context)


def _conclude_penalties(context: Context, results: Sequence[Result]) -> list[Claim]:
    grouped = by_label(results)
    ours = _penalty("LR+S", context).label
    dense = [_penalty("S+S", context, lam).label for lam in SPARSE_LAM]
    best = max(dense, key=lambda label: sum(column(grouped, label, "personal")))
    others = {
        "S+S": best,
        "LR+LR": _penalty("LR+LR", context).label,
        "S+LR": _penalty("S+LR", context).label,
    }

    claims = [
        compare(
            f"the mixed model of LR+S is ahead of that of {name}",
            _NOT_COMPARED if name != "S+S" else "the expressiveness of S+S is limited",
            column(grouped, ours, "personal"),
            column(grouped, label, "personal"),
        )
        for name, label in others.items()
    ]
    claims[0] = at_grid_end(claims[0], second=best if best in (dense[0], dense[-1]) else "")
    claims[1:] = [replace(claim, counted=OURS) for claim in claims[1:]]
    claims.append(
        compare(
            "the mixed model of LR+S is smaller than that of the best S+S (thousands)",
            _NOT_SHOWN,
            _thousands(grouped, best),
            _thousands(grouped, ours),
        )
    )
    longer = {name: _longer(results, label, ours) for name, label in others.items()}
    claims += [
        compare(
            f"{name} takes at least twice as long as LR+S (ratio of the CPU seconds, against 2)",
            "extremely inefficient: a decomposition in every personal step",
            longer[name],
            2.0,
        )
        for name in ("LR+LR", "S+LR")
    ]
    claims.append(
        compare(
            "S+S takes at most twice as long as LR+S (ratio of the CPU seconds, below 2)",
            "also computationally efficient",
            longer["S+S"],
            2.0,
            above=False,
        )
    )
    return claims


def _thousands(grouped: dict[str, list[Values]], label: str) -> list[float]:
    return [value / 1000 for value in column(grouped, label, "mixed_parameters")]


_LAM = (
    "lam = 1e-6, 1e-5, 1e-4, 1e-3 for a sparse global model, the best of them counts; S+LR has 1e-4"
)
RECIPES = (
    Recipe(
        "fedslr-solvers",
        "Solvers of the global problem: FedSLR, LPGD, GPGD",
        PAPER,
        _plan_solvers,
        _conclude_solvers,
        deviations,
    ),
    Recipe(
        "fedslr-penalties",
        "Penalties of both components: LR+S, LR+LR, S+S, S+LR",
        PAPER,
        _plan_penalties,
        _conclude_penalties,
        partial(deviations, more=(_LAM,)),
    ),
)
