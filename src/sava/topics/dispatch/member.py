"""Member: a consumer as dispatch sees it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from sava.topics.dispatch.keys import KeyFilter
from sava.topics.ranges import IntervalSet

QUEUE_BYTES: Final = 4 << 20
"""Sent to a consumer's queue and not fetched from it. Credits count messages, and a thousand of them may be a
gigabyte; this bounds what a consumer holds that stopped reading."""


@dataclass(slots=True, eq=False)
class DispatchMember:
    """One for each attachment: a consumer that comes back under its name is another member."""

    name: str
    key_filter: KeyFilter = field(default_factory=KeyFilter)
    credits: int = 0
    """Messages that may still be sent."""
    queued_bytes: int = 0
    is_stalled: bool = False
    """Left messages in its queue for longer than the ack timeout. Gets nothing until it fetches again."""
    again: IntervalSet = field(default_factory=IntervalSet)
    """Key-shared: redeliveries that only this member may get, now."""
    ahead: IntervalSet = field(default_factory=IntervalSet)
    """Key-shared: messages never sent that only this member may get, passed over for want of credits."""

    @property
    def has_room(self) -> bool:
        return self.credits > 0 and not self.is_stalled and self.queued_bytes < QUEUE_BYTES
