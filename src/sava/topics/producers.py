"""Producers: who publishes into a topic.

A producer is its name. Its id is computed from the topic's id and the name, so that a producer that comes
back, to this broker or another, is the same to deduplication.

**Last open.** A producer that an application opens under a name has that name until another one is opened
under it. Each open has a number, and each stream of Sava's protocol presents the number of its open; what is
lower than the current one is fenced, over restarts and moves (``storage.producers``). Names that a
client generated have the number 0: no other producer opens them, so there is nothing to write down.

**Taking over.** A stream that may have the name takes the place of an older stream of it: usually the same
client after a broken connection that this end has not noticed. The older one must not get a batch in
afterwards:

    old   batch 40..49 waits for room in the journal
    new   opens: the topic expects 40
    old   gets in: 40..49 are its messages
    new   sends its own 40..49: "already there", answered with the old one's offset, and lost

So opening waits until nothing of the old one is on its way in, and only then says which sequence is next.

**Sharing.** Danube's protocol knows no end of a producer and no number of an open. Its clients register
again after each broken connection, so the broker cannot tell a second client from the first one that has come
back: those of one name share the registration. One that has not sent for a while is dropped, so that limits
count producers that exist; its next message registers it again.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Final

import msgspec

from sava.errors import SavaError, shown
from sava.records import Message, RecordBatch
from sava.storage.errors import Fenced
from sava.storage.producers import FOREIGN, MAX_NAMES, ProducerEpochs
from sava.storage.topic_log import TopicClosed
from sava.topics.errors import (
    MessageInvalid,
    ProducerBusy,
    ProducerFenced,
    TopicMoved,
)
from sava.topics.names import MAX_NAME_BYTES, InvalidName, TopicName
from sava.topics.publishing import Publisher
from sava.topics.rules import OwnerRules, check_room
from sava.topics.specs import TopicSpec

IDLE_S: Final = 600.0
"""After which a producer without a stream is dropped."""


TOPIC_BITS: Final = 32
TENURE_BITS: Final = 16
"""Numbers of opens begin at the topic's id, shifted: a topic that was deleted and created again has a higher
id, so a producer of the old one presents a lower number than every producer of the new one. A topic that
keeps nothing forgets its numbers with its broker, so those of each tenure begin at its epoch, shifted."""


class AccessMode(Enum):
    SHARED = "shared"
    EXCLUSIVE = "exclusive"


def producer_id(topic_id: int, name: str) -> int:
    """62 bits (the next one is that of sources), never 0 (which is no producer)."""
    digest = hashlib.blake2b(f"{topic_id}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 2 or 1


class ProducerHandle:
    """One producer's right to publish; owned by the event loop. Made by ``TopicProducers.open``."""

    def __init__(
        self, owner: TopicProducers, name: str, *, access: AccessMode, number: int, has_stream: bool
    ) -> None:
        self.name = name
        self.principal = owner.owners.of_new()
        """Whose the name is while it is open; empty: open to all."""
        self._owners = owner.owners
        self.producer_id = producer_id(owner.spec.topic_id, name)
        self.access = access
        self.epoch = owner.epoch
        self.number = number
        """Of its open. 0: its name was generated, or it came by Danube's protocol."""
        self.is_reliable = owner.spec.reliable
        self.has_stream = has_stream
        """Whether its stream will close it; otherwise it ends by being idle."""
        self._publisher = owner.publisher
        self._clock = owner.clock
        self._ended: SavaError | None = None
        self._entering = 0
        """Batches that are not accepted and not refused yet."""
        self.is_quiet = asyncio.Event()
        """Set while no batch of it is on its way in; after its end, none will be again."""
        self.is_quiet.set()
        self.used_at = self._clock()
        self.is_degraded = self._publisher.sink.is_degraded
        """Whether a message, which was acknowledged just now, is on fewer disks than it should be."""

    @property
    def topic(self) -> TopicName:
        return self._publisher.topic

    @property
    def next_sequence(self) -> int:
        """The sequence expected next: 0 of a producer that the topic does not know."""
        return self._publisher.sink.next_sequence(self.producer_id)

    @property
    def max_message_size(self) -> int:
        """Bytes; 0: no limit below that of a batch."""
        return self._publisher.max_message_size

    @property
    def is_open(self) -> bool:
        return self._ended is None

    async def begin(self, batch: RecordBatch) -> asyncio.Future[int]:
        """Accept a batch as it came from a client; calls must follow one another in the order of sequences.
        The future has the base offset when it is durable; never cancel it. A repeated batch gets the offset
        that it has.

        Waits for the topic's publish rate and for room in the journal. Raises BatchCorrupt, MessageInvalid,
        MessageTooLarge, SchemaRefused, LimitReached, SequenceGap, DuplicateForgotten, ProducerFenced,
        TopicClosed, TopicUnknown."""
        self._check_open()
        header = batch.header
        if header.producer_id != self.producer_id:
            raise MessageInvalid(
                f"a batch of producer id {header.producer_id} through producer {self.name!r}, whose id is "
                f"{self.producer_id}"
            )
        self.used_at = self._clock()
        self._entering += 1
        self.is_quiet.clear()
        try:
            await self._publisher.verify(batch, self._check_names)
            return await self._publisher.begin(batch, self._check_open, is_measured=True)
        finally:
            self._entering -= 1
            if not self._entering:
                self.is_quiet.set()

    def _check_names(self, batch: RecordBatch) -> None:
        if not batch.is_of(self.name):
            raise MessageInvalid(f"a batch with messages of other producers through producer {self.name!r}")

    async def send(self, message: Message) -> int:
        """The message's offset when it is durable. For callers with one message at a time: what many of them
        send at once is appended together. No deduplication."""
        self._check_open()
        if message.producer is None:
            message = msgspec.structs.replace(message, producer=self.name)
        elif message.producer != self.name:
            raise MessageInvalid(f"a message of producer {shown(message.producer)} through {self.name!r}")
        self.used_at = self._clock()
        return await self._publisher.send(message, self._check_open)

    def check_own(self) -> None:
        """For protocols whose messages name their producer by its id alone. Raises OwnedByAnother unless the
        running call's principal has it."""
        if self.principal:
            self._owners.check_name(self.principal, self.name, self.topic, "producer")

    def close(self) -> None:
        """The stream ended. What is on its way resolves."""
        self.end(TopicClosed(f"producer {self.name} of topic {self.topic} is closed"))

    def end(self, error: SavaError) -> None:
        """Every later call gets this error; the first end counts."""
        if self._ended is None:
            self._ended = error

    def _check_open(self) -> None:
        if self._ended is not None:
            raise self._ended


