"""Reading: an open position in a topic's log, from which a subscription takes batch after batch.

The batch at hand and the stream behind it are kept: a consumer that takes ten messages at a time does not
make the log look for its place each time, nor open a Parquet file again. ``DeadLetters`` read the log once
more, for those messages that failed too often.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from itertools import islice
from typing import Final, Protocol

import msgspec

from sava.errors import RetryableError
from sava.records import Message, RecordBatch
from sava.storage.errors import DataGap, OffsetOutOfRange
from sava.tasks import Backoff, cancelled, set_within, spawn
from sava.topics.dispatch.core import Dispatcher, Page
from sava.topics.dispatch.members import Failure, effective_keys
from sava.topics.names import TopicName
from sava.topics.ranges import Range
from sava.topics.specs import DeadLetterPolicy

DELIVERY_BYTES: Final = 1 << 20
DELIVERY_MESSAGES: Final = 10_000
_STREAM_ON: Final = 10_000
"""Offsets that are reached by reading on; further ahead a new place is looked for."""


class LogView(Protocol):
    """What a subscription needs of a topic's log. A Protocol: models and stories of subscriptions run on a
    log in memory."""

    @property
    def start_offset(self) -> int: ...

    @property
    def next_offset(self) -> int: ...

    def read(
        self, start: int, end: int | None = None, *, max_bytes: int | None = None
    ) -> AsyncGenerator[RecordBatch, None]: ...

    async def wait_beyond(self, offset: int) -> None: ...


class Chunk:
    """A batch at hand."""

    __slots__ = ("_keys", "batch", "per_page", "size")

    def __init__(self, batch: RecordBatch) -> None:
        self.batch = batch
        self.size = batch.header.length
        self.per_page = max(1, min(DELIVERY_MESSAGES, len(batch) * DELIVERY_BYTES // self.size))
        if self.size <= DELIVERY_BYTES and len(batch) <= DELIVERY_MESSAGES:
            self.per_page = len(batch)
        self._keys: Sequence[str] | None = None

    def page(self, start: int, log_end: int) -> Page:
        """From this offset on, as much as one delivery may carry."""
        batch = self.batch
        end = min(batch.next_offset, start + self.per_page)
        return Page(start, end, self.size * (end - start) // len(batch), log_end - start, self.keys)

    def keys(self, start: int, end: int) -> Sequence[str]:
        if self._keys is None:
            self._keys = effective_keys(self.batch)
        base = self.batch.base_offset
        return self._keys[start - base : end - base]


class LogReader:
    """Owned by one task."""

    def __init__(self, log: LogView) -> None:
        self._log = log
        self._chunk: Chunk | None = None
        self._stream: AsyncGenerator[RecordBatch, None] | None = None
        self._next = 0
        """Where the stream continues."""

    async def at(self, offset: int) -> Chunk:
        """The batch that holds the offset, which must be below the log's end. Raises as the log's
        ``read``."""
        chunk = self._chunk
        if chunk is not None and chunk.batch.base_offset <= offset < chunk.batch.next_offset:
            return chunk
        if not self._next <= offset < self._next + _STREAM_ON:
            await self.close()
        for _ in range(2):  # a stream ends where the log ended when it was opened
            if self._stream is None:
                self._stream = self._log.read(offset)
            async for batch in self._stream:
                self._next = batch.next_offset
                if offset < batch.next_offset:
                    self._chunk = Chunk(batch)
                    return self._chunk
            await self.close()
        raise DataGap(f"offset {offset} was asked for, and the log has nothing to read there")

    def forget_below(self, offset: int) -> None:
        """The batch at hand is not needed any more if it ends here or before."""
        if self._chunk is not None and self._chunk.batch.next_offset <= offset:
            self._chunk = None

    async def close(self) -> None:
        stream, self._stream, self._chunk = self._stream, None, None
        if stream is not None:
            await stream.aclose()


# -- dead letters --------------------------------------------------------------------------------------------


_log = logging.getLogger(__name__)

_MESSAGES_AT_ONCE: Final = 100
_FIRST_PAUSE_S: Final = 0.1
_LONGEST_PAUSE_S: Final = 30.0


class DeadLetters:
    """Messages that failed too often, handed on to a topic of their own.

    A message is acked when it is safe there, not before; until then it is outstanding like any other. A topic
    that cannot be written to makes only dead letters wait. A crash between the two writes the letter twice.

    A task runs while there are dead letters, and only then."""

    def __init__(
        self,
        topic: TopicName,
        subscription: str,
        log: LogView,
        core: Dispatcher,
        *,
        hand_on: Callable[[str, list[Message]], Awaitable[object]],
        done: Callable[[], None],
    ) -> None:
        self._topic = topic
        self._subscription = subscription
        self._log = log
        self._core = core
        self._hand_on = hand_on
        self._done = done
        self._hurry = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.error = ""
        """Why letters wait, empty if they do not."""

    @property
    def target(self) -> str:
        policy = self._core.spec.failure_policy
        own = TopicName(self._topic.namespace, f"{self._topic.topic}-{self._subscription}-dlq")
        return policy.dead_letter_topic or str(own)

    def look(self) -> None:
        """There may be dead letters."""
        if self._core.failures.dead and self._task is None:
            self._task = spawn(self._run(), name=f"dead letters of {self._subscription}")

    def retry_now(self) -> None:
        """The policy has changed: what failed before may succeed."""
        self._hurry.set()

    async def close(self) -> None:
        await cancelled(self._task)

    async def _run(self) -> None:
        backoff = Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)
        reader = LogReader(self._log)
        try:
            while self._core.failures.dead:
                self._hurry.clear()
                try:
                    await self._hand_some_on(reader)
                except OffsetOutOfRange:
                    self._core.skip_to(self._log.start_offset)
                except Exception as error:  # noqa: BLE001 (letters that wait must say so, and are tried again)
                    is_passing = isinstance(error, RetryableError | OSError)
                    pause = backoff.next() if is_passing else _LONGEST_PAUSE_S
                    self._report(error, pause)
                    await set_within(pause, self._hurry)
                else:
                    self.error = ""
                    backoff.reset()
                    self._done()
        finally:
            self._task = None
            await reader.close()

    def _report(self, error: Exception, pause: float) -> None:
        self.error = f"dead letters wait: {error}"
        _log.warning(
            "dead letters cannot be handed on topic=%s subscription=%s target=%s retry_in=%.1fs error=%s",
            self._topic,
            self._subscription,
            self.target,
            pause,
            error,
        )

    async def _hand_some_on(self, reader: LogReader) -> None:
        letters: list[Message] = []
        ranges: list[Range] = []
        for start, end, failure in list(islice(self._core.failures.dead, _MESSAGES_AT_ONCE)):
            end = min(end, start + _MESSAGES_AT_ONCE - len(letters))
            letters += await self._letters(reader, start, end, failure)
            ranges.append((start, end))
            if len(letters) >= _MESSAGES_AT_ONCE:
                break
        await self._hand_on(self.target, letters)
        self._core.dead_lettered(ranges)

    async def _letters(self, reader: LogReader, start: int, end: int, failure: Failure) -> list[Message]:
        found: list[Message] = []
        while start < end:
            batch = (await reader.at(start)).batch
            stop = min(end, batch.next_offset)
            producer_id = batch.header.producer_id
            found += [self._letter(each, producer_id, failure) for each in batch.slice(start, stop)]
            start = stop
        return found

    def _letter(self, message: Message, producer_id: int, failure: Failure) -> Message:
        origin = {
            "x-original-topic": str(self._topic),
            "x-original-subscription": self._subscription,
            "x-original-topic-offset": str(message.offset),
            "x-original-producer-id": str(producer_id),
            "x-poison-policy": DeadLetterPolicy.DEAD_LETTER.value,
            "x-delivery-attempt": str(failure.attempt),
            "x-failure-reason": failure.reason,
        }
        return msgspec.structs.replace(
            message, attributes={**message.attributes, **origin}, offset=None, topic=None
        )
