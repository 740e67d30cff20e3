"""Controller: the leader decides which brokers are gone, recovers their ledgers, and assigns their topics
when brokers that hold the ledgers have sealed them (``salvager``).

It acts on what the store says, again and again, and writes by compare-and-swap only; so two of them at once
(a leader that does not know that it was deposed) may be in each other's way, and must not do harm."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sava.ledger.protocol.member import (
    CheckAnswer,
    Durable,
    FenceAnswer,
    LedgerRefused,
    Message,
    ReadAnswer,
    Trim,
)
from sava.ledger.protocol.record import LedgerId, LedgerRecord, LedgerState
from sava.ledger.protocol.recovery import Phase, Recovery
from tests.mirror_sim.records import TopicRecord, TopicState, journal_key, topic_key
from tests.mirror_sim.store import Held, Key, Outcome

if TYPE_CHECKING:
    from tests.mirror_sim.broker import Broker

MS = 1000
TICK_US = 80 * MS
RETRY_US = 150 * MS
STUCK_US = 1500 * MS


class Attempt:
    """One recovery, with whoever carries its messages."""

    def __init__(self, controller: Controller, ledger: LedgerId, held: Held, number: int) -> None:
        self._controller = controller
        self.world = controller.world
        self.broker = controller.broker
        by = f"{self.broker.id}.{self.broker.life}/{number}"
        self.core = Recovery(
            ledger, held.value, held.revision, by=by, spares=self.world.spares(held.value.storages)
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
        key = journal_key(self.core.ledger)

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


class Controller:
    """Of one life of a broker's process."""

    def __init__(self, broker: Broker) -> None:
        self.broker = broker
        self.world = broker.world
        self.attempts: dict[LedgerId, Attempt] = {}
        self._writing: set[Key] = set()
        self._number = 0
        self._life = broker.life
        broker._every(TICK_US, self._tick)

    @property
    def is_current(self) -> bool:
        return self.broker.controller is self and self.broker.is_life(self._life)

    def receive(self, message: Message) -> None:
        if isinstance(message, FenceAnswer | CheckAnswer | ReadAnswer | Durable | LedgerRefused):
            attempt = self.attempts.get(message.ledger)
            if attempt is not None:
                attempt.receive(message)

    def _tick(self) -> None:
        if not self.is_current or not self.world.store.is_reachable(self.broker.id):
            return
        for attempt in list(self.attempts.values()):
            attempt.tick()
        for key, held in list(self.world.store.items("ledger")):
            self._tend_journal(key[1], held)
        for key, held in list(self.world.store.items("topic")):
            self._tend_topic(key[1], held)

    # -- ledgers ----------------------------------------------------------------------------

    def _tend_journal(self, ledger: LedgerId, held: Held) -> None:
        record: LedgerRecord = held.value
        attempt = self.attempts.get(ledger)
        is_stuck = attempt is not None and self.world.now - attempt.started_at > STUCK_US
        if attempt is not None and (attempt.is_over or (is_stuck and self.broker.rng.random() < 0.1)):
            del self.attempts[ledger]
            attempt = None
        if record.state is LedgerState.CLOSED:
            self._discard(ledger, held)
            return
        is_gone = not self.world.is_present(ledger.broker)
        if attempt is None and (record.state is LedgerState.RECOVERING or is_gone):
            self._number += 1
            self.attempts[ledger] = Attempt(self, ledger, held, self._number)
            self.world.count("recoveries")

    def _discard(self, ledger: LedgerId, held: Held) -> None:
        """When no topic needs it any more: the tails of all are in segments."""
        topics = [topic.value for _, topic in self.world.store.items("topic")]
        if any(topic.ledger == ledger for topic in topics):
            return
        for storage in held.value.storages:
            trim = Trim(ledger, storage, held.value.epoch, held.value.end)
            self.broker.send(self.world.located[storage], trim)
        self._write({journal_key(ledger): held.revision}, {journal_key(ledger): None})

    # -- topics ------------------------------------------------------------------------------

    def _tend_topic(self, topic: int, held: Held) -> None:
        record: TopicRecord = held.value
        key = topic_key(topic)
        if record.state is TopicState.SEALED:
            self._assign(topic, held)
            return
        assert record.ledger is not None
        ledger = self.world.store.get(journal_key(record.ledger))
        is_open = ledger.value is not None and ledger.value.state is LedgerState.OPEN
        if record.state is TopicState.ASSIGNED and not is_open:
            # And never will be again; of one that is open the owner may be back in time.
            self._write({key: held.revision}, {key: record._replace(state=TopicState.ORPHAN)})

    def _assign(self, topic: int, held: Held) -> None:
        able = [
            (key, found)
            for key, found in self.world.store.items("ledger")
            if found.value.state is LedgerState.OPEN and self.world.is_present(key[1].broker)
        ]
        if not able:
            return
        journal_at, ledger = able[self.broker.rng.randrange(len(able))]
        record: TopicRecord = held.value
        after = record._replace(state=TopicState.ASSIGNED, epoch=record.epoch + 1, ledger=journal_at[1])
        self._write({topic_key(topic): held.revision, journal_at: ledger.revision}, {topic_key(topic): after})

    def _write(self, compares: dict[Key, int], puts: dict[Key, object]) -> None:
        keys = set(puts)
        if keys & self._writing:
            return
        self._writing |= keys
        self.world.store.txn(self.broker.id, compares, puts, lambda _: self._writing.difference_update(keys))
