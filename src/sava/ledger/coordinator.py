"""Coordinator: carries out one recovery (``protocol.Recovery``) with the metadata store and the disks.

The state machine says what to store and whom to ask; here are the tasks, the deadlines, and the patience:

* a question that is under way is not asked a second time: a check of a long copy takes its seconds;
* whoever did not answer is asked again, for as long as the recovery lasts and whatever others are at: a
  broker may come back in a minute or in a week, and its answer may be the one that is missing; and whoever
  has come to the cluster meanwhile may take a copy;
* a write whose outcome is not known is repeated: one of the two happens, and the other finds its record.

It waits for ever if too few answer. What that means for the messages, and for an operator who cannot wait,
is said by ``loss``, once everybody was asked: a disk that is about to answer has lost nothing.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from sava.errors import SavaError
from sava.ledger.ports import (
    Peers,
    PeerUnreachable,
    RecordChanged,
    Stored,
)
from sava.ledger.protocol import (
    Check,
    Fence,
    JournalId,
    JournalRecord,
    JournalState,
    Loss,
    Message,
    Phase,
    Recovery,
    StorageId,
)
from sava.metadata.commands import Compare
from sava.metadata.errors import Deposed, OutcomeUnknown, Unavailable
from sava.tasks import cancelled, spawn

log = logging.getLogger(__name__)

FENCE_S: Final = 3.0
"""A disk stores a few bytes and syncs."""
CHECK_S: Final = 120.0
"""A disk reads all that it has of the journal."""
COPY_S: Final = 15.0
"""Of one piece."""
RETRY_S: Final = 0.5
STORE_RETRY_S: Final = 0.2
TOLD_AFTER_S: Final = 10.0
"""A recovery that lasts longer is told of, and again whenever it waits for others."""


class ConditionalRecords(Protocol):
    """What a coordinator needs of ``records.Records``."""

    async def get(self, journal: JournalId) -> Stored | None: ...

    async def change(
        self,
        journal: JournalId,
        record: JournalRecord,
        *,
        revision: int,
        conditions: Sequence[Compare] = (),
        fence_term: int = 0,
    ) -> int: ...


class Coordinator:
    """One recovery of one journal. Owned by the event loop; ``run`` is one task."""

    def __init__(
        self,
        journal: JournalId,
        records: ConditionalRecords,
        peers: Peers,
        *,
        name: str,
        conditions: Sequence[Compare] = (),
        term: int = 0,
        spares: Callable[[], Sequence[StorageId]] = tuple,
    ) -> None:
        """``name`` is the coordinator's, for people. ``conditions`` must hold when the claim is written,
        ``term`` (if any) when anything is. ``spares`` (at the time) may hold a copy if too few members are
        left."""
        self.journal = journal
        self._records = records
        self._peers = peers
        self._by = f"{name}-{uuid.uuid4().hex[:12]}"
        self._conditions = tuple(conditions)
        self._term = term
        self._spares = spares
        self._recovery: Recovery | None = None
        self._asking: dict[Message, asyncio.Task[None]] = {}
        self._asked: set[Message] = set()
        """Fences and checks that had their answer or their deadline."""
        self._changed = asyncio.Event()
        self._began = time.monotonic()
        self._told: tuple[StorageId, ...] = ()

    # -- knowing -----------------------------------------------------------------------------

    @property
    def phase(self) -> Phase:
        return self._recovery.phase if self._recovery is not None else Phase.CLAIM

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    @property
    def answers_needed(self) -> int:
        return self._recovery.answers_needed if self._recovery is not None else 0

    def loss(self) -> Loss | None:
        """What closing the journal with what is there would cost; None: it goes on by itself."""
        is_asking = any(
            message not in self._asked for message in self._asking if isinstance(message, (Fence, Check))
        )
        return self._recovery.loss() if self._recovery is not None and not is_asking else None

    def give_up(self, loss: Loss, *, why: str) -> bool:
        """Somebody accepts exactly this loss; False if it is no longer what would be lost."""
        if self._recovery is None or loss != self.loss() or not self._recovery.give_up(loss):
            return False
        log.warning("journals: given up, %s journal=%s loss=%s", why, self.journal, loss)
        self._changed.set()
        return True

    # -- running -----------------------------------------------------------------------------

    async def run(self) -> JournalRecord | None:
        """Until the journal is closed; None: it has no record, or somebody else recovers it. Raises Deposed,
        and what keeps the record from being read."""
        found = await self._records.get(self.journal)
        if found is None or found.record.state is JournalState.CLOSED:
            return found.record if found is not None else None
        recovery = self._recovery = Recovery(
            self.journal, found.record, found.revision, by=self._by, spares=self._spares()
        )
        try:
            while recovery.phase not in (Phase.CLOSED, Phase.OVERTAKEN):
                await self._advance(recovery)
        finally:
            await cancelled(*self._asking.values())
        return recovery.record if recovery.phase is Phase.CLOSED else None

    async def _advance(self, recovery: Recovery) -> None:
        if recovery.wanted is not None:
            await self._store(recovery)
            return
        self._send(recovery)
        try:
            async with asyncio.timeout(RETRY_S):
                await self._changed.wait()
        except TimeoutError:
            recovery.offer(self._spares())
            if self._is_busy:
                recovery.ask_again()
            else:
                recovery.retry()
            self._tell(recovery)
        self._changed.clear()

    @property
    def _is_busy(self) -> bool:
        """Whether somebody is at work, and not only to be heard of."""
        return any(not isinstance(message, Fence) for message in self._asking)

    async def _store(self, recovery: Recovery) -> None:
        wanted = recovery.wanted
        assert wanted is not None
        is_claim = wanted.state is JournalState.RECOVERING
        try:
            revision = await self._records.change(
                self.journal,
                wanted,
                revision=recovery.revision,
                conditions=self._conditions if is_claim else (),
                fence_term=self._term,
            )
        except RecordChanged as changed:
            found = changed.found
            if found is not None and found.revision == recovery.revision:
                # As it was: it is a condition that does not hold. The owner is there.
                found = None
            recovery.found(*(found or (None, 0)))
        except Deposed:
            raise
        except (Unavailable, OutcomeUnknown, TimeoutError) as error:
            log.info("journals: a record is written again journal=%s error=%s", self.journal, error)
            await asyncio.sleep(STORE_RETRY_S)
        else:
            recovery.stored(revision)

    # -- asking ------------------------------------------------------------------------------

    def _send(self, recovery: Recovery) -> None:
        for message in recovery.poll():
            if message not in self._asking:
                task = spawn(self._ask(recovery, message), name=f"recovery of {self.journal}")
                self._asking[message] = task

    async def _ask(self, recovery: Recovery, message: Message) -> None:
        timeout = FENCE_S if isinstance(message, Fence) else CHECK_S if isinstance(message, Check) else COPY_S
        origin = recovery.record.fragments[0].members[0]
        try:
            answer = await self._peers.ask(message.storage, message, origin=origin, timeout=timeout)
        except PeerUnreachable as error:
            log.debug("journals: no answer journal=%s error=%s", self.journal, error)
        except (SavaError, TimeoutError) as error:
            log.warning("journals: no answer journal=%s error=%s", self.journal, error)
        else:
            recovery.receive(answer)
            self._changed.set()
        finally:
            del self._asking[message]
            if isinstance(message, (Fence, Check)):
                self._asked.add(message)

    def _tell(self, recovery: Recovery) -> None:
        """Once for everybody that is waited for."""
        loss = self.loss()
        if loss is None or self.seconds < TOLD_AFTER_S or loss.silent == self._told:
            return
        self._told = loss.silent
        log.warning(
            "journals: a recovery waits for disks journal=%s phase=%s needed=%d disks=%s; "
            "`sava journals recover %s` tells what it would cost to go on without them",
            self.journal,
            recovery.phase.value,
            recovery.answers_needed,
            ",".join(loss.silent),
            self.journal,
        )
