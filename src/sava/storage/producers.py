"""ProducerTable: which batches of each producer a topic already has, so that a repeated one is not appended
twice.

A producer numbers its messages. The answer to an append may be lost, so it sends the batch again, and only
its number tells the broker that this is the same one:

    producer   batch 20..29 ───────▶ appended at 700
               answer lost     ◀─╳─
    producer   batch 20..29 again ─▶ already there: 700, nothing is appended
    producer   batch 40..49 ───────▶ 30..39 never came: SequenceGap

Batches in flight count as known, since the producer may repeat one before the disk has answered; they become
part of the memory when durable (``commit``) and are forgotten together when one is refused (``abandon``).
They are kept apart from the durable ones because of that: cutting the memory to its limit while a hundred
are in flight would otherwise leave nothing when these are taken back, and the producer would be a stranger.

A stranger must begin with 0. If any number would do:

    producer   0..9 refused (disk full), 10..19 arrives: "new producer, begins with 10" ─▶ accepted
    producer   0..9 again: before the first known one, lost or out of order

**Runs.** A writer that publishes one prepared batch after another (``sava.cluster.writers``) does not know
how many messages of the one before were for this topic. So each of its batches is a run: its sequences are
``number of the run << 32 | index``, and a run may begin whenever the topic has not come further:

    writer     run 4: 4·2³² + 0..99   ─▶ appended
    writer     run 5 has nothing for this topic
    writer     run 6: 6·2³² + 0..49   ─▶ begins a run, beyond what was expected: appended
    writer     run 6: 6·2³² + 0..49   ─▶ already there
    writer     run 6: 6·2³² + 60..    ─▶ 50..59 never came: SequenceGap, as within any run

A stranger may begin with any run but not within one. That is safe because a writer's runs are numbered by
decisions that only one can win, and the next one is begun when the one before is complete. A client's own
numbers reach 2³² after four billion messages, and a hole that ends exactly there would pass; no client
makes one.

Both memories are bounded: the last ``WINDOW`` batches of a producer are answered with their offsets (older
ones with DuplicateForgotten), and the ``MAX_PRODUCERS`` that appended last are remembered; ``MAX_WRITERS``
besides, for a writer that was forgotten in the middle of a run would begin it again, and it must take more
than a crowd of clients to bring that about. A forgotten producer gets SequenceGap and begins again under
a new id. Over a move only the last batch of each is handed on.

Sources of other clusters that are copied into the topic have ids of their own kind. They go another way in
(``sources``), and are kept here because they are found in the same headers, and handed on with the rest.

**Producer epochs.** Which open of a producer's name is the last one.

A producer may stand still for minutes (a stopped process, a paused machine) while another one opens its
name. When it continues it must not publish: its owner has replaced it. Sequences cannot tell the two apart:

    A   sends 0, stands still
    B   opens the name, sends 1 ─▶ appended at 700
    A   continues, sends its own 1 ─▶ "already there", answered with 700, and lost

So each *open* of a name (a new producer object of an application) gets a number that is higher than every
one before it, and each *reconnect* presents the number of its open. The highest number has the name:

    presented                    answer
    none: an open                a new number, beyond all that the topic has given out
    the current one              the producer continues
    a lower one                  fenced, for good
    a higher one                 it becomes the current one

A higher one is the rule for the partitions of a topic. The first partition gives the number and the others
take it over, so that two producers which open a name at the same moment are in the same order everywhere.
It is also the safe answer after metadata was restored from an older copy: whichever of two producers comes
back first, the one that opened last ends up with the name.

**Durable.** An open is answered when its number is in the topic's state in the metadata store. Every owner
reads that record before it accepts anything, and only the owner of the newest epoch can write it, so numbers
survive restarts, moves and failovers, also if no message followed the open. The price is one metadata write
for each open of a name that the application chose; opens that arrive while a write is under way share the
next one. Reconnects, and producers whose name was generated, write nothing.

**Bounded.** ``MAX_NAMES`` are remembered. The one with the lowest number is forgotten first, and before those
that are connected. ``floor`` is the highest number that was forgotten: a producer that is not remembered and
presents no more than that is refused. It may be the last one of its name, or may not; its application opens
it again.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Sequence
from itertools import chain
from typing import Final, NamedTuple

from sava.errors import CallerError, Outcome, SavaError
from sava.records import Header
from sava.storage.errors import SequenceGap
from sava.storage.source_positions import SOURCE_BIT, SourcePositions, is_source_key
from sava.storage.types import EpochTable, OriginMark, ProducerState

NO_PRODUCER: Final = 0
"""The producer id of batches that have no part in deduplication."""
WINDOW: Final = 16
"""More than a client has in flight: after a reconnect it repeats all of these."""
MAX_PRODUCERS: Final = 1000
"""They are part of the topic's record in the metadata store (about 30 bytes each), rewritten per segment."""
MAX_WRITERS: Final = 250
RUN: Final = 1 << 32
"""Sequences of a run. The runs of writers are counted from 1, so a producer beyond this is a writer."""


