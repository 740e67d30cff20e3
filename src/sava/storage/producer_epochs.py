"""Producer epochs: which open of a producer's name is the last one.

A producer may stand still for minutes (a stopped process, a paused machine) while another one opens its name.
When it continues it must not publish: its owner has replaced it. Sequences cannot tell the two apart:

    A   sends 0, stands still
    B   opens the name, sends 1 ─▶ appended at 700
    A   continues, sends its own 1 ─▶ "already there", answered with 700, and lost

So each *open* of a name (a new producer object of an application) gets a number that is higher than every one
before it, and each *reconnect* presents the number of its open. The highest number has the name:

    presented                    answer
    none: an open                a new number, beyond all that the topic has given out
    the current one              the producer continues
    a lower one                  fenced, for good
    a higher one                 it becomes the current one

A higher one is the rule for the partitions of a topic. The first partition gives the number and the others
take it over, so that two producers which open a name at the same moment are in the same order everywhere. It
is also the safe answer after metadata was restored from an older copy: whichever of two producers comes back
first, the one that opened last ends up with the name.

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
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Final, NamedTuple

import msgspec

from sava.errors import SavaError

MAX_NAMES: Final = 2000
"""About 40 bytes each in the topic's record, which each change of it rewrites."""


class EpochTable(msgspec.Struct, frozen=True, array_like=True):
    """What a topic's record says of the opens of its producers."""

    last: int = 0
    """The highest number that the topic has seen."""
    floor: int = 0
    """The highest number of a producer that was forgotten."""
    known: tuple[tuple[int, int], ...] = ()
    """Producer id and number, the lowest number first."""


class Ask(NamedTuple):
    producer_id: int
    presented: int
    """0: an open."""
    above: int = 0
    """The new number must be beyond this one, too."""


class Granted(NamedTuple):
    table: EpochTable
    numbers: Sequence[int]
    """The current number of each producer that asked; 0: it is not remembered."""


Write = Callable[[Sequence[Ask]], Awaitable[Granted]]
"""Makes what ``grant`` says durable. Raises, and then nothing of it may be answered."""


def grant(table: EpochTable, asks: Sequence[Ask], in_use: Collection[int] = ()) -> Granted:
    """The answers to these questions, in their order, and the table that makes them true. ``in_use``:
    producers to be forgotten last."""
    known, last = dict(table.known), table.last
    numbers = []
    for ask in asks:
        current = known.get(ask.producer_id, 0)
        if not ask.presented:
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
    return Granted(EpochTable(last, floor, tuple(entries)), numbers)


class ProducerEpochs:
    """Of one topic on the broker that serves it; owned by the event loop."""

    def __init__(self, table: EpochTable, write: Write) -> None:
        self._write = write
        self._adopt(table)
        self._waiting: list[tuple[Ask, asyncio.Future[int]]] = []
        """One for each stream that opens: what bounds streams bounds this."""
        self._writer: asyncio.Task[None] | None = None
        self._closed: SavaError | None = None

    @classmethod
    def in_memory(cls) -> ProducerEpochs:
        """Of a topic that keeps nothing."""
        table = EpochTable()

        async def write(asks: Sequence[Ask]) -> Granted:
            nonlocal table
            granted = grant(table, asks)
            table = granted.table
            return granted

        return cls(table, write)

    def current(self, producer_id: int) -> int:
        """The number that has the name; 0: none is known."""
        return self._known.get(producer_id, 0)

    async def open(self, producer_id: int, *, above: int = 0) -> int:
        """A new number for the name, durable on return. Raises what kept it from being written; the name may
        then be another open's that was never answered, and the next open is beyond that."""
        return await self._ask(Ask(producer_id, 0, above))

    async def present(self, producer_id: int, number: int) -> int:
        """The number that has the name from now on, durable: the presented one if the producer may continue,
        else a higher one, or 0 if the topic no longer knows."""
        current = self.current(producer_id)
        if number == current or number <= (current or self._floor):
            return current
        return await self._ask(Ask(producer_id, number))

    def close(self, error: SavaError) -> None:
        """The topic ends here. A write that is under way may take effect; its open is not answered."""
        self._closed = error
        if self._writer is not None:
            self._writer.cancel()
        waiting, self._waiting = self._waiting, []
        self._fail(waiting, error)

    async def _ask(self, ask: Ask) -> int:
        if self._closed is not None:
            raise self._closed
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiting.append((ask, future))
        if self._writer is None:
            self._writer = asyncio.create_task(self._write_all(), name="sava-producer-epochs")
        return await future

    async def _write_all(self) -> None:
        """Runs while somebody waits; one write serves all who came during the one before it."""
        asked: list[tuple[Ask, asyncio.Future[int]]] = []
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

    def _fail(self, asked: Sequence[tuple[Ask, asyncio.Future[int]]], error: Exception) -> None:
        for _, future in asked:
            if not future.done():
                future.set_exception(error)
                future.exception()  # seen: its caller may be gone
