"""What a result was made on: processor, cores, versions."""

from __future__ import annotations

import os
import platform
from pathlib import Path

from parsifl.engine.run_dir import environment

_CPU_INFO = Path("/proc/cpuinfo")  # Linux; elsewhere the platform names the processor


def machine() -> dict[str, str | int]:
    """Return the processor, its cores and the versions that a result may depend on."""
    return {
        "processor": processor(),
        "cores": os.cpu_count() or 1,
        "system": platform.system(),
        **environment(),
    }


def processor() -> str:
    """Return the name of the processor, as far as the system names it."""
    try:
        lines = _CPU_INFO.read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return next(iter(names), "") or platform.processor() or platform.machine()
