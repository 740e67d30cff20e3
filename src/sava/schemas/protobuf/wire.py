"""Compatibility of two Protobuf schemas on the wire, where fields are numbers.

Names do not matter to the wire, numbers and types do. Unknown fields are skipped by every reader, so adding
and removing fields is free. What is reported:

* a number whose type changes to one that is read differently, or whose cardinality changes;
* a field (or enum value) that keeps its name and changes its number: readers would look in the wrong place;
* a number that the older schema has reserved;
* a required field (proto2) of the reader that the writer does not always write;
* fields that may be set together by the writer and exclude each other (``oneof``) for the reader;
* enum values that a reader of a closed enum (proto2) would drop, and values removed from any enum while old
  data is to be read;
* messages that are gone while old data is to be read, and another payload message.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from google.protobuf import descriptor_pb2
from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor, OneofDescriptor

from sava.schemas.fixpoint import Fixpoint
from sava.schemas.protobuf.descriptors import Descriptors

_FD = FieldDescriptor
_VARINT: Final = frozenset((_FD.TYPE_INT32, _FD.TYPE_INT64, _FD.TYPE_UINT32, _FD.TYPE_UINT64, _FD.TYPE_BOOL))
_INTERCHANGEABLE: Final = (
    _VARINT,
    frozenset((_FD.TYPE_SINT32, _FD.TYPE_SINT64)),
    frozenset((_FD.TYPE_FIXED32, _FD.TYPE_SFIXED32)),
    frozenset((_FD.TYPE_FIXED64, _FD.TYPE_SFIXED64)),
)
"""What Protobuf's documentation calls compatible. A value that does not fit the narrower type is cut off, as
in every other checker of wire compatibility."""
_ONE_WAY: Final = frozenset(
    (
        (_FD.TYPE_BYTES, _FD.TYPE_STRING),
        (_FD.TYPE_BYTES, _FD.TYPE_MESSAGE),
        *((number, _FD.TYPE_ENUM) for number in _VARINT - {_FD.TYPE_BOOL}),
    )
)
"""(reader, writer): all strings are bytes, but not all bytes are a string."""
_TYPE_NAMES: Final = {
    value.number: value.name.removeprefix("TYPE_").lower()
    for value in descriptor_pb2.FieldDescriptorProto.Type.DESCRIPTOR.values
}


def find_problems(old: Descriptors, new: Descriptors, *, new_reads_old: bool) -> list[str]:
    """``new_reads_old``: backward (the new schema reads old data), else forward."""
    if old.payload.full_name != new.payload.full_name:
        return [
            f"the payload message (the first of the file) was {old.payload.full_name} and is now "
            f"{new.payload.full_name}"
        ]
    comparison = _Comparison(new_reads_old)
    problems = comparison.fixpoint.solve(lambda: comparison.compare(old.payload, new.payload))
    if new_reads_old:
        gone = _message_names(old) - _message_names(new)
        problems += [f"message {name} is gone" for name in sorted(gone)]
    return problems


class _Comparison:
    """Of pairs (old, new); who reads is the same for all of them."""

    def __init__(self, new_reads_old: bool) -> None:
        self.fixpoint = Fixpoint()
        self._new_reads = new_reads_old

    def compare(self, old: Descriptor, new: Descriptor) -> list[str]:
        if old.full_name == new.full_name and old.full_name.startswith("google.protobuf."):
            return []
        return self.fixpoint.pair((old.full_name, new.full_name), lambda: self._compare(old, new))

    def _compare(self, old: Descriptor, new: Descriptor) -> list[str]:
        before, after = _fields(old), _fields(new)
        where = new.full_name
        problems = _reused_reservations(old, after, where) + _renumbered(before, after, where)
        for number in sorted(before.keys() & after.keys()):
            problems += self._compare_field(before[number], after[number], f"{where}.{after[number].name}")
        reader, writer = (after, before) if self._new_reads else (before, after)
        return problems + _missing_required(reader, writer, where) + _excluded(reader, writer, where)

    def _compare_field(self, old: FieldDescriptor, new: FieldDescriptor, where: str) -> list[str]:
        if _cardinality(old) != _cardinality(new):
            return [f"{where}: field {new.number} was {_cardinality(old)} and is now {_cardinality(new)}"]
        reader, writer = (new, old) if self._new_reads else (old, new)
        if old.type == new.type:
            if old.message_type is not None and new.message_type is not None:
                return self.compare(old.message_type, new.message_type)
            if old.enum_type is not None and new.enum_type is not None:
                return self._compare_enums(old.enum_type, new.enum_type, where)
            return []
        if (reader.type, writer.type) in _ONE_WAY or any(
            {old.type, new.type} <= group for group in _INTERCHANGEABLE
        ):
            return []
        was, now = _TYPE_NAMES[old.type], _TYPE_NAMES[new.type]
        return [f"{where}: field {new.number} was of type {was} and is now {now}, which is read differently"]

    def _compare_enums(self, old: EnumDescriptor, new: EnumDescriptor, where: str) -> list[str]:
        before, after = _values(old), _values(new)
        problems = [
            f"{where}: enum value {name} was {before[name]} and is now {after[name]}"
            for name in sorted(before.keys() & after.keys())
            if before[name] != after[name]
        ]
        reader, writer = (new, old) if self._new_reads else (old, new)
        unknown = set(_values(writer).values()) - set(_values(reader).values())
        if unknown and (self._new_reads or reader.is_closed):
            numbers = ", ".join(map(str, sorted(unknown)[:10]))
            problems.append(
                f"{where}: the reader's enum {reader.full_name} does not know the value {numbers}"
            )
        return problems


def _fields(message: Descriptor) -> dict[int, FieldDescriptor]:
    """By number, with the extensions that the schema itself declares."""
    extensions = message.file.pool.FindAllExtensions(message)
    return {field.number: field for field in (*message.fields, *extensions)}


def _cardinality(field: FieldDescriptor) -> str:
    """Optional, required and implicit presence look the same on the wire."""
    if not field.is_repeated:
        return "singular"
    entry = field.message_type
    return "a map" if entry is not None and entry.GetOptions().map_entry else "repeated"


def _reused_reservations(old: Descriptor, after: dict[int, FieldDescriptor], where: str) -> list[str]:
    proto = descriptor_pb2.DescriptorProto()
    old.CopyToProto(proto)
    return [
        f"{where}.{field.name}: number {number} was reserved"
        for number, field in sorted(after.items())
        if any(reserved.start <= number < reserved.end for reserved in proto.reserved_range)
    ]


def _renumbered(
    before: dict[int, FieldDescriptor], after: dict[int, FieldDescriptor], where: str
) -> list[str]:
    numbers = {field.name: number for number, field in before.items()}
    return [
        f"{where}.{field.name}: the field had number {numbers[field.name]} and has now {number}"
        for number, field in sorted(after.items())
        if numbers.get(field.name, number) != number
    ]


def _missing_required(
    reader: dict[int, FieldDescriptor], writer: dict[int, FieldDescriptor], where: str
) -> list[str]:
    return [
        f"{where}.{field.name}: required by the reader, and not always written"
        for number, field in sorted(reader.items())
        if field.is_required and not (number in writer and writer[number].is_required)
    ]


def _excluded(
    reader: dict[int, FieldDescriptor], writer: dict[int, FieldDescriptor], where: str
) -> list[str]:
    """Members of one of the reader's oneofs that the writer may set together: all but one would be lost."""
    members: dict[str, list[int]] = {}
    for number, field in sorted(reader.items()):
        if (group := _real_oneof(field)) is not None and number in writer:
            members.setdefault(group.name, []).append(number)
    problems = []
    for name, numbers in members.items():
        groups = [_real_oneof(writer[number]) for number in numbers]
        names = {group.name for group in groups if group is not None}
        if len(numbers) > 1 and (None in groups or len(names) > 1):
            listed = ", ".join(map(str, numbers))
            problems.append(f"{where}: fields {listed} exclude each other in oneof {name} of the reader only")
    return problems


def _real_oneof(field: FieldDescriptor) -> OneofDescriptor | None:
    """None also for the oneof that the compiler invents for ``optional`` in proto3."""
    group = field.containing_oneof
    if group is None:
        return None
    is_invented = len(group.fields) == 1 and group.name == f"_{field.name}"
    return None if is_invented else group


def _values(enum: EnumDescriptor) -> dict[str, int]:
    return {value.name: value.number for value in enum.values}


def _message_names(descriptors: Descriptors) -> set[str]:
    return {
        message.full_name
        for top in descriptors.file.message_types_by_name.values()
        for message in _with_nested(top)
    }


def _with_nested(message: Descriptor) -> Iterator[Descriptor]:
    if not message.GetOptions().map_entry:
        yield message
        for nested in message.nested_types:
            yield from _with_nested(nested)
