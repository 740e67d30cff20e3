"""What the simulated metadata store holds beside ledgers."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from sava.ledger.protocol.record import LedgerId, StorageId
from tests.mirror_sim.store import Key


class TopicState(StrEnum):
    ASSIGNED = "assigned"
    ORPHAN = "orphan"
    SEALED = "sealed"


class TopicRecord(NamedTuple):
    state: TopicState = TopicState.SEALED
    epoch: int = 0
    ledger: LedgerId | None = None
    """Of the owner, and after it the one that holds the tail."""
    end: int = 0
    """Registered segments hold all before it."""
    segments: tuple[str, ...] = ()
    cursor: int = 0


class Registration(NamedTuple):
    storage: StorageId
    life: int
    incarnation: int
    """The last that a ledger of this broker had; never used again, also when its record is gone."""


def journal_key(ledger: LedgerId) -> Key:
    return ("ledger", ledger)


def topic_key(topic: int) -> Key:
    return ("topic", topic)


def broker_key(broker: int) -> Key:
    return ("broker", broker)
