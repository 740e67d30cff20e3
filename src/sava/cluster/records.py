"""What the metadata store holds of brokers.

/cluster/register/{broker}    Registration, under the broker's lease: there as long as the broker is
/cluster/state/{broker}       BrokerMode; absent: active
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

import msgspec

CLUSTER: Final = "/cluster/"
REGISTRATIONS: Final = "/cluster/register/"
MODES: Final = "/cluster/state/"


def registration_key(broker: int) -> str:
    return f"{REGISTRATIONS}{broker}"


def mode_key(broker: int) -> str:
    return f"{MODES}{broker}"


class Registration(msgspec.Struct, frozen=True, kw_only=True):
    """A broker that is there. Its incarnation is its lease, a new one for each life."""

    broker: int
    incarnation: int
    client: str
    """host:port of each port, as others reach it."""
    admin: str
    raft: str
    http: str
    store_id: str
    """Which object store its segments are in. Brokers with different ones cannot read each other's topics."""
    storage_id: str = ""
    """The disk that its journal is on, and the copies that it keeps of others' journals."""
    rack: str = ""
    """What it shares with others that may fail together with it; empty: nothing that is known."""
    is_tls: bool = False
    version: str = ""
    started_ms: int = 0
    is_leaving: bool = False
    """It was asked to stop: its topics go to others, it gets none, and owners choose other mirrors. Part of
    the registration and not of the mode, for it ends with this life."""


class Mode(StrEnum):
    ACTIVE = "active"
    DRAINING = "draining"
    """Its topics go to others, and it gets no new ones."""
    DRAINED = "drained"
    """It has no topics, and gets none."""


class BrokerMode(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    mode: Mode = Mode.ACTIVE
    reason: str = ""
    parallel: int = 8
    """Of a drain: how many topics move at a time."""
    timeout_ms: int = 300_000
    """Of a drain: after so long no more moves are begun. It stays draining."""
    include: tuple[str, ...] = ()
    """Of a drain: namespaces; empty: all."""
    exclude: tuple[str, ...] = ()
    since_ms: int = 0

    def takes(self, namespace: str) -> bool:
        """Whether the drain is about this namespace."""
        return namespace not in self.exclude and (not self.include or namespace in self.include)
