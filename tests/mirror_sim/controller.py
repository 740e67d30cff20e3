"""Controller: whoever leads decides who is gone, recovers their journals, and lets their topics go on.

It acts on what the store says, again and again, and writes by compare-and-swap only; so two of them at once
(a leader that does not know that it was deposed) may be in each other's way, and must not do harm."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sava.mirror.errors import TailBroken
from sava.mirror.messages import Bytes, Checked, Durable, Fenced, Message, Read, Refused, Trim
from sava.mirror.record import JournalRecord, JournalState
from sava.mirror.recovery import Phase, Recovery
from sava.mirror.types import JournalId, StorageId
from tests.mirror_sim.copies import Batch, parse
from tests.mirror_sim.records import TopicRecord, TopicState, journal_key, topic_key
from tests.mirror_sim.store import Held, Key, Outcome
from tests.mirror_sim.tails import is_settled, tail_of

if TYPE_CHECKING:
    from tests.mirror_sim.broker import Broker

MS = 1000
TICK_US = 80 * MS
RETRY_US = 150 * MS
STUCK_US = 1500 * MS
READ_BYTES = 3000


class Attempt:
    """One recovery, with whoever carries its messages."""

    def __init__(self, controller: Controller, journal: JournalId, held: Held, number: int) -> None:
        self._controller = controller
        self.world = controller.world
        self.broker = controller.broker
        by = f"{self.broker.id}.{self.broker.life}/{number}"
        self.core = Recovery(
            journal, held.value, held.revision, by=by, spares=self.world.spares(held.value.storages)
        )
        self.started_at = self._retried_at = self.world.now
        self._is_storing = False
        self.pump()

    @property
    def is_over(self) -> bool:
        return self.core.phase in (Phase.CLOSED, Phase.OVERTAKEN)

    def tick(self) -> None:
        if self.world.now - self._retried_at > RETRY_US:
            self._retried_at = self.world.now
            self.core.offer(self.world.spares(self.core.record.storages))
            self.core.retry()
        self.pump()

    def receive(self, message: Message) -> None:
        self.core.receive(message)
        self.pump()

    def pump(self) -> None:
        for message in self.core.poll():
            storage = getattr(message, "storage")  # noqa: B009 (every message has it)
            self.broker.send(self.world.located[storage], message)
        wanted = self.core.wanted
        if wanted is None or self._is_storing:
            return
        self._is_storing = True
        key = journal_key(self.core.journal)

        def answer(outcome: Outcome) -> None:
            self._is_storing = False
            if self.core.wanted is not wanted or not outcome.is_known:
                return
            if outcome.succeeded:
                self.core.stored(outcome.revision)
            else:
                self.core.found(outcome.found[key].value, outcome.found[key].revision)
            if self._controller.is_current:
                self.pump()

        self.world.store.txn(self.broker.id, {key: self.core.revision}, {key: wanted}, answer)


class TailReading:
    """The bytes of a closed journal, from whoever has them."""

    def __init__(self, controller: Controller, journal: JournalId, record: JournalRecord) -> None:
        self._controller = controller
        self.journal = journal
        self.record = record
        self.at = record.floor
        self.sources: list[StorageId] = list(dict.fromkeys((*record.holders, *record.storages)))
        self._turn = 0
        self.batches: list[Batch] = []
        self.is_done = False
        self.ask()

    def ask(self) -> None:
        for lost in self.record.lost:
            if lost.start <= self.at < lost.end:
                self.at = lost.end
        if self.at >= self.record.end:
            self.is_done = True
            return
        source = self.sources[self._turn % len(self.sources)]
        read = Read(self.journal, source, self.at, self.record.end, READ_BYTES)
        self._controller.broker.send(self._controller.world.located[source], read)

    def next_source(self) -> None:
        self._turn += 1
        self.ask()

    def receive(self, message: Bytes) -> None:
        if message.journal != self.journal or message.position != self.at or self.is_done:
            return
        found = parse(self.journal, message.position, message.data)
        if not found:
            return  # another source at the next tick
        self.batches += found
        self.at = found[-1].position_end
        self.ask()


class Controller:
    """Of one life of a broker's process."""

    def __init__(self, broker: Broker) -> None:
        self.broker = broker
        self.world = broker.world
        self.attempts: dict[JournalId, Attempt] = {}
        self.tails: dict[JournalId, TailReading] = {}
        self._writing: set[Key] = set()
        self._number = 0
        self._life = broker.life
        broker._every(TICK_US, self._tick)

    @property
    def is_current(self) -> bool:
        return self.broker.controller is self and self.broker.is_life(self._life)

    def receive(self, message: Message) -> None:
        if isinstance(message, Fenced | Checked | Bytes | Durable | Refused):
            if isinstance(message, Bytes) and message.journal in self.tails:
                self.tails[message.journal].receive(message)
            attempt = self.attempts.get(message.journal)
            if attempt is not None:
                attempt.receive(message)

    def _tick(self) -> None:
        if not self.is_current or not self.world.store.is_reachable(self.broker.id):
            return
        for attempt in list(self.attempts.values()):
            attempt.tick()
        for key, held in list(self.world.store.items("journal")):
            self._tend_journal(key[1], held)
        for key, held in list(self.world.store.items("topic")):
            self._tend_topic(key[1], held)

    # -- journals ----------------------------------------------------------------------------

    def _tend_journal(self, journal: JournalId, held: Held) -> None:
        record: JournalRecord = held.value
        attempt = self.attempts.get(journal)
        is_stuck = attempt is not None and self.world.now - attempt.started_at > STUCK_US
        if attempt is not None and (attempt.is_over or (is_stuck and self.broker.rng.random() < 0.1)):
            del self.attempts[journal]
            attempt = None
        if record.state is JournalState.CLOSED:
            self._read_tail(journal, record)
            self._discard(journal, held)
            return
        is_gone = not self.world.is_present(journal.broker)
        if attempt is None and (record.state is JournalState.RECOVERING or is_gone):
            self._number += 1
            self.attempts[journal] = Attempt(self, journal, held, self._number)
            self.world.count("recoveries")

    def _read_tail(self, journal: JournalId, record: JournalRecord) -> None:
        if journal not in self.tails:
            self.tails[journal] = TailReading(self, journal, record)
        elif not self.tails[journal].is_done:
            self.tails[journal].next_source()

    def _discard(self, journal: JournalId, held: Held) -> None:
        """When no topic needs it any more: the tails of all are in segments."""
        topics = [topic.value for _, topic in self.world.store.items("topic")]
        if any(topic.journal == journal for topic in topics):
            return
        for storage in held.value.storages:
            trim = Trim(journal, storage, held.value.epoch, held.value.end)
            self.broker.send(self.world.located[storage], trim)
        self._write({journal_key(journal): held.revision}, {journal_key(journal): None})

    # -- topics ------------------------------------------------------------------------------

    def _tend_topic(self, topic: int, held: Held) -> None:
        record: TopicRecord = held.value
        key = topic_key(topic)
        if record.state is TopicState.SEALED:
            self._assign(topic, held)
            return
        assert record.journal is not None
        journal = self.world.store.get(journal_key(record.journal))
        is_open = journal.value is not None and journal.value.state is JournalState.OPEN
        if record.state is TopicState.ASSIGNED:
            if not is_open:  # and never will be again; of one that is open the owner may be back in time
                self._write({key: held.revision}, {key: record._replace(state=TopicState.ORPHAN)})
        elif journal.value is not None and is_settled(journal.value):
            self._seal(topic, held, record.journal, journal)

    def _seal(self, topic: int, held: Held, journal: JournalId, found: Held) -> None:
        record: TopicRecord = held.value
        if journal not in self.tails:
            self._read_tail(journal, found.value)
        tail = self.tails[journal]
        if not tail.is_done:
            return
        frames = [batch.frame for batch in tail.batches]
        try:
            wanted = {frame.position for frame in tail_of(frames, topic, record.epoch, record.end)}
        except TailBroken:
            if not self.world.oracle.was_given_up(journal):
                raise
            # An operator has accepted the loss of what is in the hole; what follows it goes with it.
            wanted = self._up_to_the_hole(tail.batches, topic, record)
        batches = [batch for batch in tail.batches if batch.frame.position in wanted]
        after = self.world.with_segment(topic, record, batches)
        after = after._replace(state=TopicState.SEALED, journal=None)
        key = topic_key(topic)
        self._write({key: held.revision, journal_key(journal): found.revision}, {key: after})

    def _up_to_the_hole(self, batches: list[Batch], topic: int, record: TopicRecord) -> set[int]:
        at, wanted = record.end, set()
        for batch in batches:
            frame = batch.frame
            if (frame.topic, frame.epoch, frame.start) == (topic, record.epoch, at):
                wanted.add(frame.position)
                at = frame.end
        return wanted

    def _assign(self, topic: int, held: Held) -> None:
        able = [
            (key, found)
            for key, found in self.world.store.items("journal")
            if found.value.state is JournalState.OPEN and self.world.is_present(key[1].broker)
        ]
        if not able:
            return
        journal_at, journal = able[self.broker.rng.randrange(len(able))]
        record: TopicRecord = held.value
        after = record._replace(state=TopicState.ASSIGNED, epoch=record.epoch + 1, journal=journal_at[1])
        self._write(
            {topic_key(topic): held.revision, journal_at: journal.revision}, {topic_key(topic): after}
        )

    def _write(self, compares: dict[Key, int], puts: dict[Key, object]) -> None:
        keys = set(puts)
        if keys & self._writing:
            return
        self._writing |= keys
        self.world.store.txn(self.broker.id, compares, puts, lambda _: self._writing.difference_update(keys))
