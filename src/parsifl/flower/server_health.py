"""What an operator must know about the server's machine: free disk space, expiry of TLS."""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import final

from parsifl.core.errors import ConfigError
from parsifl.flower.hello import LEAST_FREE

_DAY = 86_400.0
_WARNING_DAYS = 30


def expiry(certificate: Path) -> float:
    """Return when a certificate expires, in seconds since 1970."""
    from cryptography import x509

    try:
        return x509.load_pem_x509_certificate(
            certificate.read_bytes()
        ).not_valid_after_utc.timestamp()
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"deployment.certificate={str(certificate)!r} cannot be read as a certificate "
            f"({type(error).__name__}); name the server.crt of the SuperLink, readable by its user"
        ) from None


@final
@dataclass(frozen=True)
class ServerHealth:
    """The free bytes where the run directory is, and when the server's certificate expires."""

    free: int
    expires: float | None

    @classmethod
    def of(cls, out: Path, expires: float | None) -> ServerHealth:
        """Measure; `out` need not exist yet."""
        existing = next(path for path in (out, *out.absolute().parents) if path.exists())
        return cls(shutil.disk_usage(existing).free, expires)

    def problems(self) -> list[str]:
        """Return problems for the operator."""
        texts = []
        if self.free < LEAST_FREE:
            texts.append(f"server: only {self.free >> 20:,} MiB are free for the run directory")
        if self.expires is not None:
            days = (self.expires - time.time()) / _DAY
            if days < 0:
                texts.append("server: its certificate has expired; renew it")
            elif days < _WARNING_DAYS:
                texts.append(f"server: its certificate expires in {days:.0f} days; renew it")
        return texts