class TopicProducers:
    """Of one topic; owned by the event loop."""

    def __init__(
        self,
        spec: TopicSpec,
        epoch: int,
        publisher: Publisher,
        epochs: ProducerEpochs,
        *,
        owners: OwnerRules = OwnerRules(),  # noqa: B008 (frozen)
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``epoch``: under which the topic is served. ``epochs`` knows the number of each producer's open."""
        self.spec = spec
        self.epoch = epoch
        self.publisher = publisher
        self.owners = owners
        self.clock = clock
        self._topic = publisher.topic
        self._epochs = epochs
        self._by_name: dict[str, ProducerHandle] = {}
        self._ended: SavaError | None = None

    def __iter__(self) -> Iterator[ProducerHandle]:
        return (producer for producer in self._by_name.values() if producer.is_open)

    @property
    def ids(self) -> set[int]:
        return {producer.producer_id for producer in self}

    async def open(
        self,
        name: str,
        *,
        access: AccessMode = AccessMode.SHARED,
        schema_subject: str = "",
        takeover: bool,
        presented: int = 0,
        is_generated: bool = False,
    ) -> ProducerHandle:
        """With ``takeover`` the last open has the name, and an older producer of it is fenced; without, its
        registration is shared. ``presented``: the number of the producer's open; 0: this is its open.
        ``is_generated``: its client made the name up, and no other producer will open it. Both mean nothing
        without ``takeover``.

        Raises OwnedByAnother, ProducerFenced, ProducerBusy, LimitReached, SchemaRefused, InvalidName,
        TopicMoved, and what kept an open from being written down."""
        if not 0 < len(name.encode(errors="replace")) <= MAX_NAME_BYTES:
            raise InvalidName(f"producer name {name[:20]!a}: 1 to {MAX_NAME_BYTES} bytes")
        await self.publisher.gate.check_producer(self._topic, schema_subject)
        identity = producer_id(self.spec.topic_id, name)
        number = 0
        self._check_own(name, identity)
        if takeover:
            # An open that is refused must not fence the producer that has the name.
            self._check_room(name, access)
            number = await self._number(name, identity, presented, is_generated)
        else:
            await self._epochs.claim(identity, owner=self.owners.of_new(), frees=self.owners.frees)
        while True:
            if self._ended is not None:
                raise self._ended
            older = self._by_name.get(name)
            self._check_own(name, identity)
            if takeover and self._epochs.current(identity) > number:
                raise self._fenced(name)  # by an open that came while this one waited
            if older is None:
                break
            if older.is_open and not takeover:
                self._check_access(name, access)
                older.used_at = self.clock()
                return older
            older.end(self._fenced(name))
            await older.is_quiet.wait()
            if self._by_name.get(name) is older:
                del self._by_name[name]
        # No await from here on: what is checked is true when the producer is added.
        self._check_room(name, access)
        producer = ProducerHandle(self, name, access=access, number=number, has_stream=takeover)
        self._by_name[name] = producer
        return producer

    async def _number(self, name: str, identity: int, presented: int, is_generated: bool) -> int:
        """The number that the producer has the name with, durable. Raises ProducerFenced."""
        if is_generated:
            return 0  # lower than that of any name that an application chose
        owner, frees = self.owners.of_new(), self.owners.frees
        try:
            if presented:
                current = await self._epochs.present(identity, presented, owner=owner, frees=frees)
            else:
                current = presented = await self._epochs.open(
                    identity, above=self._first_number(), owner=owner, frees=frees
                )
        except Fenced as error:
            raise TopicMoved(self._topic) from error
        if current == FOREIGN:  # opened by another principal while this one waited
            self._check_own(name, identity)
            raise self._fenced(name)
        if not current:
            raise ProducerFenced(
                f"producer {name} of topic {self._topic}: at least {MAX_NAMES} other names were opened "
                "after it, and the topic no longer knows which open of this one is the last; open it again"
            )
        if current != presented:
            raise self._fenced(name)
        return presented

    def _check_own(self, name: str, identity: int) -> None:
        """Raises OwnedByAnother. A name that its client generated is its principal's while it is open."""
        older = self._by_name.get(name)
        if older is not None and older.is_open:
            older.check_own()
        self.owners.check_name(self._epochs.owner(identity), name, self._topic, "producer")

    def _first_number(self) -> int:
        """Beyond which the topic gives out numbers of its own. Partitions but the first take those that it
        gave."""
        partition = self._topic.partition_of
        if partition is not None and partition[1] > 0:
            return 0
        tenure = 0 if self.spec.reliable else self.epoch << TENURE_BITS
        return (self.spec.topic_id << TOPIC_BITS) + tenure

    def _fenced(self, name: str) -> ProducerFenced:
        return ProducerFenced(
            f"producer {name} of topic {self._topic}: a later producer of this name has taken its place; "
            "give each its own name"
        )

    def _check_room(self, name: str, access: AccessMode) -> None:
        self._check_access(name, access)
        self._forget_closed()
        limit = self.publisher.limits.of(self._topic).max_producers_per_topic
        others = sum(1 for producer in self if producer.name != name)
        check_room(others, limit, f"producers of topic {self._topic}")

    def check_shared(self, name: str) -> None:
        """Raise ProducerBusy if the topic is another producer's alone."""
        self._check_access(name, AccessMode.SHARED)

    def _check_access(self, name: str, access: AccessMode) -> None:
        others = [producer for producer in self if producer.name != name]
        exclusive = next((each for each in others if each.access is AccessMode.EXCLUSIVE), None)
        if exclusive is not None:
            raise ProducerBusy(f"topic {self._topic} has the exclusive producer {exclusive.name}")
        if access is AccessMode.EXCLUSIVE and others:
            raise ProducerBusy(
                f"topic {self._topic} has {len(others)} other producers, such as {others[0].name}"
            )

    def _forget_closed(self) -> None:
        for name in [name for name, producer in self._by_name.items() if not producer.is_open]:
            if self._by_name[name].is_quiet.is_set():
                del self._by_name[name]

    def drop_idle(self, idle_s: float = IDLE_S) -> None:
        """Forget those that end without saying so."""
        before = self.clock() - idle_s
        for producer in list(self):
            if not producer.has_stream and producer.used_at <= before:
                producer.close()
        self._forget_closed()

    def end(self, error: SavaError) -> None:
        """The topic ends here."""
        self._ended = error
        for producer in self._by_name.values():
            producer.end(error)
