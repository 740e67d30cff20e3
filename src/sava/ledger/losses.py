"""Losses: what an operator may give up so that topics go on, and what it would cost.

A journal of a broker that is gone can wait for disks for ever, at three places:

* its *recovery* has too few answers to know how far it goes, or nobody has a part of it intact;
* all of it is there, and too few disks can take the copies that are written back before it is closed: nothing
  is lost by going on, unless the disks that have it are lost before its messages are in segments;
* it is *closed*, and before its topics were salvaged the last disk that had some part was lost, too.

All are decided alike. First it is told which positions are missing, and what that means for each topic; then
exactly this loss is accepted, or nothing happens, because it is not the same any more: a disk has come back.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from sava.cluster.controller import Leadership
from sava.cluster.errors import JournalUnknown, NotController, NothingToGiveUp
from sava.ledger.closed import ClosedJournal, origin_of
from sava.ledger.coordinator import Coordinator
from sava.ledger.failover import Failover
from sava.ledger.neighbours import Registered
from sava.ledger.ports import Peers, RecordChanged, Stored
from sava.ledger.protocol import (
    JournalId,
    JournalRecord,
    JournalState,
    Loss,
    StorageId,
)
from sava.ledger.protocol import record as steps
from sava.ledger.records import Records
from sava.ledger.salvage import read_tails, unsettled
from sava.metadata.store import MetadataStore
from sava.storage.orphans import named_states

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TopicLoss:
    """What giving up would mean for a topic, as far as is known."""

    topic: str
    stored: int
    """Up to here it is in segments."""
    kept: int
    """Up to here its messages would be there."""
    found: int
    """Messages behind a missing part reach up to here, and would go with it; 0: none were found."""


@dataclass(frozen=True, slots=True)
class Prospect:
    """What going on with what is there would cost."""

    loss: Loss
    answers_needed: int
    topics: tuple[TopicLoss, ...]


class Losses:
    """Owned by the event loop."""

    def __init__(
        self,
        failover: Failover,
        store: MetadataStore,
        records: Records,
        neighbours: Registered,
        peers: Peers,
        leadership: Leadership,
        *,
        own: StorageId,
    ) -> None:
        self._failover = failover
        self._store = store
        self._records = records
        self._neighbours = neighbours
        self._peers = peers
        self._leadership = leadership
        self._own = own

    async def prospect(self, journal: JournalId) -> Prospect:
        """What would be lost. Raises NotController, JournalUnknown, NothingToGiveUp."""
        stored = await self._stuck(journal)
        if stored.record.state is JournalState.CLOSED:
            loss = await self._missing(journal, stored)
            return Prospect(loss, 0, await self._topics(journal, steps.forgone(stored.record, loss.missing)))
        coordinator = self._recovery(journal)
        expected = coordinator.loss()
        if expected is None:
            raise NothingToGiveUp(journal, f"its recovery goes on ({coordinator.phase.value})")
        return Prospect(expected, coordinator.answers_needed, await self._topics(journal, stored.record))

    async def give_up(self, journal: JournalId, loss: Loss) -> bool:
        """Accept exactly this loss; False if it is not what would be lost now. Raises as ``prospect``."""
        stored = await self._stuck(journal)
        if stored.record.state is not JournalState.CLOSED:
            return self._recovery(journal).give_up(loss, why="by an operator")
        if await self._missing(journal, stored) != loss:
            return False
        forgone = steps.forgone(stored.record, loss.missing)
        try:
            await self._records.change(
                journal, forgone, revision=stored.revision, fence_term=self._leadership.term()
            )
        except RecordChanged:
            return False
        log.warning("journals: an operator gave up messages journal=%s loss=%s", journal, loss)
        return True

    async def _stuck(self, journal: JournalId) -> Stored:
        if not self._leadership.term():
            raise NotController
        stored = await self._records.get(journal)
        if stored is None:
            raise JournalUnknown(journal)
        if self._failover.is_continued(journal):
            raise NothingToGiveUp(journal, "its broker is there and writes it")
        return stored

    def _recovery(self, journal: JournalId) -> Coordinator:
        coordinator = self._failover.recovery(journal)
        if coordinator is None:
            raise NothingToGiveUp(journal, "its recovery is about to begin; ask again")
        return coordinator

    async def _missing(self, journal: JournalId, stored: Stored) -> Loss:
        """Of a closed journal."""
        if self._neighbours.find(origin_of(stored.record)) is not None:
            raise NothingToGiveUp(journal, "it is closed, and its broker serves it")
        closed = ClosedJournal(journal, stored.record, self._peers, own=self._own)
        await closed.locate()
        missing = await closed.missing()
        if not missing:
            raise NothingToGiveUp(journal, "it is closed, and all of it can be read")
        return Loss(missing, None, closed.silent)

    async def _topics(self, journal: JournalId, record: JournalRecord) -> tuple[TopicLoss, ...]:
        """``record`` is that of this journal if the loss is accepted."""
        origin = origin_of(record)
        states = unsettled(await named_states(self._store), origin)
        found = {each: kept.record for each, kept in (await self._records.of(journal.broker)).items()}
        opened = [
            ClosedJournal(each, kept, self._peers, own=self._own)
            for each, kept in sorted({**found, journal: record}.items())
            if origin_of(kept) == origin
        ]
        tails = await read_tails(states, opened, is_partial=True)
        return tuple(
            TopicLoss(tail.topic.path, tail.state.end, tail.end, tail.behind_a_hole)
            for tail in sorted(tails.by_id.values(), key=lambda tail: tail.topic.path)
        )