class DuplicateForgotten(CallerError):
    """The batch was appended long ago: nothing was appended now, and its offset is no longer remembered."""

    outcome = Outcome.DONE_BEFORE

    def __init__(self, producer_id: int, base_sequence: int) -> None:
        super().__init__(
            f"producer {producer_id}: the batch from sequence {base_sequence} on was appended before; "
            "its offset is no longer remembered"
        )
        self.producer_id, self.base_sequence = producer_id, base_sequence


class _Appended(NamedTuple):
    base_sequence: int
    next_sequence: int
    base_offset: int


class _Producer:
    __slots__ = ("durable", "in_flight")

    def __init__(self) -> None:
        self.durable: deque[_Appended] = deque(maxlen=WINDOW)
        self.in_flight: deque[_Appended] = deque()

    @property
    def next_sequence(self) -> int:
        if self.in_flight:
            return self.in_flight[-1].next_sequence
        return self.durable[-1].next_sequence if self.durable else 0

    def find(self, base_sequence: int, next_sequence: int) -> int | None:
        for batches in (self.in_flight, self.durable):
            for known in reversed(batches):
                if known.base_sequence == base_sequence and known.next_sequence == next_sequence:
                    return known.base_offset
        return None


class ProducerTable:
    """The producers of one topic. Owned by the event loop of its TopicLog."""

    def __init__(self, known: Iterable[ProducerState] = (), origins: Iterable[OriginMark] = ()) -> None:
        known = list(known)
        self.sources = SourcePositions(known, origins)
        self._producers: dict[int, _Producer] = {}
        self._orders: tuple[dict[int, None], dict[int, None]] = {}, {}
        """Clients, and writers, by last durable batch, oldest first."""
        for state in sorted(known, key=lambda state: state.last_base_offset):
            if is_source_key(state.producer_id):
                continue
            self._remember(
                state.producer_id,
                _Appended(state.last_base_sequence, state.next_sequence, state.last_base_offset),
            )

    def find(self, header: Header) -> int | None:
        """The base offset if the batch is known, None if it is the next one. Raises SequenceGap,
        DuplicateForgotten."""
        if header.producer_id == NO_PRODUCER:
            return None
        if header.producer_id >= SOURCE_BIT:
            raise SequenceGap(f"producer {header.producer_id}: no producer has the key of a source")
        producer = self._producers.get(header.producer_id)
        expected = producer.next_sequence if producer is not None else 0
        if header.base_sequence == expected or begins_run(header.base_sequence, after=expected):
            return None
        if header.base_sequence > expected or header.next_sequence > expected or producer is None:
            raise SequenceGap(
                f"producer {header.producer_id}: sequences {header.base_sequence}..{header.next_sequence} do "
                f"not follow: {expected} is the next"
            )
        offset = producer.find(header.base_sequence, header.next_sequence)
        if offset is None:
            raise DuplicateForgotten(header.producer_id, header.base_sequence)
        return offset

    def next_sequence(self, producer_id: int) -> int:
        """The sequence expected next; 0 of a stranger."""
        producer = self._producers.get(producer_id)
        return producer.next_sequence if producer is not None else 0

    def begin(self, header: Header) -> None:
        """The batch (assigned) is on its way to the disk."""
        producer_id, base_sequence = header.producer_id, header.base_sequence
        if NO_PRODUCER < producer_id < SOURCE_BIT:
            producer = self._producers.get(producer_id)
            if producer is None:
                producer = self._producers[producer_id] = _Producer()
            producer.in_flight.append(
                _Appended(base_sequence, base_sequence + header.count, header.base_offset)
            )

    def commit(self, header: Header) -> None:
        """The oldest batch in flight, which is this producer's, is durable."""
        if self.sources.unsettled:
            self.sources.settle(header.next_offset)
        if NO_PRODUCER < header.producer_id < SOURCE_BIT:
            self._remember(header.producer_id, self._producers[header.producer_id].in_flight.popleft())

    def abandon(self) -> None:
        """Nothing that is in flight will be appended."""
        self.sources.abandon()
        for producer_id, producer in list(self._producers.items()):
            producer.in_flight.clear()
            if not producer.durable:
                del self._producers[producer_id]

    def follow(self, header: Header) -> None:
        """A batch that is durable already (recovery, upload)."""
        if is_source_key(header.producer_id):
            self.sources.follow(header)
        elif header.producer_id != NO_PRODUCER:
            self._remember(header.producer_id, _appended(header))

    def adopt(self, newer: ProducerTable) -> None:
        """Take over what a table of the same topic knows of later offsets."""
        self.sources.adopt(newer.sources)
        for producer_id in newer._remembered():
            theirs = newer._producers[producer_id].durable
            ours = self._producers.get(producer_id)
            if ours is None or ours.durable[-1].base_offset <= theirs[-1].base_offset:
                for batch in theirs:
                    self._remember(producer_id, batch)

    def states(self) -> tuple[ProducerState, ...]:
        """What the next owner must know, as of the last durable batch."""
        clients = tuple(
            ProducerState(producer_id, last.next_sequence, last.base_sequence, last.base_offset)
            for producer_id in self._remembered()
            if (last := self._producers[producer_id].durable[-1])
        )
        return clients + self.sources.states()

    def _remembered(self) -> Iterator[int]:
        """Those of whom something is durable, of each kind the oldest first."""
        return chain(*self._orders)

    def _remember(self, producer_id: int, batch: _Appended) -> None:
        producer = self._producers.get(producer_id)
        if producer is None:
            producer = self._producers[producer_id] = _Producer()
        producer.durable.append(batch)
        for order in self._orders:
            order.pop(producer_id, None)
        is_writer = batch.base_sequence >= RUN
        order = self._orders[is_writer]
        order[producer_id] = None
        if len(order) > (MAX_WRITERS if is_writer else MAX_PRODUCERS):
            oldest = next((each for each in order if not self._producers[each].in_flight), None)
            if oldest is not None and oldest != producer_id:
                del order[oldest], self._producers[oldest]


