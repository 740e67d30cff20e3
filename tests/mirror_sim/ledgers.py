"""OwnJournal: the owner's side: topics append to it, it is streamed to mirrors, its commits acknowledge."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sava.ledger.protocol.member import (
    Durable,
    Join,
    JoinAnswer,
    LedgerAppend,
    LedgerRefused,
    RefusalReason,
)
from sava.ledger.protocol.owner import Owner
from sava.ledger.protocol.record import LedgerFenced, LedgerId, LedgerRecord, StorageId, WrongStep
from tests.mirror_sim.copies import Batch, encode_batch
from tests.mirror_sim.hosting import Host
from tests.mirror_sim.records import TopicRecord, TopicState, journal_key, topic_key
from tests.mirror_sim.store import Outcome
from tests.mirror_sim.tails import Frame, lowest_needed

if TYPE_CHECKING:
    from tests.mirror_sim.broker import Broker

MS = 1000
TICK_US = 40 * MS
Reply = Callable[[bool], None]


@dataclass(slots=True)
class Served:
    epoch: int
    next: int
    registered: int
    revision: int
    acked: int
    is_leaving: bool = False
    is_writing: bool = False


@dataclass(slots=True)
class Stream:
    channel: int
    is_joined: bool
    durable: int
    moved_at: int
    """When it was last seen to be well."""


class OwnJournal:
    """Of one life of the process."""

    def __init__(
        self, broker: Broker, ledger: LedgerId, record: LedgerRecord, revision: int, host: Host
    ) -> None:
        self.id = ledger
        self.broker = broker
        self.world = broker.world
        self.host = host
        self.core = Owner(ledger, record, revision, window=self.world.knobs.window)
        self.served: dict[int, Served] = {}
        self._registered: dict[int, int] = {}
        self._streams: dict[StorageId, Stream] = {}
        self._waiting: list[tuple[Batch, Reply]] = []
        """Appended, not yet committed."""
        self._held: list[Batch] = []
        """Committed, not yet below the floor."""
        self._is_storing = False
        self._is_stopped = False
        self._bad_since: dict[StorageId, int] = {}
        self._upload_at = 0
        host.member.receive(Join(ledger, broker.storage, 0, 0, 0))
        host.pump()
        broker._every(TICK_US, self._tick)

    def stopped(self) -> None:
        """Nothing more is acknowledged; the outcome of what is under way is unknown to its producers."""
        self._is_stopped = True
        for _, reply in self._waiting:
            self.world.after(0, reply, False)
        self._waiting.clear()

    # -- appending ---------------------------------------------------------------------------

    def publish(self, topic: int, hash_: int, reply: Reply) -> None:
        served = self.served.get(topic)
        is_full = self.core.end - self.core.commit > self.world.knobs.max_backlog
        if served is None or served.is_leaving or is_full or self._is_stopped or self.core.is_fenced:
            reply(False)
            return
        frame = Frame(topic, served.epoch, served.next, served.next + 1, self.host.member.end)
        data = encode_batch(self.id, frame, hash_, self.world.knobs.payload_bytes)
        append = LedgerAppend(
            self.id, self.broker.storage, 0, frame.position, data, self.core.commit, self.core.floor
        )
        if self.host.member.receive(append):
            self.core.is_fenced = True
            reply(False)
            return
        served.next += 1
        batch = Batch(frame, hash_, frame.position + len(data))
        self.world.oracle.appended(self.id, batch, data)
        self._waiting.append((batch, reply))
        self.host.pump()

    def written(self, end: int) -> None:
        try:
            self.core.appended(end)
        except LedgerFenced:
            return
        self._push_all()

    def own_disk_full(self, end: int) -> None:
        """What was not written is taken back: nobody else has seen it."""
        refused = [entry for entry in self._waiting if entry[0].position_end > end]
        self._waiting = [entry for entry in self._waiting if entry[0].position_end <= end]
        self.world.oracle.taken_back(self.id, end)
        for batch, reply in refused:
            served = self.served.get(batch.frame.topic)
            if served is not None:
                served.next = min(served.next, batch.frame.start)
            self.world.after(0, reply, False)

    # -- committing --------------------------------------------------------------------------

    def receive(self, source: int, channel: int, message: JoinAnswer | Durable | LedgerRefused) -> None:
        if self._is_stopped:
            return
        stream = self._streams.get(message.storage)
        is_current = stream is not None and stream.channel == channel
        is_fact = isinstance(message, Durable) or (
            isinstance(message, LedgerRefused) and message.reason is RefusalReason.FENCED
        )
        if isinstance(message, LedgerRefused) and message.reason is RefusalReason.OTHER_DISK:
            return  # in the name of another disk; the stream stays as it is, and is found not to move
        if not (is_current or is_fact):
            return
        self.core.receive(message)
        if isinstance(message, JoinAnswer) and stream is not None:
            stream.is_joined = True
        self._commit()
        self._push_all()

    def _commit(self) -> None:
        commit = self.core.commit
        while self._waiting and self._waiting[0][0].position_end <= commit:
            batch, reply = self._waiting.pop(0)
            self.world.oracle.acked(self, batch)
            self._held.append(batch)
            served = self.served.get(batch.frame.topic)
            if served is not None and served.epoch == batch.frame.epoch:
                served.acked = batch.frame.end
            self.world.after(self.world.net.delay(), reply, True)

    # -- streaming ---------------------------------------------------------------------------

    def _push_all(self) -> None:
        for storage, stream in self._streams.items():
            if stream.is_joined:
                self._push(storage, stream)

    def _push(self, storage: StorageId, stream: Stream) -> None:
        destination = self.world.located[storage]
        while (wanted := self.core.next_send(storage)) is not None:
            data = self.host.copy.read(wanted.start, self.core.end, wanted.end - wanted.start)
            if not data and wanted.start < self.core.floor:
                self.core.disconnected(storage)  # trimmed: it joins anew when it is found not to move
                return
            if not data:
                # The own log cannot be read back as it was written: not to be copied, and not to be trusted.
                self.world.after(0, self._own_log_is_bad, self.broker.life)
                return
            self.broker.send(destination, self.core.append(storage, wanted.start, data), stream.channel)

    def _own_log_is_bad(self, life: int) -> None:
        if self.broker.is_life(life):
            self.broker.die("the own ledger is damaged")

    def _connect(self, storage: StorageId) -> None:
        known = self._streams.get(storage)
        moved_at = known.moved_at if known is not None else self.world.now
        channel = self.world.net.open_channel()
        self._streams[storage] = Stream(channel, False, self.core.durable_end(storage), moved_at)
        self.broker.send(self.world.located[storage], self.core.join(storage), channel)

    # -- tending -----------------------------------------------------------------------------

    def _tick(self) -> None:
        if self._is_stopped:
            return
        if self.core.is_fenced:
            return
        self._tend_streams()
        self._tend_members()
        self._store_record()
        if self.world.store.is_reachable(self.broker.id):
            held = self.world.store.get(journal_key(self.id))
            if held.revision != self.core.revision and not self._is_storing:
                self.core.found(held.value, held.revision)
                self._commit()
            self._tend_topics()
        is_time = self.world.now >= self._upload_at
        if is_time:
            self._upload_at = self.world.now + self.world.knobs.upload_ms * MS
        for topic, served in list(self.served.items()):
            if (is_time or served.is_leaving) and not served.is_writing:
                self._upload_topic(topic, served)
        self._trim()

    def _tend_streams(self) -> None:
        now, rejoin = self.world.now, self.world.knobs.rejoin_ms * MS
        for storage in [each for each in self._streams if each not in self.core.mirrors]:
            self.core.disconnected(storage)
            del self._streams[storage]
        for storage in self.core.mirrors:
            stream = self._streams.get(storage)
            if stream is None:
                self._connect(storage)
                continue
            durable = self.core.durable_end(storage)
            if durable > stream.durable or (stream.is_joined and durable >= self.core.end):
                stream.durable, stream.moved_at = durable, now
            elif (now - stream.moved_at) // rejoin > (now - TICK_US - stream.moved_at) // rejoin:
                self._connect(storage)

    def _is_ill(self, storage: StorageId) -> bool:
        stream = self._streams.get(storage)
        return stream is None or self.world.now - stream.moved_at > self.world.knobs.replace_ms * MS

    def _tend_members(self) -> None:
        record, knobs = self.core.record, self.world.knobs
        if self.core.wanted is not None and self.broker.rng.random() > 0.02:
            return
        members = record.last.members
        ill = [storage for storage in members[1:] if self._is_ill(storage)]
        spares = self.world.spares(members)
        if "churn" in knobs.faults and not self.world.is_healing and self.broker.rng.random() < 0.03:
            ill = list(members[1:])
        wanted, qa = members, record.last.qa
        staying = tuple(each for each in members if each == members[0] or not self.world.is_leaving(each))
        without = (*staying, *spares)[: record.qw]
        if staying != members and len(without) >= qa:
            # While it still answers; if messages need it, it stays until it is gone.
            wanted = without
            self.world.count("mirrors left in time")
        elif record.is_degraded or len(members) < record.qw:
            wanted = (*members, *spares)[: record.qw]
            qa = record.qa if len(wanted) >= record.qa else 1
        elif ill and spares:
            out = self.broker.rng.choice(ill)
            wanted = (*(each for each in members if each != out), self.broker.rng.choice(spares))
        elif knobs.allows_degraded and len(members) - len(ill) < record.last.qa:
            wanted, qa = members[:1], 1
        if (wanted, qa) != (members, record.last.qa) and not self.core.is_fenced:
            try:
                self.core.change(wanted, qa=qa)
                self.world.count("mirror changes wanted")
            except WrongStep as wrong:
                raise AssertionError(str(wrong)) from wrong

    def _store_record(self) -> None:
        wanted = self.core.wanted
        if wanted is None or self._is_storing:
            return
        self._is_storing = True
        key = journal_key(self.id)
        compares = {key: self.core.revision}

        def answer(outcome: Outcome) -> None:
            self._is_storing = False
            if self._is_stopped or not outcome.is_known:
                return
            if outcome.succeeded:
                self.core.stored(wanted, outcome.revision)
            else:
                self.core.found(outcome.found[key].value, outcome.found[key].revision)
            self._commit()

        self.world.store.txn(self.broker.id, compares, {key: wanted}, answer)

    # -- topics ------------------------------------------------------------------------------

    def _tend_topics(self) -> None:
        for key, held in self.world.store.items("topic"):
            topic, record = key[1], held.value
            served = self.served.get(topic)
            is_mine = record.state is TopicState.ASSIGNED and record.ledger == self.id
            if served is not None and (not is_mine or record.epoch != served.epoch):
                del self.served[topic]
                served = None
            if is_mine and served is None:
                self.world.oracle.serves(topic, record)
                self.served[topic] = Served(record.epoch, record.end, record.end, held.revision, record.end)
            elif served is not None and not served.is_writing and served.revision != held.revision:
                served.revision, served.registered = held.revision, record.end
            self._registered[topic] = record.end

    def _upload_topic(self, topic: int, served: Served) -> None:
        batches = [
            batch
            for batch in self._held
            if (batch.frame.topic, batch.frame.epoch) == (topic, served.epoch)
            and batch.frame.start >= served.registered
        ]
        is_all = served.is_leaving and served.next == (
            batches[-1].frame.end if batches else served.registered
        )
        if not batches and not is_all:
            return
        record: TopicRecord = self.world.store.get(topic_key(topic)).value
        if record.epoch != served.epoch or self.world.store.get(topic_key(topic)).revision != served.revision:
            return
        after = self.world.with_segment(topic, record, batches)._replace(cursor=served.acked)
        if is_all:
            after = after._replace(state=TopicState.SEALED, ledger=None)
        served.is_writing = True

        def answer(outcome: Outcome) -> None:
            served.is_writing = False
            if outcome.is_known and outcome.succeeded:
                served.registered, served.revision = after.end, outcome.revision
                self._registered[topic] = max(after.end, self._registered.get(topic, 0))

        self.world.store.txn(
            self.broker.id, {topic_key(topic): served.revision}, {topic_key(topic): after}, answer
        )

    def leave(self, topic: int) -> None:
        """Give the topic away: accept no more; when all is in segments, seal it."""
        if topic in self.served:
            self.served[topic].is_leaving = True

    def _trim(self) -> None:
        frames = [batch.frame for batch in self._held]
        self.core.covered(lowest_needed(frames, self._registered, self.core.commit))
        floor = self.core.floor
        self._held = [batch for batch in self._held if batch.position_end > floor]
        self.host.member.receive(self.core.trim(self.broker.storage))
        self.host.pump()
        for storage, stream in self._streams.items():
            if stream.is_joined and self.broker.rng.random() < 0.2:
                self.broker.send(self.world.located[storage], self.core.trim(storage), stream.channel)
