"""Staged objects, as the tasks of a writer make them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import google_crc32c

from sava.proto import writers_pb2 as pb
from sava.records import Compression, RecordBatch
from sava.storage.staging import Section

_numbers = itertools.count()


def batch(
    payloads: Sequence[bytes], *, codec: Compression = Compression.NONE, **columns: object
) -> RecordBatch:
    return RecordBatch.encode(payloads, publish_time=1_000_000, codec=codec, **columns)  # type: ignore[arg-type]


def section_of(key: str, start: int, batches: Sequence[RecordBatch]) -> tuple[bytes, Section]:
    data = b"".join(each.to_bytes() for each in batches)
    largest = max(len(payload) for each in batches for payload in each.payloads())
    messages = sum(map(len, batches))
    return data, Section(key, start, start + len(data), messages, largest, google_crc32c.value(data))


def new_object(
    prefix: str, parts: Mapping[str, Sequence[RecordBatch]]
) -> tuple[str, bytes, list[tuple[str, Section]]]:
    """Its key, its bytes, and its sections with their topics."""
    key, data = f"{prefix}/task-{next(_numbers)}", b""
    sections = []
    for topic, batches in parts.items():
        added, section = section_of(key, len(data), batches)
        data += added
        sections.append((topic, section))
    return key, data, sections


def message(topic: str, section: Section) -> pb.Section:
    return pb.Section(
        topic=topic,
        key=section.key,
        start=section.start,
        end=section.end,
        messages=section.messages,
        largest=section.largest,
        crc32c=section.crc32c,
    )
