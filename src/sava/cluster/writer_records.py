"""Writer records: what the metadata store holds of writers, and the pure rules by which a batch may be
decided. ``writers`` applies them.

/writers/{writer}   WriterRecord: the last batch that was decided
/staging/sweep      up to when staged objects are removed; a decision that looked at them before is refused
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec

from sava.errors import CallerError, HostError, Outcome, RetryableError, cut
from sava.metadata.commands import KeyValue
from sava.storage import staging
from sava.storage.errors import StagedInvalid
from sava.storage.producers import RUN
from sava.storage.staging import Manifest, Section
from sava.topics import specs
from sava.topics.names import (
    MAX_NAME_BYTES,
    InvalidName,
    TopicName,
    check_name,
)

WRITERS: Final = "/writers/"
SWEEP: Final = "/staging/sweep"
MAX_EARLIER: Final = 32
"""Runs that are remembered as fenced. One that was followed by more than this could decide again, if it
had come exactly as far as the current one."""

MAX_RECENT: Final = 64
"""A driver that is restarted repeats its last batch."""


def writer_key(writer: str) -> str:
    return f"{WRITERS}{writer}"


class WriterRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    producer_id: int
    """Under which topics know the writer; drawn when the record is made. A writer that was forgotten and
    begins again is another one to them, or they would take its first batches for repeated ones."""
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


class SweepMark(NamedTuple):
    moment_ms: int
    """What was staged before, by the object store's clock, may be gone; it only grows."""
    revision: int


def swept_until(kv: KeyValue | None) -> SweepMark:
    return SweepMark(specs.decode(kv, int), kv.mod_revision) if kv is not None else SweepMark(0, 0)


def new_producer_id(writer: str, salt: str) -> int:
    """62 bits (the next one is that of sources), never 0, which is no producer."""
    digest = hashlib.blake2b(f"writer/{writer}/{salt}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 2 or 1


def now_ms() -> int:
    return time.time_ns() // 1_000_000


# -- what writers are refused, by whose fault it is -------------------------------------------


class WriterUnknown(CallerError):
    def __init__(self, writer: str) -> None:
        super().__init__(f"there is no writer {cut(writer)}; `sava writers list` shows those that are known")
        self.writer = writer


class WriterFenced(CallerError):
    """Another run of the same writer has taken over."""

    def __init__(self, writer: str, run: str, current: str) -> None:
        super().__init__(
            f"writer {writer}: run {run} is fenced, run {current} has followed it; two programs write as the "
            "same writer, and the earlier one must stop"
        )
        self.writer, self.run, self.current = writer, run, current


class WriterReused(CallerError):
    """The writer has published further in the name of another query."""

    def __init__(self, writer: str, *, query: str, batch: int, known_query: str, known_batch: int) -> None:
        super().__init__(
            f"writer {writer} has published up to batch {known_batch} of query {known_query or 'none'}, and "
            f"this is batch {batch} of query {query or 'none'}: taken for a repeated one, it would be lost. "
            "If the query was started again, choose another writer id, or forget this one with "
            f"`sava writers forget {writer}`"
        )
        self.writer = writer


class BatchOutOfOrder(CallerError):
    """A batch that was never decided comes behind one with a greater number."""

    def __init__(self, writer: str, batch: int, last: int) -> None:
        super().__init__(
            f"writer {writer}: batch {batch} is not one of those that are remembered as published, and batch "
            f"{last} is: taken for a repeated one, it might be lost. The numbers of a writer's batches must "
            "grow; write it as another writer"
        )
        self.writer, self.batch, self.last = writer, batch, last


class WriterBusy(RetryableError):
    """A batch of the writer is decided and not published yet."""

    def __init__(self, writer: str, batch: int, error: str) -> None:
        why = f" ({error})" if error else ""
        super().__init__(
            f"batch {batch} of writer {writer} is being published{why}; with --force the writer is forgotten "
            "all the same, and what is not published of the batch by then never will be"
        )
        self.writer, self.batch = writer, batch


class StagedLost(HostError):
    """A batch was decided, and what it consists of is not there any more: it was removed."""

    outcome = Outcome.PARTLY


# -- what a writer asks for, and whether it may be decided ------------------------------------


class Commit(NamedTuple):
    writer: str
    run: str
    query: str
    batch: int
    parts: Sequence[tuple[TopicName, Sequence[Section]]]


def check_commit(commit: Commit) -> None:
    """Raise unless the request makes sense by itself."""
    check_name(commit.writer, "writer")
    if not commit.run:
        raise InvalidName(f"a commit of writer {commit.writer} does not say which run it is of")
    for what, name in (("run", commit.run), ("query", commit.query)):
        if len(name.encode()) > MAX_NAME_BYTES:
            raise InvalidName(f"{what} {name[:20]!a}… is longer than {MAX_NAME_BYTES} bytes")
    for topic, sections in commit.parts:
        for section in sections:
            staging.check_section(commit.writer, section)
        messages = sum(section.messages for section in sections)
        if messages >= RUN:
            raise StagedInvalid(f"{messages} messages for topic {topic} in one batch; {RUN - 1} are possible")


def check_run(record: WriterRecord, commit: Commit) -> None:
    if commit.run in record.earlier:
        raise WriterFenced(commit.writer, commit.run, record.run)


def check_repeated(record: WriterRecord, commit: Commit) -> None:
    """Raise unless it is certain that the batch was decided before."""
    if commit.query != record.query:
        raise WriterReused(
            commit.writer,
            query=commit.query,
            batch=commit.batch,
            known_query=record.query,
            known_batch=record.batch,
        )
    if not record.has_decided(commit.batch):
        raise BatchOutOfOrder(commit.writer, commit.batch, record.batch)


def next_record(commit: Commit, before: WriterRecord | None, manifest: Manifest) -> WriterRecord:
    ordinal = before.ordinal + 1 if before is not None else 1
    suffix = secrets.token_hex(8)
    return WriterRecord(
        producer_id=before.producer_id if before is not None else new_producer_id(commit.writer, suffix),
        ordinal=ordinal,
        query=commit.query,
        run=commit.run,
        earlier=before.followed_by(commit.run).earlier if before is not None else (),
        batch=commit.batch,
        recent=(before.batch, *before.recent)[:MAX_RECENT] if before is not None else (),
        manifest=staging.manifest_key(commit.writer, ordinal, suffix),
        messages=sum(part.messages for part in manifest.parts),
        decided_ms=now_ms(),
    )
