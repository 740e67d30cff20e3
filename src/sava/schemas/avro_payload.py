"""A check that bytes are one value of an Avro schema, to the last byte.

A schema is compiled once into a function for each node: ``(data, position, depth) -> next position``. No
value is built. It is stricter than decoding (an int beyond 32 bits, a boolean of 7, a negative branch, a
block of a wrong size are refused) and it is what makes decoding safe: the decoder that the codec uses
recurses in C as deep as the data is nested, and ends the process when that is too deep.

Bounded by construction: every item of an array or map takes at least one byte (``avro.read`` refuses
others), and fields that take none are not looked at, so the work is in proportion to the payload;
``depth`` bounds recursion.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from sava.schemas.avro import Array, AvroRecord, Enum, Fixed, Map, Node, Primitive, Union, empty_weight

MAX_DEPTH: Final = 128
"""The most arrays, maps, unions and records within each other."""

Check = Callable[[bytes, int, int], int]


class Malformed(Exception):
    """The bytes are not a value of the schema; the text says why."""


def compile_check(root: Node) -> Callable[[bytes], None]:
    """A function that raises Malformed unless its argument is exactly one value."""
    check = _Compiler().compile(root)

    def check_payload(data: bytes) -> None:
        end = check(data, 0, 0)
        if end != len(data):
            raise Malformed(f"{len(data) - end} bytes after the value")

    return check_payload


class _Compiler:
    def __init__(self) -> None:
        self._records: dict[int, Check] = {}
        self._weights: dict[int, int] = {}

    def compile(self, node: Node) -> Check:
        match node:
            case Primitive(name):
                return _PRIMITIVES[name]
            case Fixed(size=size):
                return _fixed(size)
            case Enum(symbols=symbols):
                return _enum(len(symbols))
            case Array(items):
                return _blocks(self.compile(items))
            case Map(values):
                return _blocks(_after_key(self.compile(values)))
            case Union(branches):
                return _union([self.compile(branch) for branch in branches])
            case AvroRecord():
                return self._record(node)

    def _record(self, record: AvroRecord) -> Check:
        known = self._records.get(id(record))
        if known is not None:
            return known
        checks: list[Check] = []

        def check_record(data: bytes, position: int, depth: int) -> int:
            if depth > MAX_DEPTH:
                raise Malformed(f"nested more than {MAX_DEPTH} levels deep")
            depth += 1
            for check in checks:
                position = check(data, position, depth)
            return position

        self._records[id(record)] = check_record
        checks.extend(
            self.compile(each.type) for each in record.fields if not empty_weight(each.type, self._weights)
        )
        return check_record


def _read_long(data: bytes, position: int) -> tuple[int, int]:
    shift = value = 0
    try:
        while True:
            byte = data[position]
            position += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                break
            shift += 7
            if shift > 63:
                raise Malformed("a number of more than 64 bits")
    except IndexError:
        raise Malformed("the payload ends inside a number") from None
    if value >> 64:
        raise Malformed("a number of more than 64 bits")
    return (value >> 1) ^ -(value & 1), position


def _check_null(data: bytes, position: int, depth: int) -> int:
    return position


def _check_boolean(data: bytes, position: int, depth: int) -> int:
    if position >= len(data) or data[position] > 1:
        raise Malformed("a boolean is neither 0 nor 1")
    return position + 1


def _check_int(data: bytes, position: int, depth: int) -> int:
    value, position = _read_long(data, position)
    if not -(1 << 31) <= value < 1 << 31:
        raise Malformed(f"{value} is not an int of 32 bits")
    return position


def _check_long(data: bytes, position: int, depth: int) -> int:
    return _read_long(data, position)[1]


def _fixed(size: int) -> Check:
    def check_fixed(data: bytes, position: int, depth: int) -> int:
        end = position + size
        if end > len(data):
            raise Malformed("the payload ends inside a value")
        return end

    return check_fixed


def _check_bytes(data: bytes, position: int, depth: int) -> int:
    length, position = _read_long(data, position)
    end = position + length
    if length < 0 or end > len(data):
        raise Malformed(f"{length} bytes are announced, {len(data) - position} are there")
    return end


def _check_string(data: bytes, position: int, depth: int) -> int:
    length, start = _read_long(data, position)
    end = start + length
    if length < 0 or end > len(data):
        raise Malformed(f"a string of {length} bytes is announced, {len(data) - start} are there")
    try:
        data[start:end].decode()
    except UnicodeDecodeError:
        raise Malformed("a string is not UTF-8") from None
    return end


_PRIMITIVES: Final[dict[str, Check]] = {
    "null": _check_null,
    "boolean": _check_boolean,
    "int": _check_int,
    "long": _check_long,
    "float": _fixed(4),
    "double": _fixed(8),
    "bytes": _check_bytes,
    "string": _check_string,
}


def _enum(count: int) -> Check:
    def check_enum(data: bytes, position: int, depth: int) -> int:
        index, position = _read_long(data, position)
        if not 0 <= index < count:
            raise Malformed(f"symbol {index} of an enum of {count}")
        return position

    return check_enum


def _union(branches: list[Check]) -> Check:
    def check_union(data: bytes, position: int, depth: int) -> int:
        if depth > MAX_DEPTH:
            raise Malformed(f"nested more than {MAX_DEPTH} levels deep")
        index, position = _read_long(data, position)
        if not 0 <= index < len(branches):
            raise Malformed(f"branch {index} of a union of {len(branches)}")
        return branches[index](data, position, depth + 1)

    return check_union


def _after_key(check_value: Check) -> Check:
    def check_entry(data: bytes, position: int, depth: int) -> int:
        return check_value(data, _check_string(data, position, depth), depth)

    return check_entry


def _blocks(check_item: Check) -> Check:
    """Arrays and maps: blocks of a count and items, until a count of 0. A negative count is followed by the
    block's size in bytes."""

    def check_blocks(data: bytes, position: int, depth: int) -> int:
        if depth > MAX_DEPTH:
            raise Malformed(f"nested more than {MAX_DEPTH} levels deep")
        depth += 1
        while True:
            count, position = _read_long(data, position)
            if count == 0:
                return position
            end = None
            if count < 0:
                count = -count
                size, position = _read_long(data, position)
                end = position + size
            if count > len(data) - position:
                raise Malformed(f"{count} items are announced in {len(data) - position} bytes")
            for _ in range(count):
                position = check_item(data, position, depth)
            if end is not None and position != end:
                raise Malformed("a block is not as long as it says")

    return check_blocks
