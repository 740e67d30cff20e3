"""Agent: on every broker, does what the ownership records ask of it for its own topics.

==========  ====================================================  ==============================
record      what this broker does                                 and writes
==========  ====================================================  ==============================
assigned    takes the topic up, unless it serves it already       ``take`` (as it begins)
moving      hands it over: everything to where others can read    ``seal``, or ``roll_back``
orphan      its own, after a return: takes it up again            ``take``
deleting    closes it                                             ``release``
another's   drops what it still has of it                         nothing
==========  ====================================================  ==============================

Level-triggered: what to do follows from the record as it is and from what is loaded, never from which change
came last. So a topic is looked at when its record changes, after each job, when this broker is registered
again, and every quarter of a minute in any case; whatever was interrupted, at whatever point, is decided
again.
A job other than taking up (which asks by itself) begins with a linearizable read: a view that is behind must
not drop what was taken up a moment ago.

Nothing is done while this broker is not registered: others may be taking over.

**Between handing over and sealing.** Once ``hand_over`` has returned, no broker can append under this epoch,
and the end is known. When the answer to ``seal`` is lost, the record decides: still moving under this epoch,
it is written again; otherwise it happened, or the controller has taken the move back, and the topic is taken
up under the next epoch. A broker that dies in between comes back with another incarnation, rolls the move
back and continues to serve from its journal.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from enum import StrEnum
from typing import Any, Final

from sava.cluster import records
from sava.cluster.registration import Registrar
from sava.cluster.view import ClusterView, TopicEntry
from sava.errors import SavaError
from sava.metadata.commands import Put
from sava.metadata.errors import Unfinished
from sava.metadata.records import RecordBusy, RecordCorrupt, unchanged
from sava.metadata.store import MetadataStore
from sava.storage.catalog import Catalog
from sava.storage.types import TopicKey
from sava.supervisor import Supervisor
from sava.tasks import Backoff, Reconciler, cancelled, spawn
from sava.topics import ownership, specs
from sava.topics.errors import NotOwner, TopicUnknown
from sava.topics.names import TopicName
from sava.topics.ownership import WrongState
from sava.topics.served import ServedTopics
from sava.topics.specs import OwnershipState, TopicSpec

log = logging.getLogger(__name__)

FAILURES: Final = (SavaError, TimeoutError, OSError)
"""Of one topic: logged, and tried again later."""
OVERTAKEN: Final = (NotOwner, TopicUnknown, WrongState, RecordBusy)
"""Another broker or a client has changed the record: what is to be done is decided again."""
PASS_S: Final = 15.0
CHUNK: Final = 256
"""Topics looked at between two turns of other tasks, in a pass over all of them."""
FIRST_RETRY_S: Final = 0.1
LONGEST_RETRY_S: Final = 5.0
PARALLEL: Final = 64
"""Topics taken up at a time: what they write shares log entries, of which more topics fill more."""
MOVES: Final = 16
"""Topics handed over at a time: each may have a segment to upload."""
GIVE_BACK_AFTER: Final = 5
"""Attempts to take up a topic before another broker may try."""
TAKE_S: Final = 60.0
HAND_OVER_GRACE_S: Final = 5.0
"""Beyond the time that a hand-over has: one that does not return is given up."""
RELEASE_S: Final = 30.0
NOT_SERVING: Final = -1
"""Instead of an epoch: it is loaded and has stopped by itself."""


class Job(StrEnum):
    TAKE_UP = "take_up"
    HAND_OVER = "hand_over"
    ROLL_BACK = "roll_back"
    DROP = "drop"
    RELEASE = "release"


def decide(entry: TopicEntry, *, broker: int, incarnation: int, epoch: int) -> Job | None:
    """``epoch``: under which the topic is loaded here; 0: it is not. Of several things to do, the first."""
    record = entry.record
    if record.owner != broker:
        return Job.DROP if epoch else None
    is_ours = record.incarnation == incarnation
    match record.state:
        case OwnershipState.DELETING:
            return Job.RELEASE
        case OwnershipState.MOVING if not is_ours:
            return Job.ROLL_BACK
        case OwnershipState.MOVING:
            return Job.HAND_OVER if epoch in (0, record.epoch) else Job.DROP
        case OwnershipState.ASSIGNED if is_ours and epoch == record.epoch:
            return None
        case OwnershipState.ASSIGNED | OwnershipState.ORPHAN:
            if epoch:
                return Job.DROP
            return None if entry.spec.deleting else Job.TAKE_UP
    return Job.DROP if epoch else None


class _Case:
    """A topic that something is being done about, and what must be remembered until it is done."""

    __slots__ = ("backoff", "failed", "failures", "handed_over", "moving", "refused", "task", "woken")

    def __init__(self) -> None:
        self.task: asyncio.Task[None] | None = None
        self.failures = 0
        """In a row, by the topic's own fault: not because the record had changed."""
        self.backoff = Backoff(FIRST_RETRY_S, LONGEST_RETRY_S)
        self.failed: Job | None = None
        """What is to be tried again after a pause."""
        self.woken = asyncio.Event()
        self.refused = 0
        """Assignments in a row that failed before this one; taking it up erases them from the record."""
        self.moving = (0, 0.0)
        """The epoch under which the topic is to move, and when that was first seen."""
        self.handed_over = (0, 0)
        """The epoch under which it was handed over, and its end."""


