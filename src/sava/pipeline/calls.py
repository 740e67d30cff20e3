"""Calls to a cluster: unary ones that are repeated until a broker answers, calls for many partitions at once,
and long polls for the ends of partitions. One event loop owns everything here.

**One call** (``PartitionOwner``, ``ClusterCalls``). A broker that is down, a topic that moves and a leader
election pass; a call waits for them up to its timeout. What a broker refuses is raised at once.

**Many partitions** (``read_tails``, ``read_ends``, ``append_each``): a little of each, by one call to each
broker that has some of them, as ``sava.api.replica`` has it. What a broker does not answer, refuses or does
not have is for the caller to try one by one, by the calls that wait, find the owner, and say what is wrong.

**Ends** (``EndWatcher``). A streaming query asks again and again whether there are more messages. For a
partition without traffic one request stays open at its owner, which answers when the partition grows; until
then the known end is true. A partition that has grown is asked again when the next caller waits: the first
answer after a change is stale by then, and requests that stay open while no caller waits would be answered
for every message.

    wait(A, B)   ──▶ ends of A and B                                        two requests
                 ──▶ A stays open, B stays open ─── B grows ──▶ return      one answer
    wait(A, B)   ──▶ end of B                                               A is still open

A request is not repeated when no caller has asked for IDLE_S.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager, suppress
from typing import Any, Final, NamedTuple

from sava.client.connection import OPEN_TIMEOUT_S, Connection, ReconnectBackoff, silent
from sava.client.errors import ELSEWHERE, ClientError, Unanswered, Unavailable, translated
from sava.errors import SavaError
from sava.proto import replica_pb2 as pb
from sava.proto import (
    replica_pb2_grpc,
    streams_pb2,
    streams_pb2_grpc,
)
from sava.records import RecordBatch
from sava.tasks import cancelled

SIDE_BY_SIDE: Final = 64
"""Concurrent calls when one question concerns many partitions."""


class PartitionOwner:
    """The broker that owns one partition: the one that answered last, or after a failure the result of a
    look-up."""

    def __init__(self, connection: Connection, name: str) -> None:
        self.name = name
        self.target = ""
        """The broker that answered last; empty after a failure."""
        self._connection = connection
        self._failed = ""

    async def call(
        self,
        method: str,
        request: Any,
        *,
        timeout: float,
        service: Callable[[Any], Any] = streams_pb2_grpc.StreamsStub,
    ) -> Any:
        """Make one attempt, after a look-up if the owner is not known."""
        target = await self.find(timeout)
        try:
            response = await self._connection.call(
                method, request, target=target, timeout=timeout, service=service
            )
        except Unavailable:
            self.failed(target)
            raise
        self.answered(target)
        return response

    async def find(self, timeout: float) -> str:
        """The address of the owner. Raises Unavailable, TopicUnknown."""
        return self.target or await self._connection.locate(
            self.name, but_not=self._failed, timeout=min(timeout, OPEN_TIMEOUT_S)
        )

    def answered(self, target: str) -> None:
        self.target, self._failed = target, ""

    def failed(self, target: str) -> None:
        """Note that this broker does not answer or does not own the partition."""
        if self.target in ("", target):  # unless another call has found a better one meanwhile
            self.target, self._failed = "", target

    async def ask(self, method: str, request: Any) -> Any:
        """Repeat the call until it succeeds or the connection's timeout is over."""
        loop = asyncio.get_running_loop()
        timeout = self._connection.timeout
        deadline = loop.time() + timeout
        backoff = ReconnectBackoff()
        while True:
            left = deadline - loop.time()
            try:
                return await self.call(method, request, timeout=min(left, OPEN_TIMEOUT_S))
            except Unavailable as error:
                delay = backoff.delay(error)
                if loop.time() + delay >= deadline:
                    raise _unanswered(f"{method} of {self.name}", timeout, error) from None
                await asyncio.sleep(delay)


