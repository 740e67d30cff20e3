"""Appending: one stream of stretches into a chain, from its opening to its end.

As with publishing, the directions do not wait for each other: stretches are taken while those before them are
on their way to the disk, up to ``MAX_UNANSWERED``. Receipts go out in the order of the stretches. The first
failure is the last answer:

    stretches  1  2  3  4  5
    receipts   1  2  ended(why, where the chain is)      4 and 5, taken or not, have failed with 3

What the end says of the position is durable, and read when what is on its way of the chain, whoever sent it,
has come to its end: whoever goes on from there has a chance to be the next. It is said in the stream and not
only in its status, for a stream that ends while its client writes fails there with an error of gRPC's own.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any, Final

from sava.api.sessions import GOODBYE_S
from sava.errors import HostError, RetryableError, SavaError
from sava.metadata.errors import OutcomeUnknown
from sava.peers import faults
from sava.peers.relays import EOF
from sava.proto import replica_pb2 as pb
from sava.records import iter_batches
from sava.tasks import cancelled
from sava.topics.chain import Copied, SourceCopier
from sava.topics.errors import MessageInvalid
from sava.topics.stretches import SourceRange

MAX_UNANSWERED: Final = 64
"""Stretches of one stream whose outcome is open. Those who copy keep fewer."""
MAY_PASS: Final = (RetryableError, OutcomeUnknown)


class Appending:
    """Owned by the event loop."""

    def __init__(self, chain: SourceCopier, context: Any) -> None:
        self._chain = chain
        self._context = context
        self._unanswered: deque[asyncio.Future[Copied]] = deque()
        self._changed = asyncio.Event()
        """An outcome is known, or there will be no more stretches."""
        self._has_room = asyncio.Event()
        self._has_read_all = False
        self._refusal: SavaError | None = None
        """Of a stretch that was not taken: nothing more is."""

    async def run(self) -> None:
        """Until the client is done. Raises the error that the stream ends with; everything before it has its
        receipt."""
        progress = await self._chain.progress()
        opened = pb.ChainOpened(
            is_known=progress.is_known,
            position=progress.position,
            kept_position=progress.kept,
            topic_id=self._chain.topic_id,
            max_message_size=self._chain.max_message_size,
        )
        await self._context.write(pb.AppendResponse(opened=opened))
        reading = asyncio.ensure_future(self._read())
        try:
            failure = await self._answer()
            if failure is not None:
                await self._end(failure, reading)
            await reading
        finally:
            await cancelled(reading)

    async def _read(self) -> None:
        try:
            while (request := await self._context.read()) is not EOF:
                if self._refusal is not None:
                    continue
                try:
                    outcome = await self._chain.begin(_requested(request))
                except SavaError as error:
                    self._refusal = error
                    self._changed.set()
                    continue
                self._unanswered.append(outcome)
                outcome.add_done_callback(self._settled)
                while len(self._unanswered) >= MAX_UNANSWERED and self._refusal is None:
                    self._has_room.clear()
                    await self._has_room.wait()
        finally:
            self._has_read_all = True
            self._changed.set()

    def _settled(self, _: asyncio.Future[Copied]) -> None:
        self._changed.set()

    async def _answer(self) -> SavaError | None:
        """Receipts, until there is nothing more to answer; what the stream fails with."""
        while True:
            self._changed.clear()
            while self._unanswered and self._unanswered[0].done():
                outcome = self._unanswered.popleft()
                self._has_room.set()
                failure = outcome.exception()
                if isinstance(failure, SavaError):
                    self._refusal = failure
                    return failure
                copied = outcome.result()
                await self._context.write(pb.AppendResponse(receipt=receipt_of(copied)))
            if not self._unanswered:
                if self._refusal is not None or self._has_read_all:
                    return self._refusal
                await self._changed.wait()
            elif not self._unanswered[0].done():
                await self._changed.wait()

    async def _end(self, failure: SavaError, reading: asyncio.Future[None]) -> None:
        """Tell the client, and wait until it has heard it."""
        progress = await self._chain.progress()
        ended = pb.ChainEnded(
            code=faults.code_of(failure),
            reason=str(failure),
            may_pass=isinstance(failure, MAY_PASS) and not isinstance(failure, HostError),
            is_known=progress.is_known,
            position=progress.position,
        )
        await self._context.write(pb.AppendResponse(ended=ended))
        await asyncio.wait((reading,), timeout=GOODBYE_S)
        raise failure


def _requested(request: pb.AppendRequest) -> SourceRange:
    if request.WhichOneof("kind") != "stretch":
        raise MessageInvalid("a stream of a chain carries stretches after its opening")
    return stretch_of(request.stretch)


def stretch_of(stretch: pb.Stretch) -> SourceRange:
    batches = list(iter_batches(stretch.batches))
    return SourceRange(stretch.start, stretch.end, stretch.begin, batches, stretch.offsets)


def receipt_of(copied: Copied) -> pb.ChainReceipt:
    return pb.ChainReceipt(
        position=copied.position,
        kept_position=copied.kept,
        appended=copied.appended,
        duplicates=copied.duplicates,
        loops=copied.loops,
    )
