"""Protocol Buffers on the wire, as much as the benchmark needs of etcd's API: varints and length-delimited
fields.

Hand-made so that neither etcd's .proto files nor their generated code are needed, and so that encoding a
request costs the client nothing that would be held against etcd."""

from __future__ import annotations

import struct

Field = tuple[int, int | bytes | str]


def varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def message(*fields: Field) -> bytes:
    """``message((1, b"key"), (7, 1))``: numbers as varints, bytes, text and nested messages as
    length-delimited."""
    out = bytearray()
    for number, value in fields:
        if isinstance(value, int):
            out += varint(number << 3) + varint(value)
        else:
            data = value.encode() if isinstance(value, str) else value
            out += varint(number << 3 | 2) + varint(len(data)) + data
    return bytes(out)


def fields(data: bytes) -> dict[int, list[int | bytes]]:
    """All fields of a message, by number, in the order they came in."""
    found: dict[int, list[int | bytes]] = {}
    at = 0

    def read_varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = data[at]
            at += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
            shift += 7

    while at < len(data):
        tag = read_varint()
        if tag & 7 == 0:
            value: int | bytes = read_varint()
        elif tag & 7 == 2:
            length = read_varint()
            value, at = data[at : at + length], at + length
        else:
            raise ValueError(f"wire type {tag & 7} is not used by the messages read here")
        found.setdefault(tag >> 3, []).append(value)
    return found


def number(data: bytes, field: int) -> int:
    """A varint field; absent means 0, as everywhere in proto3."""
    value = fields(data).get(field, [0])[-1]
    if not isinstance(value, int):
        raise ValueError(f"field {field} is not a number")
    return value


def nested(data: bytes, field: int) -> bytes:
    """A length-delimited field; absent means empty."""
    value = fields(data).get(field, [b""])[-1]
    if not isinstance(value, bytes):
        raise ValueError(f"field {field} is not a message")
    return value


def grpc_frame(data: bytes) -> bytes:
    """gRPC's length prefix, not compressed: what the body of the HTTP/2 request holds."""
    return struct.pack(">BI", 0, len(data)) + data
