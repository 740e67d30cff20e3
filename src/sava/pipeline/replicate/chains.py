"""Chain: one stream of stretches into a chain at the target, as its copier sees it.

    stretches  1  2  3  4  5                  on their way without waiting, a bounded number of bytes
    answers    1  2  ended(why, where)        3 was refused, 4 and 5 with it

What is known of the chain (``CopyProgress``) is only ever what the target has said: where it was at the
opening, the end of each stretch that has its receipt, and what the end of the stream says. Nothing
is concluded from what was sent, so whatever fails in a row of stretches, the copier can continue from there.

The stream belongs to the event loop of its ``Target``; the methods are for one other thread. Each of them has
a moment (of ``time.monotonic``) at which it gives up.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Coroutine, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeVar

from sava.client.backoff import ReconnectBackoff
from sava.client.connection import (
    STATUS_S,
    ClientStream,
    Connection,
    Route,
    open_stream,
)
from sava.client.errors import ClientError, Unavailable
from sava.client.loop_thread import LoopThread
from sava.proto import replica_pb2 as pb
from sava.proto import replica_pb2_grpc as rpc
from sava.tasks import cancelled

T = TypeVar("T")

UNANSWERED: Final = 8
"""Stretches of one chain that are on their way: the target reads, checks and writes different ones at a
time."""
UNANSWERED_BYTES: Final = 8 << 20
"""Of them; a larger one goes alone."""


OWNER_S: Final = 30.0
"""Until a topic is looked up again: a broker that has given it away forwards, which costs a hop."""


class Owners:
    """Which broker of the target has which topic, as far as that was found out. Owned by the target's event
    loop."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[str, float]] = {}

    def get(self, topic: str) -> str:
        """Empty: not known, or not lately."""
        address, until = self._known.get(topic, ("", 0.0))
        return address if asyncio.get_running_loop().time() < until else ""

    def learn(self, topic: str, address: str) -> None:
        if self.get(topic) != address:
            self._known[topic] = (address, asyncio.get_running_loop().time() + OWNER_S)

    def forget(self, topic: str) -> None:
        self._known.pop(topic, None)


class Stretch(NamedTuple):
    """As ``replica.proto`` has it."""

    start: int
    end: int
    begin: bool
    batches: bytes
    offsets: Sequence[int]
    skipped: int
    """Messages of the source that are not in it."""

    def message(self) -> pb.SourceRange:
        return pb.SourceRange(
            start=self.start, end=self.end, begin=self.begin, batches=self.batches, offsets=self.offsets
        )


@dataclass(slots=True)
class CopyProgress:
    """What the target has said so far."""

    is_known: bool = False
    position: int = 0
    kept_position: int = 0
    messages: int = 0
    bytes: int = 0
    duplicates: int = 0
    skipped: int = 0

    def receive(self, stretch: Stretch, receipt: pb.SourceReceipt) -> None:
        """The stretch is durable."""
        self.is_known, self.position = True, receipt.position
        self.kept_position = receipt.kept_position
        self.messages += receipt.appended
        self.bytes += len(stretch.batches)
        self.duplicates += receipt.duplicates
        self.skipped += stretch.skipped + receipt.loops


