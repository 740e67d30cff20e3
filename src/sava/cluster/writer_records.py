"""What the metadata store holds of writers.

/writers/{writer}   WriterRecord: the last batch that was decided
/staging/sweep      up to when staged objects are removed; a decision that looked at them before is refused
"""

from __future__ import annotations

import hashlib
import time
from typing import Final, NamedTuple

import msgspec

from sava.metadata.commands import KeyValue
from sava.topics import specs

WRITERS: Final = "/writers/"
SWEEP: Final = "/staging/sweep"
MAX_EARLIER: Final = 32
"""Runs that are remembered as fenced. One that was followed by more than so many could decide again, if it
had come exactly as far as the current one."""

MAX_RECENT: Final = 64
"""A driver that is restarted repeats its last batch."""


def writer_key(writer: str) -> str:
    return f"{WRITERS}{writer}"


class WriterRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    producer_id: int
    """Under which topics know the writer; drawn when the record is made. A writer that was forgotten and
    begins anew is another one to them, or they would take its first batches for repeated ones."""
    ordinal: int
    """Of the last decision; they are counted from 1. Batches may be numbered as the writer likes."""
    query: str
    run: str
    earlier: tuple[str, ...] = ()
    """Runs that were followed by another, the last first."""
    batch: int
    recent: tuple[int, ...] = ()
    """Batches that were decided before it, the last first. A number among them is a repeated one; one that is
    not, and smaller than the last, was never here or is long past, which is not for us to guess."""
    manifest: str
    """Key of the object that names what was decided."""
    messages: int
    decided_ms: int
    is_published: bool = False
    done: tuple[str, ...] = ()
    """Topics that have theirs of a batch that is not published everywhere. Noted when another failed, so that
    they need not remember the writer for as long as that takes."""
    error: str = ""
    """Why it is not published yet, if the last attempt has failed."""

    def has_decided(self, batch: int) -> bool:
        return batch == self.batch or batch in self.recent

    def followed_by(self, run: str) -> WriterRecord:
        if run == self.run:
            return self
        earlier = (self.run, *self.earlier)[:MAX_EARLIER]
        return msgspec.structs.replace(self, run=run, earlier=earlier)


class HeldWriter(NamedTuple):
    """A record as it was read; revision 0: there is none."""

    writer: str
    record: WriterRecord | None
    revision: int


def held(writer: str, kv: KeyValue | None) -> HeldWriter:
    """Raises RecordCorrupt."""
    return (
        HeldWriter(writer, specs.decode(kv, WriterRecord), kv.mod_revision)
        if kv is not None
        else HeldWriter(writer, None, 0)
    )


class SweepMark(NamedTuple):
    moment_ms: int
    """What was staged before, by the object store's clock, may be gone; it only grows."""
    revision: int


def swept_until(kv: KeyValue | None) -> SweepMark:
    return SweepMark(specs.decode(kv, int), kv.mod_revision) if kv is not None else SweepMark(0, 0)


def new_producer_id(writer: str, salt: str) -> int:
    """62 bits (the next one is that of chains), never 0, which is nobody."""
    digest = hashlib.blake2b(f"writer/{writer}/{salt}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 2 or 1


def now_ms() -> int:
    return time.time_ns() // 1_000_000
