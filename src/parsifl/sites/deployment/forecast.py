"""The forecast of a site before a fit starts: a dry run on its own rows, which sends nothing."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from parsifl.core.algorithm import ClientInfo
from parsifl.core.batching import ClientRoundData
from parsifl.core.errors import DataError
from parsifl.core.keys import Key
from parsifl.data.clients import ClientData
from parsifl.sites.deployment.agreement import Agreement, Prepared
from parsifl.sites.deployment.guards import PROFILES, Guards, Profile
from parsifl.sites.deployment.ledger import Exposure, Indices, Ledger
from parsifl.sites.deployment.row_terms import RowTerms, all_rows
from parsifl.sites.deployment.table_site import data_of, problem_of
from parsifl.sites.search.fedbestsubset import FedBestSubset
from parsifl.sites.search.subset_state import Phase

_ROUNDS = 40
_MOST_FITS = 5
_MOST_VALUES = 5e6
"""The largest table, in values, for which a dry run takes about a second."""
_RIDGE = 0.01
"""Keeps the local fit of a small site finite; the fit of all sites has no need of it."""


@dataclass(frozen=True)
class Forecast:
    """What a fit would use of a ledger.

    Attributes
    ----------
    alone
        The exposure of the fit without any history.
    further
        How many fits of this kind the ledger still allows under each profile, at most 5; each has
        one term less than the one before it.
    """

    alone: Exposure
    further: dict[Profile, int]


def forecast(
    table: Prepared, algorithm: FedBestSubset, ledger: Ledger, rows: Indices, guards: Guards
) -> Forecast | None:
    """Return the forecast of a fit of a GLM or a Cox model; None if no dry run is possible.

    The site fits its own rows alone. Its path is not that of the fit of all sites, but its
    coefficients, and therefore its weights, have similar sizes.
    """
    spec = replace(table.spec, l2=max(table.spec.l2, _RIDGE))
    table = replace(table, spec=spec)
    try:
        agreement = Agreement.of([table.summary()], spec, guards.columns(table.rows))
        x = agreement.preprocessing.standardised(table.columns)
        data, always = data_of(x, agreement.targets(table.columns)), agreement.kept
    except DataError:  # one class, or a column that only other sites have
        return None
    if x.size > _MOST_VALUES or not x.shape[1]:
        return None
    problem: Any = problem_of(spec, always, agreement.target_mean)(data)
    units = np.unique(agreement.preprocessing.units, return_inverse=True)[1].tolist()
    algorithm = replace(algorithm, units=tuple(units), gradients=True, noise=guards.noise)
    empty = Ledger(rows=ledger.rows, vectors=np.zeros((len(ledger.rows), 0)))
    alone = _after(empty, algorithm, problem, data, rows, guards)
    further: dict[Profile, int] = dict.fromkeys(PROFILES, 0)
    for number in range(_MOST_FITS):
        tau = max(algorithm.tau - number, min(algorithm.tau, 1))
        ledger = _after(ledger, replace(algorithm, tau=tau), problem, data, rows, guards)
        worst = ledger.exposure(PROFILES["strict"][1])
        for profile, (row, pair) in PROFILES.items():
            if worst.single <= row and worst.pair <= pair:
                further[profile] = number + 1
        if worst.single > PROFILES["standard"][0]:
            break
    return Forecast(alone.exposure(guards.pair_limit), further)


def _after(
    ledger: Ledger,
    algorithm: FedBestSubset,
    problem: Any,
    data: ClientData,
    rows: Indices,
    guards: Guards,
) -> Ledger:
    """Return the ledger after a fit of these rows."""
    server = algorithm.started(problem, problem.init(Key(0))[problem.name])
    site, no_key = ClientInfo(0, len(rows)), torch.tensor(0)
    names = [str(position) for position in range(problem.width)]
    inner = problem.width - problem.intercept
    for number in range(_ROUNDS):
        question = algorithm.broadcast(problem, server, site, Key(0))
        at, columns = question.at[problem.name], question.candidates.tolist()
        terms = RowTerms.of(problem, data, at)
        block = terms.block(columns, names, diagonal=not at[:inner].any())
        vectors = np.column_stack(list(block.values()))
        ledger = ledger.with_block(f"dry run {number}", vectors, rows, guards.noise / np.sqrt(12))
        asked = ClientRoundData({}, all_rows(data), no_key, number)
        total = algorithm.client_update(problem, question, None, asked).upload
        server = algorithm.aggregate(problem, server, total, Key(0))
        if int(server.phase) >= Phase.CONVERGED:
            break
    return ledger
