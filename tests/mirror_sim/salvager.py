"""Salvager: each broker turns its share of what a closed ledger holds into segments, and seals the topics.

The rule that divides the topics is the brokers' own (``share_of``). A broker that has waited helps with the
other shares, and one whose view is behind takes all of them: so two brokers do different topics of one
ledger, or the same ones, and either of them dies midway."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sava.ledger.protocol.member import Read, ReadAnswer
from sava.ledger.protocol.record import LedgerId, LedgerRecord, StorageId, TailBroken
from sava.ledger.tail_recovery import WHOLE, Share, share_of
from tests.mirror_sim.copies import Batch, parse
from tests.mirror_sim.records import TopicRecord, TopicState, journal_key, topic_key
from tests.mirror_sim.store import Held, Key, Outcome
from tests.mirror_sim.tails import is_settled, tail_of

if TYPE_CHECKING:
    from tests.mirror_sim.broker import Broker

MS = 1000
TICK_US = 80 * MS
HELP_US = 800 * MS
TURN_US = 1500 * MS
READ_BYTES = 3000
BEHIND = 0.25
"""How often a broker sees other holders than there are."""


class TailReading:
    """The bytes of a closed ledger, from any disk that has them."""

    def __init__(self, salvager: Salvager, ledger: LedgerId, record: LedgerRecord) -> None:
        self._salvager = salvager
        self.ledger = ledger
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
        read = Read(self.ledger, source, self.at, self.record.end, READ_BYTES)
        self._salvager.broker.send(self._salvager.world.located[source], read)

    def next_source(self) -> None:
        self._turn += 1
        self.ask()

    def receive(self, message: ReadAnswer) -> None:
        if message.ledger != self.ledger or message.position != self.at or self.is_done:
            return
        found = parse(self.ledger, message.position, message.data)
        if not found:
            return  # another source at the next tick
        self.batches += found
        self.at = found[-1].position_end
        self.ask()


class Salvager:
    """Of one life of a broker's process."""

    def __init__(self, broker: Broker) -> None:
        self.broker = broker
        self.world = broker.world
        self.tails: dict[LedgerId, TailReading] = {}
        self._closed_since: dict[LedgerId, int] = {}
        self._writing: dict[Key, Share] = {}
        broker._every(TICK_US, self._tick)

    def receive(self, message: ReadAnswer) -> None:
        if message.ledger in self.tails:
            self.tails[message.ledger].receive(message)

    def _tick(self) -> None:
        if not self.world.store.is_reachable(self.broker.id):
            return
        for key, held in list(self.world.store.items("ledger")):
            if is_settled(held.value):
                self._tend(key[1], held)

    def _tend(self, ledger: LedgerId, held: Held) -> None:
        waited = self.world.now - self._closed_since.setdefault(ledger, self.world.now)
        share = self._share(held.value, waited)
        if share is None:
            return
        tail = self.tails.get(ledger)
        if tail is None:
            tail = self.tails[ledger] = TailReading(self, ledger, held.value)
        elif not tail.is_done:
            tail.next_source()
        if tail.is_done:
            for key, topic in list(self.world.store.items("topic")):
                is_waiting = topic.value.state is TopicState.ORPHAN and topic.value.ledger == ledger
                if is_waiting and share.has(key[1]) and key not in self._writing:
                    self._seal(key[1], topic, ledger, held, share)

    def _share(self, record: LedgerRecord, waited: int) -> Share | None:
        present = {each.storage for each in self.world.brokers.values() if self.world.is_present(each.id)}
        share = share_of(record.holders, present, self.broker.storage)
        if share is None:
            return WHOLE if waited > TURN_US and self.broker.controller is not None else None
        is_behind = self.broker.rng.random() < BEHIND
        return WHOLE if waited > HELP_US or is_behind else share

    def _seal(self, topic: int, held: Held, ledger: LedgerId, found: Held, share: Share) -> None:
        record: TopicRecord = held.value
        tail = self.tails[ledger]
        frames = [batch.frame for batch in tail.batches]
        try:
            wanted = {frame.position for frame in tail_of(frames, topic, record.epoch, record.end)}
        except TailBroken:
            if not self.world.oracle.was_given_up(ledger):
                raise
            # An operator has accepted the loss of what is in the hole; what follows it goes with it.
            wanted = self._up_to_the_hole(tail.batches, topic, record)
        batches = [batch for batch in tail.batches if batch.frame.position in wanted]
        after = self.world.with_segment(topic, record, batches)
        after = after._replace(state=TopicState.SEALED, ledger=None)
        key = topic_key(topic)
        self._writing[key] = share
        compares = {key: held.revision, journal_key(ledger): found.revision}
        self.world.store.txn(
            self.broker.id, compares, {key: after}, lambda outcome: self._stored(key, outcome)
        )

    def _up_to_the_hole(self, batches: list[Batch], topic: int, record: TopicRecord) -> set[int]:
        at, wanted = record.end, set()
        for batch in batches:
            frame = batch.frame
            if (frame.topic, frame.epoch, frame.start) == (topic, record.epoch, at):
                wanted.add(frame.position)
                at = frame.end
        return wanted

    def _stored(self, key: Key, outcome: Outcome) -> None:
        share = self._writing.pop(key)
        if outcome.is_known and outcome.succeeded:
            self.world.count("topics sealed by " + ("one for all" if share == WHOLE else "shares"))
        elif outcome.is_known:
            self.world.count("topics that another broker had sealed")