def begins_run(sequence: int, *, after: int) -> bool:
    """Whether a run begins here that the topic, which expects ``after``, has nothing of yet."""
    return sequence > after and sequence % RUN == 0


def _appended(header: Header) -> _Appended:
    return _Appended(header.base_sequence, header.next_sequence, header.base_offset)


# -- which open of a producer's name is the last one -----------------------------------------------


MAX_OWNED: Final = 2000
"""Names of producers whose owner is remembered, about 10 bytes each."""
MAX_NAMES: Final = 2000
"""About 40 bytes each in the topic's record, which each change of it rewrites."""


class EpochRequest(NamedTuple):
    producer_id: int
    presented: int
    """0: an open."""
    above: int = 0
    """The new number must be beyond this one, too."""
    owner: str = ""
    """The principal whose the name is from now on, if it is no other's; empty: it is asked for by one that
    owns nothing."""
    frees: bool = False
    """The name is open to all from now on."""
    is_claim: bool = False
    """The owner is all that is asked for: the number stays."""


class Granted(NamedTuple):
    table: EpochTable
    numbers: Sequence[int]
    """The current number of each producer that asked; 0: it is not remembered; ``FOREIGN``: the name is
    another principal's, and nothing was done."""


FOREIGN: Final = -1

Write = Callable[[Sequence[EpochRequest]], Awaitable[Granted]]
"""Makes what ``grant`` says durable. Raises, and then nothing of it may be answered."""


def grant(table: EpochTable, asks: Sequence[EpochRequest], in_use: Collection[int] = ()) -> Granted:
    """The answers to these questions, in their order, and the table that makes them true. ``in_use``:
    producers to be forgotten last."""
    known, last = dict(table.known), table.last
    owners = {each: owner for owner, ids in table.owners for each in ids}
    numbers = []
    for ask in asks:
        current = known.get(ask.producer_id, 0)
        if ask.frees:
            owners.pop(ask.producer_id, None)
        elif owners.get(ask.producer_id, ask.owner) != ask.owner:
            numbers.append(FOREIGN)
            continue
        elif ask.owner:
            owners[ask.producer_id] = ask.owner
        if ask.is_claim:
            pass
        elif not ask.presented:
            current = known[ask.producer_id] = max(last, ask.above) + 1
        elif ask.presented > (current or table.floor):
            current = known[ask.producer_id] = ask.presented
        last = max(last, current)
        numbers.append(current)
    entries = sorted(known.items(), key=lambda entry: entry[1])
    floor = table.floor
    if (excess := len(entries) - MAX_NAMES) > 0:
        kept = {*in_use, *(ask.producer_id for ask in asks)}
        forgotten = sorted(entries, key=lambda entry: entry[0] in kept)[:excess]
        floor = max(floor, *(number for _, number in forgotten))
        entries = [entry for entry in entries if entry not in forgotten]
    return Granted(EpochTable(last, floor, tuple(entries), _by_owner(owners, in_use)), numbers)


