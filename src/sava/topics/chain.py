"""Chain: one source that is copied into a topic of this cluster.

Any number may copy the same source into the same topic at once: only one of two links that say the same is
taken (``source_positions``), and the other is told where the chain is. So a chain here holds nothing that
would have to be handed on, and needs no lease.

Stretches follow one another without waiting: the next one is taken while those before it are on their way to
the disk. When one is refused, the ones behind it do not follow any more, and are refused as well.

What the topic asks of producers it asks of a chain, too: limits, schema, rate, and to hold while it moves.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Final, NamedTuple

from sava.storage.errors import Fenced
from sava.storage.source_positions import ChainBroken, MarksChanged, SourceProgress
from sava.storage.topic_log import TopicLog
from sava.topics.errors import TopicMoved
from sava.topics.publishing import Publisher
from sava.topics.stretches import CheckedRange, Source, SourceRange

SMALL: Final = 64 << 10
"""Bytes of a stretch that is read at once; a larger one is read in a thread."""

__all__ = ["ChainBroken", "Copied", "Source", "SourceCopier", "SourceRange"]


class Copied(NamedTuple):
    """What became of a stretch, when it is durable."""

    position: int
    kept: int
    """See ``SourceProgress``."""
    appended: int
    duplicates: int
    """Left out: they had come another way before."""
    loops: int
    """Left out: they have been in this cluster."""


class CopyCounts:
    """Counts of messages since the topic was loaded."""

    def __init__(self) -> None:
        self.appended = self.duplicates = self.loops = self.refused = 0


class SourceCopier:
    """Owned by the event loop. Made by ``Topic.open_chain``."""

    def __init__(
        self,
        source: Source,
        publisher: Publisher,
        log: TopicLog,
        copies: CopyCounts,
        *,
        cluster: str,
        check: Callable[[], None],
    ) -> None:
        """``check`` raises if nobody may publish but somebody else."""
        self.source = source
        self._publisher = publisher
        self._log = log
        self._copies = copies
        self._cluster = cluster
        self._check = check

    @property
    def topic_id(self) -> int:
        return self._log.topic.topic_id

    @property
    def max_message_size(self) -> int:
        return self._publisher.max_message_size

    async def progress(self) -> SourceProgress:
        """Durable; when what is on its way now, whoever sent it, has come to its end."""
        return await self._log.chains.progress(self.source.chain_id)

    async def begin(self, stretch: SourceRange) -> asyncio.Future[Copied]:
        """Take the stretch, after which its place in the topic is fixed; to be called for one after another.
        The future is done when it is durable, and fails with what becomes known later.

        Raises ChainBroken; MessageInvalid, BatchCorrupt, MessageTooLarge, SchemaRefused; LimitReached,
        TopicMoved, TopicClosed, DiskFull. Links of it that were taken before the error stay."""
        size = sum(batch.header.length for batch in stretch.batches)
        read = partial(CheckedRange, self.source, stretch, self._cluster)
        pieces = await asyncio.to_thread(read) if size > SMALL else read()
        for batch in stretch.batches:
            await self._publisher.measure(batch)
        start, appended = stretch.start, 0
        future: asyncio.Future[int] | None = None
        while future is None or start < stretch.end:
            cut = partial(pieces.cut, start, self._log.chains.marks(pieces.origins))
            links = await asyncio.to_thread(cut) if size > SMALL else cut()
            try:
                for link in links:
                    enter = partial(self._log.extend, link)
                    future = await self._publisher.begin_checked(link.batch, self._check, enter)
                    start = link.end
                    appended += len(link.batch) if link.batch is not None else 0
            except ChainBroken:
                self._copies.refused += 1
                raise
            except MarksChanged:
                pass  # what is left of it is cut anew
        outcome: asyncio.Future[Copied] = asyncio.get_running_loop().create_future()
        duplicates = pieces.count - appended - pieces.loops
        future.add_done_callback(
            partial(self._settled, outcome, stretch.end, appended, duplicates, pieces.loops)
        )
        return outcome

    def _settled(
        self,
        outcome: asyncio.Future[Copied],
        end: int,
        appended: int,
        duplicates: int,
        loops: int,
        future: asyncio.Future[int],
    ) -> None:
        """The last link of a stretch is durable, and so are those before it; or it failed."""
        failure = future.exception()
        if outcome.done():
            return
        if failure is not None:
            lost = isinstance(failure, Fenced)
            outcome.set_exception(TopicMoved(self._publisher.topic) if lost else failure)
            outcome.exception()  # seen: its caller may be gone
            return
        copies = self._copies
        copies.appended += appended
        copies.duplicates += duplicates
        copies.loops += loops
        kept = self._log.chains.settled(self.source.chain_id).kept
        outcome.set_result(Copied(end, kept, appended, duplicates, loops))
