"""Why a call came to nothing, from the only thing that gRPC tells about it: a text for people.

Texts are no contract, and nothing but other texts depends on what is recognised here: a cause that gRPC words
otherwise one day is shown in gRPC's words. What must be named is a fault of TLS. The broker runs, so a user
who reads "cannot be reached" looks in the wrong place; and gRPC ends the text of a failed handshake with
"OK", the status of a check that was not the one that failed."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

_SHOW: Final = (
    "name the authority of its cluster, and the client's own certificate if brokers want one: SAVA_TLS_CA, "
    "SAVA_TLS_CERT and SAVA_TLS_KEY of a command, tls=Tls(...) of a client, and https:// in the address"
)
_PLAIN: Final = "do without TLS: none of SAVA_TLS_*, no tls=Tls(...), and http:// in the address"
_NAME: Final = "use an address that the certificate names, or give the broker one that names this address"

_PORT: Final = (
    "name an admin port (50051 by default; --admin or SAVA_ADMIN) to commands that manage, and a client port "
    "(6650 by default; --service or SAVA_SERVICE) to those that produce and consume, and to clients"
)

_BROKEN_OFF: Final = re.compile(r"failed to connect.*: (Socket closed|.*Connection reset by peer)$")
_HANDSHAKE: Final = re.compile(r"OPENSSL_internal:(?P<fault>\w+)(?:: (?P<detail>.+))?$")
_HTTP_1: Final = "http1.x server"
_NOT_HTTP_2: Final = "Failed parsing HTTP/2"
_MISNAMED: Final = "Hostname Verification Check failed"
_UNKNOWN_CALL: Final = "Method not found"


@dataclass(frozen=True, slots=True)
class Cause:
    text: str
    remedy: str = ""
    """What to do about it; empty if that does not follow from the cause."""

    def __str__(self) -> str:
        return f"{self.text}; {self.remedy}" if self.remedy else self.text


def cause_of(details: str | None) -> Cause:
    """Of a call that no broker answered. gRPC's texts are long and repeat themselves; the last part names the
    cause."""
    said = re.sub(r"(^|: )OK$", "", (details or "").strip())
    if _BROKEN_OFF.search(said):
        # A broker tells strangers nothing, not even that it wants TLS.
        return Cause(
            "it breaks connections off at once, as a broker with TLS does to a client that shows no "
            "certificate signed by its authority",
            _SHOW,
        )
    if found := _HANDSHAKE.search(said):
        return _handshake(found["fault"], found["detail"] or "")
    if _MISNAMED in said:
        return Cause("TLS: its certificate does not name this address", _NAME)
    if _HTTP_1 in said:
        return Cause("it speaks HTTP/1.1, as no port of a broker does but the one for Prometheus", _PORT)
    if _NOT_HTTP_2 in said:
        return Cause("another program has this port: it does not speak HTTP/2", _PORT)
    if _UNKNOWN_CALL in said:
        return Cause("it knows no such call: it is another port, or a broker of another version", _PORT)
    return Cause(said.rsplit(": ", 1)[-1].rstrip("]") or "gRPC does not say why")


def _handshake(fault: str, detail: str) -> Cause:
    match fault:
        case "WRONG_VERSION_NUMBER":
            return Cause("TLS: it speaks without TLS", _PLAIN)
        case "CERTIFICATE_VERIFY_FAILED":
            return Cause(f"TLS: its certificate is not trusted here: {detail or 'not verified'}", _SHOW)
        case _:
            return Cause(f"TLS: {fault.replace('_', ' ').lower()}", _SHOW)
