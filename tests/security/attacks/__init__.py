"""Attacks on a cluster from outside: what a stranger or an application does that has no right to it.

Each attack is a function of a ``Target`` and of the seconds that it has; it says what was accepted. They run
in a process of their own (``python -m tests.security.attacks NAME SECONDS``, with the target on standard
input), so that their work does not slow down the client that they are to disturb.

``python -m tests.security.attack`` runs all of them against a cluster while a client publishes and consumes.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final, Literal

import msgspec

Expected = Literal["refused", "borne"]
"""``refused``: nothing of it may be accepted. ``borne``: it may be, and others are served meanwhile."""


class Target(msgspec.Struct, frozen=True):
    """Where the ports of the brokers are, one of each kind a broker, as ``host:port``."""

    client: tuple[str, ...]
    admin: tuple[str, ...]
    raft: tuple[str, ...]
    http: tuple[str, ...]
    ca: str = ""
    """A file. Empty: the ports are plain."""
    token: str = ""
    """What the attacker has: that of a principal without any role. Empty: none."""

    @property
    def ports(self) -> tuple[str, ...]:
        return (*self.client, *self.admin, *self.raft, *self.http)


class Tally(msgspec.Struct):
    """What came of an attack."""

    accepted: int = 0
    refused: int = 0
    note: str = ""

    def count(self, *, is_accepted: bool) -> None:
        if is_accepted:
            self.accepted += 1
        else:
            self.refused += 1


@dataclass(frozen=True, slots=True)
class Attack:
    name: str
    run: Callable[[Target, float], Awaitable[Tally]]
    expected: Expected
    is_of_strangers: bool = False
    """It is an attack only where callers are known: a cluster without security lets all of them do it."""

    def must_be_refused(self, *, is_secured: bool) -> bool:
        """``is_secured``: the cluster knows its callers, and the attacker has no role."""
        if is_secured and self.name.startswith("client:"):
            return True
        return self.expected == "refused" and not self.is_of_strangers


def all_attacks() -> dict[str, Attack]:
    from tests.security.attacks import broker_port, client_port, sockets

    found = (*broker_port.ATTACKS, *client_port.ATTACKS, *sockets.ATTACKS)
    return {attack.name: attack for attack in found}


CALL_S: Final = 5.0
"""For one call of an attacker."""
