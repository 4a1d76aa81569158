"""What a node reports about its machine: versions, clock and disk."""

from __future__ import annotations

import os
import platform
import shutil
import time
from pathlib import Path
from typing import Annotated

from annotated_types import Ge, Le
from pydantic import BaseModel, ConfigDict, StringConstraints

Version = Annotated[str, StringConstraints(pattern=r"^[0-9A-Za-z.+-]{1,60}$")]

CLOCK_SECONDS = 60.0
"""A clock that differs by more is reported; certificates and Flower's heartbeats depend on it."""
LEAST_FREE = 256 << 20


class Machine(BaseModel):
    """Versions, clock (seconds since 1970) and free bytes where client state is kept."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)
    parsifl: Version
    python: Version
    torch: Version
    clock: Annotated[float, Ge(0), Le(1e11)]
    free: Annotated[int, Ge(0), Le(1 << 62)]


def this_machine(state: Path) -> Machine:
    """Return what this process reports; `state` need not exist yet."""
    from importlib.metadata import version

    import parsifl

    place = next(path for path in (state, *state.absolute().parents) if path.exists())
    return Machine(
        parsifl=parsifl.__version__,
        python=platform.python_version(),
        torch=version("torch"),
        clock=time.time(),
        free=shutil.disk_usage(place).free if os.access(place, os.R_OK) else 0,
    )


def mismatch(machine: Machine | None) -> str:
    """Return why a node cannot take part, or "": server and nodes run the same Parsifl."""
    import parsifl

    own = parsifl.__version__
    if machine is None:
        return f"the node does not report its version of Parsifl; install {own} on it"
    if machine.parsifl != own:
        return f"the node runs Parsifl {machine.parsifl}, the server {own}; install the same one"
    return ""


def concerns(machine: Machine, delay: float = 0.0) -> list[str]:
    """Return what an operator should look at: a clock that is off, a full disk.

    `delay` is how long the report may have been under way.
    """
    found = []
    ahead = machine.clock - time.time()
    if ahead > CLOCK_SECONDS or ahead < -CLOCK_SECONDS - delay:
        side = "ahead of" if ahead > 0 else "behind"
        found.append(f"its clock is {abs(ahead):,.0f} s {side} the server's")
    if machine.free < LEAST_FREE:
        found.append(f"only {machine.free / (1 << 20):,.0f} MiB are free where its state is kept")
    return found
