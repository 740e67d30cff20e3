"""What gRPC says of connections that came to nothing, in words that name the cause."""

from __future__ import annotations

import pytest

from sava.connecting import cause_of

FAILED = "failed to connect to all addresses; last error: "
HANDSHAKE = f"{FAILED}UNKNOWN: ipv4:127.0.0.1:1: Tls handshake failed (TSI_PROTOCOL_FAILURE): SSL_ERROR_SSL: "


@pytest.mark.parametrize(
    ("details", "text", "remedy"),
    [
        pytest.param(
            f"{FAILED}UNAVAILABLE: ipv4:127.0.0.1:1: Socket closed",
            "shows no certificate",
            "SAVA_TLS_CA, SAVA_TLS_CERT and SAVA_TLS_KEY",
            id="no certificate is shown",
        ),
        pytest.param(
            f"{HANDSHAKE}error:1000007d:SSL routines:OPENSSL_internal:CERTIFICATE_VERIFY_FAILED: "
            "unable to get local issuer certificate: OK",
            "not trusted here: unable to get local issuer certificate",
            "SAVA_TLS_CA, SAVA_TLS_CERT and SAVA_TLS_KEY",
            id="another authority",
        ),
        pytest.param(
            f"{HANDSHAKE}error:100000f7:SSL routines:OPENSSL_internal:WRONG_VERSION_NUMBER: "
            "Invalid certificate verification context: OK",
            "without TLS",
            "none of SAVA_TLS_*",
            id="a broker without TLS",
        ),
        pytest.param(
            f"{FAILED}UNKNOWN: ipv4:127.0.0.1:1: Custom verification check failed with error: "
            "UNAUTHENTICATED: Hostname Verification Check failed.",
            "does not name this address",
            "an address that the certificate names",
            id="another name",
        ),
        pytest.param(
            f"{HANDSHAKE}error:1000045c:SSL routines:OPENSSL_internal:TLSV1_ALERT_CERTIFICATE_REQUIRED: OK",
            "TLS: tlsv1 alert certificate required",
            "SAVA_TLS_CERT",
            id="an alert",
        ),
        pytest.param(
            f"{FAILED}UNAVAILABLE: ipv4:127.0.0.1:1: Failed parsing HTTP/2 (Expected SETTINGS frame as the "
            "first frame, got frame type 80) (Trying to connect an http1.x server (HTTP status 405))",
            "the one for Prometheus",
            "SAVA_ADMIN",
            id="the port for metrics",
        ),
        pytest.param(
            f"{FAILED}UNAVAILABLE: ipv4:127.0.0.1:1: Failed parsing HTTP/2 (Expected SETTINGS frame as the "
            "first frame, got frame type 79)",
            "another program has this port",
            "SAVA_ADMIN",
            id="another program",
        ),
        pytest.param("Method not found!", "another port", "SAVA_SERVICE", id="the other port"),
    ],
)
def test_a_wrong_setting_is_named(details: str, text: str, remedy: str) -> None:
    cause = cause_of(details)
    assert text in cause.text
    assert remedy in cause.remedy
    assert str(cause) == f"{cause.text}; {cause.remedy}"


def test_the_port_for_prometheus_is_not_the_one_that_was_meant() -> None:
    cause = cause_of(
        f"{FAILED}UNAVAILABLE: ipv4:127.0.0.1:1: Failed parsing HTTP/2 (Expected SETTINGS frame as the first "
        "frame, got frame type 80) (Trying to connect an http1.x server (HTTP status 405))"
    )
    assert "the one for Prometheus" in cause.text
    assert "50051" in cause.remedy


@pytest.mark.parametrize(
    ("details", "text"),
    [
        (
            "errors resolving x.example:1: [field:hostname lookup error:address lookup failed for "
            "x.example:1: Domain name not found]",
            "Domain name not found",
        ),
        (f"{FAILED}UNKNOWN: ipv4:127.0.0.1:1: Failed to connect to remote host: refused", "refused"),
        ("Socket closed", "Socket closed"),  # of a connection that had come about: no matter of certificates
    ],
)
def test_other_causes_are_grpcs_last_words(details: str, text: str) -> None:
    assert str(cause_of(details)) == text


@pytest.mark.parametrize("details", [None, "", "OK", f"{FAILED}: OK"])
def test_ok_is_never_a_reason(details: str | None) -> None:
    assert "OK" not in str(cause_of(details))
    assert str(cause_of(details))
