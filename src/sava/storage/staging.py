"""Staging: messages that wait in the object store for the decision to publish them.

Each task that has a part of a batch puts it into an object of its own, as record batches end to end, in
sections: one for each topic. Until a decision names them (``sava.cluster.writers``) they are nothing: no
broker reads them, and after a while they are swept away.

    staging/parts/{writer}/…                            the rest of the key is the writer's choice
    staging/manifests/{writer}/{ordinal}-{suffix}.json  what a decision is about, put before it is made

A manifest is an object and not a part of the decision because it grows with the batch: thousands of tasks
with a section for each of hundreds of partitions, against a metadata store that keeps everything in memory.

**Reading.** A section may be larger than memory, so it is read in pieces and its batches are given out one by
one. Each batch has a checksum of its own. That of the section, and the number of its messages, are known to
be right before the last batch leaves: a section that is read in one piece is checked before anything of it
is published.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from typing import Final

import google_crc32c
import msgspec

from sava.errors import CallerError
from sava.records import HEADER_BYTES, MAX_COUNT, RecordBatch, peek_header
from sava.storage.errors import ObjectTruncated, StagedInvalid
from sava.storage.objectstore import ObjectInfo, ObjectStore

PREFIX: Final = "staging"
PIECE_BYTES: Final = 8 << 20
"""Read at once. A batch that is larger is read whole."""
SIDE_BY_SIDE: Final = 16
"""Small sections that are fetched together: a store is far away, and a batch of a thousand tasks has a
thousand of them."""
FRAME_BYTES: Final = 8 << 20
"""Of bodies that are joined. What is for one topic and not larger is one frame of the journal: on disk it is
there or not, whatever happens."""
MAX_KEY_BYTES: Final = 1024


class Section(msgspec.Struct, frozen=True, array_like=True):
    """Messages for one topic in a staged object."""

    key: str
    start: int
    end: int
    messages: int
    largest: int
    """Bytes of the largest payload."""
    crc32c: int


class Part(msgspec.Struct, frozen=True, array_like=True):
    """What a batch has for one topic, in the order in which it is published."""

    topic: str
    topic_id: int
    """Which topic of this name: one that is created later has no part in the batch."""
    sections: tuple[Section, ...]

    @property
    def messages(self) -> int:
        return sum(section.messages for section in self.sections)


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What a decision is about."""

    writer: str
    batch: int
    parts: tuple[Part, ...]

    @property
    def keys(self) -> list[str]:
        """Of the staged objects."""
        return list(dict.fromkeys(section.key for part in self.parts for section in part.sections))


# -- keys --------------------------------------------------------------------------------------


def parts_prefix(writer: str) -> str:
    return f"{PREFIX}/parts/{writer}"


def manifest_key(writer: str, ordinal: int, suffix: str) -> str:
    return f"{PREFIX}/manifests/{writer}/{ordinal:020}-{suffix}.json"


def check_section(writer: str, section: Section) -> None:
    """Raise StagedInvalid unless it can be what it says. A key that leads out of the writer's own place would
    let a writer publish, and remove, any object of the store."""
    prefix = f"{parts_prefix(writer)}/"
    names = section.key.removeprefix(prefix).split("/")
    is_own = section.key.startswith(prefix) and not {"", ".", ".."}.intersection(names)
    if not is_own or len(section.key.encode()) > MAX_KEY_BYTES or not section.key.isprintable():
        raise StagedInvalid(
            f"the object {section.key[:200]!a} is not below {prefix}, where writer {writer} stages"
        )
    if not 0 <= section.start < section.end or section.messages < 1 or section.largest < 0:
        raise StagedInvalid(
            f"a section of {section.key}: bytes {section.start}..{section.end}, {section.messages} messages"
        )


# -- manifests ---------------------------------------------------------------------------------


async def put_manifest(store: ObjectStore, key: str, manifest: Manifest) -> None:
    await store.put_new(key, msgspec.json.encode(manifest))


async def get_manifest(store: ObjectStore, key: str) -> Manifest:
    """Raises ObjectMissing, StagedInvalid."""
    data = await store.get(key)
    try:
        return msgspec.json.decode(data, type=Manifest)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise StagedInvalid(f"the manifest {key} cannot be read: {error}") from error


async def list_staged(store: ObjectStore) -> list[ObjectInfo]:
    """Everything, manifests included."""
    return [info async for info in store.list(PREFIX)]


async def store_time_ms(store: ObjectStore) -> int:
    """What the store's own clock says: the age of objects by a broker's would be wrong by the difference."""
    key = f"{PREFIX}/clock/{secrets.token_hex(8)}"
    await store.put_new(key, b"what time is it?")
    try:
        return (await store.head(key)).modified_ms
    finally:
        await store.delete([key])


