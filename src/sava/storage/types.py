"""The nouns of storage: a topic's place in it, its segments, and the state that one owner hands to the next.

Ends are exclusive everywhere: ``end`` and ``next_offset`` name the first offset that is *not* there, so an
empty topic is ``start == end == 0`` and needs no special case.
"""

from __future__ import annotations

import re
from typing import Final

import msgspec

_PARTITION: Final = re.compile(r"(.+)-part-(0|[1-9]\d{0,5})")


def split_partition(name: str) -> tuple[str, int] | None:
    """The name of the partitioned topic and the index, if the name is that of a partition."""
    match = _PARTITION.fullmatch(name)
    return (match[1], int(match[2])) if match else None


class TopicKey(msgspec.Struct, frozen=True, array_like=True):
    """A topic as storage knows it. ``topic_id`` is new for each creation: what a deleted topic of the same
    name left behind can never be taken for this one's."""

    namespace: str
    name: str
    topic_id: int
    """Grows with each creation: of two topics that had one name, the greater id is the newer."""

    @property
    def path(self) -> str:
        """As users write it."""
        return f"/{self.namespace}/{self.name}"

    @property
    def partition(self) -> tuple[str, int]:
        """The path of the topic that users know, and which of its partitions this is; 0 if it has none."""
        head, number = split_partition(self.name) or (self.name, 0)
        return f"/{self.namespace}/{head}", number


class Segment(msgspec.Struct, frozen=True, kw_only=True):
    """One immutable Parquet object that holds the offsets ``start .. end`` of a topic, and how to check
    it."""

    topic_id: int
    start: int
    end: int
    epoch: int
    key: str
    """Object key; names topic id, start, end, epoch and a unique suffix, so no two writers ever write one
    key."""
    size: int
    crc32c: int
    footer_size: int
    """Bytes at the end of the object that a Parquet reader needs first: one read fetches exactly them."""
    footer_crc32c: int
    """Parquet protects its pages with checksums, but not the footer that says where they are."""
    min_publish_time: int
    max_publish_time: int
    created_ms: int
    """By the clock of the broker that wrote it; of a merged one, the latest of its parts. Retention goes by
    this: publish times are the producers' to choose."""
    raw_bytes: int = 0
    """Before compression. 0: not known."""


class ProducerState(msgspec.Struct, frozen=True, array_like=True):
    """What deduplication must remember of a producer over moves: the sequence after the last one appended,
    and where that batch went (so that a repeated last batch is answered with its offset)."""

    producer_id: int
    next_sequence: int
    last_base_sequence: int
    last_base_offset: int


class Late(msgspec.Struct, frozen=True, array_like=True):
    """Messages of an origin that are not in its order: in this part of the topic, there are some below others
    that came before."""

    start: int
    end: int
    lowest: int
    top: int
    """They are at the origin's offsets ``lowest .. top``."""


class OriginMark(msgspec.Struct, frozen=True, array_like=True):
    """What the topic has of the messages of a topic of another cluster, where they were published (see
    ``seen`` and ``sources``)."""

    cluster: str
    topic: str
    """As the messages say it."""
    steps: tuple[int, ...]
    """To the start of the first range of offsets there that were seen, from there to its end, from there to
    the start of the next: most are a digit or two."""
    vague: tuple[int, int]
    by: int
    top: int
    late: tuple[Late, ...] = ()


class EpochTable(msgspec.Struct, frozen=True, array_like=True):
    """What a topic's record says of the opens of its producers."""

    last: int = 0
    """The highest number that the topic has seen."""
    floor: int = 0
    """The highest number of a producer that was forgotten."""
    known: tuple[tuple[int, int], ...] = ()
    """Producer id and number, the lowest number first."""
    owners: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """Principals, and the ids of the producers whose names are theirs, in the order of their first opens."""


class TopicState(msgspec.Struct, frozen=True, kw_only=True):
    """The record under ``/storage/topics/{ns}/{topic}/state``; changed by compare-and-swap only.

    ``start .. end`` is what the registered segments hold, without a gap. ``sealed`` says that nothing exists
    beyond ``end``: the next owner begins there. ``is_clean`` says the same for as long as it stands: the
    owner takes it back before it accepts anything. Otherwise only the journal of the owner of ``epoch``
    knows what follows ``end``.
    """

    topic_id: int
    epoch: int
    storage_id: str
    """Journal (disk) of the owner of ``epoch``: where offsets from ``end`` on are to be found unless
    settled."""
    start: int = 0
    end: int = 0
    sealed: bool = True
    is_clean: bool = False
    producers: tuple[ProducerState, ...] = ()
    """As of ``end``; and the sources that are copied into the topic."""
    origins: tuple[OriginMark, ...] = ()
    """As of ``end``."""
    epochs: EpochTable = EpochTable()
    """As of now, whatever ``end`` says: an open of a producer need not be followed by a message."""

    @property
    def is_settled(self) -> bool:
        """Nothing exists beyond ``end``, and nothing will before this record is written again: any broker may
        continue there."""
        return self.sealed or self.is_clean
