"""Protobuf: definitions compiled in a child process, private descriptors, and compatibility on the wire.

A definition is ``.proto`` source text, or a serialized ``FileDescriptorSet`` (``protoc
--descriptor_set_out --include_imports``). Source is compiled by ``protoc`` in a child process: a compiler
written in C++ that reads what clients send belongs where it can crash or hang without taking the broker
along. The child has a deadline, a directory of its own with nothing else in it, and sees only Google's
well-known types.

What comes out is one canonical ``FileDescriptorSet``: without source positions, without the well-known
types (every reader has its own), and with the main file last under a fixed name. It is stored next to the
definition, so that only the broker that registers a schema compiles it. A file may define many messages;
the payload of a topic is the first one of the main file.

``find_problems`` compares two schemas on the wire, where fields are numbers: names do not matter, numbers
and types do. Every reader skips unknown fields, so adding and removing fields is free. What is reported:

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

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Final

from google.protobuf import (
    any_pb2,
    api_pb2,
    descriptor_pb2,
    descriptor_pool,
    duration_pb2,
    empty_pb2,
    field_mask_pb2,
    message_factory,
    source_context_pb2,
    struct_pb2,
    timestamp_pb2,
    type_pb2,
    unknown_fields,
    wrappers_pb2,
)
from google.protobuf.descriptor import (
    Descriptor,
    EnumDescriptor,
    FieldDescriptor,
    FileDescriptor,
    OneofDescriptor,
)
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import DecodeError, Message

from sava.schemas.bounds import Fixpoint
from sava.schemas.errors import (
    CompilerBusy,
    CompilerMissing,
    PayloadInvalid,
    SchemaInvalid,
    SchemaTooLarge,
    shortened,
)
from sava.schemas.types import MAX_DEFINITION_BYTES

WELL_KNOWN: Final = {
    module.DESCRIPTOR.name: module.DESCRIPTOR
    for module in (
        any_pb2,
        api_pb2,
        descriptor_pb2,
        duration_pb2,
        empty_pb2,
        field_mask_pb2,
        source_context_pb2,
        struct_pb2,
        timestamp_pb2,
        type_pb2,
        wrappers_pb2,
    )
}
MAIN_FILE: Final = "schema.proto"
DEADLINE_S: Final = 20.0
"""A definition of the largest size takes well under a second; the rest is for a machine that is busy."""
_LENGTH_DELIMITED_FIELD_1: Final = 0x0A


@lru_cache(maxsize=64)
def compile_definition(definition: bytes) -> bytes:
    """The canonical ``FileDescriptorSet``; raises SchemaInvalid, SchemaTooLarge, CompilerBusy,
    CompilerMissing. Blocks: not for the event loop."""
    files = _as_descriptor_set(definition)
    if files is None:
        files = descriptor_pb2.FileDescriptorSet.FromString(_run_protoc(definition))
    compiled = _canonical(files).SerializeToString(deterministic=True)
    if len(compiled) > MAX_DEFINITION_BYTES:
        raise SchemaTooLarge(
            f"the compiled schema has {len(compiled)} bytes; the limit is {MAX_DEFINITION_BYTES}"
        )
    return compiled


def load(compiled: bytes) -> descriptor_pool.DescriptorPool:
    """A pool with these files only; raises SchemaInvalid. Private, because two versions of one message have
    the same name."""
    pool = descriptor_pool.DescriptorPool()
    added: set[str] = set()
    try:
        for file in descriptor_pb2.FileDescriptorSet.FromString(compiled).file:
            for imported in file.dependency:
                _add_well_known(pool, imported, added)
            pool.Add(file)
    except (TypeError, DecodeError) as error:
        raise SchemaInvalid(shortened(f"the descriptors do not fit together: {error}")) from None
    return pool


def _add_well_known(pool: descriptor_pool.DescriptorPool, name: str, added: set[str]) -> None:
    """Adds a well-known file after the files that it imports."""
    known = WELL_KNOWN.get(name)
    if known is None or name in added:
        return
    added.add(name)
    for imported in known.dependencies:
        _add_well_known(pool, imported.name, added)
    file = descriptor_pb2.FileDescriptorProto()
    known.CopyToProto(file)
    pool.Add(file)


def _as_descriptor_set(definition: bytes) -> descriptor_pb2.FileDescriptorSet | None:
    """The definition as a descriptor set; None when it is something else. Source text can begin with the same
    byte (a line feed), but its next bytes are not the length of a file that has a name."""
    if not definition or definition[0] != _LENGTH_DELIMITED_FIELD_1:
        return None
    files = descriptor_pb2.FileDescriptorSet()
    try:
        files.ParseFromString(definition)
    except DecodeError:
        return None
    return files if files.file and all(file.name for file in files.file) else None


def _canonical(files: descriptor_pb2.FileDescriptorSet) -> descriptor_pb2.FileDescriptorSet:
    own = [file for file in files.file if file.name not in WELL_KNOWN]
    if not own:
        raise SchemaInvalid("there is no file in it but well-known ones")
    known = {file.name for file in own} | WELL_KNOWN.keys()
    if MAIN_FILE in known and own[-1].name != MAIN_FILE:
        raise SchemaInvalid(f"a file that others import is named {MAIN_FILE}, which is the main file's name")
    for file in own:
        file.ClearField("source_code_info")
        for imported in file.dependency:
            if imported not in known:
                raise SchemaInvalid(f"import of {shortened(imported)!r}, which is not there")
    own[-1].name = MAIN_FILE
    return descriptor_pb2.FileDescriptorSet(file=own)


def _run_protoc(source: bytes) -> bytes:
    try:
        source.decode()
    except UnicodeDecodeError:
        raise SchemaInvalid("neither .proto source in UTF-8 nor a FileDescriptorSet") from None
    with tempfile.TemporaryDirectory(prefix="sava-protoc-") as place:
        folder = Path(place)
        (folder / MAIN_FILE).write_bytes(source)
        output = folder / "descriptors"
        command = [sys.executable, "-I", "-m", "grpc_tools.protoc", "--proto_path=.", "--include_imports"]
        try:
            done = subprocess.run(
                [*command, f"--descriptor_set_out={output}", MAIN_FILE],
                cwd=folder,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=DEADLINE_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise CompilerBusy(f"protoc did not finish within {DEADLINE_S} s") from None
        except OSError as error:
            raise CompilerMissing(f"protoc cannot be run: {error}") from error
        if done.returncode or not output.exists():
            raise _refusal(done.stderr.decode(errors="replace").strip())
        return output.read_bytes()


def _refusal(complaints: str) -> SchemaInvalid | CompilerMissing:
    """The error in the words of the compiler, without its warnings and the name of our file."""
    place = f"{MAIN_FILE}:"
    found = [line.removeprefix(place) for line in complaints.splitlines() if line.startswith(place)]
    if not found and "No module named" in complaints:
        return CompilerMissing("the package grpcio-tools is not installed")
    return SchemaInvalid(shortened("; ".join(f"line {line}" for line in found) or complaints or "refused"))


CACHED_SCHEMAS: Final = 64


class Descriptors:
    """The messages of a compiled schema. Raises SchemaInvalid when the main file has no message."""

    def __init__(self, compiled: bytes) -> None:
        self.pool: DescriptorPool = load(compiled)
        self.file: FileDescriptor = self.pool.FindFileByName(MAIN_FILE)
        self.payload: Descriptor = _first_message(self.file)
        self.message_class: type[Message] = message_factory.GetMessageClass(self.payload)
        self._numbers = frozenset(self.payload.fields_by_number)

    def parse(self, payload: bytes) -> Message:
        """Raises PayloadInvalid. Nesting is bounded by the parser."""
        message = self.message_class()
        try:
            message.ParseFromString(payload)
        except DecodeError as error:
            raise PayloadInvalid(f"not a {self.payload.full_name}: {error}") from None
        if not message.IsInitialized():
            raise PayloadInvalid(f"a required field of {self.payload.full_name} is missing")
        unknown = unknown_fields.UnknownFieldSet(message)
        for index in range(len(unknown)):
            if (number := unknown[index].field_number) in self._numbers:
                raise PayloadInvalid(
                    f"field {number} of {self.payload.full_name} holds a value of another type"
                )
        return message


@lru_cache(maxsize=CACHED_SCHEMAS)
def descriptors_of(compiled: bytes) -> Descriptors:
    return Descriptors(compiled)


def _first_message(file: FileDescriptor) -> Descriptor:
    """The first message in the order of the source, which the dictionary of descriptors keeps."""
    first = next(iter(file.message_types_by_name.values()), None)
    if first is None:
        raise SchemaInvalid("the file defines no message")
    return first


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
    """A comparison of pairs (old, new); the reader is on the same side in all of them."""

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
    """The fields by number, with the extensions that the schema itself declares."""
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
