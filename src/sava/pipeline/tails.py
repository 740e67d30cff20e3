"""EndWatcher: long polls for the ends of partitions.

A streaming query asks again and again whether there are more messages. For a partition without traffic one
request stays open at its owner, which answers when the partition grows; until then the known end is true. A
partition that has grown is asked again when the next caller waits: the first answer after a change is stale
by then, and requests that stay open while no caller waits would be answered for every message.

    wait(A, B)   ──▶ ends of A and B                                        two requests
                 ──▶ A stays open, B stays open ─── B grows ──▶ return      one answer
    wait(A, B)   ──▶ end of B                                               A is still open

A request is not repeated when no caller has asked for IDLE_S. One event loop owns everything here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from sava.client.backoff import ReconnectBackoff
from sava.client.connection import OPEN_TIMEOUT_S
from sava.client.errors import Unavailable
from sava.pipeline import several
from sava.pipeline.calls import ClusterCalls, PartitionOwner
from sava.proto import replica_pb2, streams_pb2
from sava.tasks import cancelled

STAND_S: Final = 20.0
"""An owner answers an open request after this time even if nothing changed."""
ASK_S: Final = 1.0
"""The timeout of a request about many partitions. The owner has the answer in memory."""
SETTLE_S: Final = 2.0
"""A caller waits this long for partitions with unknown ends while others are known."""
IDLE_S: Final = 60.0


class PartitionExtent(NamedTuple):
    """The offsets that a partition holds; ends are exclusive."""

    start: int
    """The first retained offset."""
    stored: int
    """The end of the segments."""
    end: int
    """The end of the readable messages."""

    @classmethod
    def of(cls, response: streams_pb2.OffsetsResponse | replica_pb2.TailRead) -> PartitionExtent:
        return cls(response.start_offset, response.stored_offset, response.next_offset)


class _WatchedEnd:
    """The last known extent of one partition, and the request that is open at its owner."""

    def __init__(self, owner: PartitionOwner) -> None:
        self.owner = owner
        self.extent: PartitionExtent | None = None
        """None while it is unknown."""
        self.asked_at = 0.0
        self.task: asyncio.Task[None] | None = None
        self._backoff = ReconnectBackoff()

    @property
    def is_standing(self) -> bool:
        return self.task is not None and not self.task.done()

    def stand(self) -> asyncio.Task[None]:
        if self.task is None or self.task.done():
            self.task = asyncio.create_task(self._run(), name=f"sava tail of {self.owner.name}")
            self.task.add_done_callback(_seen)
        return self.task

    async def _run(self) -> None:
        """Return when the extent is known or has grown. Raises what the broker refuses."""
        loop = asyncio.get_running_loop()
        known = self.extent
        while True:
            try:
                found = await self._ask(known)
                self._backoff.reset()
            except Unavailable as error:
                self.extent = known = None
                await self._backoff.pause(error)
            else:
                is_news = known is None or found.end > known.end
                self.extent = known = found
                if is_news:
                    return
            if loop.time() - self.asked_at > IDLE_S:
                return

    async def _ask(self, known: PartitionExtent | None) -> PartitionExtent:
        request = streams_pb2.OffsetsRequest(topic=self.owner.name)
        timeout = OPEN_TIMEOUT_S
        if known is not None:
            request.beyond, request.wait_ms = known.end, int(STAND_S * 1000)
            timeout += STAND_S
        return PartitionExtent.of(await self.owner.call("Offsets", request, timeout=timeout))


class EndWatcher:
    """The ends of partitions of one cluster."""

    def __init__(self, calls: ClusterCalls) -> None:
        self._calls = calls
        self._tails: dict[str, _WatchedEnd] = {}

    async def wait(self, ends: Mapping[str, int], timeout: float) -> dict[str, PartitionExtent]:
        """As ``Link.wait_beyond``."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        self._forget_idle(loop.time())
        tails = [self._tail(name, loop.time()) for name in ends]
        await self._learn(tail for tail in tails if not tail.is_standing)
        while True:
            known = {tail.owner.name: tail.extent for tail in tails if tail.extent is not None}
            has_grown = any(extent.end > ends[name] for name, extent in known.items())
            left = deadline - loop.time()
            if has_grown or left <= 0:
                return known
            await _first_of([tail.stand() for tail in tails], left)

    @property
    def standing(self) -> int:
        """The number of open requests."""
        return sum(tail.is_standing for tail in self._tails.values())

    async def close(self) -> None:
        await cancelled(*(tail.task for tail in self._tails.values()))
        self._tails.clear()

    def _tail(self, name: str, now: float) -> _WatchedEnd:
        tail = self._tails.get(name)
        if tail is None:
            tail = self._tails[name] = _WatchedEnd(self._calls.owner(name))
        tail.asked_at = now
        return tail

    async def _learn(self, tails: Iterable[_WatchedEnd]) -> None:
        """Learn ends that are unknown or were not watched: one call per broker, then one call for each
        partition that the broker did not answer for."""
        unknown = {tail.owner.name: tail for tail in tails}
        found = await several.ends(self._calls, unknown, ASK_S) if len(unknown) > 1 else {}
        asking = []
        for name, tail in unknown.items():
            if tail.is_standing:
                continue  # another caller opened a request meanwhile and gets the newer answer
            tail.extent = PartitionExtent.of(found[name]) if name in found else None
            if tail.extent is None:
                asking.append(tail.stand())
        if asking:
            done, _ = await asyncio.wait(asking, timeout=SETTLE_S)
            _raise_refusals(done)

    def _forget_idle(self, now: float) -> None:
        for name, tail in list(self._tails.items()):
            if not tail.is_standing and now - tail.asked_at > IDLE_S:
                del self._tails[name]


async def _first_of(tasks: list[asyncio.Task[None]], timeout: float) -> None:
    if not tasks:
        await asyncio.sleep(timeout)
        return
    done, _ = await asyncio.wait(tasks, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
    _raise_refusals(done)


def _seen(task: asyncio.Task[None]) -> None:
    """Consume a refusal that arrives while no caller waits; the next caller gets a new one."""
    if not task.cancelled():
        task.exception()


def _raise_refusals(done: Iterable[asyncio.Task[None]]) -> None:
    for task in done:
        task.result()
