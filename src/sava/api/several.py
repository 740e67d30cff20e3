"""Several: a little of each of many topics, in one call.

A stream costs the same whether it carries one message or a million, and most of what it costs is its
beginning and its end. Whoever copies a few messages of each of a hundred topics, several times a second,
would do little else than open streams. So it may read, and append, the little of all topics of a broker by
one call.

Nothing else is different: what is read is what ``Streams.Read`` would give, and each stretch is one that
could have come by ``Replica.Append``, and is taken or refused alone. What is not in memory, or is another
broker's, is left to those calls: they wait, ask others, and say why not.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

from sava.api.appending import receipt_of, stretch_of
from sava.errors import SavaError
from sava.peers import faults
from sava.proto import replica_pb2 as pb
from sava.topics.chain import SourceCopier
from sava.topics.errors import MessageInvalid
from sava.topics.names import TopicName
from sava.topics.topics import ServedTopics

MAX_EACH: Final = 256
"""Topics in one call."""
TAIL_BYTES: Final = 1 << 20
"""Of one topic; and of one response, about."""
MAX_BYTES: Final = 16 << 20
"""Of one call."""


async def read_each(topics: ServedTopics, request: pb.ReadEachRequest, context: Any) -> None:
    _check_number(request.tails)
    left = min(request.max_bytes, MAX_BYTES)
    response, size = pb.ReadEachResponse(), 0
    for number, tail in enumerate(request.tails):
        topic = topics.loaded.get(TopicName.parse(tail.topic))
        if topic is None or not topic.is_serving or topic.log is None:
            continue
        log = topic.log
        batches = log.recent(tail.start, tail.end, max_bytes=min(left, TAIL_BYTES))
        response.tails.add(
            number=number,
            batches=[batch.to_bytes() for batch in batches],
            start_offset=log.start_offset,
            stored_offset=log.stored_offset,
            next_offset=log.next_offset,
        )
        read = sum(batch.header.length for batch in batches)
        left, size = left - read, size + read
        if size >= TAIL_BYTES:
            await context.write(response)
            response, size = pb.ReadEachResponse(), 0
    await context.write(response)


async def append_each(
    request: pb.AppendEachRequest,
    open_chain: Callable[[pb.ChainStretch], Awaitable[SourceCopier]],
    context: Any,
) -> None:
    """Side by side: one that waits, for its rate or because its topic moves, keeps no other waiting."""
    _check_number(request.stretches)
    waiting: set[asyncio.Task[pb.StretchAnswer]] = set()
    try:
        for number, each in enumerate(request.stretches):
            waiting.add(asyncio.create_task(_answer(number, each, open_chain)))
            await asyncio.sleep(0)  # others have their turn in between
        while waiting:
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            await context.write(pb.AppendEachResponse(answers=[task.result() for task in done]))
    finally:
        for task in waiting:
            task.cancel()


async def _answer(
    number: int, each: pb.ChainStretch, open_chain: Callable[[pb.ChainStretch], Awaitable[SourceCopier]]
) -> pb.StretchAnswer:
    try:
        chain = await open_chain(each)
        copied = await (await chain.begin(stretch_of(each.stretch)))
    except SavaError as error:
        return pb.StretchAnswer(number=number, code=faults.code_of(error))
    return pb.StretchAnswer(number=number, receipt=receipt_of(copied))


def _check_number(of: Sequence[object]) -> None:
    if len(of) > MAX_EACH:
        raise MessageInvalid(f"{len(of)} topics; one call takes {MAX_EACH}")
