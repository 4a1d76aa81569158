"""Settings that numerical libraries read once, when they are loaded.

This module imports neither torch nor NumPy, because the settings must be in place first.
"""

from __future__ import annotations

import os
import sys

from parsifl.core.errors import ConfigError

VARIABLE = "PARSIFL_REPRODUCIBLE"

WAITING = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "3000"}
"""Keeps idle OpenMP threads from spinning for long (docs/adr/0004)."""

REPRODUCIBLE = {
    # torch: matrix products and LAPACK (MKL), its own kernels (ATen), convolutions (oneDNN)
    "MKL_CBWR": "COMPATIBLE",
    "ATEN_CPU_CAPABILITY": "default",
    "ONEDNN_MAX_CPU_ISA": "SSE41",
    # NumPy and SciPy: matrix products (OpenBLAS) and elementwise functions
    "OPENBLAS_CORETYPE": "Nehalem",
    "NPY_DISABLE_CPU_FEATURES": "X86_V3 X86_V4 AVX512_ICL AVX512_SPR",
    # how a product is split among threads decides how its sums round
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}
"""Selects code paths that exist on every x86-64 processor (docs/reference/reproducibility.md)."""

_MACHINES = ("x86_64", "amd64")
_reproducible = False
_spinning = False


def prepare() -> None:
    """Apply the settings of `import parsifl`."""
    global _spinning
    requested = os.environ.get(VARIABLE, "")
    if requested not in ("", "0", "1"):
        raise ConfigError(f"{VARIABLE} must be 0 or 1, got '{requested}'")
    if requested == "1":
        make_reproducible()
    _spinning = "torch" in sys.modules and not WAITING.keys() & os.environ.keys()
    for name, value in WAITING.items():
        os.environ.setdefault(name, value)


def make_reproducible() -> None:
    """Select arithmetic that gives the same bits on every x86-64 processor with FMA.

    Child processes inherit the setting. Raises ConfigError if torch or NumPy is already loaded
    with other settings, because they would ignore these.
    """
    global _reproducible
    import platform

    if platform.machine().lower() not in _MACHINES:
        raise ConfigError(
            f"reproducible runs need an x86-64 processor; this one is {platform.machine()}"
        )
    loaded = [name for name in ("torch", "numpy") if name in sys.modules]
    if loaded and any(os.environ.get(name) != value for name, value in REPRODUCIBLE.items()):
        raise ConfigError(
            f"request a reproducible run before importing {' and '.join(loaded)}: "
            f"set {VARIABLE}=1 in the shell and import parsifl first"
        )
    os.environ.update(REPRODUCIBLE)
    os.environ[VARIABLE] = "1"
    _reproducible = True


def reproducible() -> bool:
    """Return whether this process computes reproducibly; raise if it was requested too late."""
    if os.environ.get(VARIABLE) == "1" and not _reproducible:
        raise ConfigError(
            f"{VARIABLE}=1 was set after parsifl was imported, which has no effect: "
            "set it in the shell, or before the import"
        )
    return _reproducible


def spinning() -> bool:
    """Return whether OpenMP was loaded before it could be configured."""
    return _spinning
