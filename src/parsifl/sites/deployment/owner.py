"""What the owner of a site's tables sees and changes: ledgers, what is left of them, refusals."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from parsifl.core.errors import ConfigError
from parsifl.sites.deployment.guards import PROFILES, Audit, Guards
from parsifl.sites.deployment.ledger import Ledger

_NAME = re.compile(r"ledger-([A-Za-z0-9_-]{1,64})\.npz")
_CLIENT = re.compile(r"client-(\d+)")


@dataclass(frozen=True)
class OwnedLedger:
    """A ledger in the state directory of a node."""

    client: int
    table: str
    path: Path

    def lines(self) -> list[str]:
        """Return what was released, and what each profile still allows."""
        ledger = Ledger.read(self.path)
        worst = ledger.exposure(0.0)
        lines = [
            f"client {self.client}, table '{self.table}'",
            f"  rows ever seen: {len(ledger.rows)}, answers: {len(ledger.requests)}, "
            f"dimensions: {worst.dimensions:.1f}",
            f"  largest leverage: {worst.single:.2f} of a row, {worst.pair:.2f} of a pair",
        ]
        for profile, (row, pair) in PROFILES.items():
            left = "no further questions"
            if worst.single <= row and worst.pair <= pair:
                left = (
                    f"left {row - worst.single:.2f} for a row, {pair - worst.pair:.2f} for a pair"
                )
            lines.append(f"  {profile} ({row:g}, {pair:g}): {left}")
        most = Guards().refusals
        note = f" (closed after {most}, or as guard-refusals says)" if ledger.refused else ""
        lines.append(f"  refusals since the owner last acted: {len(ledger.refused)}{note}")
        return lines


def manage(
    folder: Path, client: int | None, table: str | None, change: Literal["open", "new"] | None
) -> list[str]:
    """Show the ledgers of a client and a table (None: of all), or change one of them."""
    known = ledgers(folder)
    chosen = [one for one in known if client in (None, one.client) and table in (None, one.table)]
    if not chosen:
        listed = ", ".join(f"client {one.client}: {one.table}" for one in known) or "none"
        raise ConfigError(f"{folder} has no such ledger; it has: {listed}")
    if change is None:
        return [line for one in chosen for line in one.lines()]
    if len(chosen) > 1:
        raise ConfigError("name one ledger: --client NUMBER --table NAME")
    return [opened(chosen[0]) if change == "open" else renewed(chosen[0])]


def ledgers(folder: Path) -> list[OwnedLedger]:
    """Return the ledgers of all clients of a node, by client and table."""
    owned = []
    for path in folder.glob("client-*/ledger-*.npz"):
        client, name = _CLIENT.fullmatch(path.parent.name), _NAME.fullmatch(path.name)
        if client and name:
            owned.append(OwnedLedger(int(client[1]), name[1], path))
    return sorted(owned, key=lambda one: (one.client, one.table))


def opened(one: OwnedLedger) -> str:
    """Forget the refusals of a ledger; what was released still counts."""
    audit = Audit(one.path.parent)
    with audit.locked():
        ledger = Ledger.read(one.path)
        replace(ledger, refused=()).write(one.path)
        audit.write({"kind": "owner", "action": "open", "table-name": one.table})
    return f"opened the ledger '{one.table}' of client {one.client}: {len(ledger.refused)} refusals"


def renewed(one: OwnedLedger) -> str:
    """Set a ledger aside, so that the next answer starts a new one."""
    audit = Audit(one.path.parent)
    with audit.locked():
        aside = one.path.with_name(f"{one.path.name}.until-{time.time_ns()}")
        one.path.rename(aside)
        audit.write({"kind": "owner", "action": "new", "table-name": one.table, "old": aside.name})
    return f"the ledger '{one.table}' of client {one.client} is now {aside.name}"