def _by_owner(owners: dict[int, str], in_use: Collection[int]) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """At most ``MAX_OWNED`` names. The principal that has the most of them loses its oldest one, so that none
    drives out the others' by opening many."""
    found: dict[str, list[int]] = {}
    for producer_id, owner in owners.items():
        found.setdefault(owner, []).append(producer_id)
    connected = set(in_use)
    for _ in range(len(owners) - MAX_OWNED):
        most = max(found.values(), key=len)
        most.remove(next((each for each in most if each not in connected), most[0]))
    return tuple((owner, tuple(ids)) for owner, ids in found.items() if ids)


class ProducerEpochs:
    """The opens of one topic's producers, on the broker that serves it. Owned by the event loop."""

    def __init__(self, table: EpochTable, write: Write) -> None:
        self._write = write
        self._adopt(table)
        self._waiting: list[tuple[EpochRequest, asyncio.Future[int]]] = []
        """One for each stream that opens: what bounds streams bounds this."""
        self._writer: asyncio.Task[None] | None = None
        self._closed: SavaError | None = None

    @classmethod
    def in_memory(cls) -> ProducerEpochs:
        """Opens of a topic that keeps nothing."""
        table = EpochTable()

        async def write(asks: Sequence[EpochRequest]) -> Granted:
            nonlocal table
            granted = grant(table, asks)
            table = granted.table
            return granted

        return cls(table, write)

    def current(self, producer_id: int) -> int:
        """The number that has the name; 0: none is known."""
        return self._known.get(producer_id, 0)

    def owner(self, producer_id: int) -> str:
        """The principal whose the name is; empty: open to all."""
        return self._owners.get(producer_id, "")

    async def open(self, producer_id: int, *, above: int = 0, owner: str = "", frees: bool = False) -> int:
        """A new number for the name, durable on return; ``FOREIGN`` if it is not the owner's. Raises what
        kept it from being written; the name may then be another open's that was never answered, and the next
        open is beyond that."""
        return await self._ask(EpochRequest(producer_id, 0, above, owner, frees))

    async def present(self, producer_id: int, number: int, *, owner: str = "", frees: bool = False) -> int:
        """The number that has the name from now on, durable: the presented one if the producer may continue,
        else a higher one, 0 if the topic no longer knows, or ``FOREIGN``."""
        if not frees and self.owner(producer_id) not in ("", owner):
            return FOREIGN
        current = self.current(producer_id)
        if number == current or number <= (current or self._floor):
            return current
        return await self._ask(EpochRequest(producer_id, number, 0, owner, frees))

    async def claim(self, producer_id: int, *, owner: str, frees: bool = False) -> None:
        """The name is the owner's from now on, durable, unless it is another's: see ``owner``. Writes nothing
        if that is so already."""
        known = self.owner(producer_id)
        if known != owner:
            await self._ask(EpochRequest(producer_id, 0, 0, owner, frees, is_claim=True))

    def close(self, error: SavaError) -> None:
        """The topic ends here. A write that is under way may take effect; its open is not answered."""
        self._closed = error
        if self._writer is not None:
            self._writer.cancel()
        waiting, self._waiting = self._waiting, []
        self._fail(waiting, error)

    async def _ask(self, ask: EpochRequest) -> int:
        if self._closed is not None:
            raise self._closed
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiting.append((ask, future))
        if self._writer is None:
            self._writer = asyncio.create_task(self._write_all(), name="sava-producer-epochs")
        return await future

    async def _write_all(self) -> None:
        """Runs while a caller waits; one write serves all that came during the one before it."""
        asked: list[tuple[EpochRequest, asyncio.Future[int]]] = []
        try:
            while self._waiting:
                asked, self._waiting = self._waiting, []
                try:
                    granted = await self._write([ask for ask, _ in asked])
                except Exception as error:  # noqa: BLE001 (whatever it is, those who wait must hear of it)
                    self._fail(asked, error)
                    continue
                self._adopt(granted.table)
                for (_, future), number in zip(asked, granted.numbers, strict=True):
                    if not future.done():
                        future.set_result(number)
        finally:
            self._writer = None
            if self._closed is not None:
                self._fail(asked, self._closed)

    def _adopt(self, table: EpochTable) -> None:
        self._floor, self._known = table.floor, dict(table.known)
        self._owners = {each: owner for owner, ids in table.owners for each in ids}

    def _fail(self, asked: Sequence[tuple[EpochRequest, asyncio.Future[int]]], error: Exception) -> None:
        for _, future in asked:
            if not future.done():
                future.set_exception(error)
                future.exception()  # seen: its caller may be gone
