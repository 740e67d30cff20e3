"""Deliveries on the wire: encoded once, however many subscriptions of a topic get them.

A batch goes to each subscription as it is stored. Protobuf would copy it into a message and again out of it,
for every consumer; here the few bytes around it are written by hand, and the result of one delivery serves
those of the others that follow within a moment, since all who keep up read the same batch.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Final

from sava.proto import streams_pb2 as pb
from sava.records import RecordBatch
from sava.topics.consumer import Delivery

MAX_HELD_BYTES: Final = 8 << 20
MAX_RESPONSE_BYTES: Final = 1 << 20
_OBJECT_BYTES: Final = 256
"""What an entry costs besides its bytes. Without it, single small messages take three times the bound."""

_DELIVERED: Final = bytes(((pb.SubscribeResponse.DELIVERED_FIELD_NUMBER << 3) | 2,))
_BATCH: Final = bytes(((pb.Delivered.BATCH_FIELD_NUMBER << 3) | 2,))

_Key = tuple[int, int, int, int, int]


class Deliveries:
    """Those that were encoded last. Owned by the event loop."""

    def __init__(self, max_held_bytes: int = MAX_HELD_BYTES) -> None:
        self._max_held_bytes = max_held_bytes
        self._held: OrderedDict[_Key, bytes] = OrderedDict()
        self._held_bytes = 0

    def responses(self, deliveries: Sequence[Delivery]) -> Iterator[bytes]:
        """Serialized ``SubscribeResponse`` messages that carry these deliveries, together as far as they are
        small: a message costs gRPC as much as a hundred kilobytes. Messages that are written one behind the
        other are, by Protobuf's rules, one message with what all of them hold."""
        parts: list[bytes] = []
        size = 0
        for delivery in deliveries:
            part = self.encode(delivery)
            if parts and size + len(part) > MAX_RESPONSE_BYTES:
                yield b"".join(parts)
                parts, size = [], 0
            parts.append(part)
            size += len(part)
        yield parts[0] if len(parts) == 1 else b"".join(parts)

    def encode(self, delivery: Delivery) -> bytes:
        """A serialized ``SubscribeResponse`` with one delivery."""
        batch = delivery.batch
        if len(delivery.ranges) > 1 or delivery.ranges[0][0] != batch.base_offset:
            ranges = [offset for pair in delivery.ranges for offset in pair]
            return _encode(batch, pb.Delivered(ranges=ranges, attempt=delivery.attempt))
        header = batch.header
        key = (header.topic_id, header.epoch, header.base_offset, header.count, delivery.attempt)
        encoded = self._held.get(key)
        if encoded is None:
            encoded = _encode(batch, pb.Delivered(attempt=delivery.attempt))
            self._hold(key, encoded)
        return encoded

    def _hold(self, key: _Key, encoded: bytes) -> None:
        self._held[key] = encoded
        self._held_bytes += len(encoded) + _OBJECT_BYTES
        while self._held_bytes > self._max_held_bytes:
            _, dropped = self._held.popitem(last=False)
            self._held_bytes -= len(dropped) + _OBJECT_BYTES


def _encode(batch: RecordBatch, rest: pb.Delivered) -> bytes:
    size = batch.header.length
    tail = rest.SerializeToString()
    field = _BATCH + _varint(size)
    return b"".join((_DELIVERED, _varint(len(field) + size + len(tail)), field, *batch.buffers, tail))


def _varint(value: int) -> bytes:
    parts = bytearray()
    while value > 0x7F:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    parts.append(value)
    return bytes(parts)
