"""Holdings: what a journal holds of each topic, by the headers of its frames: where they are, and what they
tell of the topic's producers. In memory, and found again by a scan (``replay``)."""

from __future__ import annotations

from sava.records import Header
from sava.storage.journal_index import JournalIndex
from sava.storage.producers import ProducerTable


class Holdings:
    """Owned by one thread at a time: that of a scan, then that of the journal's event loop."""

    def __init__(self) -> None:
        self._topics: dict[int, JournalIndex] = {}
        """None of them is empty."""
        self._producers: dict[int, ProducerTable] = {}

    def __bool__(self) -> bool:
        return bool(self._topics)

    @property
    def topic_ids(self) -> list[int]:
        return list(self._topics)

    def index(self, topic_id: int) -> JournalIndex:
        """Not to be changed."""
        return self._topics.get(topic_id) or JournalIndex()

    @property
    def lowest_position(self) -> int | None:
        """Of the first frame that somebody needs."""
        return min(
            (position for index in self._topics.values() if (position := index.lowest_position) is not None),
            default=None,
        )

    # -- frames ------------------------------------------------------------------------------

    def add(self, header: Header, position: int) -> None:
        """Raises JournalCorrupt."""
        index = self._topics.get(header.topic_id) or JournalIndex()
        index.add(header, position)
        self._topics[header.topic_id] = index

    def drop_before(self, topic_id: int, offset: int) -> None:
        """What is below the offset is in registered segments."""
        index = self._topics.get(topic_id)
        if index is not None:
            index.drop_before(offset)
            self._let_go(topic_id, index)

    def drop_from(self, topic_id: int, offset: int) -> None:
        """What is held from the offset on is not history, and neither is what it told of producers."""
        index = self._topics.get(topic_id)
        if index is not None:
            index.drop_from(offset)
            self._producers.pop(topic_id, None)
            self._let_go(topic_id, index)

    def _let_go(self, topic_id: int, index: JournalIndex) -> None:
        if not index:
            del self._topics[topic_id]
            self._producers.pop(topic_id, None)

    # -- producers ---------------------------------------------------------------------------

    def follow(self, header: Header) -> None:
        """Of a topic that is not open."""
        table = self._producers.get(header.topic_id)
        if table is None:
            table = self._producers[header.topic_id] = ProducerTable()
        table.follow(header)

    def take_producers(self, topic_id: int) -> ProducerTable:
        """What the frames of a topic that is not open tell of its producers."""
        return self._producers.pop(topic_id, None) or ProducerTable()

    def keep_producers(self, topic_id: int, table: ProducerTable) -> None:
        """The topic is closed: keep this for the next opening, which cannot learn it from the headers of
        frames without reading them again."""
        if topic_id in self._topics:
            self._producers[topic_id] = table
