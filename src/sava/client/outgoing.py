"""What a producer has on its way, from the call of the application to the receipt of the broker.

    Columns ─▶ PendingLimit ─▶ ProducerBatch ─▶ SendWindow
    checked    back-pressure   gathered, encoded   sent, without a receipt

``Columns`` finds whatever could make a broker or the format refuse a batch, as far as it can be known: a
batch holds the messages of many callers, and one of them must not fail the others.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from sava.client.errors import ClientError, DuplicateForgotten, OutcomeUnknown, Refused, Timeout
from sava.client.messages import Codec
from sava.records import Compression, RecordBatch

MESSAGE_OVERHEAD: Final = 16
"""Bytes that a message takes besides its content, roughly: offsets of its columns, its place in the lists
here."""

MAX_PENDING_BYTES: Final = 256 << 20

MAX_IN_FLIGHT: Final = 16
"""As many batches of a producer as a broker recognises when they are repeated."""

UNKNOWN_OFFSET: Final = -1
"""The offset of messages that are in the topic, exactly once, at a place that the broker no longer
remembers."""

_LOST_TRACK: Final = OutcomeUnknown(
    "the broker no longer knows which batches of this producer it has: these may be stored or not"
)


class Columns(NamedTuple):
    """Messages of one call, checked. Nothing is done per message in Python if it can be avoided."""

    payloads: Sequence[bytes]
    keys: Sequence[str | None] | None
    attributes: Sequence[Mapping[str, str]] | None
    size: int
    largest: int

    @classmethod
    def of(
        cls,
        payloads: Sequence[Any],
        keys: Sequence[str | None] | None,
        attributes: Sequence[Mapping[str, str]] | None,
        codec: Codec | None,
    ) -> Columns:
        if codec is not None:
            payloads = [codec.encode(value) for value in payloads]
        elif not set(map(type, payloads)) <= {bytes}:
            payloads = [payload_of(payload) for payload in payloads]
        for name, column in (("keys", keys), ("attributes", attributes)):
            if column is not None and len(column) != len(payloads):
                raise Refused(f"{len(column)} {name} for {len(payloads)} messages")
        return cls._measured(payloads, keys, attributes)

    @classmethod
    def _measured(
        cls,
        payloads: Sequence[bytes],
        keys: Sequence[str | None] | None,
        attributes: Sequence[Mapping[str, str]] | None,
    ) -> Columns:
        lengths = list(map(len, payloads))
        size = sum(lengths)
        if keys is not None:
            size += _keys_size(keys)
        if attributes is not None:
            size += sum(map(attributes_size, attributes))
        return cls(payloads, keys, attributes, size, max(lengths, default=0))

    def select(self, rows: Sequence[int]) -> Columns:
        payloads, keys, attributes = self.payloads, self.keys, self.attributes
        return self._measured(
            [payloads[row] for row in rows],
            None if keys is None else [keys[row] for row in rows],
            None if attributes is None else [attributes[row] for row in rows],
        )

    def chunks(self, max_messages: int, max_bytes: int) -> list[Columns]:
        """Parts that fit into a batch each, or are single messages."""
        count = len(self.payloads)
        if not count:
            return []
        step = min(max_messages, count)
        if self.size + count * MESSAGE_OVERHEAD > max_bytes:
            # As many as fit if all are alike; where they are not, a part is cut again.
            step = max(1, min(step, max_bytes * count // (self.size + count * MESSAGE_OVERHEAD)))
        elif step == count:
            return [self]
        parts: list[Columns] = []
        for start in range(0, count, step):
            part = self._slice(start, min(start + step, count))
            fits = len(part.payloads) == 1 or part.size + step * MESSAGE_OVERHEAD <= max_bytes
            parts.extend((part,) if fits else part.chunks(max(1, step // 2), max_bytes))
        return parts

    def _slice(self, start: int, end: int) -> Columns:
        keys, attributes = self.keys, self.attributes
        return self._measured(
            self.payloads[start:end],
            None if keys is None else keys[start:end],
            None if attributes is None else attributes[start:end],
        )


def payload_of(payload: Any) -> bytes:
    if not isinstance(payload, bytes | bytearray | memoryview):
        raise Refused(f"a payload is bytes, not {type(payload).__name__}")
    return bytes(payload)


def key_size(key: str) -> int:
    if not isinstance(key, str):
        raise Refused(f"a key is text, not {type(key).__name__}")
    return len(key) if key.isascii() else _encoded_size(key)


def _keys_size(keys: Sequence[str | None]) -> int:
    try:
        return _encoded_size("".join(key for key in keys if key is not None))
    except TypeError as error:
        raise Refused(f"keys: {error}") from None


def attributes_size(attributes: Mapping[str, str]) -> int:
    try:
        return _encoded_size("".join(attributes)) + _encoded_size("".join(attributes.values()))
    except (TypeError, AttributeError) as error:
        raise Refused(f"attributes: {error}") from None


def _encoded_size(text: str) -> int:
    try:
        return len(text.encode())
    except UnicodeEncodeError as error:
        raise Refused(f"text that is not Unicode: {error}") from None


# -- back-pressure -----------------------------------------------------------


class _Waiter(NamedTuple):
    messages: int
    size: int
    admitted: asyncio.Future[None]


class PendingLimit:
    """A limit on what a producer holds without a receipt. A caller that wants to send more waits, first come
    first served; room that becomes free is taken on behalf of those who wait, many at once."""

    def __init__(self, max_messages: int) -> None:
        self._max_messages = max_messages
        self._messages = 0
        self._size = 0
        self._waiters: deque[_Waiter] = deque()

    @property
    def messages(self) -> int:
        """Taken now."""
        return self._messages

    def take(self, messages: int, size: int) -> bool:
        """Take room if there is some. What is alone may be of any size: it would never fit otherwise."""
        total, total_size = self._messages + messages, self._size + size
        if self._waiters or (
            self._messages and (total > self._max_messages or total_size > MAX_PENDING_BYTES)
        ):
            return False
        self._messages, self._size = total, total_size
        return True

    async def wait(self, messages: int, size: int, timeout: float) -> None:
        """Take room when there is some. Raises Timeout."""
        waiter = _Waiter(messages, size, asyncio.get_running_loop().create_future())
        self._waiters.append(waiter)
        try:
            async with asyncio.timeout(timeout):
                await waiter.admitted
        except BaseException as error:
            self._withdraw(waiter)
            if isinstance(error, TimeoutError):
                raise Timeout(
                    f"no room within {timeout} s: {self._messages} messages wait for their receipts"
                ) from None
            raise

    def give_back(self, messages: int, size: int) -> None:
        self._messages -= messages
        self._size -= size
        self._admit()

    def fail(self, error: ClientError) -> None:
        """All who wait get this error; no room comes any more."""
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.admitted.done():
                waiter.admitted.set_exception(error.again())

    def _fits(self, messages: int, size: int) -> bool:
        return not self._messages or (
            self._messages + messages <= self._max_messages and self._size + size <= MAX_PENDING_BYTES
        )

    def _admit(self) -> None:
        while self._waiters and self._fits(self._waiters[0].messages, self._waiters[0].size):
            waiter = self._waiters.popleft()
            if not waiter.admitted.done():  # cancelled a moment ago, and not withdrawn yet
                self._messages += waiter.messages
                self._size += waiter.size
                waiter.admitted.set_result(None)

    def _withdraw(self, waiter: _Waiter) -> None:
        if waiter in self._waiters:
            self._waiters.remove(waiter)
            self._admit()  # it may have stood before a smaller one
        elif not waiter.admitted.cancelled() and waiter.admitted.exception() is None:
            self.give_back(waiter.messages, waiter.size)


# -- batches -----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Stamp:
    """What all batches of a producer have in common."""

    producer: str
    codec: Compression = Compression.NONE
    schema_id: int | None = None
    schema_version: int | None = None


class ProducerBatch:
    """Messages on their way into a topic, gathered as columns until they are one batch.

    The columns are kept until the batch has its receipt: its sequence stands under its checksum, so giving it
    another one means to encode it again. Columns that no message uses do not exist.
    """

    __slots__ = (
        "attributes",
        "base_sequence",
        "data",
        "deadline",
        "is_plain",
        "is_settled",
        "keys",
        "payloads",
        "publish_time",
        "ready_at",
        "rows",
        "size",
        "times",
        "waiters",
        "was_sent",
        "watchers",
    )

    def __init__(self, *, ready_at: float, deadline: float) -> None:
        self.ready_at = ready_at
        self.deadline = deadline
        self.is_plain = True
        """No message has anything but its payload."""
        self.payloads: list[bytes] = []
        self.keys: list[str | None] | None = None
        self.attributes: list[Mapping[str, str]] | None = None
        self.times: list[int | None] | None = None
        self.size = 0
        self.waiters: list[asyncio.Future[int]] = []
        self.rows: list[int] | None = None
        """Of each waiter, the row whose offset it waits for. None: every row has its own."""
        self.watchers: list[asyncio.Future[None]] = []
        """They wait for the outcome, success or failure."""
        self.publish_time = 0
        self.base_sequence = -1
        self.data: bytes | memoryview | None = None
        self.was_sent = False
        self.is_settled = False
        """No caller waits any longer: it has its receipt, or its time is up."""

    def __len__(self) -> int:
        return len(self.payloads)

    @property
    def next_sequence(self) -> int:
        return self.base_sequence + len(self)

    # -- gathering -----------------------------------------------------------------

    def add(
        self,
        payload: bytes,
        key: str | None,
        attributes: Mapping[str, str] | None,
        publish_time: int | None,
        size: int,
        waiter: asyncio.Future[int],
    ) -> None:
        if not self.is_plain or key is not None or attributes or publish_time is not None:
            self._add_rest(key, attributes, publish_time)
        if self.rows is not None:
            self.rows.append(len(self.payloads))
        self.payloads.append(payload)
        self.waiters.append(waiter)
        self.size += size

    def _add_rest(
        self, key: str | None, attributes: Mapping[str, str] | None, publish_time: int | None
    ) -> None:
        self.is_plain = False
        row = len(self.payloads)
        if key is not None or self.keys is not None:
            self.keys = [None] * row if self.keys is None else self.keys
            self.keys.append(key)
        if attributes or self.attributes is not None:
            self.attributes = [{}] * row if self.attributes is None else self.attributes
            self.attributes.append(attributes or {})
        if publish_time is not None or self.times is not None:
            self.times = [None] * row if self.times is None else self.times
            self.times.append(publish_time)

    def extend(
        self,
        payloads: Sequence[bytes],
        keys: Sequence[str | None] | None,
        attributes: Sequence[Mapping[str, str]] | None,
        publish_time: int | None,
        size: int,
        waiter: asyncio.Future[int],
    ) -> None:
        row, count = len(self.payloads), len(payloads)
        self.is_plain = False
        if self.rows is None:
            self.rows = list(range(row))
        if keys is not None or self.keys is not None:
            self.keys = [None] * row if self.keys is None else self.keys
            self.keys.extend(keys if keys is not None else [None] * count)
        if attributes is not None or self.attributes is not None:
            self.attributes = [{}] * row if self.attributes is None else self.attributes
            self.attributes.extend(attributes if attributes is not None else [{}] * count)
        if publish_time is not None or self.times is not None:
            self.times = [None] * row if self.times is None else self.times
            self.times.extend([publish_time] * count)
        self.payloads.extend(payloads)
        self.waiters.append(waiter)
        self.rows.append(row)
        self.size += size

    # -- sending -----------------------------------------------------------------

    def number(self, base_sequence: int) -> None:
        if base_sequence != self.base_sequence:
            self.base_sequence = base_sequence
            self.data = None

    def encode(self, stamp: Stamp, producer_id: int) -> bytes | memoryview:
        """The batch's bytes, made once for a sequence. Raises InvalidMessage, BatchTooLarge."""
        if self.data is None:
            # Taken once: a batch that is sent again is the same batch.
            self.publish_time = now = self.publish_time or time.time_ns() // 1000
            self.data = RecordBatch.encode(
                self.payloads,
                publish_time=now if self.times is None else [now if t is None else t for t in self.times],
                keys=self.keys,
                attributes=self.attributes,
                schema_id=stamp.schema_id,
                schema_version=stamp.schema_version,
                producer=stamp.producer,
                producer_id=producer_id,
                base_sequence=self.base_sequence,
                codec=stamp.codec,
            ).data
        return self.data

    # -- settling -----------------------------------------------------------------

    def succeed(self, base_offset: int) -> None:
        """A negative offset is one that is not known."""
        rows = range(len(self.waiters)) if self.rows is None else self.rows
        for waiter, row in zip(self.waiters, rows, strict=True):
            if not waiter.done():
                waiter.set_result(base_offset + row if base_offset >= 0 else base_offset)
        self._settled()

    def fail(self, error: ClientError) -> None:
        for waiter in self.waiters:
            if not waiter.done():
                waiter.set_exception(error.again())
        self._settled()

    def _settled(self) -> None:
        self.is_settled = True
        self.waiters, self.rows = [], None
        for watcher in self.watchers:
            if not watcher.done():
                watcher.set_result(None)
        self.watchers = []


