"""Whom a certificate names."""

from __future__ import annotations

from pathlib import Path

import pytest

from sava.security.certificates import (
    Certificate,
    CertificateIdentity,
    CertificateUnreadable,
    brokers_of,
    parse_identity,
    principal_of,
    read_certificate,
)
from sava.security.principal import Principal
from tests.support.certificates import Authority


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def read(authority: Authority, *uris: str, common_name: str = "") -> Certificate:
    return read_certificate(authority.issue("x", uris=uris, common_name=common_name).cert.read_bytes())


def test_a_brokers_certificate_names_its_node_and_its_hosts(authority: Authority) -> None:
    issued = authority.issue("x", uris=["sava://c/broker/17"], hosts=["Broker-1.Example", "::1", "10.0.0.1"])
    found = read_certificate(issued.cert.read_bytes())
    assert brokers_of(found, "c") == ("17",)
    assert brokers_of(found, "other") == ()
    assert found.hosts == ("broker-1.example", "::1", "10.0.0.1")
    assert principal_of(found, "c") == Principal("broker", "17")
    assert found.serial > 0


def test_der_and_pem_say_the_same(authority: Authority) -> None:
    from cryptography import x509
    from cryptography.hazmat.primitives.serialization import Encoding

    pem = authority.issue("x", uris=["sava://c/user/alice"]).cert.read_bytes()
    der = x509.load_pem_x509_certificate(pem).public_bytes(Encoding.DER)
    assert read_certificate(der) == read_certificate(pem)
    assert principal_of(read_certificate(der), "c") == Principal("user", "alice")


def test_a_common_name_is_a_user_and_never_a_broker(authority: Authority) -> None:
    found = read(authority, common_name="broker/17")
    assert principal_of(found, "c") == Principal("user", "broker/17")
    assert brokers_of(found, "c") == ()
    assert principal_of(read(authority), "c") is None


def test_an_identity_of_another_cluster_is_none_here(authority: Authority) -> None:
    found = read(authority, "sava://other/user/admin", common_name="admin")
    assert principal_of(found, "c") is None
    assert brokers_of(read(authority, "sava://other/broker/1"), "c") == ()


@pytest.mark.parametrize(
    ("uri", "expected"),
    [
        ("sava://c/broker/1", CertificateIdentity("c", "broker", "1")),
        ("sava://c/user/with%20space", CertificateIdentity("c", "user", "with space")),
        ("sava://c%20d/user/x", CertificateIdentity("c d", "user", "x")),
        ("sava://c/anonymous/anonymous", None),
        ("sava://c/user/", None),
        ("sava://c/user/a/b", None),
        ("sava:///user/a", None),
        ("sava://c/Broker/1", None),
        ("sava://c/user/%0a", None),
        ("sava://c/user/" + "a" * 257, None),
        ("https://c/broker/1", None),
        ("sava://[c/broker/1", None),
        ("", None),
    ],
)
def test_which_uris_are_identities(uri: str, expected: CertificateIdentity | None) -> None:
    assert parse_identity(uri) == expected


def test_what_is_no_certificate_is_said_to_be_none() -> None:
    for data in (b"", b"x" * 100, b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"):
        with pytest.raises(CertificateUnreadable):
            read_certificate(data)
