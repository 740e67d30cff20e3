"""The files that a secured cluster begins with: keys, tokens, a cluster's secret, an authority, certificates.

    token.key, token.pub      sign tokens; brokers need the second one alone
    cluster_secret            by which brokers know each other
    NAME.token                of a user, who sends it
    ca.key, ca.pem            an authority of the cluster's own; clients and brokers need the second one alone
    HOST.pem, HOST.key        of the broker that others reach as HOST
    NAME.pem, NAME.key        of a user, who shows it where a token is not wanted
    auth.yml                  the section ``auth`` of the brokers' settings that names all this

Every file is its owner's alone (0600), in a directory of its owner's alone (0700), and none is written over.
``sava auth bootstrap`` writes them once; ``sava up --secure`` keeps what is there and adds what is missing.
"""

from __future__ import annotations

import ipaddress
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from sava.security.certificates import SCHEME
from sava.security.credentials import token_in
from sava.security.principal import BROKER, USER, Principal
from sava.security.tokens import (
    KeysInvalid,
    create_token,
    identify_unverified,
    new_key_pair,
    new_secret,
    read_key_file,
    write_private,
)

AUTHORITY_DAYS: Final = 3650
CERTIFICATE_DAYS: Final = 825
"""The longest that common verifiers take from a certificate of a server."""
CLOCK_OFF: Final = timedelta(hours=1)
"""A certificate is valid this long before it is made: clocks of other machines are late."""
MAX_COMMON_NAME: Final = 64


class SigningAuthority:
    """Signs certificates of brokers and users. Its key is ``ca.key``, and stays where it was made."""

    def __init__(self, directory: Path) -> None:
        """That of the directory. Raises KeysInvalid."""
        self.path = directory / "ca.pem"
        try:
            self._own = x509.load_pem_x509_certificate(read_key_file(self.path))
            key = serialization.load_pem_private_key(read_key_file(directory / "ca.key"), None)
        except ValueError as error:
            raise KeysInvalid(f"the authority in {directory} cannot be used: {error}") from None
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise KeysInvalid(f"the authority in {directory} has no key of an elliptic curve")
        self._key = key

    @classmethod
    def create(cls, directory: Path, cluster_name: str) -> SigningAuthority:
        """Raises SecretExists, OSError."""
        key = ec.generate_private_key(ec.SECP256R1())
        name = _name(f"authority of {cluster_name}")
        own = (
            _builder(name, name, key, AUTHORITY_DAYS)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(signs=True), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .sign(key, hashes.SHA256())
        )
        write_private(directory / "ca.key", _pem(key))
        write_private(directory / "ca.pem", own.public_bytes(serialization.Encoding.PEM))
        return cls(directory)

    def issue_broker(self, cluster_name: str, host: str, directory: Path) -> Path:
        """Of the broker that others reach as ``host``. Raises SecretExists, OSError."""
        hosts = [host, *(["localhost"] if host == "127.0.0.1" else [])]
        return self._issue(directory, host, identity(cluster_name, BROKER, host), hosts)

    def issue_user(self, cluster_name: str, name: str, directory: Path) -> Path:
        """Raises SecretExists, OSError."""
        return self._issue(directory, name, identity(cluster_name, USER, name), ())

    def _issue(self, directory: Path, name: str, uri: str, hosts: Sequence[str]) -> Path:
        """A certificate in ``name.pem``, with its key in ``name.key``."""
        key = ec.generate_private_key(ec.SECP256R1())
        names = [*map(_host, hosts), x509.UniformResourceIdentifier(uri)]
        signed = (
            _builder(_name(name), self._own.subject, key, CERTIFICATE_DAYS)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(signs=False), critical=True)
            .add_extension(
                x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]),
                critical=False,
            )
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False
            )
            .sign(self._key, hashes.SHA256())
        )
        write_private(directory / f"{name}.key", _pem(key))
        path = directory / f"{name}.pem"
        write_private(path, signed.public_bytes(serialization.Encoding.PEM))
        return path


def identity(cluster_name: str, kind: str, name: str) -> str:
    """The URI by which a certificate says whom it is for (``security.certificates``)."""
    return f"{SCHEME}://{quote(cluster_name, safe='')}/{kind}/{quote(name, safe='')}"


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCK_OFF)
        .not_valid_after(now + timedelta(days=days))
    )


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text[:MAX_COMMON_NAME])])


def _host(text: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(text))
    except ValueError:
        return x509.DNSName(text)


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


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


# -- all together ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Provision:
    """What there is to be in a directory."""

    directory: Path
    cluster_name: str
    admin: str = "admin"
    """The first administrator, who may do everything."""
    issuer: str = "sava"
    algorithm: str = "ES256"
    ttl_s: float
    """Of tokens."""
    has_authority: bool = False
    brokers: Sequence[str] = ()
    """Hosts by which brokers are reached; each gets a certificate if there is an authority."""
    users: Sequence[str] = field(default_factory=list)
    """Beside the administrator."""

    def token_file(self, user: str) -> Path:
        return self.directory / f"{user}.token"

    @property
    def ca_file(self) -> Path:
        return self.directory / "ca.pem"

    def write(self) -> None:
        """Raises SecretExists, before anything is written if anything is there; OSError."""
        self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        private, public = new_key_pair(self.algorithm)
        write_private(self.directory / "token.key", private)
        write_private(self.directory / "token.pub", public)
        write_private(self.directory / "cluster_secret", new_secret() + b"\n")
        if self.has_authority:
            authority = SigningAuthority.create(self.directory, self.cluster_name)
            for host in self.brokers:
                authority.issue_broker(self.cluster_name, host, self.directory)
        for user in (self.admin, *self.users):
            self.write_token(user)
            if self.has_authority:
                authority.issue_user(self.cluster_name, user, self.directory)
        write_private(self.directory / "auth.yml", self.section().encode())

    def renew_tokens(self, within_s: float) -> None:
        """Make tokens again that have ended, or do soon, or are not there."""
        for user in (self.admin, *self.users):
            file = self.token_file(user)
            if file.exists() and identify_unverified(token_in(file))[1] > time.time() + within_s:
                continue
            file.unlink(missing_ok=True)
            self.write_token(user)

    def write_token(self, user: str) -> None:
        """Raises SecretExists, TokenInvalid, KeysInvalid, OSError."""
        key = read_key_file(self.directory / "token.key")
        token = create_token(self.issuer, Principal(USER, user), self.ttl_s, key, algorithm=self.algorithm)
        write_private(self.token_file(user), token.encode() + b"\n")

    def section(self) -> str:
        """The settings of brokers that name these files."""
        at = self.directory.absolute()
        tls: dict[str, Any] = {}
        if self.has_authority:
            host = self.brokers[0]
            tls = {
                "tls": {
                    "cert_file": str(at / f"{host}.pem"),
                    "key_file": str(at / f"{host}.key"),
                    "ca_file": str(at / "ca.pem"),
                }
            }
        auth = {
            **tls,
            "cluster_secret_file": str(at / "cluster_secret"),
            "tokens": [
                {
                    "issuer": self.issuer,
                    "algorithm": self.algorithm,
                    "public_key_file": str(at / "token.pub"),
                }
            ],
            "super_admins": [f"{USER}:{self.admin}"],
        }
        return yaml.safe_dump({"auth": auth}, sort_keys=False)