class EncodedBatch(ProducerBatch):
    """A batch that came encoded: it gets its producer and its sequence, and goes as it is."""

    __slots__ = ("_records",)

    def __init__(self, records: RecordBatch, *, deadline: float, waiter: asyncio.Future[int]) -> None:
        super().__init__(ready_at=0.0, deadline=deadline)
        self._records = records
        self.size = records.header.length
        self.waiters, self.rows = [waiter], [0]

    def __len__(self) -> int:
        return len(self._records)

    def encode(self, stamp: Stamp, producer_id: int) -> bytes | memoryview:
        if self.data is None:
            self.data = self._records.stamped(producer_id=producer_id, base_sequence=self.base_sequence).data
        return self.data


# -- the window --------------------------------------------------------------


class SendWindow:
    """The batches of a producer that were sent and have no receipt yet, and what becomes of them when a
    stream ends and the next one opens.

    The broker says on opening which sequence it expects next. That number cuts the window in two:

        window          20..29 | 30..39 | 40..49        the broker expects 40
                        known    known    not known

    What is known is sent again all the same, because its receipt, with the offset, never came; the broker
    recognises it. What is not known is sent as if for the first time. If the last stream ended because the
    broker refused a batch, it is the one at the cut: the broker takes batches in order, so it took everything
    before it and nothing behind it. It leaves the window, and those behind it get new numbers, since
    sequences must follow one another.

    A number that is no boundary of the window means that the broker has forgotten this producer, or has heard
    another of the same name. It can no longer be known whether the sent batches are in the topic, and sending
    them again could double them: they fail with OutcomeUnknown.

    Pure: no I/O, no clock. Owned by the stream of one partition.
    """

    def __init__(
        self,
        *,
        succeed: Callable[[ProducerBatch, int], None],
        fail: Callable[[ProducerBatch, ClientError], None],
    ) -> None:
        self.batches: deque[ProducerBatch] = deque()
        self.producer_id = 0
        self.next_sequence = 0
        self._expected = 0
        """What the broker said when the stream opened."""
        self._succeed = succeed
        self._fail = fail

    def __len__(self) -> int:
        return len(self.batches)

    @property
    def is_full(self) -> bool:
        return len(self.batches) >= MAX_IN_FLIGHT

    def is_known(self, batch: ProducerBatch) -> bool:
        """Whether the broker had the batch when the stream opened."""
        return batch.next_sequence <= self._expected

    def push(self, batch: ProducerBatch) -> None:
        """The next batch; it has a sequence now."""
        batch.number(self.next_sequence)
        self.next_sequence = batch.next_sequence
        self.batches.append(batch)

    def drop_last(self) -> None:
        """Take back a batch that was pushed and not sent."""
        self.next_sequence = self.batches.pop().base_sequence

    def receipt(self, base_sequence: int, base_offset: int) -> None:
        """A batch is durable. Those before it are too: batches are durable in order."""
        while self.batches and self.batches[0].base_sequence <= base_sequence:
            batch = self.batches.popleft()
            self._succeed(batch, base_offset if batch.base_sequence == base_sequence else UNKNOWN_OFFSET)

    def refuse_all(self) -> None:
        """The stream ended because the topic has gone elsewhere. Batches are answered in their order, so what
        has no receipt was not taken, and can go to the next broker even where no sequences tell them
        apart."""
        for batch in self.batches:
            batch.was_sent = False

    def resume(
        self, *, producer_id: int, expected: int, reliable: bool, ended_with: ClientError | None
    ) -> None:
        """A stream is open again. ``ended_with`` is what the last one ended with, if that was about a
        batch."""
        sent = [batch for batch in self.batches if batch.was_sent]
        unsent = [batch for batch in self.batches if not batch.was_sent]
        known: list[ProducerBatch] = []
        if sent and (not reliable or producer_id != self.producer_id or not _is_boundary(expected, sent)):
            self._give_up(sent, ended_with if not reliable else None)
        else:
            known = [batch for batch in sent if batch.next_sequence <= expected]
            unsent = [batch for batch in sent if batch.next_sequence > expected] + unsent
            if isinstance(ended_with, DuplicateForgotten):
                known = self._settle_forgotten(known)
            elif ended_with is not None and unsent and unsent[0].was_sent:
                self._fail(unsent.pop(0), ended_with)
        # A batch whose time is up stays in the window only to find out whether its sequence is taken.
        known = [batch for batch in known if not batch.is_settled]
        unsent = [batch for batch in unsent if not batch.is_settled]
        for batch in unsent:
            batch.was_sent = False
            if producer_id != self.producer_id:
                batch.data = None
        self.producer_id, self.next_sequence, self._expected = producer_id, expected, expected
        self.batches = deque(known)
        for batch in unsent:
            self.push(batch)

    def _give_up(self, sent: list[ProducerBatch], refusal: ClientError | None) -> None:
        for index, batch in enumerate(sent):
            # Without sequences to compare, answers in order tell that the first one was refused.
            self._fail(batch, refusal if refusal is not None and index == 0 else _LOST_TRACK)

    def _settle_forgotten(self, known: list[ProducerBatch]) -> list[ProducerBatch]:
        """The last batch is what a broker remembers longest, so only the others lose their offsets by one
        such answer."""
        forgotten, kept = (known[:-1], known[-1:]) if len(known) > 1 else (known, [])
        for batch in forgotten:
            self._succeed(batch, UNKNOWN_OFFSET)
        return kept


def _is_boundary(sequence: int, batches: list[ProducerBatch]) -> bool:
    return sequence == batches[0].base_sequence or any(sequence == batch.next_sequence for batch in batches)
