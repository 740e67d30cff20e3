"""An authority for tests, and certificates for brokers and users that it signs.

authority = Authority(directory, "ca")
auth = broker_auth(tmp_path / "certificates")           one certificate for all brokers on this machine
leaf = authority.issue("alice", uris=["sava://test/user/alice"])
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from sava.config import Auth, TlsSettings
from sava.security.certificates import read_certificate

CLUSTERS = ("test", "sava", "east", "west")
HOSTS = ("127.0.0.1", "localhost")


class Issued(NamedTuple):
    cert: Path
    key: Path

    def auth(self, ca: Path, **more: object) -> Auth:
        """Of a broker that shows it. Tests call brokers with the brokers' own certificate: whom it names may
        do everything."""
        tls = TlsSettings(cert_file=self.cert, key_file=self.key, ca_file=ca, **more)  # type: ignore[arg-type]
        named = read_certificate(self.cert.read_bytes()).identities
        admins = dict.fromkeys(f"{each.kind}:{each.name}" for each in named) or ("user:root",)
        return Auth(tls=tls, super_admins=tuple(admins))


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)] if text else [])


def _san(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


class Authority:
    """Signs certificates. Its own is at ``path``."""

    def __init__(self, directory: Path, name: str = "ca") -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _name(name)
        now = datetime.now(UTC)
        self._own = (
            x509.CertificateBuilder()
            .subject_name(self._name)
            .issuer_name(self._name)
            .public_key(self._key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(days=2))
            .not_valid_after(now + timedelta(days=60))
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(self._key.public_key()), critical=False)
            .add_extension(_usage(signs=True), critical=True)
            .sign(self._key, hashes.SHA256())
        )
        self.path = directory / f"{name}.pem"
        self.path.write_bytes(self._own.public_bytes(serialization.Encoding.PEM))

    def issue(
        self,
        name: str,
        *,
        uris: Sequence[str] = (),
        hosts: Sequence[str] = HOSTS,
        common_name: str | None = None,
        is_expired: bool = False,
    ) -> Issued:
        """A certificate and its key, in files named ``name``; files that are there are replaced, the key
        first."""
        key = ec.generate_private_key(ec.SECP256R1())
        now = datetime.now(UTC)
        end = now - timedelta(hours=1) if is_expired else now + timedelta(days=30)
        builder = (
            x509.CertificateBuilder()
            .subject_name(_name(name if common_name is None else common_name))
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(days=1))
            .not_valid_after(end)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(signs=False), critical=True)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False
            )
        )
        names = [*map(_san, hosts), *map(x509.UniformResourceIdentifier, uris)]
        if names:
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        issued = Issued(self._directory / f"{name}.pem", self._directory / f"{name}.key")
        pem, pkcs8 = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
        issued.key.write_bytes(key.private_bytes(pem, pkcs8, serialization.NoEncryption()))
        issued.key.chmod(0o600)
        issued.cert.write_bytes(builder.sign(self._key, hashes.SHA256()).public_bytes(pem))
        return issued


def _usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs,
        crl_sign=signs,
        encipher_only=False,
        decipher_only=False,
    )


def make_certificates(directory: Path, *addresses: str) -> Auth:
    """An authority of our own, and one certificate for all brokers of the tests' clusters: those of this
    machine, and at these addresses."""
    authority = Authority(directory)
    hosts = (*HOSTS, *addresses)
    uris = [f"sava://{cluster}/broker/{host}" for cluster in CLUSTERS for host in hosts]
    auth = authority.issue("node", uris=uris, hosts=hosts).auth(authority.path)
    # Tests call brokers with the brokers' own certificate.
    return auth.model_copy(update={"super_admins": (f"broker:{hosts[0]}",)})
