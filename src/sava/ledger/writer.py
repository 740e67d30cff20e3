"""The writer of one ledger: its streams, what is committed, and which disks mirror it.

The ``Owner`` decides; here are its clock, its connections and its writes to the metadata store.

    writer's thread   write ─┬─ sync ───────────┐
    event loop               └─ send to mirrors │ Durable(own) ┐
    mirrors                       write, sync ──── Durable ────┴─▶ commit ─▶ Journal.committed

So a message waits for the slower of the own sync and a round trip with a mirror's sync, not for their sum.

**Maintenance.** A few times a second the writer looks at its mirrors. A mirror is *gone* when its broker is
not registered any more, and *failing* when it refuses (a full disk, another disk), or when it was silent for
longer than its patience: about a second if acknowledgements wait for it, ``mirror_timeout`` otherwise
(``protocol.owner.Health``). Both are replaced if another broker is there, and left out otherwise, as long as
enough are left to acknowledge anything (``choice``). If even then fewer disks are left than an
acknowledgement needs, appends are refused, or, if the configuration allows it, the ledger continues degraded,
which the record says before the first message is acknowledged that way. When more brokers come, they are
taken.

The number of copies is never lowered silently: what was asked for once within this generation is asked for
from then on, whichever broker dies. An operator who removes a broker from the cluster says that there are
fewer now.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final

from sava.errors import SavaError
from sava.ledger.mirror_log import WalRangeReader
from sava.ledger.protocol import (
    Health,
    LedgerId,
    LedgerRecord,
    Owner,
    RefusalReason,
    StorageId,
)
from sava.ledger.protocol.owner import FLOOR_S
from sava.ledger.registry import LedgerRecordChanged, LedgerRecords, LiveBroker, LiveBrokers, choose
from sava.ledger.streams import LedgerStream, RecentBytes
from sava.peer_connection import Dialer
from sava.storage.commit_queue import NotCommittable
from sava.tasks import cancelled, set_within, spawn
from sava.wal import Tap

log = logging.getLogger(__name__)

PASS_S: Final = 0.25
LONELY_PASS_S: Final = 1.0
"""Where there is no mirror to look after."""
STORE_RETRY_S: Final = 0.2
BEAT_S: Final = 0.25
LATE_S: Final = 0.25
"""A beat that is later than this shows that this process stood still, and could hear no mirror."""
GRACE_S: Final = 1.0
"""Too few mirrors may be connected for this long before appends are refused: connections break and heal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MirrorOptions:
    write_quorum: int = 0
    """How many disks are to hold the ledger; 0: by the number of brokers."""
    ack_quorum: int = 0
    may_degrade: bool = False
    mirror_timeout_s: float = 5.0
    window_bytes: int = 8 << 20
    """How much may be on its way to one mirror, and how much is kept in memory for all of them."""

    def quorums(self, brokers: int) -> tuple[int, int]:
        """For a cluster of this many brokers: 1/1, 2/2, 3/2. What is configured stays as it is: too few disks
        are reported."""
        qw = max(self.write_quorum or min(brokers, 3), self.ack_quorum, 1)
        return qw, self.ack_quorum or min(2, qw)


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerCluster:
    """The cluster, as far as this broker's ledgers need it."""

    records: LedgerRecords
    live_brokers: LiveBrokers
    dialer: Dialer
    brokers: Callable[[], int]
    """How many the cluster has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnLog:
    """The log of this broker, as far as one generation's ledger needs it."""

    recent: RecentBytes
    older: WalRangeReader
    set_tap: Callable[[Tap | None], Awaitable[int]]
    """Begins or ends the filling of ``recent``, and says from where on."""
    is_tapped: bool
    committed: Callable[[int], None]
    """Called with how far the ledger is, whenever that moves because of other disks."""


