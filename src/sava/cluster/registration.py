"""Registrar: being there. A lease in the metadata store, and what happens when it is lost.

The others take a broker for gone when its lease has ended; the broker itself must not serve any more by then.
No message can reach it (what cut it off from the store ends the lease), so it goes by its own clock: the
lease lives at least one TTL from the moment at which the last keep-alive that was answered was *sent*, and
for nothing beyond that is there any proof. The monotonic clock continues while the process stands still, so a
broker that was stopped for a minute knows it as soon as it looks, and it looks before it acts:
``incarnation`` is 0 from the deadline on, whether or not the task that renews it had its turn.

    sent t0 ── answered            sent t1 ── no answer           sent t2 ── no answer      t0 + TTL
       is there until t0 + TTL                                                              drops its topics

A renewal is also a look at the metadata store as it is now. The leader renews the lease of a broker whose own
copy stands still (its disk is full, say): it owns topics, takes no messages for them, and does not see that
the controller moves them. Such a broker is as good as gone, so after one TTL it drops its topics and revokes
the lease, and others, which have copies of its journal, serve its topics until it can follow again. It must
not leave the lease to expire: the leader has renewed it up to that moment, and the topics would be without
an owner for another TTL.

A registration may also be given up from within (``renew``), when what it stands for has ended: the journal
that was opened under its number.

The leader may end a lease early, when the members agree that its broker is gone (``eviction``). A broker that
is there after all sees its registration vanish in its own copy of the metadata (``look``), and does not wait
for its next renewal to find out.

A lost lease is not renewed: the broker drops what it serves and registers again under the next one. The lease
is the broker's *incarnation*, which tells apart the topics that an earlier process took up.

A broker that is asked to stop says so in its registration first (``leave``). From then on it gets no topics,
for every assignment has its registration as a condition; its topics go to others, and so do the journals that
it mirrors. The lease is revoked when that is over.

A registration that is still there from the life before (the process died and is back within a TTL) is
replaced in one transaction, so that no other sees the broker gone in between. It is known to be the same
broker's former life because a data directory has one process at a time.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Final

import msgspec

from sava.cluster import records
from sava.cluster.records import Registration
from sava.errors import SavaError
from sava.metadata.commands import Put
from sava.metadata.errors import Deposed, LeaseNotFound, Unavailable
from sava.metadata.records import RecordChange, RecordStore, encode, unchanged
from sava.metadata.store import MetadataStore
from sava.metadata.suspicion import Note
from sava.raft.types import NodeId
from sava.supervisor import Supervisor
from sava.tasks import Backoff, Reconciler, cancelled, set_within, until_success

log = logging.getLogger(__name__)

FAILURES: Final = (SavaError, TimeoutError)
FIRST_RETRY_S: Final = 0.1
LONGEST_RETRY_S: Final = 2.0
CALL_S: Final = 5.0
"""Of each call that registers; a store without a quorum is asked again."""
LEAVE_S: Final = 2.0
"""For saying so. A broker that cannot stops all the same."""
REVOKE_S: Final = 2.0
"""At the end: a broker that cannot revoke its lease lets it expire."""


class Registrar:
    """Owned by the event loop. ``on_lost`` returns when nothing is served any more."""

    def __init__(
        self,
        store: MetadataStore,
        describe: Callable[[int], Registration],
        *,
        broker: int,
        ttl_ms: int,
        on_lost: Callable[[], Awaitable[None]],
    ) -> None:
        self._store = store
        self._describe = describe
        self._broker = broker
        self._ttl_ms = ttl_ms
        self._on_lost = on_lost
        self._lease = 0
        """Granted; what is registered under it is another question."""
        self._is_written = False
        self._is_behind = False
        """The leader answered the last renewal, and this node's own copy of the metadata did not follow."""
        self.is_leaving = False
        self._deadline = 0.0
        self._listeners: list[Callable[[], None]] = []
        self._given_up = ""
        self._gives_up = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    # -- knowing -----------------------------------------------------------------------------

    @property
    def incarnation(self) -> int:
        """Which life this is; 0 while this broker is not there, or cannot know that it is."""
        return self._lease if self._is_written and time.monotonic() < self._deadline else 0

    @property
    def is_registered(self) -> bool:
        return self.incarnation != 0

    def listen(self, listener: Callable[[], None]) -> None:
        """Called each time that this broker is registered. It must return at once."""
        self._listeners.append(listener)

    def renew(self, reason: str) -> None:
        """Give this registration up, as if it were lost, and register again."""
        self._given_up = reason
        self._gives_up.set()

    def look(self) -> None:
        """Give up at once if the registration is gone, by this node's copy of the metadata."""
        if not self._is_written:
            return
        kv = self._store.local.get(records.registration_key(self._broker))
        if kv is None or kv.lease != self._lease:
            self._is_written = False  # from now on, not when the task has its turn
            self.renew("the others took this broker for gone")

    # -- running -----------------------------------------------------------------------------

    def start(self, supervisor: Supervisor) -> None:
        self._task = supervisor.essential(self._run(), name="registration")

    async def leave(self) -> bool:
        """Say that this broker is about to stop; whether the others know. Not to be taken back."""
        self.is_leaving = True
        lease, key = self.incarnation, records.registration_key(self._broker)
        if not lease:
            return False
        leaving = self._described(lease)
        try:
            async with asyncio.timeout(LEAVE_S):
                updated = await RecordStore(self._store, timeout=LEAVE_S).update(
                    key,
                    Registration,
                    lambda found: RecordChange(leaving, lease=lease) if found.lease == lease else None,
                )
        except FAILURES as error:
            log.warning("cluster: the others do not know that this broker leaves error=%s", error)
            return False
        return updated.is_changed

    def _described(self, lease: int) -> Registration:
        return msgspec.structs.replace(self._describe(lease), is_leaving=self.is_leaving)

    async def close(self) -> None:
        """The lease is revoked, so that others take over at once: after all topics are closed."""
        await cancelled(self._task)
        self._is_written = False
        lease, self._lease = self._lease, 0
        if lease:
            await self._revoke(lease)
            log.info("cluster: this broker has left broker=%d incarnation=%d", self._broker, lease)

    async def _run(self) -> None:
        while True:
            await self._register()
            reason = await self._keep()
            log.warning(
                "cluster: the registration is lost, topics are dropped broker=%d incarnation=%d reason=%s",
                self._broker,
                self._lease,
                reason,
            )
            self._is_written = False
            await self._fence()
            if self._is_behind:
                await self._revoke(self._lease)

    async def _fence(self) -> None:
        try:
            await self._on_lost()
        except Exception:
            # Whatever it is: closing runs code of every topic, and an error that was not
            # foreseen must not end this task, since the broker would never come back. To continue risks
            # nothing: what still has a topic writes under a tenure that others may end, and the agent drops
            # what an earlier incarnation took up.
            log.exception("cluster: not all topics could be dropped broker=%d", self._broker)

    # -- registering -------------------------------------------------------------------------

    async def _register(self) -> None:
        def failed(error: BaseException) -> None:
            log.info("cluster: not registered yet error=%s: %s", type(error).__name__, error)

        pauses = Backoff(FIRST_RETRY_S, LONGEST_RETRY_S)
        await until_success(self._try_register, failed, pauses=pauses, failures=FAILURES)
        log.info("cluster: this broker is registered broker=%d incarnation=%d", self._broker, self._lease)
        for listener in self._listeners:
            listener()

    async def _try_register(self) -> None:
        """An attempt whose outcome is not known does no harm when it takes effect late: it was to write on
        the condition that the record is the one that it had read. Its lease expires."""
        sent = time.monotonic()
        self._lease = await self._store.grant_lease(self._ttl_ms, timeout=CALL_S)
        key = records.registration_key(self._broker)
        older = await self._store.get(key, timeout=CALL_S)
        result = await self._store.txn(
            (unchanged(key, older.mod_revision if older is not None else 0),),
            (Put(key, encode(self._described(self._lease)), lease=self._lease),),
            timeout=CALL_S,
        )
        if not result.succeeded:
            raise Unavailable(f"the registration of broker {self._broker} changed while it was written")
        self._deadline = sent + self._ttl_ms / 1000
        self._gives_up.clear()
        self._is_written = True
        if older is not None and older.lease:
            log.info("cluster: the earlier registration was replaced incarnation=%d", older.lease)
            await self._revoke(older.lease)

    async def _revoke(self, lease: int) -> None:
        try:
            await self._store.revoke_lease(lease, timeout=REVOKE_S)
        except LeaseNotFound:
            pass  # expired
        except FAILURES as error:
            log.info("cluster: a lease is left to expire lease=%d error=%s", lease, error)

    # -- renewing ----------------------------------------------------------------------------

    async def _keep(self) -> str:
        """Renew it for as long as that succeeds; why it is lost."""
        ttl, interval = self._ttl_ms / 1000, self._ttl_ms / 4000
        sent, reason = self._deadline - ttl, ""
        while True:
            left = max(0.0, min(sent + interval, self._deadline) - time.monotonic())
            if await set_within(left, self._gives_up):
                return self._given_up
            sent = time.monotonic()
            if sent >= self._deadline:
                return reason or f"not renewed within {self._ttl_ms} ms"
            limit, self._is_behind = min(0.9 * interval, self._deadline - sent), False
            try:
                # The bound is enforced here too: no call may keep this task from looking at the clock.
                async with asyncio.timeout(limit):
                    await self._store.keep_alive(self._lease, timeout=limit)
                    self._is_behind = True
                    await self._store.get(records.registration_key(self._broker), timeout=limit)
                    self._is_behind = False
            except LeaseNotFound as error:
                return str(error)
            except FAILURES as error:
                now = f"{type(error).__name__}: {str(error) or f'no answer within {limit:.1f} s'}"
                if not reason:
                    log.warning("cluster: the registration was not renewed error=%s", now)
                reason = now
            else:
                if reason:
                    log.info("cluster: the registration is renewed again broker=%d", self._broker)
                reason = ""
                self._deadline = sent + ttl


