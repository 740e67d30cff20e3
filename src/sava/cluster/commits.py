"""Commits: what a writer asks for, and whether it may be decided. Pure rules; ``writers`` applies them."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import NamedTuple

from sava.cluster.errors import BatchOutOfOrder, WriterFenced, WriterReused
from sava.cluster.writer_records import MAX_RECENT, WriterRecord, new_producer_id, now_ms
from sava.storage import staging
from sava.storage.errors import StagedInvalid
from sava.storage.producers import RUN
from sava.storage.staging import Manifest, Section
from sava.topics.names import (
    MAX_NAME_BYTES,
    InvalidName,
    TopicName,
    check_name,
)


class Commit(NamedTuple):
    writer: str
    run: str
    query: str
    batch: int
    parts: Sequence[tuple[TopicName, Sequence[Section]]]


def check(commit: Commit) -> None:
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