class LedgerWriter:
    """Implements ``storage.AckQuorum``. Owned by the event loop."""

    def __init__(
        self,
        ledger: LedgerId,
        record: LedgerRecord,
        revision: int,
        *,
        cluster: LedgerCluster,
        own_log: OwnLog,
        options: MirrorOptions,
        fenced: Callable[[], None],
        fail: Callable[[BaseException], None],
    ) -> None:
        """``fenced`` is called once, when another broker ends this generation."""
        self.owner = Owner(ledger, record, revision, window=options.window_bytes)
        self._cluster = cluster
        self._own_log = own_log
        self._recent = own_log.recent
        self._is_tapped = own_log.is_tapped
        self._options = options
        self._fenced = fenced
        self._fail = fail
        self._loop = asyncio.get_running_loop()
        self._streams: dict[StorageId, LedgerStream] = {}
        self._health = Health(longest_s=options.mirror_timeout_s)
        self._beat: asyncio.TimerHandle | None = None
        self._qw, self._qa = record.qw, record.qa
        """How many there should be, as far as was asked for in this generation."""
        self._size = 0
        """Of the cluster, when it was last looked at."""
        self._has_shrunk = False
        self._short_since = 0.0
        self._logged_refusing = self._logged_degraded = False
        self._is_over = False
        self._woken = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._ends: list[Callable[[], None]] = []
        self.changes = 0
        """Of mirrors, stored."""
        self.degraded_s = 0.0
        self._degraded_since = self._loop.time() if record.is_degraded else 0.0
        self._follow_members()

    # -- for the ledger ---------------------------------------------------------------------

    def check(self) -> None:
        # Mirrors may have joined since they were last counted.
        if self._short_since and self._is_refusing and not self._has_enough:
            raise NotCommittable(
                f"ledger {self.owner.ledger}: {self._qa} disks must have a message before it is "
                f"acknowledged, and only {1 + self._connected} can be reached; start the other brokers, or "
                "set journal.degraded to allow"
            )

    def durable(self, end: int) -> int:
        if end > self.owner.end and not self.owner.is_fenced:
            self.owner.appended(end)  # without mirrors there is no tap that says so
        self.owner.advance(self.owner.own, end)
        return self.owner.commit

    def trimmable(self, floor: int) -> int:
        self.owner.covered(floor)
        if self.owner.wanted is not None:
            self._woken.set()
        return self.owner.floor

    # -- for the mirrors ---------------------------------------------------------------------

    def grown(self) -> None:
        """There is something to send."""
        if self._is_over or self.owner.is_fenced:
            return
        self.owner.appended(self._recent.end)
        now = self._loop.time()
        for stream in self._streams.values():
            stream.answers.expect(now, self.owner.end)
            stream.pump()

    def _heard(self) -> None:
        if self.owner.is_fenced:
            self._end()
        elif not self._is_over:
            self._own_log.committed(self.owner.commit)

    def _end(self) -> None:
        if not self._is_over:
            self._is_over = True
            log.warning("ledgers: fenced ledger=%s", self.owner.ledger)
            self._fenced()

    def _follow_members(self) -> None:
        """One stream to each mirror, those included that are only perhaps members."""
        wanted = set(self.owner.mirrors)
        for storage in wanted - self._streams.keys():
            self._streams[storage] = LedgerStream(
                storage,
                self.owner,
                dialer=self._cluster.dialer,
                live_brokers=self._cluster.live_brokers,
                recent=self._recent,
                older=self._own_log.older,
                heard=self._heard,
                fail=self._fail,
            )
        for storage in self._streams.keys() - wanted:
            task = asyncio.create_task(self._streams.pop(storage).close())
            self._tasks.append(task)
            task.add_done_callback(self._tasks.remove)

    # -- maintenance --------------------------------------------------------------------------

    def start(self) -> None:
        self._ends = [
            self._cluster.live_brokers.listen(self._woken.set),
            self._cluster.records.listen(self.owner.ledger, self._woken.set),
        ]
        self._tasks.append(spawn(self._maintain(), name="mirrors", failed=self._fail))
        self._expect_beat()

    def _expect_beat(self) -> None:
        due = self._loop.time() + BEAT_S
        self._beat = self._loop.call_at(due, self._on_beat, due)

    def _on_beat(self, due: float) -> None:
        late = self._loop.time() - due
        if late > LATE_S:
            for stream in self._streams.values():
                stream.answers.stood_still(late)
        self._expect_beat()

    async def _maintain(self) -> None:
        while not self._is_over:
            self._woken.clear()
            try:
                self._count()
                self._choose_mirrors()
                await self._tap()
                await self._store()
                for stream in self._streams.values():
                    stream.trim()
            except (SavaError, TimeoutError) as error:
                log.warning(
                    "ledger maintenance failed, retrying ledger=%s error=%s", self.owner.ledger, error
                )
                await asyncio.sleep(STORE_RETRY_S)
            await set_within(PASS_S if self._streams else LONELY_PASS_S, self._woken)

    async def _tap(self) -> None:
        """A ledger without mirrors pays nothing for those that may come."""
        has_mirrors = bool(self.owner.mirrors)
        if has_mirrors != self._is_tapped and not self._is_over:
            self._is_tapped = has_mirrors
            end = await self._own_log.set_tap(self._recent.tap if has_mirrors else None)
            if has_mirrors:
                self._recent.begin(end)
                self.grown()
            else:
                self._recent.clear()

    @property
    def _connected(self) -> int:
        members = self.owner.record.last.members
        return sum(1 for storage, stream in self._streams.items() if stream.is_joined and storage in members)

    @property
    def _has_enough(self) -> bool:
        """Disks, to acknowledge anything."""
        return 1 + self._connected >= self.owner.record.last.qa

    def _count(self) -> None:
        now = self._loop.time()
        if self._has_enough:
            self._short_since = 0.0
        elif not self._short_since:
            self._short_since = now
        self._log_refusing()
        self._log_degraded()
        if self._degraded_since:
            self.degraded_s += now - self._degraded_since
        self._degraded_since = now if self.is_degraded else 0.0

    def _log_refusing(self) -> None:
        if self._is_refusing == self._logged_refusing:
            return
        self._logged_refusing = self._is_refusing
        if self._logged_refusing:
            log.warning(
                "ledgers: messages are refused, too few disks are connected ledger=%s needed=%d connected=%d",
                *(self.owner.ledger, self.owner.record.last.qa, 1 + self._connected),
            )
        else:
            log.info("ledgers: messages are accepted again ledger=%s", self.owner.ledger)

    def _log_degraded(self) -> None:
        if self.is_degraded == self._logged_degraded:
            return
        self._logged_degraded = self.is_degraded
        if self._logged_degraded:
            log.warning(
                "ledgers: messages are acknowledged with fewer copies than asked for ledger=%s asked=%d "
                "enough=%d",
                *(self.owner.ledger, self._qa, self.owner.record.last.qa),
            )
        else:
            log.info("ledgers: there are as many copies again as asked for ledger=%s", self.owner.ledger)

    @property
    def _is_refusing(self) -> bool:
        return bool(self._short_since) and self._loop.time() - self._short_since > GRACE_S

    @property
    def is_degraded(self) -> bool:
        """Whether fewer copies are enough at the moment than should be: by the record, so nothing is
        acknowledged that way before it says so."""
        return self.owner.is_degraded

    @property
    def is_short(self) -> bool:
        """Whether too few disks are connected to acknowledge anything."""
        return bool(self._short_since)

    @property
    def lags(self) -> dict[StorageId, int]:
        """How many bytes each mirror is behind the own log."""
        return {
            storage: max(0, self.owner.end - self.owner.durable_end(storage)) for storage in self._streams
        }

    def _choose_mirrors(self) -> None:
        """Other members, if the ones that are there do not do."""
        if self.owner.wanted is not None or self.owner.is_fenced:
            return
        # A mirror that is about to stop is left while it still works. Its broker still counts as one.
        registered = self._cluster.live_brokers.all()
        candidates = [each for each in registered if not each.is_leaving or each.storage == self.owner.own]
        if all(each.storage != self.owner.own for each in candidates):
            return  # this broker's view of the others is not up to date
        record, current = self.owner.record, self.owner.record.last
        asked = self._qw, self._qa = self._asked(len(registered))
        members, qa = (self.owner.own, *self._chosen(candidates, current.members[1:])), self._qa
        if len(members) < qa and self._options.may_degrade:
            qa = len(members)
        elif len(members) < qa:  # there are too few to choose from: the former ones are waited for
            members, qa = current.members, current.qa
        is_as_wished = (set(members), qa) == (set(current.members), current.qa)
        if not is_as_wished or asked != (record.qw, record.qa):
            log.info(
                "ledgers: other mirrors are wanted ledger=%s ack_quorum=%d disks=%s",
                self.owner.ledger,
                qa,
                ",".join(members),
            )
            self.owner.change(members, qa=qa, asked=asked)
            self._follow_members()

    def _asked(self, registered: int) -> tuple[int, int]:
        """How many disks should have the ledger, and how many before a message is acknowledged."""
        size = self._cluster.brokers()
        qw, qa = self._options.quorums(max(size, registered))
        self._has_shrunk |= size < self._size
        self._size = size
        if not self._has_shrunk:
            return max(self._qw, qw), max(self._qa, qa)
        self._has_shrunk = registered > size  # until those that were removed are gone
        return qw, qa

    def _chosen(
        self, candidates: Sequence[LiveBroker], current: tuple[StorageId, ...]
    ) -> tuple[StorageId, ...]:
        now = self._loop.time()
        for storage in current:
            if self._is_failing(storage, now):
                self._avoid(storage, now)
            elif self._keeps_up(storage, now):
                self._health.recovered(storage)
        avoid = self._health.avoided(current, now)
        chosen = choose(
            candidates,
            own=self.owner.own,
            keep=[storage for storage in current if storage not in avoid],
            avoid=avoid,
            count=self._qw - 1,
            # A ledger that may continue degraded waits for no mirror that fails.
            needed=0 if self._options.may_degrade else self._qa - 1,
        )
        if any(storage in avoid and storage not in current for storage in chosen):
            self._health.retried(now)
        return chosen

    def _avoid(self, storage: StorageId, now: float) -> None:
        is_new = self._health.failed(
            storage, now, has_refused=self._has_refused(storage), is_needed=self._is_needed(storage, now)
        )
        if is_new:
            stream = self._streams[storage]
            log.info(
                "ledgers: a mirror does not keep up ledger=%s disk=%s durable=%d own=%d joined=%s refused=%s",
                *(self.owner.ledger, storage, self.owner.durable_end(storage)),
                *(self.owner.durable_end(self.owner.own), stream.is_joined),
                stream.refusal.name if stream.refusal is not None else "no",
            )

    def _has_refused(self, storage: StorageId) -> bool:
        return self._streams[storage].refusal in (RefusalReason.FULL, RefusalReason.OTHER_DISK)

    def _is_failing(self, storage: StorageId, now: float) -> bool:
        stream = self._streams.get(storage)
        if stream is None:
            return False
        if self._cluster.live_brokers.find(storage) is None:
            return False  # gone, so it is no candidate either; when it is back, it may be chosen at once
        if self._has_refused(storage):
            return True
        if self._is_level(storage):
            return False
        is_needed = self._is_needed(storage, now)
        return stream.answers.silence(now) > self._health.patience(stream.answers, now, is_needed=is_needed)

    def _is_level(self, storage: StorageId) -> bool:
        """Whether the mirror is connected and has what the own disk has."""
        own = self.owner.durable_end(self.owner.own)
        return self._streams[storage].is_joined and self.owner.durable_end(storage) >= own

    def _keeps_up(self, storage: StorageId, now: float) -> bool:
        stream = self._streams.get(storage)
        if stream is None or not stream.is_joined or stream.refusal is not None:
            return False
        return self._is_level(storage) or stream.answers.silence(now) < FLOOR_S

    def _is_needed(self, storage: StorageId, now: float) -> bool:
        """Whether nothing can be acknowledged without this member, because too few others keep up."""
        current = self.owner.record.last
        others = [each for each in current.members[1:] if each != storage and self._keeps_up(each, now)]
        return 1 + len(others) < current.qa

    async def _store(self) -> None:
        """Until what is wanted is stored, or found to be impossible."""
        while (wanted := self.owner.wanted) is not None:
            before = self.owner.record.last
            try:
                revision = await self._cluster.records.change(
                    self.owner.ledger, wanted, revision=self.owner.revision
                )
            except LedgerRecordChanged as changed:
                found = changed.found
                self.owner.found(*(found if found is not None else (None, 0)))
            except (SavaError, TimeoutError) as error:
                log.info("ledgers: writing the record again ledger=%s error=%s", self.owner.ledger, error)
                await asyncio.sleep(STORE_RETRY_S)
                continue
            else:
                self.owner.stored(wanted, revision)
            if self.owner.record.last != before:
                self.changes += 1
                log.info(
                    "ledgers: mirrors changed ledger=%s disks=%s",
                    self.owner.ledger,
                    ",".join(self.owner.record.last.members),
                )
            self._follow_members()
            self._heard()

    # -- ending ------------------------------------------------------------------------------

    def stop(self) -> None:
        """This generation is over: nothing more is sent, nothing more is committed."""
        self._is_over = True
        self.owner.is_fenced = True

    async def close(self) -> None:
        self.stop()
        if self._beat is not None:
            self._beat.cancel()
        for end in self._ends:
            end()
        await cancelled(*self._tasks)
        for stream in list(self._streams.values()):
            await stream.close()
        self._streams.clear()