# -- eviction: the leader ends the lease of a broker that the members agree is gone ------------
#
# It is the one action that follows from a suspicion (``sava.metadata.suspicion``). Everything after it is
# driven by the absence of the registration, as after a lease that has run out: topics become orphans, the
# journal is fenced and recovered, other brokers take the topics up.
#
# One write ends the lease. It names the lease that the suspect had when the doubt began, so a broker that has
# registered again keeps its new one; and it names the term, so a leader that was deposed meanwhile, and whose
# evidence may be old, changes nothing. A write that fails is not repeated here: while the evidence lasts, the
# suspicion is confirmed again after two seconds, and the lease runs out in any case.

WRITE_S: Final = 2.0
IDLE_S: Final = 60.0
"""A pass without a confirmed suspicion does nothing."""


class Evictor:
    """Owned by the event loop."""

    def __init__(self, store: MetadataStore) -> None:
        self._store = store
        self._confirmed: dict[NodeId, Note] = {}
        self._passes = Reconciler("evictions", self._pass, period_s=IDLE_S)
        self._task: asyncio.Task[None] | None = None
        self.evictions: Counter[str] = Counter()
        """Leases ended, by the sign that led to it."""

    def start(self, supervisor: Supervisor) -> None:
        self._task = supervisor.repeated(self._passes.run, name="evictions")

    async def close(self) -> None:
        await cancelled(self._task)

    def confirmed(self, note: Note) -> None:
        self._confirmed[note.node] = note
        self._passes.wake()

    async def _pass(self) -> None:
        confirmed, self._confirmed = self._confirmed, {}
        for note in confirmed.values():
            await self._evict(note)

    async def _evict(self, note: Note) -> None:
        sign = note.sign.name.lower()
        # Before the write: if its outcome is unknown and it was applied, no later line tells of the eviction.
        log.warning(
            "cluster: evicting broker=%d incarnation=%d sign=%s silent_ms=%d",
            *(note.node, note.lease, sign, note.silent_ms),
        )
        try:
            await self._store.revoke_lease(note.lease, fence_term=note.term, timeout=WRITE_S)
        except (LeaseNotFound, Deposed) as error:
            log.info("cluster: not evicted broker=%d incarnation=%d error=%s", note.node, note.lease, error)
        except (SavaError, TimeoutError) as error:
            log.warning(
                "cluster: eviction failed broker=%d incarnation=%d error=%s: %s",
                *(note.node, note.lease, type(error).__name__, error),
            )
        else:
            self.evictions[sign] += 1
            log.info("cluster: evicted broker=%d incarnation=%d", note.node, note.lease)
