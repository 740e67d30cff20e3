"""PartitionCalls: calls about partitioned topics, each part of them done by the broker that has the
partition.

A call about one topic is passed on as a whole (``forwarding``). One about a partitioned topic has a part for
each partition, and these may be anywhere: each part is done here if the partition is, and asked of its owner
otherwise, as the same call with the partition's name. A partition that moves meanwhile is looked for again.

**Parts end differently.** A part that fails does not end the others: cut off on their way, their outcome
would be unknown for no reason. When all have ended, the caller of a change learns which partitions have made
it, which have not, and of which that is not known (``PartitionsDiffer``). A change that no partition has made
fails as in one topic.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from google.protobuf.message import Message

from sava.cluster.view import TopicRouter
from sava.errors import Outcome, RetryableError, SavaError
from sava.metadata.errors import OutcomeUnknown, Unavailable
from sava.peers.channels import Port
from sava.peers.error_mapping import Relayed
from sava.peers.forwarding import Forwarder
from sava.tasks import spread
from sava.topics.errors import NotOwner
from sava.topics.names import TopicName

_log = logging.getLogger(__name__)

Reply = TypeVar("Reply", bound=Message)

PARALLEL: Final = 16
"""Parts of one call that are under way at a time."""
TIMEOUT_S: Final = 8.0
"""For all parts of a call, finding their owners included: less than the callers' own deadline."""
GRACE_S: Final = 1.0
"""For a part that its time ends by itself, before it is cut off."""


class PartitionsDiffer(RetryableError):
    """Some partitions of a topic have made a change (``done``), others have not (``failed``), or may have
    (``unknown``). Repeating the change is safe."""

    outcome = Outcome.PARTLY

    def __init__(
        self,
        topic: TopicName,
        *,
        done: Sequence[int],
        failed: Mapping[int, SavaError],
        unknown: Mapping[int, SavaError],
    ) -> None:
        texts = [f"done in partitions {numbers(done)}" if done else "done in no partition for certain"]
        if failed:
            texts.append(f"not in {numbers(failed)} ({next(iter(failed.values()))})")
        if unknown:
            texts.append(f"unknown in {numbers(unknown)} ({next(iter(unknown.values()))})")
        super().__init__(f"topic {topic}: {', '.join(texts)}; repeat it to make it in all")
        self.topic, self.done, self.failed, self.unknown = topic, tuple(done), failed, unknown
        if unknown:
            self.outcome = Outcome.UNKNOWN


def numbers(values: Iterable[int]) -> str:
    """In order, neighbours as a range: ``0-3, 7``."""
    ranges: list[list[int]] = []
    for value in sorted(values):
        if ranges and ranges[-1][1] == value - 1:
            ranges[-1][1] = value
        else:
            ranges.append([value, value])
    return ", ".join(f"{first}-{last}" if last > first else str(first) for first, last in ranges)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionCall(Generic[Reply]):
    topic: TopicName
    method: str
    """Its path: ``/sava.admin.Topics/DescribeTopic``."""
    request: Message
    """As the owner is asked it."""
    reply: type[Reply]
    here: Callable[[], Awaitable[Reply]]
    """The same without a network. Raises NotOwner."""
    port: Port = "admin"


class PartitionCalls:
    """Holds nothing between calls."""

    def __init__(self, router: TopicRouter, forwarder: Forwarder) -> None:
        self._router = router
        self._forwarder = forwarder

    async def do(self, part: PartitionCall[Reply], *, timeout: float = TIMEOUT_S) -> Reply:
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

    async def each(self, parts: Iterable[PartitionCall[Reply]]) -> list[Reply]:
        """The answers of all, in their order. Raises PartitionsDiffer when only some have made the change, or
        may have; when none has, what the first of them raised."""
        asked = list(parts)
        deadline = asyncio.get_running_loop().time() + TIMEOUT_S
        ended = await spread(asked, lambda part: self._attempt(part, deadline), parallel=PARALLEL)
        errors = {index: end for index, end in enumerate(ended) if isinstance(end, SavaError)}
        if not errors:
            return [end for end in ended if not isinstance(end, SavaError)]
        unknown = {index for index, error in errors.items() if _outcome(error) is not Outcome.NOT_DONE}
        if len(asked) == 1 or (len(errors) == len(asked) and not unknown):
            raise next(iter(errors.values()))
        numbered = [part.topic.partition_of or (part.topic, index) for index, part in enumerate(asked)]
        raise PartitionsDiffer(
            numbered[0][0],
            done=[number for index, (_, number) in enumerate(numbered) if index not in errors],
            failed={numbered[index][1]: errors[index] for index in errors if index not in unknown},
            unknown={numbered[index][1]: errors[index] for index in errors if index in unknown},
        )

    async def _attempt(self, part: PartitionCall[Reply], deadline: float) -> Reply | SavaError:
        """How the part ended. An error that no rule names, and a part that is cut off, leave open whether it
        was done."""
        left = deadline - asyncio.get_running_loop().time()
        if left <= 0:
            return Unavailable(f"topic {part.topic}: its turn did not come within {TIMEOUT_S:g} s")
        try:
            async with asyncio.timeout(left + GRACE_S):
                return await self.do(part, timeout=left)
        except SavaError as error:
            return error
        except TimeoutError:
            return OutcomeUnknown(f"topic {part.topic}: not done within {left + GRACE_S:.1f} s")
        except Exception as error:  # noqa: BLE001 (whatever it is, the other parts are reported)
            _log.exception("partition calls: a part failed topic=%s method=%s", part.topic, part.method)
            return OutcomeUnknown(f"topic {part.topic}: {error!r}")

    async def settled(self, names: Iterable[TopicName], *, timeout: float) -> None:
        """Until all have an owner, or the time is over; which of the two, their description shows."""

        async def settle(name: TopicName) -> None:
            with suppress(RetryableError):
                await self._router.owner(name, timeout=timeout)

        with suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await spread(names, settle, parallel=PARALLEL)


def _outcome(error: SavaError) -> Outcome:
    """What became of a part. Of an answer that another broker gave, what that broker says."""
    return error.outcome_there if isinstance(error, Relayed) else error.outcome