class ClusterCalls:
    """Calls to one cluster, with the known owners of its partitions."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self._owners: dict[str, PartitionOwner] = {}

    def owner(self, name: str) -> PartitionOwner:
        """The owner of a plain topic or of a partition."""
        owner = self._owners.get(name)
        if owner is None:
            owner = self._owners[name] = PartitionOwner(self.connection, name)
        return owner

    async def by_owner(self, names: Iterable[str], *, timeout: float) -> dict[str, list[str]]:
        """Partitions grouped by owner. Partitions whose owner is not found are left out."""
        room = asyncio.Semaphore(SIDE_BY_SIDE)
        found: dict[str, str] = {}

        async def find(owner: PartitionOwner) -> None:
            with suppress(ClientError):
                async with room:
                    found[owner.name] = await owner.find(timeout)

        owners = [self.owner(name) for name in names]
        await asyncio.gather(*(find(owner) for owner in owners if not owner.target))
        groups: dict[str, list[str]] = {}
        for owner in owners:
            if target := owner.target or found.get(owner.name):
                groups.setdefault(target, []).append(owner.name)
        return groups

    async def ask(
        self,
        method: str,
        request: Any,
        *,
        service: Callable[[Any], Any] = streams_pb2_grpc.StreamsStub,
        timeout: float | None = None,
        attempt: float = OPEN_TIMEOUT_S,
    ) -> Any:
        """Ask any broker; after a failure another one gets the same request."""
        timeout = self.connection.timeout if timeout is None else timeout
        try:
            return await self.connection.ask(
                method, request, timeout=timeout, attempt=attempt, service=service
            )
        except Unavailable as error:
            raise _unanswered(method, timeout, error) from None

    async def look_up(self, topic: str, *, create: bool) -> streams_pb2.LookUpResponse:
        """Look a topic up and remember the owners of its partitions."""
        delivery = streams_pb2.RELIABLE if create else streams_pb2.ANY
        try:
            found = await self.connection.look_up(topic, create=create, delivery=delivery)
        except Unavailable as error:
            raise _unanswered(f"LookUp of {topic}", self.connection.timeout, error) from None
        for partition in found.partitions:
            owner = self.owner(partition.topic)
            owner.target = owner.target or partition.address
        return found


def _unanswered(what: str, timeout: float, error: Unavailable) -> Unavailable:
    kind = Unanswered if isinstance(error, Unanswered) else Unavailable
    return kind(f"no broker has answered {what} within {timeout:g} s: {error}", error.code)


log = logging.getLogger(__name__)

MAX_EACH: Final = 256
"""Partitions in one call."""
FIND_S: Final = 2.0
"""To find out who has which."""
PART_BYTES: Final = 4 << 20
"""That one call sends; a larger range goes alone."""


def parts_of(names: Sequence[str]) -> Iterator[Sequence[str]]:
    """As many as one call may have."""
    for first in range(0, len(names), MAX_EACH):
        yield names[first : first + MAX_EACH]


async def read_tails(
    calls: ClusterCalls, target: str, tails: Mapping[str, tuple[int, int]], timeout: float, max_bytes: int
) -> dict[str, list[RecordBatch]]:
    """As ``Link.read_each``, of one broker; of no more than ``MAX_EACH`` partitions."""
    wanted = [pb.Tail(topic=name, start=start, end=end) for name, (start, end) in tails.items()]
    return {
        tail.topic: batches
        async for tail, found in _read(calls, target, wanted, timeout, max_bytes)
        if (batches := _batches(tail.topic, found.batches))
    }


async def read_ends(calls: ClusterCalls, names: Iterable[str], timeout: float) -> dict[str, pb.TailRead]:
    """How far partitions reach, of those that answer."""
    found: dict[str, pb.TailRead] = {}

    async def ask(target: str, part: Sequence[str]) -> None:
        wanted = [pb.Tail(topic=name) for name in part]
        async for tail, read in _read(calls, target, wanted, timeout, 0):
            found[tail.topic] = read

    groups = await calls.by_owner(names, timeout=timeout)
    await asyncio.gather(*(ask(target, part) for target in groups for part in parts_of(groups[target])))
    return found


async def _read(
    calls: ClusterCalls, target: str, tails: Sequence[pb.Tail], timeout: float, max_bytes: int
) -> AsyncGenerator[tuple[pb.Tail, pb.TailRead], None]:
    """What the broker says, up to where the call breaks off."""
    request = pb.ReadEachRequest(tails=tails, max_bytes=max_bytes)
    missing = {tail.topic for tail in tails}
    with _told_of(calls, target, missing):
        async with aclosing(_responses(calls, target, "ReadEach", request, timeout)) as responses:
            async for response in responses:
                for read in response.tails:
                    tail = tails[read.number]
                    missing.discard(tail.topic)
                    calls.owner(tail.topic).answered(target)
                    yield tail, read


def _batches(name: str, encoded: Sequence[bytes]) -> list[RecordBatch]:
    try:
        batches = [RecordBatch.parse(each) for each in encoded]
        for batch in batches:
            batch.verify_crc()
    except SavaError as error:
        log.warning("client: a tail of %s cannot be read: %s", name, error)
        return []
    return batches


async def append_each(
    calls: ClusterCalls, appends: Sequence[pb.EachAppend], until: float
) -> dict[str, pb.SourceReceipt | None]:
    """By topic, the receipts of those that are durable; None: it was not taken, or that is not known. Those
    that were sent and not answered by then (on the clock of the event loop) are missing."""
    by_topic = {each.open.topic: each for each in appends}
    groups = await calls.by_owner(by_topic, timeout=min(FIND_S, until - asyncio.get_running_loop().time()))
    answers: dict[str, pb.SourceReceipt | None] = dict.fromkeys(by_topic)
    await asyncio.gather(
        *(
            _append_to(calls, target, portion, until, answers)
            for target, names in groups.items()
            for portion in _portions([by_topic[name] for name in names])
        )
    )
    return answers


def _portions(appends: Sequence[pb.EachAppend]) -> Iterator[list[pb.EachAppend]]:
    portion: list[pb.EachAppend] = []
    size = 0
    for each in appends:
        length = len(each.range.batches)
        if portion and (size + length > PART_BYTES or len(portion) == MAX_EACH):
            yield portion
            portion, size = [], 0
        portion.append(each)
        size += length
    if portion:
        yield portion


async def _append_to(
    calls: ClusterCalls,
    target: str,
    appends: Sequence[pb.EachAppend],
    until: float,
    answers: dict[str, pb.SourceReceipt | None],
) -> None:
    loop = asyncio.get_running_loop()
    names = [each.open.topic for each in appends]
    unanswered = set(names)
    request = pb.AppendEachRequest(appends=appends)
    left = until - loop.time()
    with _told_of(calls, target, unanswered):
        async with aclosing(_responses(calls, target, "AppendEach", request, left)) as responses:
            async for response in responses:
                for answer in response.answers:
                    name = names[answer.number]
                    if answer.code in ELSEWHERE:
                        continue
                    unanswered.discard(name)
                    calls.owner(name).answered(target)
                    answers[name] = answer.receipt if answer.HasField("receipt") else None
    if loop.time() >= until:
        for name in unanswered:
            del answers[name]


@contextmanager
def _told_of(calls: ClusterCalls, target: str, missing: set[str]) -> Iterator[None]:
    """A call to a broker. Of partitions that are missing at its end, the broker is not the owner, or does not
    answer; unless it refuses such calls, which says nothing about them."""
    try:
        yield
    except Unavailable as error:
        log.info("client: %s has not answered for %d partitions: %s", target, len(missing), error)
    except ClientError as error:
        log.info("client: %s refuses calls for many partitions: %s", target, error)
        for name in missing:
            calls.owner(name).answered(target)
        return
    for name in missing:
        calls.owner(name).failed(target)


async def _responses(
    calls: ClusterCalls, target: str, method: str, request: Any, timeout: float
) -> AsyncGenerator[Any, None]:
    """Raises ClientError; Unavailable also when the broker falls silent, which closes no connection."""
    connection = calls.connection
    with translated(target):
        metadata = await connection.metadata()
        call = getattr(connection.stub(target, replica_pb2_grpc.ReplicaStub), method)(
            request, timeout=max(timeout, 0.001), metadata=metadata
        )
        with connection.liveness(target).watch(call, lambda: True) as waiting:
            try:
                async for response in call:
                    waiting.liveness.heard()
                    yield response
            except asyncio.CancelledError:
                if not waiting.was_given_up():
                    raise
                raise silent(target) from None
            finally:
                call.cancel()


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
    def of(cls, response: streams_pb2.OffsetsResponse | pb.TailRead) -> PartitionExtent:
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
                await asyncio.sleep(self._backoff.delay(error))
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
        found = await read_ends(self._calls, unknown, ASK_S) if len(unknown) > 1 else {}
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
