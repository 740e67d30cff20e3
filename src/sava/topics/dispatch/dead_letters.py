"""Dead letters: messages that failed too often, handed on to a topic of their own.

A message is acked when it is safe there, not before; until then it is outstanding like any other. A topic
that cannot be written to makes only dead letters wait. A crash between the two writes the letter twice."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from itertools import islice
from typing import Final

import msgspec

from sava.errors import RetryableError
from sava.records import Message
from sava.storage.errors import OffsetOutOfRange
from sava.tasks import cancelled, spawn
from sava.topics.dispatch.core import Dispatcher
from sava.topics.dispatch.outstanding import Failure
from sava.topics.dispatch.reading import LogReader, LogView
from sava.topics.names import TopicName
from sava.topics.ranges import Range
from sava.topics.specs import DeadLetterPolicy

_log = logging.getLogger(__name__)

_MESSAGES_AT_ONCE: Final = 100
_FIRST_PAUSE_S: Final = 0.1
_LONGEST_PAUSE_S: Final = 30.0


class DeadLetters:
    """Owned by the event loop. A task runs while there are dead letters, and only then."""

    def __init__(
        self,
        topic: TopicName,
        subscription: str,
        log: LogView,
        core: Dispatcher,
        *,
        hand_on: Callable[[str, str, list[Message]], Awaitable[object]],
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
        pause = _FIRST_PAUSE_S
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
                    pause = min(2 * pause, _LONGEST_PAUSE_S) if is_passing else _LONGEST_PAUSE_S
                    self._report(error, pause)
                    await self._rest(pause)
                else:
                    pause, self.error = _FIRST_PAUSE_S, ""
                    self._done()
        finally:
            self._task = None
            await reader.close()

    async def _rest(self, pause: float) -> None:
        try:
            async with asyncio.timeout(pause):
                await self._hurry.wait()
        except TimeoutError:
            pass

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
        await self._hand_on(self.target, self._subscription, letters)
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