class Chain:
    """Made by ``Target.chain``."""

    def __init__(
        self, loop: LoopThread, connection: Connection, owners: Owners, topic: str, source: pb.Source
    ) -> None:
        self.topic = topic
        self.progress = CopyProgress()
        self.ended: pb.SourceEnded | None = None
        """A stretch was refused, or failed."""
        self._loop = loop
        self._connection = connection
        self._owners = owners
        self._opening = pb.AppendRequest(open=pb.OpenSource(topic=topic, source=source))
        self._streams = AsyncExitStack()
        """Ends the stream that is open."""
        self._stream: ClientStream | None = None
        self._is_opening = False
        self._reading: asyncio.Task[None] | None = None
        self._unanswered: deque[Stretch] = deque()
        self._unanswered_bytes = 0
        self._changed = asyncio.Event()
        self._failure: ClientError | None = None

    # -- for the thread that copies ----------------------------------------------------------

    def open(self, *, until: float, life_until: float) -> pb.SourceOpened:
        """At the owner of the topic, or through any broker. ``life_until``: when the stream ends, come what
        may. Raises Unavailable, Refused."""
        return self._loop.run(self._within(self._open(life_until), until, "opened"))

    def put(self, stretch: Stretch, *, until: float) -> bool:
        """Send it as soon as there is room. False: the chain has ended. Raises Unavailable, Refused."""
        return self._loop.run(self._within(self._put(stretch), until, "answered"))

    def settle(self, *, until: float) -> None:
        """Until everything is answered, or the chain has ended. Raises Unavailable, Refused."""
        self._loop.run(self._within(self._settle(), until, "answered"))

    def close(self) -> None:
        """What is not answered goes its way or not."""
        self._loop.run(self._close())

    # -- on the loop -------------------------------------------------------------------------

    async def _within(self, work: Coroutine[Any, Any, T], until: float, what: str) -> T:
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            async with asyncio.timeout_at(until):
                return await work
        except TimeoutError:
            raise Unavailable(
                f"{self.topic}: the target has not {what} within {loop.time() - began:.1f} s"
            ) from None

    async def _open(self, life_until: float) -> pb.SourceOpened:
        route, backoff = Route(self._connection, self.topic, self._owners.get(self.topic)), ReconnectBackoff()
        while True:
            try:
                address = await route.find()
                opened = await self._open_at(address, life_until)
                self._owners.learn(self.topic, address)
                return opened
            except Unavailable as error:
                self._owners.forget(self.topic)
                await self._close()
                delay = backoff.delay(error)
                if self._left(life_until) <= delay:
                    raise
                await asyncio.sleep(delay)

    async def _open_at(self, address: str, life_until: float) -> pb.SourceOpened:
        self._is_opening = True
        self._stream = await self._streams.enter_async_context(
            open_stream(
                self._connection,
                "Append",
                address,
                owes=lambda: self._is_opening or bool(self._unanswered),
                service=rpc.ReplicaStub,
                timeout=self._left(life_until),
            )
        )
        opened: pb.SourceOpened = (await self._stream.open(self._opening)).opened
        self._is_opening = False
        self._failure = None
        self.progress.is_known, self.progress.position = opened.is_known, opened.position
        self.progress.kept_position = opened.kept_position
        self._reading = asyncio.create_task(self._read(self._stream), name=f"sava chain of {self.topic}")
        return opened

    @staticmethod
    def _left(until: float) -> float:
        return max(until - asyncio.get_running_loop().time(), 0.001)

    async def _put(self, stretch: Stretch) -> bool:
        assert self._stream is not None
        size = len(stretch.batches)
        while self._goes_on() and self._unanswered and not self._has_room(size):
            await self._change()
        if not self._goes_on():
            return False
        self._unanswered.append(stretch)
        self._unanswered_bytes += size
        try:
            await self._stream.write(pb.AppendRequest(range=stretch.message()))
        except ClientError as error:
            # The end of the stream says why, and a write only that it has ended.
            assert self._reading is not None
            await asyncio.wait((self._reading,), timeout=STATUS_S)
            if self._goes_on():
                raise error
            return False
        return True

    async def _settle(self) -> None:
        while self._goes_on() and self._unanswered:
            await self._change()

    def _goes_on(self) -> bool:
        """Raises what the stream has failed with."""
        if self._failure is not None:
            raise self._failure.again()
        return self.ended is None

    def _has_room(self, size: int) -> bool:
        return len(self._unanswered) < UNANSWERED and self._unanswered_bytes + size <= UNANSWERED_BYTES

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    async def _read(self, stream: ClientStream) -> None:
        try:
            while self.ended is None:
                response: pb.AppendResponse = await stream.receive()
                if response.WhichOneof("kind") == "ended":
                    self._end(response.ended)
                else:
                    self._receive(response.receipt)
                self._changed.set()
        except ClientError as error:
            self._failure = error
        finally:
            self._changed.set()

    def _receive(self, receipt: pb.SourceReceipt) -> None:
        if not self._unanswered or self._unanswered[0].end != receipt.position:
            raise ClientError(f"{self.topic}: the target has a receipt for {receipt.position}, out of order")
        stretch = self._unanswered.popleft()
        self._unanswered_bytes -= len(stretch.batches)
        self.progress.receive(stretch, receipt)

    def _end(self, ended: pb.SourceEnded) -> None:
        self.ended = ended
        if ended.may_pass:
            self._owners.forget(self.topic)  # it may have moved
        self.progress.is_known, self.progress.position = ended.is_known, ended.position

    async def _close(self) -> None:
        await cancelled(self._reading)
        await self._streams.aclose()
        self._reading = self._stream = None
