"""Publishing: how batches and single messages get into a topic.

A batch of Sava's own protocol goes in as it came. Single messages (Danube's protocol has no others) are
joined first: an append costs about the same for one message as for a thousand, so those that arrive in the
same turn of the event loop, or while the append before them is on its way to the disk, become one batch.

    turn      a b c arrive            ─▶ one append of 3
    writing   d … z arrive meanwhile  ─▶ the next append, of 23
    durable   a b c get their offsets: base, base + 1, base + 2

One append is under way at a time, so the disk sets the pace: the slower it is, the larger the batches. An
append that fails fails for all of its callers, with an error whose ``outcome`` says whether its messages may
be in the topic all the same. A message that no batch can hold fails alone.

While the topic is handed over to another broker, what arrives is *held*: accepted here, it could be behind
the end that the next owner begins at; refused at once, its sender would come back before there is a next
owner. When the topic closes, those that were held get an error, and nothing of theirs is in the topic.

Batches that a pipeline staged in the object store take the same way (``StagedWrites``).
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, Protocol

import pyarrow as pa
import pyarrow.compute as pc

from sava.errors import CallerError, RetryableError, SavaError
from sava.metadata.errors import OutcomeUnknown
from sava.records import MAX_BATCH_BYTES, BatchTooLarge, Compression, Message, RecordBatch
from sava.storage import staging
from sava.storage.errors import Fenced, StagedInvalid
from sava.storage.objectstore import ObjectStore
from sava.storage.producers import RUN
from sava.storage.staging import Section
from sava.storage.topic_log import TopicClosed, TopicLog
from sava.tasks import SingleFlight
from sava.topics.errors import MessageTooLarge, TopicMismatch, TopicMoved
from sava.topics.names import TopicName
from sava.topics.rules import EffectiveLimits, RateLimiter, SchemaChecks, TopicCheck, TopicLimits

_log = logging.getLogger(__name__)

MAX_JOINED: Final = 10_000
MAX_JOINED_BYTES: Final = 4 << 20
"""Of one append. A message that is larger has one of its own."""
DECODE_BYTES: Final = 128 << 20
DECODE_WAIT_S: Final = 10.0
MAX_DECODE_WAITING: Final = 10_000
LARGE: Final = 1 << 20
"""A body of this size is checked in a thread: a smaller one takes less than a millisecond or two."""
CROWD: Final = 6
CROWD_FADES: Final = 0.98
GATHER_S: Final = 0.003
"""How long to wait for more between two appends when many publish at once, and how many that is. An append
costs as much as handling several messages, and with that many under way each takes longer than this anyway.
The largest append of late shows how many there are; a few callers do not wait for others."""
MAX_WAITING_BYTES: Final = 64 << 20
"""Of messages that wait for their append; beyond this ``send`` waits to get in line."""
MESSAGE_BYTES: Final = 200
"""What a message counts besides its payload."""


class DecodeBusy(RetryableError):
    """Batches that are decompressed at the moment take all the memory that there is for it."""


class DecodeBudget:
    """Bytes of decompressed batches that may be in memory while they are checked, of a whole broker. Owned by
    the event loop.

    A kilobyte of zstd becomes 60 MB, and many streams may bring one at the same time. Each waits for its part
    of the budget in the order of asking, so that its stream, and by flow control its client, is slowed down.
    Small batches need no part of it, since they are checked one at a time, and do not wait for large ones."""

    def __init__(self, size: int = DECODE_BYTES) -> None:
        """``size``: at least that of one batch."""
        self._size = self.left = max(size, MAX_BATCH_BYTES)
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        self.waited = 0
        """Batches that had to wait, and those that were refused after it."""
        self.refused = 0

    @asynccontextmanager
    async def hold(self, size: int) -> AsyncIterator[None]:
        """Raises DecodeBusy after ``DECODE_WAIT_S``. Who asks for more than there is gets all of it."""
        size = min(size, self._size)
        if self._waiting or self.left < size:
            await self._wait(size)
        else:
            self.left -= size
        try:
            yield
        finally:
            self._give_back(size)

    async def _wait(self, size: int) -> None:
        if len(self._waiting) >= MAX_DECODE_WAITING:
            self.refused += 1
            raise DecodeBusy(f"{len(self._waiting)} compressed batches wait to be checked; try again")
        self.waited += 1
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = (size, future)
        self._waiting.append(entry)
        try:
            async with asyncio.timeout(DECODE_WAIT_S):
                await future
        except BaseException as error:
            if future.done() and not future.cancelled():
                self._give_back(size)  # granted in the turn in which the wait ended
            else:
                self._waiting.remove(entry)
                self._grant()  # it may have stood before others that fit
            if isinstance(error, TimeoutError):
                self.refused += 1
                raise DecodeBusy(
                    f"the broker decompresses as much as it may (limits.decompressing_mb), and a batch "
                    f"of {size} bytes did not get its turn within {DECODE_WAIT_S:g} s"
                ) from None
            raise

    def _give_back(self, size: int) -> None:
        self.left += size
        self._grant()
        if self.left == self._size:
            pa.default_memory_pool().release_unused()  # else the allocator keeps it for the next time

    def _grant(self) -> None:
        while self._waiting and self._waiting[0][0] <= self.left:
            size, future = self._waiting.popleft()
            self.left -= size
            future.set_result(None)


class Sink(Protocol):
    """Where batches go: a TopicLog, or the consumers of a topic that keeps nothing."""

    async def begin(self, batch: RecordBatch) -> asyncio.Future[int]: ...

    def next_sequence(self, producer_id: int) -> int: ...

    def is_degraded(self, offset: int) -> bool:
        """Whether the message, which was acknowledged just now, is on fewer disks than it should be."""
        ...


class _Waiting(NamedTuple):
    message: Message
    size: int
    future: asyncio.Future[int]


class Publisher:
    """Of one topic; owned by the event loop."""

    def __init__(
        self,
        topic: TopicName,
        sink: Sink,
        limits: TopicLimits,
        gate: SchemaChecks,
        budget: DecodeBudget | None = None,
    ) -> None:
        self.topic = topic
        self._budget = budget or DecodeBudget()
        self.sink = sink
        self.limits = limits
        self.gate = gate
        self._store = limits.store
        self._rules_at = -1
        """The store's revision when rules were looked up."""
        self._found_rules: tuple[EffectiveLimits, TopicCheck | None]
        self._rate = RateLimiter()
        self._waiting: deque[_Waiting] = deque()
        self._waiting_bytes = 0
        self._room = asyncio.Event()
        self._joiner: asyncio.Task[None] | None = None
        self._is_entering = False
        """Whether the joiner waits for the sink to accept a batch."""
        self._held: asyncio.Event | None = None
        """There while the topic is handed over; set when it closes."""
        self._crowd = 0.0
        self._closed: SavaError | None = None
        self.messages = self.bytes = 0
        """That went to the sink so far."""

    async def begin(
        self,
        batch: RecordBatch | None,
        check: Callable[[], None] = lambda: None,
        *,
        enter: Callable[[], Awaitable[asyncio.Future[int]]] | None = None,
        is_measured: bool = False,
    ) -> asyncio.Future[int]:
        """Accept a verified batch; its future has the base offset when it is durable. ``check`` raises if the
        producer may not publish (any more); it is asked after every wait but that for room. ``enter``: how
        the batch gets into the sink if not as any batch (then there may be none). ``is_measured``: see
        ``measure``."""
        if batch is not None:
            limits, schema = self._rules()
            header = batch.header
            if not is_measured and (schema is not None or 0 < limits.max_message_size < header.body_size):
                await self.measure(batch)
            if limits.max_publish_rate:
                await self._rate.acquire(header.count, limits.max_publish_rate, f"topic {self.topic}")
        check()
        if self._held is not None:
            await self._hold_out()
        try:
            if enter is not None:
                future = await enter()
            else:
                assert batch is not None
                future = await self.sink.begin(batch)
        except TopicClosed:  # while it waited for room
            await self._hold_out()
            raise
        except Fenced as error:
            raise TopicMoved(self.topic) from error
        if batch is not None:
            self.messages += header.count
            self.bytes += header.body_size
        return future

    @asynccontextmanager
    async def decoding(self, batches: Sequence[RecordBatch]) -> AsyncIterator[None]:
        """Around the use of batches that came over the network. Raises DecodeBusy."""
        size = sum(each.header.body_size for each in batches if each.header.codec is not Compression.NONE)
        if size > LARGE:
            async with self._budget.hold(size):
                yield
        else:
            yield

    async def verify(self, batch: RecordBatch, check: Callable[[RecordBatch], None]) -> None:
        """Raise unless the batch can be read, ``check`` accepts it, and the topic takes such messages. What
        it takes in memory when it is decompressed counts, and is free again when this returns."""
        header = batch.header
        is_large = header.body_size > LARGE
        is_packed = header.codec is not Compression.NONE
        if is_packed and (is_large or self._rules()[1] is not None):
            async with self._budget.hold(header.body_size):
                try:
                    await self._verify(batch, check, is_large=is_large)
                finally:
                    batch.drop_views()
        else:
            await self._verify(batch, check, is_large=is_large)

    async def _verify(
        self, batch: RecordBatch, check: Callable[[RecordBatch], None], *, is_large: bool
    ) -> None:
        if is_large:
            await asyncio.to_thread(batch.verify)
        else:
            batch.verify()
        check(batch)
        limits, schema = self._rules()
        if schema is not None or 0 < limits.max_message_size < batch.header.body_size:
            await self.measure(batch)

    async def measure(self, batch: RecordBatch) -> None:
        """Raise MessageTooLarge or SchemaRefused unless the topic takes such messages."""
        limits, schema = self._rules()
        if 0 < limits.max_message_size < batch.header.body_size:
            self.check_largest(largest_payload(batch))
        if schema is not None:
            await schema.check(batch)

    async def send(self, message: Message, check: Callable[[], None]) -> int:
        """The offset of the message, when it is durable."""
        limits, schema = self._rules()
        self.check_largest(len(message.payload))
        if schema is not None:
            await schema.check(RecordBatch.from_messages((message,)))
        await self._rate.acquire(1, limits.max_publish_rate, f"topic {self.topic}")
        while self._waiting_bytes >= MAX_WAITING_BYTES and self._closed is None:
            self._room.clear()
            await self._room.wait()
        check()
        if self._closed is not None:
            raise self._closed
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        size = len(message.payload) + MESSAGE_BYTES
        self._waiting.append(_Waiting(message, size, future))
        self._waiting_bytes += size
        if self._joiner is None and self._held is None:
            self._joiner = asyncio.create_task(self._join(), name=f"publish {self.topic}")
        return await future

    async def hold(self) -> None:
        """Whatever is not accepted yet waits until ``close`` and fails with its error. Returns when the
        outcome of single messages that were on their way in is known; of batches it is the sink that knows
        when theirs is."""
        self._held = self._held or asyncio.Event()
        if self._joiner is not None:
            await asyncio.wait((self._joiner,))

    async def close(self, error: SavaError) -> None:
        """What has not been accepted fails with the error; what is under way resolves."""
        self._closed = error
        self._room.set()
        if self._held is not None:
            self._held.set()
        for waiting in self._take_all():
            _fail(waiting, error)
        if self._joiner is not None:
            if self._is_entering:
                self._joiner.cancel()  # room may never come, and without it nothing is in the topic
            await asyncio.gather(self._joiner, return_exceptions=True)

    async def _hold_out(self) -> None:
        """Raises what the topic closes with; returns only if it does not."""
        if self._held is not None:
            await self._held.wait()
        if self._closed is not None:
            raise self._closed

    # -- admission ---------------------------------------------------------------------------

    def _rules(self) -> tuple[EffectiveLimits, TopicCheck | None]:
        """Limits and schema as they are now: a change takes effect with the next message."""
        revision = self._store.local.revision
        if revision != self._rules_at:
            self._found_rules = self.limits.of(self.topic), self.gate.batch_check(self.topic)
            self._rules_at = revision
        return self._found_rules

    @property
    def max_message_size(self) -> int:
        """0: no limit."""
        return self._rules()[0].max_message_size

    def check_largest(self, size: int) -> None:
        """Raise MessageTooLarge if the topic takes no payload of this size."""
        if 0 < (limit := self.max_message_size) < size:
            raise MessageTooLarge(f"topic {self.topic}: a message has {size} bytes; the limit is {limit}")

    # -- joining -----------------------------------------------------------------------------

    async def _join(self) -> None:
        """Runs while there is something to append."""
        try:
            await asyncio.sleep(0)  # until every caller that is ready in this turn has added its message
            while self._waiting and self._held is None:
                part = self._take()
                try:
                    await self._append(part)
                except Exception:  # noqa: BLE001 (whatever it is, their callers must not be left waiting)
                    _log.exception("publishing: messages were not appended topic=%s", self.topic)
                    for waiting in part:
                        _fail(waiting, self._stopped())
                self._crowd = max(len(part), self._crowd * CROWD_FADES)
                if self._crowd >= CROWD and len(self._waiting) < MAX_JOINED:
                    await asyncio.sleep(GATHER_S)
        finally:
            self._joiner = None
            if self._held is None:
                for waiting in self._take_all():  # only when cancelled
                    _fail(waiting, self._stopped())

    async def _append(self, part: list[_Waiting]) -> None:
        try:
            batch = RecordBatch.from_messages([waiting.message for waiting in part])
        except CallerError as error:
            if len(part) == 1:
                _fail(part[0], error)
                return
            good = [waiting for waiting in part if _is_possible(waiting)]
            # All are possible alone and not together: too much for one batch.
            for half in (
                (good[: len(good) // 2], good[len(good) // 2 :]) if len(good) == len(part) else (good,)
            ):
                if half:
                    await self._append(half)
            return
        durable: asyncio.Future[int] | None = None
        try:
            durable = await self._enter(batch)
            base = await durable
        except SavaError as error:
            for waiting in part:
                _fail(waiting, error)
            return
        except BaseException as error:
            # A sink that waits for room has taken nothing, and waits only there. Behind that the batch may be
            # in the topic, whatever went wrong: a caller who hears "not appended" would report a loss.
            is_waiting = durable is None and isinstance(error, asyncio.CancelledError)
            failure = self._stopped() if is_waiting else self._unknown()
            for waiting in part:
                _fail(waiting, failure)
            raise
        for index, waiting in enumerate(part):
            if not waiting.future.done():
                waiting.future.set_result(base + index)

    async def _enter(self, batch: RecordBatch) -> asyncio.Future[int]:
        self._is_entering = True
        self.messages += len(batch)
        self.bytes += batch.header.body_size
        try:
            return await self.sink.begin(batch)
        except Fenced as error:
            raise TopicMoved(self.topic) from error
        finally:
            self._is_entering = False

    def _stopped(self) -> SavaError:
        return self._closed or TopicClosed(f"topic {self.topic}: publishing was stopped")

    def _unknown(self) -> SavaError:
        return OutcomeUnknown(
            f"topic {self.topic}: publishing failed while messages were appended; they may or may not be in "
            "the topic, and the broker's log says why"
        )

    def _take(self) -> list[_Waiting]:
        part: list[_Waiting] = []
        size = 0
        while self._waiting and len(part) < MAX_JOINED:
            size += self._waiting[0].size
            if part and size > MAX_JOINED_BYTES:
                break
            waiting = self._waiting.popleft()
            self._waiting_bytes -= waiting.size
            part.append(waiting)
        self._room.set()
        return part

    def _take_all(self) -> list[_Waiting]:
        taken = list(self._waiting)
        self._waiting.clear()
        self._waiting_bytes = 0
        return taken


def largest_payload(batch: RecordBatch) -> int:
    payloads: Any = batch.to_arrow(("payload",)).column(0)
    largest: int = pc.max(pc.binary_length(payloads)).as_py()
    return largest


def _is_possible(waiting: _Waiting) -> bool:
    """Whether a batch can hold the message; its caller gets the error if not."""
    try:
        RecordBatch.from_messages((waiting.message,))
    except CallerError as error:
        _fail(waiting, error)
        return False
    return True


def _fail(waiting: _Waiting, error: SavaError) -> None:
    if not waiting.future.done():
        waiting.future.set_exception(error)
        waiting.future.exception()  # seen: its caller may be gone


# -- staged writes -------------------------------------------------------------------------------------------


SLOTS: Final = 8
"""Each needs a piece of a section, the frame that is made of it, and its parts in between: some 30 MB."""


class Run(NamedTuple):
    """What a batch of a writer has for one topic."""

    producer_id: int
    ordinal: int
    """Its number among the writer's batches; from 1 on."""
    sections: Sequence[Section]

    @property
    def start(self) -> int:
        """Its first sequence."""
        return self.ordinal * RUN

    @property
    def messages(self) -> int:
        return sum(section.messages for section in self.sections)


@dataclass(frozen=True, slots=True)
class Stage:
    """Where staged messages are, and how many topics of this broker may have some of them in memory."""

    objects: ObjectStore
    slots: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(SLOTS))


class StagedWrites:
    """Staged writes: messages that a decision has given to the topic, taken from the object store.

    They were decided upon as a whole (``sava.cluster.writers``), and the broker that decided may be dead, so
    any number of brokers may ask for the same ones any number of times. The topic's memory of producers says
    how much of them is here already:

        asked    run 7: 300 messages; nothing of run 7 is known     ─▶ frames 0..199, then 200..299
        crash    behind the first frame; the journal remembers run 7 up to 200
        asked    by another broker, of the next owner                ─▶ 200..299
        asked    a third time                                       ─▶ nothing

    Only whole batches are put into frames, so wherever a run broke off, a batch ends there; and the next
    broker need not cut frames as the one before did.

    **Measured once.** Limits and schema are asked before the decision. A topic that has become stricter since
    does not refuse what was promised: the other topics of the batch have theirs. What paces and fences
    publishing (rate, hand-over, ownership) is asked for each frame.
    """

    def __init__(self, publisher: Publisher, log: TopicLog | None) -> None:
        self._publisher = publisher
        self._log = log
        self.runs: SingleFlight[tuple[int, int], None] = SingleFlight()
        """Under way. Two that publish the same run at once would both find its next frame missing."""

    async def check(self, stage: Stage, sections: Sequence[Section]) -> None:
        """Raise unless the topic takes these messages: TopicMismatch, MessageTooLarge, SchemaRefused,
        StagedInvalid."""
        if self._log is None:
            raise TopicMismatch(
                f"topic {self._publisher.topic} is not reliable: what it does not keep cannot be there "
                "exactly once; write to it at least once, or to a reliable topic"
            )
        for section in sections:
            self._publisher.check_largest(section.largest)
        schema = self._publisher.gate.batch_check(self._publisher.topic)
        if schema is None:
            return
        async with stage.slots, aclosing(staging.read_batches(stage.objects, sections)) as batches:
            async for batch in batches:
                await asyncio.to_thread(_verify, batch, batch.header.body_size)
                await schema.check(batch)

    async def publish(self, stage: Stage, run: Run) -> None:
        """Until all of it is durable, however often it is asked for. What is in the topic already is not
        published again. Raises TopicMoved, TopicClosed, LimitReached and what keeps the sections from being
        read; what was published by then stays, and the next call continues behind it."""
        key = run.producer_id, run.ordinal
        await self.runs.run(key, lambda: self._publish(stage, run))

    async def _publish(self, stage: Stage, run: Run) -> None:
        assert self._log is not None
        done = max(self._log.next_sequence(run.producer_id) - run.start, 0)
        if done >= run.messages:
            return  # of this run, or of a later one, which was begun when this one was complete
        largest = max(section.largest for section in run.sections)
        frames = staging.read_frames(stage.objects, run.sections, skip=done)
        async with stage.slots, aclosing(frames) as groups:
            async for group in groups:
                for frame in await asyncio.to_thread(_frames, group, run, done, largest):
                    # One at a time: a second one behind a refused first would be a gap, and hide the reason.
                    await asyncio.shield(await self._publisher.begin(frame, is_measured=True))
                    done += len(frame)


def _frames(group: Sequence[RecordBatch], run: Run, done: int, largest: int) -> list[RecordBatch]:
    """The batches of a group, verified and stamped, as one; as several if no batch can hold them all."""
    for batch in group:
        _verify(batch, largest)
    return _joined(group, run.producer_id, run.start + done)


def _verify(batch: RecordBatch, largest: int) -> None:
    try:
        batch.verify()
    except CallerError as error:
        raise StagedInvalid(f"a staged batch cannot be read: {error}") from error
    if batch.header.body_size > largest and largest_payload(batch) > largest:
        raise StagedInvalid(f"a staged payload is larger than the {largest} bytes that were announced")


def _joined(group: Sequence[RecordBatch], producer_id: int, sequence: int) -> list[RecordBatch]:
    try:
        return [RecordBatch.joined(group, producer_id=producer_id, base_sequence=sequence)]
    except BatchTooLarge:
        if len(group) == 1:
            raise
    middle = len(group) // 2
    first, rest = group[:middle], group[middle:]
    return [
        *_joined(first, producer_id, sequence),
        *_joined(rest, producer_id, sequence + sum(map(len, first))),
    ]
