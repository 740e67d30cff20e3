"""Owners: a part of a call, done by the broker that has the topic it is about.

A call about one topic is passed on as a whole (``forwarding``). One about a partitioned topic has a part for
each partition, and these may be anywhere: each part is done here if the partition is, and asked of its owner
otherwise, as the same call with the partition's name. A partition that moves meanwhile is looked for again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from google.protobuf.message import Message

from sava.broker.errors import NotOwner
from sava.broker.names import TopicName
from sava.errors import RetryableError
from sava.metadata.errors import Unavailable
from sava.services.forwarding import Forwarder, Routes
from sava.services.peers import Port
from sava.tasks import spread

Reply = TypeVar("Reply", bound=Message)

PARALLEL: Final = 16
"""Parts of one call that are under way at a time."""
TIMEOUT_S: Final = 10.0
"""For one part, finding its owner included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part(Generic[Reply]):
    topic: TopicName
    method: str
    """Its path: ``/sava.admin.Topics/DescribeTopic``."""
    request: Message
    """As the owner is asked it."""
    reply: type[Reply]
    here: Callable[[], Awaitable[Reply]]
    """The same without a network. Raises NotOwner."""
    port: Port = "admin"


class Owners:
    """Holds nothing between calls."""

    def __init__(self, router: Routes, forwarder: Forwarder) -> None:
        self._router = router
        self._forwarder = forwarder

    async def do(self, part: Part[Reply], *, timeout: float = TIMEOUT_S) -> Reply:
        """Raises Relayed with what the owner answered, and what keeps it from being found or asked."""
        deadline = asyncio.get_running_loop().time() + timeout
        while True:
            try:
                return await part.here()
            except NotOwner as error:
                left = deadline - asyncio.get_running_loop().time()
                if left <= 0:
                    # Not as NotOwner: that would send the whole call to where this one part is.
                    raise Unavailable(str(error)) from error
            try:
                return await self._forwarder.ask(
                    part.port, part.method, part.request, part.reply, topic=part.topic, timeout=left
                )
            except NotOwner:
                pass  # it has come here meanwhile

    async def each(self, parts: Iterable[Part[Reply]]) -> list[Reply]:
        """All, in their order. The first failure is raised, and the parts that are not done yet are given
        up."""
        return await spread(parts, self.do, parallel=PARALLEL)

    async def settled(self, names: Iterable[TopicName], *, timeout: float) -> None:
        """Until all have an owner, or the time is over; which of the two, whoever describes them finds
        out."""

        async def settle(name: TopicName) -> None:
            with suppress(RetryableError):
                await self._router.owner(name, timeout=timeout)

        with suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await spread(names, settle, parallel=PARALLEL)
