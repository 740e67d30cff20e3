"""Tails: the ends of partitions, watched.

A program that processes what comes in small batches asks again and again whether there is more. Of a
partition where nothing happens one question stands at its owner, which answers when there is more, and so
what is known of it stays true for as long as nobody answers. Of one that has grown since it was last asked
about, the end is asked for anew: the first answer after a change is old by the time somebody comes for it,
and questions that stand while nobody waits for them would be answered for every message.

    asked   A, B    ──▶ ends of A and B                                     both are asked
    waits           ──▶ A stands, B stands ─── B grows ──▶ told             one answer
    asked   A, B    ──▶ end of B                                            A still stands

A question that nobody has asked for some time is not repeated. Owned by one event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from sava.client.backoff import Backoff
from sava.client.connection import OPEN_TIMEOUT_S
from sava.client.errors import Unavailable
from sava.pipeline import several
from sava.pipeline.calls import Calls, Owner
from sava.proto import replica_pb2, streams_pb2
from sava.tasks import cancelled

STAND_S: Final = 20.0
"""How long an owner keeps a question before it answers that nothing has changed."""
ASK_S: Final = 1.0
"""For a question about many partitions: the owner has the answer in memory."""
SETTLE_S: Final = 2.0
"""How long an answer waits for partitions of which nothing is known yet, while others are."""
IDLE_S: Final = 60.0


class Extent(NamedTuple):
    """What a partition holds; ends are exclusive."""

    start: int
    """The first that is kept."""
    stored: int
    """End of what is in segments."""
    end: int
    """End of what can be read."""

    @classmethod
    def of(cls, response: streams_pb2.OffsetsResponse | replica_pb2.TailRead) -> Extent:
        return cls(response.start_offset, response.stored_offset, response.next_offset)


class _Tail:
    def __init__(self, owner: Owner) -> None:
        self.owner = owner
        self.extent: Extent | None = None
        """None: not known, or not any more."""
        self.asked_at = 0.0
        self.task: asyncio.Task[None] | None = None
        self._backoff = Backoff()

    @property
    def is_standing(self) -> bool:
        return self.task is not None and not self.task.done()

    def stand(self) -> asyncio.Task[None]:
        if self.task is None or self.task.done():
            self.task = asyncio.create_task(self._run(), name=f"sava tail of {self.owner.name}")
            self.task.add_done_callback(_seen)
        return self.task

    async def _run(self) -> None:
        """Until there is news: the extent is known, or has grown. Raises what the broker refuses."""
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

    async def _ask(self, known: Extent | None) -> Extent:
        request = streams_pb2.OffsetsRequest(topic=self.owner.name)
        timeout = OPEN_TIMEOUT_S
        if known is not None:
            request.beyond, request.wait_ms = known.end, int(STAND_S * 1000)
            timeout += STAND_S
        return Extent.of(await self.owner.call("Offsets", request, timeout=timeout))


class Tails:
    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._tails: dict[str, _Tail] = {}

    async def wait(self, ends: Mapping[str, int], timeout: float) -> dict[str, Extent]:
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
        """Questions at their owners now."""
        return sum(tail.is_standing for tail in self._tails.values())

    async def close(self) -> None:
        await cancelled(*(tail.task for tail in self._tails.values()))
        self._tails.clear()

    def _tail(self, name: str, now: float) -> _Tail:
        tail = self._tails.get(name)
        if tail is None:
            tail = self._tails[name] = _Tail(self._calls.owner(name))
        tail.asked_at = now
        return tail

    async def _learn(self, tails: Iterable[_Tail]) -> None:
        """Ask for the ends that are not known, or were not watched: all that a broker has by one call, and
        then one by one those of which it has said nothing."""
        unknown = {tail.owner.name: tail for tail in tails}
        found = await several.ends(self._calls, unknown, ASK_S) if len(unknown) > 1 else {}
        asking = []
        for name, tail in unknown.items():
            if tail.is_standing:
                continue  # somebody else asks meanwhile, and is told what is newer
            tail.extent = Extent.of(found[name]) if name in found else None
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
    """A refusal while nobody waits is no mistake: whoever asks next gets it anew."""
    if not task.cancelled():
        task.exception()


def _raise_refusals(done: Iterable[asyncio.Task[None]]) -> None:
    for task in done:
        task.result()
