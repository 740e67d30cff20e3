"""Delegation: a runner acts for the creator of a pipeline that it has claimed.

The broker that grants a claim makes a token that says *which principal, by which claim on which pipeline*,
under a MAC by the cluster's secret. The runner shows it as a bearer token with what it does for that
pipeline, and every broker of the cluster can check it. It is valid as long as the claim is held: a broker
that checks it looks at the claim in its copy of the metadata, so a token needs no end of its own, ends with
the runner's lease, and cannot outlive the pipeline or a change of its creator.

A delegation is good for PERMISSIONS alone, however many the creator has: a pipeline reads and writes topics,
and administers nothing.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Callable
from typing import Final, NamedTuple

from sava.errors import CallerError
from sava.security.principal import Principal

SCHEME: Final = "sava-delegation."
"""Begins such a token, so that none is ever looked at as a JWT, which begins otherwise."""
PERMISSIONS: Final = frozenset({"lookup", "read", "produce", "consume"})
PURPOSE: Final = b"pipeline-delegation"
MAX_CHARACTERS: Final = 2048


class DelegationInvalid(CallerError):
    """A token of this kind that is not valid, or not any more. The text does not say which."""

    def __init__(self) -> None:
        super().__init__("the delegation is not valid, or the claim that it was made for has ended")


Mac = Callable[[bytes, bytes], bytes]
"""``ClusterSecret.mac``: of a purpose and data."""
CheckMac = Callable[[bytes, bytes, bytes], bool]
"""``ClusterSecret.verify``: whether the last is the MAC of the others."""
IsDelegated = Callable[[str, str, int], bool]
"""``Pipelines.is_delegated``: whether this principal's pipeline is held by this claim now."""


class Delegation(NamedTuple):
    principal: Principal
    """The creator, who is answerable for what the pipeline does."""
    pipeline: str
    claim: int


def is_delegation(token: str) -> bool:
    """Whether the bearer token is to be checked by ``verified``."""
    return token.startswith(SCHEME)


def issued(mac: Mac, delegation: Delegation) -> str:
    """Raises what ``mac`` raises."""
    said = json.dumps([str(delegation.principal), delegation.pipeline, delegation.claim]).encode()
    return f"{SCHEME}{_text(said)}.{_text(mac(PURPOSE, said))}"


def verified(token: str, check: CheckMac, is_delegated: IsDelegated) -> Delegation:
    """Nothing of the token is parsed before its MAC is right. Raises DelegationInvalid."""
    if not is_delegation(token) or len(token) > MAX_CHARACTERS or not token.isascii():
        raise DelegationInvalid
    said_text, _, mac_text = token.removeprefix(SCHEME).partition(".")
    try:
        said, mac = _bytes(said_text), _bytes(mac_text)
    except (binascii.Error, ValueError):
        raise DelegationInvalid from None
    if not check(PURPOSE, said, mac):
        raise DelegationInvalid
    principal, pipeline, claim = json.loads(said)
    if not is_delegated(principal, pipeline, claim):
        raise DelegationInvalid
    return Delegation(Principal.parse(principal), pipeline, claim)


def _text(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


def _bytes(text: str) -> bytes:
    return base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
