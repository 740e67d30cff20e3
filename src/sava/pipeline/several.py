"""Several: a little of each of many partitions, by one call to each broker that has some of them.

As ``sava.api.replica`` has it. What a broker does not answer, refuses or does not have is for the caller
to try one by one, by the calls that wait, find out where a partition is by now, and say what is wrong.

Owned by the event loop of ``ClusterCalls``.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from typing import Any, Final

from sava.client.connection import silent
from sava.client.errors import ELSEWHERE, ClientError, Unavailable, translated
from sava.errors import SavaError
from sava.pipeline.calls import ClusterCalls
from sava.proto import replica_pb2 as pb
from sava.proto import replica_pb2_grpc as rpc
from sava.records import RecordBatch

log = logging.getLogger(__name__)

MAX_EACH: Final = 256
"""Partitions in one call."""
FIND_S: Final = 2.0
"""To find out who has which."""
PART_BYTES: Final = 4 << 20
"""That one call sends; a larger stretch goes alone."""


def parts(names: Sequence[str]) -> Iterator[Sequence[str]]:
    """As many as one call may have."""
    for first in range(0, len(names), MAX_EACH):
        yield names[first : first + MAX_EACH]


async def read(
    calls: ClusterCalls, target: str, tails: Mapping[str, tuple[int, int]], timeout: float, max_bytes: int
) -> dict[str, list[RecordBatch]]:
    """As ``Link.read_each``, of one broker; of no more than ``MAX_EACH`` partitions."""
    wanted = [pb.Tail(topic=name, start=start, end=end) for name, (start, end) in tails.items()]
    return {
        tail.topic: batches
        async for tail, found in _read(calls, target, wanted, timeout, max_bytes)
        if (batches := _batches(tail.topic, found.batches))
    }


async def ends(calls: ClusterCalls, names: Iterable[str], timeout: float) -> dict[str, pb.TailRead]:
    """How far partitions reach, of those that answer."""
    found: dict[str, pb.TailRead] = {}

    async def ask(target: str, part: Sequence[str]) -> None:
        wanted = [pb.Tail(topic=name) for name in part]
        async for tail, read in _read(calls, target, wanted, timeout, 0):
            found[tail.topic] = read

    groups = await calls.by_owner(names, timeout=timeout)
    await asyncio.gather(*(ask(target, part) for target in groups for part in parts(groups[target])))
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
        log.warning("several: %s: %s", name, error)
        return []
    return batches


async def append(
    calls: ClusterCalls, stretches: Sequence[pb.EachAppend], until: float
) -> dict[str, pb.SourceReceipt | None]:
    """By topic, the receipts of those that are durable; None: it was not taken, or that is not known. Those
    that were sent and not answered by then (on the clock of the event loop) are missing."""
    by_topic = {each.open.topic: each for each in stretches}
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


def _portions(stretches: Sequence[pb.EachAppend]) -> Iterator[list[pb.EachAppend]]:
    portion: list[pb.EachAppend] = []
    size = 0
    for each in stretches:
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
    stretches: Sequence[pb.EachAppend],
    until: float,
    answers: dict[str, pb.SourceReceipt | None],
) -> None:
    loop = asyncio.get_running_loop()
    names = [each.open.topic for each in stretches]
    unanswered = set(names)
    request = pb.AppendEachRequest(appends=stretches)
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
        log.info("several: %s has not answered of %d partitions: %s", target, len(missing), error)
    except ClientError as error:
        log.info("several: %s refuses: %s", target, error)
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
        call = getattr(connection.stub(target, rpc.ReplicaStub), method)(
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
