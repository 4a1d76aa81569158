from __future__ import annotations

import ssl
from pathlib import Path

import pytest

pytest.importorskip("cryptography", reason="needs flwr: install the extra parsifl[flower]")

from cryptography.hazmat.primitives import serialization

from parsifl.core.errors import ConfigError
from parsifl.flower.server_health import expiry
from parsifl.flower.tls import make_keys, renew


def handshake(server: ssl.SSLContext, client: ssl.SSLContext, host: str) -> None:
    """Shake hands in memory; raises if the client does not trust the server."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = (
        client.wrap_bio(to_client, to_server, server_hostname=host),
        server.wrap_bio(to_server, to_client, server_side=True),
    )
    open_ends = list(ends)
    for _ in range(10):
        for end in list(open_ends):
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
            open_ends.remove(end)
        if not open_ends:
            return
    raise AssertionError("no end of the handshake")


def contexts(server: Path, authority: Path) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    here = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    here.load_cert_chain(server / "server.crt", server / "server.key")
    return here, ssl.create_default_context(cafile=str(authority))


def test_clients_trust_the_server_by_its_names_and_no_other(tmp_path: Path) -> None:
    keys = make_keys(tmp_path / "a", 1, ["10.0.0.1", "server.example.org"])
    here, there = contexts(keys.path, keys.authority)
    handshake(here, there, "10.0.0.1")
    handshake(here, there, "server.example.org")
    handshake(here, there, "127.0.0.1")  # Flower's own processes on the server
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(here, there, "other.example.org")


def test_another_authority_is_not_trusted(tmp_path: Path) -> None:
    ours, others = make_keys(tmp_path / "a", 1), make_keys(tmp_path / "b", 1)
    here, there = contexts(ours.path, others.authority)
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(here, there, "localhost")


def test_nodes_get_pairs_of_their_own(tmp_path: Path) -> None:
    keys = make_keys(tmp_path / "a", 2)
    publics = []
    for number in range(2):
        private = serialization.load_ssh_private_key(keys.node(number).read_bytes(), None)
        form = serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
        publics.append(private.public_key().public_bytes(*form))
        assert keys.public(number).read_bytes().strip() == publics[-1]
    assert publics[0] != publics[1]


def test_private_files_are_private_and_kept(tmp_path: Path) -> None:
    keys = make_keys(tmp_path / "a", 1)
    assert keys.path.stat().st_mode & 0o777 == 0o700
    for path in (keys.key, keys.node(0), keys.path / "ca.key"):
        assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(ConfigError, match="already holds keys"):
        make_keys(tmp_path / "a", 1)


@pytest.mark.parametrize(
    "host",
    ["", "server.example.org:90", "münchen.example", "a b", "x" * 300, "-a.example", "a..b"],
)
def test_a_host_that_no_certificate_can_name_is_rejected(host: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not a host name or address"):
        make_keys(tmp_path / "a", 1, [host])
    assert not (tmp_path / "a").exists()


def test_a_long_host_name_has_a_certificate(tmp_path: Path) -> None:
    host = f"{'a' * 60}.{'b' * 60}.example.org"
    keys = make_keys(tmp_path / "a", 1, [host])
    handshake(*contexts(keys.path, keys.authority), host)


@pytest.mark.parametrize("days", [0, -1, 10_000_000])
def test_impossible_lifetimes_are_rejected(days: int, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="days must be between 1 and 3650"):
        make_keys(tmp_path / "a", 1, days=days)


def test_a_renewed_certificate_is_trusted_by_the_old_authority(tmp_path: Path) -> None:
    keys = make_keys(tmp_path / "keys", 1, ["fl.example.org", "10.1.2.3"], days=3)
    authority, before = keys.authority.read_bytes(), expiry(keys.certificate)
    renew(keys, 400)
    assert keys.authority.read_bytes() == authority
    assert round((expiry(keys.certificate) - before) / 86_400) == 397
    assert keys.key.stat().st_mode & 0o777 == 0o600
    for host in ("fl.example.org", "10.1.2.3", "localhost"):
        handshake(*contexts(keys.path, keys.authority), host)
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(*contexts(keys.path, keys.authority), "other.example.org")
    with pytest.raises(ConfigError, match="when the authority expires"):
        renew(keys, 5000)
    keys.signing_key.unlink()
    with pytest.raises(ConfigError, match="does not hold the keys of an authority"):
        renew(keys, 30)
