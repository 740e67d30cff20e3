"""History: where the messages of a range are, as brokers describe it.

Descriptors of segments are kept: a query that is far behind needs thousands of them, a few for each batch.
One that became wrong (retention deletes objects) is noticed by whoever reads, who then asks the owner.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Final, NamedTuple
from urllib.parse import urlsplit

from sava.pipeline.link import Link
from sava.pipeline.positions import Part
from sava.pipeline.source.filters import Bounds
from sava.pipeline.source.planning import Piece
from sava.proto import streams_pb2 as pb
from sava.storage.keys import parse_object_key
from sava.storage.types import Segment

KEPT_S: Final = 30.0
MESSAGE_BYTES: Final = 256.0
"""Of messages that nothing is known of."""
SAMPLE: Final = 100


class _Known(NamedTuple):
    segments: tuple[Segment, ...]
    start: int
    """From where on they are all known."""
    stored: int
    asked_at: float


class History:
    """Of one query, on the driver."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._known: dict[str, _Known] = {}
        self._message_bytes: dict[str, float] = {}
        self.store_url = ""

    def pieces(
        self,
        part: Part,
        name: str,
        start: int,
        end: int,
        *,
        stored: int | None = None,
        times: Bounds | None = None,
    ) -> list[Piece]:
        """The range without a gap, but for segments that hold nothing within ``times``. ``stored``: end of
        what is in segments, when it is known."""
        segments = () if stored is not None and stored <= start else self._segments(name, start, end, stored)
        return list(self._cover(part, name, start, end, segments, times))

    def _cover(
        self, part: Part, name: str, start: int, end: int, segments: tuple[Segment, ...], times: Bounds | None
    ) -> Iterator[Piece]:
        at = start
        for segment in segments:
            if segment.end <= at:
                continue
            if segment.start >= end:
                break
            if segment.start > at:
                yield Piece(part, name, at, segment.start, None, self._guess(name))
                at = segment.start
            stop = min(segment.end, end)
            message_bytes = segment.size / (segment.end - segment.start)
            self._message_bytes[name] = message_bytes
            if times is None or (
                segment.max_publish_time >= times.start and segment.min_publish_time < times.end
            ):
                yield Piece(part, name, at, stop, segment, message_bytes)
            at = stop
        if at < end:
            yield Piece(part, name, at, end, None, self._guess(name))

    def message_bytes(self, name: str, start: int, end: int, *, stored: int) -> float:
        """About how large the messages are that come next: in segments as they are there, compressed. Asks
        for some if none has been seen yet."""
        for segment in self._segments(name, start, min(end, stored), stored) if start < stored else ():
            if segment.start <= start < segment.end:
                return segment.size / (segment.end - segment.start)
        if name not in self._message_bytes:
            for batch in self._link.read(name, start, min(start + SAMPLE, end)):
                self._message_bytes[name] = batch.header.length / len(batch)
                break
        return self._guess(name)

    def _guess(self, name: str) -> float:
        return self._message_bytes.get(name, MESSAGE_BYTES)

    def _segments(self, name: str, start: int, end: int, stored: int | None) -> tuple[Segment, ...]:
        known = self._known.get(name)
        if (
            known is None
            or not known.start <= start
            or (end > known.stored and stored != known.stored)
            or time.monotonic() > known.asked_at + KEPT_S
        ):
            response = self._link.segments(name, start)
            self.store_url = response.store_url
            known = _Known(
                # What a broker keeps in its memory only the broker can read.
                ()
                if urlsplit(response.store_url).scheme == "memory"
                else tuple(map(_segment, response.segments)),
                start,
                response.stored_offset,
                time.monotonic(),
            )
            self._known[name] = known
        return known.segments


def _segment(described: pb.Segment) -> Segment:
    name = parse_object_key(described.key)
    return Segment(
        # An object of another name is found out by the check of its footer.
        topic_id=name.topic.topic_id if name is not None else 0,
        start=described.start_offset,
        end=described.end_offset,
        epoch=described.epoch,
        key=described.key,
        size=described.size,
        crc32c=described.crc32c,
        footer_size=described.footer_size,
        footer_crc32c=described.footer_crc32c,
        min_publish_time=described.min_publish_time,
        max_publish_time=described.max_publish_time,
        created_ms=described.created_ms,
    )