class Agent:
    """Owned by the event loop: one task for each topic that there is something to do about."""

    def __init__(
        self,
        view: ClusterView,
        store: MetadataStore,
        topics: ServedTopics,
        *,
        broker: int,
        registrar: Registrar,
        parallel: int = PARALLEL,
    ) -> None:
        self._view = view
        self._store = store
        self._topics = topics
        self._broker = broker
        self._registrar = registrar
        # Apart, because a hand-over may take as long as an upload does: those who wait for a topic that is
        # to be taken up must not wait for that.
        self._slots = asyncio.Semaphore(parallel)
        self._slots_for_moves = asyncio.Semaphore(MOVES)
        self._cases: dict[TopicName, _Case] = {}
        # No failure of a pass is foreseen: it only looks at dictionaries.
        self._passes = Reconciler("agent", self._pass, period_s=PASS_S, failures=())
        self._task: asyncio.Task[None] | None = None
        self._is_closing = False

    # -- running -----------------------------------------------------------------------------

    def start(self, supervisor: Supervisor) -> None:
        self._view.listen(self._changed)
        self._registrar.listen(self._passes.wake)
        self._task = supervisor.essential(self._passes.run(), name="agent")

    async def close(self) -> None:
        """What is under way ends where it is; records and journal say where that was."""
        self._is_closing = True
        await cancelled(self._task, *(case.task for case in self._cases.values()))

    def _changed(self, topics: frozenset[TopicName] | None) -> None:
        if topics is None:
            self._passes.wake()
        else:
            for name in topics:
                self._consider(name)

    async def _pass(self) -> None:
        names = self._view.names_of(self._broker) | set(self._topics.loaded)
        for count, name in enumerate(names, 1):
            self._consider(name)
            if not count % CHUNK:
                await asyncio.sleep(0)

    def _consider(self, name: TopicName) -> None:
        """By the view, which may be behind: it says whether to look more closely."""
        if self._is_closing or not self._view.is_ready:
            return
        job = self._decide(name, self._view.entry(name))
        case = self._cases.get(name)
        if case is not None:
            if case.failed is not None and case.failed is not job:
                case.woken.set()
        elif job is not None:
            case = self._cases[name] = _Case()
            case.task = spawn(self._work_on(name, case), name=f"agent: {name}")

    def _decide(self, name: TopicName, entry: TopicEntry | None) -> Job | None:
        incarnation = self._registrar.incarnation
        if not incarnation:
            return None
        topic = self._topics.loaded.get(name)
        epoch = 0 if topic is None else topic.epoch if topic.is_serving else NOT_SERVING
        if entry is None:
            return Job.DROP if epoch else None
        return decide(entry, broker=self._broker, incarnation=incarnation, epoch=epoch)

    # -- one topic ---------------------------------------------------------------------------

    async def _work_on(self, name: TopicName, case: _Case) -> None:
        """Until there is nothing left to do, as this node knows it. The case is closed without a wait after
        that was found: what changes later opens another."""
        try:
            while (job := self._decide(name, self._known(name))) is not None:
                await self._attempt(job, name, case)
        except RecordCorrupt as error:
            log.error("agent: nothing can be done topic=%s error=%s", name, error)
        finally:
            del self._cases[name]

    async def _attempt(self, job: Job, name: TopicName, case: _Case) -> None:
        self._note_move(name, case)
        try:
            async with self._slots_for_moves if job is Job.HAND_OVER else self._slots:
                if job is not Job.TAKE_UP:
                    await self._barrier(name)
                entry = self._known(name)
                if self._decide(name, entry) is job:
                    await self._do(job, name, entry, case)
        except RecordCorrupt:
            raise
        except OVERTAKEN as error:
            log.info("agent: overtaken job=%s topic=%s error=%s", job, name, _text(error))
            await self._pause(job, case)
        except FAILURES as error:
            case.failures += 1
            log.warning(
                "agent: failed job=%s topic=%s failures=%d error=%s", job, name, case.failures, _text(error)
            )
            if job is Job.TAKE_UP and not case.failures % GIVE_BACK_AFTER:
                await self._try_give_back(name, case, _text(error))
            await self._pause(job, case)
        else:
            case.failures = 0
            case.backoff.reset()

    async def _do(self, job: Job, name: TopicName, entry: TopicEntry | None, case: _Case) -> None:
        began = time.monotonic()
        match job:
            case Job.DROP:
                await self._topics.drop(name, self._why_drop(entry))
            case Job.RELEASE:
                await self._topics.release(name)
            case Job.TAKE_UP if entry is not None:
                case.refused = max(case.refused, entry.record.failures)
                async with asyncio.timeout(TAKE_S):
                    await self._topics.get(name)
            case Job.ROLL_BACK if entry is not None:
                why = "was restarted" if entry.record.incarnation else "had not taken it up yet"
                await self._write("roll_back", entry, error=f"broker {self._broker} {why}")
            case Job.HAND_OVER if entry is not None:
                await self._hand_over(entry, case)
        took = (time.monotonic() - began) * 1000
        log.info("agent: done job=%s topic=%s ms=%.0f", job, name, took)

    def _why_drop(self, entry: TopicEntry | None) -> str:
        if entry is None:
            return "it does not exist any more"
        owner = entry.record.owner
        return f"broker {owner} has it now" if owner not in (0, self._broker) else "it is taken up again"

    def _note_move(self, name: TopicName, case: _Case) -> None:
        """The time that a hand-over has counts from here, a wait for its turn included."""
        record = ownership.known(self._store.local, name).record
        if record.state is OwnershipState.MOVING and case.moving[0] != record.epoch:
            case.moving = record.epoch, time.monotonic()

    async def _hand_over(self, entry: TopicEntry, case: _Case) -> None:
        name, record = entry.name, entry.record
        if case.handed_over[0] != record.epoch:
            left = case.moving[1] + record.timeout_ms / 1000 - time.monotonic()
            try:
                if left <= 0:
                    raise TimeoutError(f"it was not handed over within {record.timeout_ms} ms")
                async with asyncio.timeout(left + HAND_OVER_GRACE_S):
                    end = await self._topics.hand_over(name, timeout=left)
            except OVERTAKEN:
                raise
            except FAILURES as error:
                log.warning("agent: a move is taken back topic=%s error=%s", name, _text(error))
                await self._write("roll_back", entry, error=_text(error))
                return
            case.handed_over = record.epoch, end
        await self._write("seal", entry, end=case.handed_over[1], from_broker=self._broker)

    async def _try_give_back(self, name: TopicName, case: _Case, error: str) -> None:
        try:
            await self._give_back(name, case, error)
        except FAILURES as second:
            log.warning("agent: cannot be given back topic=%s error=%s", name, _text(second))

    async def _give_back(self, name: TopicName, case: _Case, error: str) -> None:
        """Another broker may try, unless what the topic's end is may only be known here. A claim of its
        storage that is still on its way comes too late: it is made on the condition of the record that this
        writes over."""
        await self._barrier(name)
        entry = self._known(name)
        if entry is None or self._decide(name, entry) is not Job.TAKE_UP:
            return
        end = await self._settled_end(entry)
        if entry.record.state is not OwnershipState.ASSIGNED or end is None:
            return
        await self._write(
            "give_back", entry, end=end, error=error, failures=case.refused + 1, from_broker=self._broker
        )
        log.warning("agent: given back topic=%s error=%s", name, error)

    async def _settled_end(self, entry: TopicEntry) -> int | None:
        """Where another broker would continue; None: a journal may hold what is not in segments."""
        if not entry.spec.reliable:
            return 0
        key = TopicKey(entry.name.namespace, entry.name.topic, entry.spec.topic_id)
        state = await Catalog(self._store, key).load()
        if state is None:
            return 0
        return state.end if state.is_settled else None

    async def _pause(self, job: Job, case: _Case) -> None:
        """Before the next attempt, unless something else is to be done by then."""
        case.failed = job
        case.woken.clear()
        await case.backoff.pause(case.woken)
        case.failed = None

    # -- records -----------------------------------------------------------------------------

    async def _barrier(self, name: TopicName) -> None:
        """What this node knows is from now on not older than this call."""
        await self._store.get(specs.ownership_key(name))

    def _known(self, name: TopicName) -> TopicEntry | None:
        """As this node knows it. None: there is no such topic. Raises RecordCorrupt."""
        local = self._store.local
        kv = local.get(specs.spec_key(name))
        if kv is None or (spec := specs.decode(kv, TopicSpec)).partitions:
            return None
        return TopicEntry(name, spec, kv.mod_revision, *ownership.known(local, name))

    async def _write(self, step: str, entry: TopicEntry, **changes: Any) -> None:
        """Raises WrongState or RecordBusy if it was overtaken: what is to be done is decided again."""
        name = entry.name
        record = ownership.after(step, name, entry.record, **changes)
        key = specs.ownership_key(name)
        compare = (unchanged(key, entry.revision), unchanged(specs.spec_key(name), entry.spec_revision))
        if not (await self._store.txn(compare, (Put(key, specs.encode(record)),), batched=True)).succeeded:
            raise RecordBusy(f"topic {name}: its ownership changed before {step} was written")

    # -- for others --------------------------------------------------------------------------

    async def released(self, names: Sequence[TopicName]) -> None:
        """Until no broker has these topics, which are being deleted: their owners have released them, or are
        not there and hence serve nothing. Raises Unfinished."""
        if not names:
            return
        await self._barrier(names[0])
        try:
            await self._view.wait(lambda: not any(map(self._holder, names)), timeout=RELEASE_S)
        except TimeoutError:
            held = [f"{name} by broker {owner}" for name in names if (owner := self._holder(name))]
            raise Unfinished(
                f"{len(held)} topics are still held after {RELEASE_S:g} s ({', '.join(held[:3])}); "
                "repeat the deletion"
            ) from None

    def _holder(self, name: TopicName) -> int:
        """Not by the view: it may not have seen the deletion yet."""
        owner = ownership.known(self._store.local, name).record.owner
        return owner if owner and self._store.local.get(records.registration_key(owner)) is not None else 0


def _text(error: Exception) -> str:
    """One line, for a record that people read."""
    return " ".join(f"{type(error).__name__}: {str(error) or 'no answer in time'}".split())[:200]
