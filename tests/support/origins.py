"""What the stories about chains share: sources in other clusters, and stretches of what they hold.

A source is a list of messages, each with the place where it was published: the source itself, or another one
whose copy it is. The payload names that place, so what is found in a topic tells what it is a copy of.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from sava.records import Message, Origin, RecordBatch
from sava.storage.source_positions import ORIGIN_TOPIC, PATH, origin_topic
from sava.topics.ranges import runs
from sava.topics.source_copier import Source, SourceRange


class Copy(NamedTuple):
    """A message at a source."""

    cluster: str
    topic_id: int
    offset: int
    """There, where it was published."""
    path: tuple[str, ...]
    """The clusters that it has been in, the source's included."""
    cluster_id: str = ""

    @property
    def payload(self) -> bytes:
        return f"{self.cluster}/{self.topic_id}/{self.offset}".encode()

    def message(self, size: int = 0) -> Message:
        attributes = {PATH: ",".join(self.path), ORIGIN_TOPIC: origin_topic(self.cluster_id, self.topic_id)}
        payload = self.payload + b" " * size
        return Message(payload, None, attributes, 1, origin=Origin(self.cluster, self.offset))


class Origins:
    """What one partition of another cluster holds; None: a message that is not to be copied."""

    def __init__(self, cluster: str, topic_id: int = 7, *, cluster_id: str = "") -> None:
        self.source = Source(cluster, cluster_id or f"id-of-{cluster}", "/default/orders", topic_id)
        self.held: list[Copy | None] = []

    def publish(self, count: int, *, skip: Iterable[int] = ()) -> Origins:
        """Messages of its own; those at these offsets are not to be copied."""
        skipped = set(skip)
        for offset in range(len(self.held), len(self.held) + count):
            cluster, cluster_id, _, topic_id = self.source
            mine = Copy(cluster, topic_id, offset, (cluster,), cluster_id)
            self.held.append(None if offset in skipped else mine)
        return self

    def relay(
        self, other: Origins, start: int = 0, end: int | None = None, *, skip: Iterable[int] = ()
    ) -> Origins:
        """Copies of what another source has to be copied; those of the other's at these offsets are not for
        this one."""
        skipped = set(skip)
        for offset, copy in enumerate(other.held[start:end], start):
            if copy is not None and offset not in skipped:
                self.held.append(copy._replace(path=(*copy.path, self.source.cluster)))
        return self

    def stretch(
        self, start: int, end: int, *, begin: bool = False, batches: int = 1, size: int = 0
    ) -> SourceRange:
        """As whoever copies would send it; payloads are longer by ``size``."""
        offsets = [offset for offset in range(start, end) if self.held[offset] is not None]
        messages = [copy.message(size) for offset in offsets if (copy := self.held[offset]) is not None]
        step = -(-len(messages) // batches) or 1
        parts = [messages[first : first + step] for first in range(0, len(messages), step)]
        return SourceRange(
            start,
            end,
            begin,
            [RecordBatch.from_messages(part) for part in parts],
            [bound for each in runs(offsets) for bound in each],
        )

    @property
    def payloads(self) -> list[str]:
        """Of all that is to be copied, in order."""
        return [copy.payload.decode() for copy in self.held if copy is not None]


def of_origin(payloads: Sequence[str], source: Source) -> list[str]:
    """Those that were published there."""
    prefix = f"{source.cluster}/{source.topic_id}/"
    return [stripped for payload in payloads if (stripped := payload.strip()).startswith(prefix)]