# -- reading -----------------------------------------------------------------------------------


async def read_frames(
    store: ObjectStore, sections: Sequence[Section], *, skip: int = 0
) -> AsyncGenerator[list[RecordBatch], None]:
    """The batches of the sections but for the first ``skip`` messages, in groups that fit into one frame; at
    least one in each. Nothing is verified but the sections. ``skip`` ends where a batch ends: frames are made
    of whole ones. Raises StagedInvalid, ObjectMissing."""
    group: list[RecordBatch] = []
    size = count = 0
    async with aclosing(read_batches(store, sections, skip=skip)) as batches:
        async for batch in batches:
            header = batch.header
            if group and (size + header.body_size > FRAME_BYTES or count + header.count > MAX_COUNT):
                yield group
                group, size, count = [], 0, 0
            group.append(batch)
            size += header.body_size
            count += header.count
    if group:
        yield group


async def read_batches(
    store: ObjectStore, sections: Sequence[Section], *, skip: int = 0
) -> AsyncGenerator[RecordBatch, None]:
    """As ``read_frames``, one by one."""
    for near in _side_by_side(sections):
        wanted = []
        for section in near:
            is_done = skip >= section.messages
            if is_done:
                skip -= section.messages
            else:
                wanted.append(section)
        firsts = await asyncio.gather(*(_read(store, each, each.start) for each in wanted))
        for section, first in zip(wanted, firsts, strict=True):
            async with aclosing(_read_section(store, section, first)) as batches:
                async for batch in batches:
                    if skip <= 0:
                        yield batch
                        continue
                    skip -= len(batch)
                    if skip < 0:
                        raise StagedInvalid(f"batches of {section.key} are not cut as they were before")


def _side_by_side(sections: Sequence[Section]) -> Iterator[list[Section]]:
    """Groups to be fetched at once: together no more than a piece, or one alone."""
    near: list[Section] = []
    size = 0
    for section in sections:
        if near and (size + section.end - section.start > PIECE_BYTES or len(near) == SIDE_BY_SIDE):
            yield near
            near, size = [], 0
        near.append(section)
        size += section.end - section.start
    if near:
        yield near


async def _read_section(
    store: ObjectStore, section: Section, piece: bytes
) -> AsyncGenerator[RecordBatch, None]:
    """Its batches, from the first piece on. Checksum and number of messages are right when the last comes."""
    position, held, crc, messages = section.start, b"", 0, 0
    while True:
        position += len(piece)
        crc = google_crc32c.extend(crc, piece)
        batches, held = _cut(section, held + piece if held else piece)
        messages += sum(len(batch) for batch in batches)
        if position == section.end:
            _check(section, crc, messages, left=len(held))
        for batch in batches:
            yield batch
        if position == section.end:
            return
        piece = await _read(store, section, position, _missing(section, held))


async def _read(store: ObjectStore, section: Section, start: int, least: int = 0) -> bytes:
    end = min(section.end, start + max(PIECE_BYTES, least))
    try:
        return await store.get_range(section.key, start, end)
    except ObjectTruncated as error:
        raise StagedInvalid(str(error)) from error


def _missing(section: Section, held: bytes) -> int:
    """Bytes that the batch which ``held`` begins with lacks, as far as that is known."""
    return _length(section, held) - len(held) if len(held) >= HEADER_BYTES else 0


def _length(section: Section, data: bytes, position: int = 0) -> int:
    try:
        return peek_header(data, position).length
    except CallerError as error:
        raise StagedInvalid(f"bytes of {section.key} are no record batch: {error}") from error


def _cut(section: Section, data: bytes) -> tuple[list[RecordBatch], bytes]:
    """The batches that are there as a whole, and the beginning of the next."""
    batches, position, view = [], 0, memoryview(data)
    while len(data) - position >= HEADER_BYTES:
        length = _length(section, data, position)
        if position + length > len(data):
            break
        batches.append(RecordBatch.parse(view[position : position + length]))
        position += length
    return batches, data[position:]


def _check(section: Section, crc: int, messages: int, *, left: int) -> None:
    if crc != section.crc32c:
        raise StagedInvalid(f"bytes {section.start}..{section.end} of {section.key} are not those staged")
    if left or messages != section.messages:
        raise StagedInvalid(
            f"bytes {section.start}..{section.end} of {section.key} hold {messages} messages and {left} "
            f"bytes more; {section.messages} messages were announced"
        )
