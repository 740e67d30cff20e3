"""Delegations: a runner acts for the creator of what it has claimed, and for nobody else."""

from __future__ import annotations

import hashlib
import hmac

import pytest

from sava.security.delegation import (
    MAX_CHARACTERS,
    PERMISSIONS,
    SCHEME,
    Delegation,
    DelegationInvalid,
    is_delegation,
    issued,
    verified,
)
from sava.security.principal import Principal

ANN = Principal("user", "ann")
GIVEN = Delegation(ANN, "shout", 42)


def mac(purpose: bytes, data: bytes, secret: bytes = b"s" * 32) -> bytes:
    return hmac.digest(secret, purpose + b"/" + data, hashlib.sha256)


def check(purpose: bytes, data: bytes, given: bytes) -> bool:
    return hmac.compare_digest(mac(purpose, data), given)


class Held:
    """Which claims are held, and whose pipelines they are on."""

    def __init__(self, **claims: tuple[str, int]) -> None:
        self.claims = claims

    def __call__(self, principal: str, pipeline: str, claim: int) -> bool:
        return self.claims.get(pipeline) == (principal, claim)


def test_a_delegation_is_the_creators_while_the_claim_is_held() -> None:
    held = Held(shout=("user:ann", 42))
    token = issued(mac, GIVEN)
    assert is_delegation(token)
    assert verified(token, check, held) == GIVEN
    held.claims["shout"] = ("user:ann", 43)  # another runner has it by now
    with pytest.raises(DelegationInvalid):
        verified(token, check, held)
    held.claims["shout"] = ("user:bob", 42)  # applied by another principal
    with pytest.raises(DelegationInvalid):
        verified(token, check, held)
    held.claims.clear()
    with pytest.raises(DelegationInvalid):
        verified(token, check, held)


def test_no_changed_delegation_is_valid() -> None:
    def all_held(*_: object) -> bool:
        return True

    token = issued(mac, GIVEN)
    changed = [
        token[:place] + ("A" if token[place] != "A" else "B") + token[place + 1 :]
        for place in range(len(token))
    ]
    said, _, proof = token.removeprefix(SCHEME).partition(".")
    other = issued(mac, Delegation(Principal("user", "root"), "shout", 42))
    spliced = f"{other.rpartition('.')[0]}.{proof}"
    forged = issued(lambda purpose, data: mac(purpose, data, b"x" * 32), GIVEN)
    cut = [f"{SCHEME}{said}.", f"{SCHEME}{said}", SCHEME, f"{SCHEME}.", f"{SCHEME}{said}.{proof[:20]}"]
    odd = ["", "ey.J.x", f"{SCHEME}é.{proof}", f"{SCHEME}!!.??", SCHEME + "A" * MAX_CHARACTERS]
    for each in (*changed, spliced, forged, *cut, *odd):
        try:
            found = verified(each, check, all_held)
        except DelegationInvalid:
            continue
        # The last character of a text may stand for the same bytes as another one.
        assert found == GIVEN, each


def test_a_delegation_administers_nothing() -> None:
    assert {"lookup", "read", "produce", "consume"} == PERMISSIONS
