"""Keep freed memory in the process, where the allocator is glibc's.

Each step of local training allocates and frees the same buffers. By default glibc returns large
ones to the kernel at once, and the next step pays for the page faults: about 500 a step for a small
convolutional network. With the thresholds below a process keeps what it has used; its peak memory
does not change.
"""

from __future__ import annotations

import ctypes
import os
import platform
from functools import cache

from parsifl.core.errors import ConfigError

VARIABLE = "PARSIFL_MALLOC"
_MEGABYTE = 1 << 20
# the names are those of mallopt(3)
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3
_THRESHOLDS = {
    _M_TRIM_THRESHOLD: (1 << 31) - 1,  # do not shrink the heap
    _M_TOP_PAD: 64 * _MEGABYTE,  # grow it in large steps
    _M_MMAP_THRESHOLD: 32 * _MEGABYTE,  # the largest value that glibc accepts
}


@cache
def keep_freed_memory() -> bool:
    """Set the thresholds once in this process; return whether they are in place.

    `PARSIFL_MALLOC=0` leaves the allocator alone, as do systems without glibc.
    """
    requested = os.environ.get(VARIABLE, "1")
    if requested not in ("0", "1"):
        raise ConfigError(f"{VARIABLE} must be 0 or 1, got '{requested}'")
    if requested == "0" or platform.libc_ver()[0] != "glibc":
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and all(
        mallopt(parameter, value) == 1 for parameter, value in _THRESHOLDS.items()
    )


def allocator() -> str:
    """Return how memory is allocated, for environment.json."""
    return "glibc, freed memory is kept" if keep_freed_memory() else "default"
