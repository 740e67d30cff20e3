"""Who a certificate (X.509) is for.

Sava's identities are URIs among the subject's alternative names:

    sava://CLUSTER/broker/NODE     a broker: its node id in decimal, or the host that others reach it by
    sava://CLUSTER/user/alice      the principal user:alice; so for other kinds
    CN=alice                       user:alice, if no URI of Sava's is there

A URI of another cluster is no identity in this one, and does not leave the common name to count: the
authority that signed it has said nothing about this cluster.

Whether a certificate was signed by the right authority and is valid now, TLS has checked before anything here
is asked.
"""

from __future__ import annotations

import re
from datetime import datetime
from functools import lru_cache
from typing import Final, NamedTuple
from urllib.parse import unquote, urlsplit

from cryptography import x509
from cryptography.x509.oid import NameOID

from sava.errors import CallerError
from sava.security.principal import ANONYMOUS, BROKER, USER, Principal

SCHEME: Final = "sava"
MAX_NAME: Final = 256
_KIND: Final = re.compile(r"[a-z][a-z0-9_-]{0,31}")


class CertificateUnreadable(CallerError):
    """Bytes that are no certificate, or one whose names cannot be read."""


class CertificateIdentity(NamedTuple):
    """What one URI of Sava's says."""

    cluster: str
    kind: str
    name: str


class Certificate(NamedTuple):
    """What Sava reads of a certificate."""

    identities: tuple[CertificateIdentity, ...]
    common_name: str
    hosts: tuple[str, ...]
    """DNS names and addresses, in small letters."""
    serial: int
    not_after: datetime


@lru_cache(maxsize=1024)
def read_certificate(data: bytes) -> Certificate:
    """``data`` is one certificate in DER or PEM (of several in PEM the first). Raises
    CertificateUnreadable."""
    try:
        pem = data.lstrip().startswith(b"-----")
        found = x509.load_pem_x509_certificate(data) if pem else x509.load_der_x509_certificate(data)
        names = _alternative_names(found)
        common = found.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
        uris = names.get_values_for_type(x509.UniformResourceIdentifier) if names is not None else []
        dns = names.get_values_for_type(x509.DNSName) if names is not None else []
        addresses = names.get_values_for_type(x509.IPAddress) if names is not None else []
        identities = tuple(each for uri in uris if (each := parse_identity(uri)) is not None)
        return Certificate(
            identities,
            str(common[0].value)[:MAX_NAME] if common else "",
            (*(name.lower() for name in dns), *(str(address) for address in addresses)),
            found.serial_number,
            found.not_valid_after_utc,
        )
    except ValueError as error:
        raise CertificateUnreadable(f"the certificate cannot be read: {str(error)[:200]}") from error


def _alternative_names(found: x509.Certificate) -> x509.SubjectAlternativeName | None:
    try:
        return found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return None


def parse_identity(uri: str) -> CertificateIdentity | None:
    """None: not one of Sava's."""
    try:
        parts = urlsplit(uri)
    except ValueError:
        return None
    match parts.path.split("/"):
        case ["", kind, name] if parts.scheme == SCHEME and _KIND.fullmatch(kind):
            cluster, name = unquote(parts.netloc), unquote(name)
            if cluster and 0 < len(name) <= MAX_NAME and name.isprintable() and kind != ANONYMOUS.kind:
                return CertificateIdentity(cluster, kind, name)
    return None


def brokers_of(certificate: Certificate, cluster_name: str) -> tuple[str, ...]:
    """The brokers that a certificate is for, as it names them: by node id in decimal, or by host. Empty: it
    is no broker's of this cluster."""
    return tuple(
        identity.name
        for identity in certificate.identities
        if identity.cluster == cluster_name and identity.kind == BROKER
    )


def principal_of(certificate: Certificate, cluster_name: str) -> Principal | None:
    """Who a caller with this certificate is; None: no one in this cluster."""
    for identity in certificate.identities:
        if identity.cluster == cluster_name:
            return Principal(identity.kind, identity.name)
    if certificate.identities or not certificate.common_name:
        return None
    return Principal(USER, certificate.common_name)
