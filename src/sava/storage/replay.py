"""Replay: what a scan of the journal's records says of its topics.

A frame is a record batch with its broker-assigned part, or one of two notes:

    kind       payload                what it says
    BATCH      record batch           these messages are part of the topic
    RELEASED   topic id, offset       what stands before this record, below the offset, is in segments
    DISOWNED   topic id, offset       what stands before this record, from the offset on, is not history
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final

from sava.errors import CallerError
from sava.records import peek_header
from sava.storage.holdings import Holdings
from sava.storage.journal_index import JournalCorrupt
from sava.wal import LogClosed, Record

BATCH: Final = 1
RELEASED: Final = 2
DISOWNED: Final = 3

NOTE: Final = struct.Struct("<qq")


def unpack_note(payload: bytes) -> tuple[int, int]:
    """Topic id and offset of a RELEASED or DISOWNED record."""
    topic_id, offset = NOTE.unpack(payload)
    return topic_id, offset


class Replay:
    """What the recovery scan finds. Only headers are looked at: ``wal`` has checked the bytes."""

    def __init__(self, void: Sequence[tuple[int, int]] = ()) -> None:
        """``void``: from where to where the log holds frames that were never acknowledged, and are not
        history: whoever ended their life of the journal did so without them."""
        self.void = void
        self.holdings = Holdings()
        self.is_unwanted = False
        """Set by the event loop: nobody waits for the scan any more."""

    def take(self, record: Record) -> None:
        if self.is_unwanted:
            raise LogClosed("nobody waits for the journal any more")
        if record.kind == BATCH:
            if any(start <= record.position < end for start, end in self.void):
                return
            try:
                header = peek_header(record.payload)
            except CallerError as error:  # no client is to blame for what stands in our own journal
                raise JournalCorrupt(f"the frame at {record.position}: {error}") from error
            self.holdings.add(header, record.position)
            self.holdings.follow(header)
        elif record.kind == RELEASED:
            self.holdings.drop_before(*unpack_note(record.payload))
        elif record.kind == DISOWNED:
            self.holdings.drop_from(*unpack_note(record.payload))
        else:
            raise JournalCorrupt(f"the frame at {record.position} is of a kind unknown here: {record.kind}")
