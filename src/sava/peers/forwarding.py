"""Forwarder: calls for topics that another broker serves are answered by that broker, through this one.

A client may stay with the broker that it knows. A handler that finds its topic elsewhere raises NotOwner
(NotController: what only the leader decides); instead of an answer the call then gets another broker:

    client ──▶ this broker ─ NotOwner ─▶ who has it? (waits, bounded) ──▶ this one: the handler again
                                                                     └─▶ another: the same call, as bytes

**Nothing is done twice.** A call is repeated only if the answer says that it had no effect (the other broker
does not have the topic either), or if nothing was sent for want of a connection. A call that was sent and has
no answer ends UNAVAILABLE, and its client, who knows what the call is about, decides.

**One hop.** A forwarded call says so, and is never forwarded again: two brokers with different views would
play ball with it. It is refused instead, and the first broker asks its view anew.

**Streams** are passed on message by message, as bytes, in both directions; whoever reads slowly is waited
for. Until the owner has answered the opening, nothing more is read from the client: so an owner that refuses
can be exchanged for another unnoticed. From then on a stream ends when the owner ends it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Final, Protocol, TypeVar, cast

import grpc
from google.protobuf.message import Message
from grpc import aio

from sava.cluster.errors import NotController
from sava.cluster.records import Registration
from sava.cluster.router import NotServed
from sava.errors import SavaError
from sava.peers import faults, relays
from sava.peers.brokers import (
    Link,
    Peers,
    Port,
    Unreachable,
)
from sava.peers.faults import Relayed
from sava.peers.handlers import FORWARD_S, Answer, ForwardingServer
from sava.proto import streams_pb2 as pb
from sava.records import RecordBatch
from sava.topics.errors import NotOwner
from sava.topics.names import TopicName

Reply = TypeVar("Reply", bound=Message)
T = TypeVar("T")

ROUNDS: Final = 3
LAG_S: Final = 0.5
"""By so much one broker's view may be behind another's: so long a broker that has just refused is not asked
again unless something is known to have changed."""
POLL_S: Final = 0.02
LOCATE_S: Final = 3.0

NOT_THERE: Final = frozenset(("not_owner", "topic_moved", "not_controller"))
"""Codes that say: it had no effect here, ask another broker."""


class _Here(Exception):
    """Another broker was to be asked for a topic, and this one has it by now."""


class Routes(Protocol):
    """Who has a topic (``sava.cluster.router``)."""

    async def owner(self, name: TopicName, *, timeout: float = 5.0, but_not: int = 0) -> int: ...

    def registration(self, broker: int) -> Registration | None: ...


class Forwarder:
    """Owned by the event loop. ``leader`` says which broker leads, 0 if that is not known."""

    def __init__(self, router: Routes, peers: Peers, leader: Callable[[], int], *, broker: int) -> None:
        self.broker = broker
        self._router = router
        self._peers = peers
        self._leader = leader
        self.forwards: Counter[str] = Counter()
        """Calls that were passed on, by kind: the port, or ``leader``."""
        self.calls = 0
        """Calls that came to this broker, on any port."""

    def serving(self, server: aio.Server, port: Port, answer: Answer = faults.answer) -> aio.Server:
        """``server`` as services should be registered at it so that their calls are forwarded. ``answer``
        ends a call with an error in the manner of the services."""
        return cast(aio.Server, ForwardingServer(server, self, port, answer))

    # -- for this broker's own use ---------------------------------------------------------------

    async def ask(
        self,
        port: Port,
        method: str,
        request: Message,
        reply_type: type[Reply],
        *,
        topic: TopicName | None = None,
        broker: int = 0,
        timeout: float = FORWARD_S,
    ) -> Reply:
        """A unary call to the broker that has ``topic``, or to ``broker``, which must not be this one.
        ``method`` is its path: ``/sava.admin.Topics/DescribeTopic``. Raises Relayed with what the other
        broker answered, NotOwner if this broker has the topic by now (the other one is not the owner),
        and what keeps it from being asked."""

        async def here() -> Reply:
            raise _Here

        async def there(link: Link, left: float) -> Reply:
            return reply_type.FromString(await relays.unary(link, method, raw, left, relays.ONE_HOP))

        raw = request.SerializeToString()
        if topic is not None:
            try:
                return await self.elsewhere(NotOwner(topic, 0), port, here, there, timeout=timeout)
            except _Here:
                raise NotOwner(topic, self.broker) from None
        return await there(await self._peers.link(broker, port, timeout=timeout), timeout)

    async def ask_leader(
        self, method: str, request: Message, reply_type: type[Reply], *, timeout: float
    ) -> Reply | None:
        """A unary call to the admin port of the broker that leads. None if that is this one, or is not known.
        Raises as ``ask`` does."""
        leader = self._leader()
        if leader in (0, self.broker):
            return None
        return await self.ask("admin", method, request, reply_type, broker=leader, timeout=timeout)

    async def publish_elsewhere(self, topic: TopicName, batch: RecordBatch) -> None:
        """To the end of a topic that another broker has; as it is, without deduplication: whoever repeats it
        after an error may have it there twice. Raises NotServed for what passes."""
        request = pb.AppendRequest(topic=str(topic), batch=batch.to_bytes())
        try:
            await self.ask("client", "/sava.streams.Streams/Append", request, pb.AppendResponse, topic=topic)
        except Relayed as error:
            if error.status is not grpc.StatusCode.UNAVAILABLE:
                raise
            raise NotServed(topic, str(error)) from error

    async def locate(self, topic: TopicName) -> tuple[int, str]:
        """Who has a topic, and where clients reach it; 0 and nothing if nobody has it for a while."""
        try:
            owner = await self._router.owner(topic, timeout=LOCATE_S)
        except NotServed:
            return 0, ""
        registration = self._router.registration(owner)
        return (owner, registration.client) if registration is not None else (0, "")

    async def owner_link(self, topic: TopicName, port: Port, *, timeout: float) -> Link | None:
        """A connection to the broker that has the topic; None if that is this one. Raises NotServed,
        TopicUnknown, Unreachable."""
        deadline = asyncio.get_running_loop().time() + timeout
        owner = await self._find(NotOwner(topic, 0), timeout, but_not=self.broker)
        if owner == self.broker:
            return None
        left = deadline - asyncio.get_running_loop().time()
        link = await self._peers.link(owner, port, timeout=max(left, 0.0))
        self.forwards[port] += 1
        return link

    # -- rounds --------------------------------------------------------------------------------

    async def elsewhere(
        self,
        error: SavaError,
        port: Port,
        here: Callable[[], Awaitable[T]],
        there: Callable[[Link, float], Awaitable[T]],
        *,
        timeout: float,
        may_repeat: Callable[[], bool] = lambda: True,
    ) -> T:
        """Wherever the topic of ``error`` is by now (or the leader): ``here`` on this broker, ``there`` on
        another, until one has it. Raises the last error; all of them are SavaErrors."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        last = self.broker
        failure: SavaError = error
        for _ in range(ROUNDS):
            last = await self._find(error, deadline - loop.time(), but_not=last)
            try:
                if last == self.broker:
                    return await here()
                link = await self._peers.link(last, _port(error, port), timeout=deadline - loop.time())
                self.forwards["leader" if isinstance(error, NotController) else port] += 1
                return await there(link, deadline - loop.time())
            except faults.ELSEWHERE as elsewhere:
                failure = error = elsewhere
            except Unreachable as unreached:
                failure = unreached
            except Relayed as answered:
                if answered.code not in NOT_THERE:
                    raise
                failure = answered
            if not may_repeat() or loop.time() >= deadline:
                break
        raise failure

    async def _find(self, error: SavaError, left: float, *, but_not: int) -> int:
        """Not ``but_not``, which does not have it, unless nothing else is known for a while."""
        if isinstance(error, NotController):
            return await self._find_leader(error, left, but_not)
        assert isinstance(error, NotOwner)
        topic = TopicName.parse(error.topic)
        lag = min(left, LAG_S)
        try:
            return await self._router.owner(topic, timeout=lag, but_not=but_not)
        except NotServed:
            return await self._router.owner(topic, timeout=max(left - lag, 0.0))

    async def _find_leader(self, error: NotController, left: float, but_not: int) -> int:
        loop = asyncio.get_running_loop()
        now = loop.time()
        while (leader := self._leader()) in (0, but_not):
            waited = loop.time() - now
            if leader and waited >= LAG_S:
                break
            if waited >= left:
                raise NotController(leader) from error
            await asyncio.sleep(POLL_S)
        return leader


def _port(error: SavaError, port: Port) -> Port:
    return "admin" if isinstance(error, NotController) else port
