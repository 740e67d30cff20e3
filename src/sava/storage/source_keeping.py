"""SourceKeeper: the source positions of a topic. What its memory lacks is fetched when it is needed, and what
only memory has is written down.

**Learning.** Positions of sources are in frame headers, marks of origins in the messages. The marks of what
is in segments are in the topic's state; those of the journal's tail are read from its frames, once, before
the first append is taken: a topic that nothing is copied into never pays for it. Only frames of an earlier
opening are looked at, for nothing of a source is accepted before. If the uploader takes such a frame
meanwhile, the state tells what it held.

**Noting.** An append without messages moves a source and leaves no frame. While the journal has a tail, the
next segment carries the position; when everything is in segments, and perhaps nothing will ever be appended
(a cluster that copies both ways gets back what it sent), it is written into the state by itself, after a
pause in which more may come.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from sava.storage.catalog import Catalog
from sava.storage.errors import DataGap, Fenced
from sava.storage.journal import Journal
from sava.storage.origin_marks import read_marks
from sava.storage.source_positions import (
    SourcePositions,
    SourceProgress,
    is_source_key,
    learned,
)
from sava.storage.uploader import Backlog

_log = logging.getLogger(__name__)

NOTE_S: Final = 1.0
"""Between an append without messages and the note of it."""
RETRY_S: Final = 5.0
_READ_BYTES: Final = 4 << 20


class SourceKeeper:
    """Learns and notes the source positions of one TopicLog. Owned by its event loop."""

    def __init__(
        self,
        positions: SourcePositions,
        *,
        backlog: Backlog,
        journal: Journal,
        catalog: Catalog,
        tail_end: int,
        is_stored: Callable[[], bool],
        advanced: asyncio.Event,
    ) -> None:
        """``tail_end``: of what the journal held when the topic was opened. ``is_stored``: all that is
        durable is in segments. ``advanced``: set when something becomes durable, or fails."""
        self.positions = positions
        """Of sources, and the marks of origins, which are known once ``learned`` has returned."""
        self._backlog = backlog
        self._journal = journal
        self._catalog = catalog
        self._tail_end = tail_end
        self._is_stored = is_stored
        self._advanced = advanced
        self._has_learned = tail_end <= backlog.state.end
        self._learning: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._noting: asyncio.Task[None] | None = None
        self._is_closed = False

    # -- knowing -----------------------------------------------------------------------------

    async def progress(self, source_key: int) -> SourceProgress:
        """How far a source was copied, durably, when what is in flight of it now has come to its end. What
        comes later is not waited for: there may always be more."""
        await self.learned()
        last = self.positions.last_taken(source_key)
        while last and not self.positions.is_settled(last):
            await self._advanced.wait()
        return self.positions.settled(source_key)

    # -- learning ----------------------------------------------------------------------------

    async def learned(self) -> None:
        """Until the marks of origins are known. Raises what keeps the journal from being read."""
        if self._has_learned:
            return
        if self._learning is None or self._learning.done():
            self._learning = asyncio.create_task(self._learn(), name="sava-origins")
            self._learning.add_done_callback(_seen)
        await asyncio.shield(self._learning)

    async def _learn(self) -> None:
        topic = self._backlog.topic
        while True:
            state = self._backlog.state
            self.positions.learn(read_marks(state.origins))
            position = state.end
            while position < self._tail_end:
                batches = await self._journal.read(topic.topic_id, position, _READ_BYTES)
                copied = [batch for batch in batches if is_source_key(batch.header.producer_id)]
                if copied:
                    self.positions.learn(await asyncio.to_thread(learned, self.positions.known(), copied))
                if not batches:
                    break
                position = batches[-1].next_offset
            else:
                self.positions.passed_since(state.producers)
                self._has_learned = True
                return
            if self._backlog.state.end <= position:
                raise DataGap(
                    f"topic {topic.path}: offset {position} is not in the journal and in no segment"
                )

    # -- noting ------------------------------------------------------------------------------

    def skipped(self) -> None:
        """An append without messages was taken."""
        if self._timer is None:
            self._arm(NOTE_S)

    def _arm(self, pause_s: float) -> None:
        if not self._is_closed:
            self._timer = asyncio.get_running_loop().call_later(pause_s, self._due)

    def _due(self) -> None:
        self._timer = None
        # If there is a tail, the segment that it becomes carries the positions.
        if self._is_stored() and self._noting is None and self.positions.skips(self._backlog.state.end):
            self._noting = asyncio.create_task(self._note(), name="sava-sources")

    async def _note(self) -> None:
        backlog, path = self._backlog, self._backlog.topic.path
        end = backlog.state.end
        pause_s = NOTE_S
        try:
            backlog.catch_up_with_skips(end)
            known = backlog.producers
            state = await self._catalog.note(
                epoch=backlog.epoch, end=end, producers=known.states(), origins=known.sources.origin_marks()
            )
            self.positions.keep(state.producers)
        except Fenced as error:
            backlog.fence(error)
            return
        except Exception as error:  # noqa: BLE001 (whatever it is, the note must be tried again)
            pause_s = RETRY_S
            _log.warning(
                "source positions are not stored, retrying topic=%s error=%s: %s",
                *(path, type(error).__name__, error),
            )
        finally:
            self._noting = None
        if self._timer is None and self.positions.skips(self._backlog.state.end):
            self._arm(pause_s)

    def close(self) -> None:
        """What is being written may take effect: it is true."""
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
        if self._noting is not None:
            self._noting.cancel()


def _seen(learning: asyncio.Task[None]) -> None:
    """The callers that waited for it may be gone."""
    if not learning.cancelled():
        learning.exception()
