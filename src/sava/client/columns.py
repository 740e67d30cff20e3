"""Columns: messages as an application hands them over, checked and measured.

Whatever could make a broker or the format refuse a batch is found here as far as it can be known: a batch
holds the messages of many callers, and one of them must not fail the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from sava.client.codec import Codec
from sava.client.errors import Refused
from sava.client.pending import MESSAGE_OVERHEAD


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
