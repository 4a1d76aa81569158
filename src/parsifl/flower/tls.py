"""A test certificate authority, a server certificate, and keys for nodes.

They are sufficient for a trial and for a closed network. Otherwise use certificates of your own
authority. Node keys created here are suitable for any deployment (ECDSA on P-384, OpenSSH format).
"""

from __future__ import annotations

import datetime
import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from parsifl.core.errors import ConfigError
from parsifl.engine.safe_files import replace_file, write_synced

LOOPBACK = ("127.0.0.1", "::1", "localhost")
_CURVE = ec.SECP384R1()
_MOST_DAYS = 3650
_NAME = re.compile(r"(\*\.)?([A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?\.)*[A-Za-z0-9-]{1,63}")


@final
@dataclass(frozen=True)
class KeyFolder:
    """Paths of the files: `ca.crt` goes to every machine, private keys to one machine each."""

    path: Path

    @property
    def authority(self) -> Path:
        """The authority's certificate."""
        return self.path / "ca.crt"

    @property
    def signing_key(self) -> Path:
        """The authority's private key, which signs certificates."""
        return self.path / "ca.key"

    @property
    def certificate(self) -> Path:
        """The server's certificate."""
        return self.path / "server.crt"

    @property
    def key(self) -> Path:
        """The server's private key."""
        return self.path / "server.key"

    def node(self, number: int) -> Path:
        """Return a node's private key; its public key has the suffix .pub."""
        return self.path / f"node{number}"

    def public(self, number: int) -> Path:
        """Return a node's public key, which must be registered with the server."""
        return self.path / f"node{number}.pub"


def make_keys(
    folder: Path,
    nodes: int,
    hosts: Sequence[str] = (),
    days: int = 30,
) -> KeyFolder:
    """Write an authority, a server certificate for `hosts` and loopback, and node key pairs."""
    for host in hosts:
        _check_host(host)
    if not 1 <= days <= _MOST_DAYS:
        raise ConfigError(f"days must be between 1 and {_MOST_DAYS}, got {days}")
    # the SuperLink's own processes reach it over loopback, and check its certificate too
    hosts = list(dict.fromkeys([*hosts, *LOOPBACK]))
    key_folder = KeyFolder(folder)
    if key_folder.authority.exists():
        raise ConfigError(f"{folder} already holds keys; choose another directory or delete them")
    pairs = [path for n in range(nodes) for path in (key_folder.node(n), key_folder.public(n))]
    for path in (key_folder.signing_key, key_folder.key, key_folder.certificate, *pairs):
        if path.exists() or path.is_symlink():
            raise ConfigError(f"{path} exists and would be overwritten; choose another directory")
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)
    authority = ec.generate_private_key(_CURVE)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "parsifl test authority")])
    # the authority outlives the certificate, so that `renew` needs no new one
    root = _certificate(name, name, authority, authority, _MOST_DAYS, hosts=())
    server = ec.generate_private_key(_CURVE)
    # a common name has at most 64 characters; clients check only the alternative names
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, hosts[0][:64])])
    signed = _certificate(subject, name, server, authority, days, hosts)
    write_synced(
        key_folder.signing_key, _private(authority, serialization.PrivateFormat.PKCS8), 0o600
    )
    write_synced(key_folder.key, _private(server, serialization.PrivateFormat.PKCS8), 0o600)
    write_synced(key_folder.certificate, signed.public_bytes(serialization.Encoding.PEM), 0o644)
    for number in range(nodes):
        add_node(key_folder, number)
    # last: it marks the directory as complete
    write_synced(key_folder.authority, root.public_bytes(serialization.Encoding.PEM), 0o644)
    return key_folder


def renew(folder: KeyFolder, days: int) -> None:
    """Replace the server's certificate; names, keys and the authority stay the same.

    Raises
    ------
    ConfigError
        If the directory is not complete, or if the authority expires earlier.
    """
    try:
        signer = serialization.load_pem_private_key(folder.signing_key.read_bytes(), None)
        key = serialization.load_pem_private_key(folder.key.read_bytes(), None)
        root = x509.load_pem_x509_certificate(folder.authority.read_bytes())
        old = x509.load_pem_x509_certificate(folder.certificate.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{folder.path} does not hold the keys of an authority ({error})"
        ) from None
    assert isinstance(signer, ec.EllipticCurvePrivateKey)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    left = (root.not_valid_after_utc - datetime.datetime.now(datetime.UTC)).days
    if not 1 <= days <= left:
        raise ConfigError(
            f"days must be between 1 and {left}, when the authority expires, got {days}; for a "
            "longer time, create a new directory with `parsifl flower keys`"
        )
    names = old.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    hosts = [str(entry.value) for entry in names]
    signed = _certificate(old.subject, root.subject, key, signer, days, hosts)
    replace_file(folder.certificate, signed.public_bytes(serialization.Encoding.PEM), 0o644)


def add_node(folder: KeyFolder, number: int) -> None:
    """Write one node's key pair."""
    key = ec.generate_private_key(_CURVE)
    public = key.public_key().public_bytes(
        serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    )
    write_synced(folder.node(number), _private(key, serialization.PrivateFormat.OpenSSH), 0o600)
    write_synced(folder.public(number), public + b"\n", 0o644)


def _private(key: ec.EllipticCurvePrivateKey, form: serialization.PrivateFormat) -> bytes:
    return key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())


def _certificate(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    signer: ec.EllipticCurvePrivateKey,
    days: int,
    hosts: Sequence[str],
) -> x509.Certificate:
    """Sign a certificate for hosts, or for an authority if there are none."""
    now = datetime.datetime.now(datetime.UTC)
    is_authority = not hosts
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=5))
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
        .add_extension(_usage(is_authority), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False
        )
    )
    if hosts:
        names = x509.SubjectAlternativeName([_host(host) for host in hosts])
        server = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH])
        builder = builder.add_extension(names, critical=False)
        builder = builder.add_extension(server, critical=False)
    return builder.sign(signer, hashes.SHA384())


def _usage(is_authority: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not is_authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=is_authority,
        crl_sign=is_authority,
        encipher_only=False,
        decipher_only=False,
    )


def _check_host(host: str) -> None:
    """Raise ConfigError unless this is an address or a valid host name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        if not _NAME.fullmatch(host) or len(host) > 253:
            raise ConfigError(
                f"{host!r:.80} is not a host name or address: omit the port, and use only letters, "
                "digits, hyphens and dots (write international names in xn-- form)"
            ) from None


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
