"""Protobuf: definitions that compile, and changes that are seen on the wire."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from google.protobuf import descriptor_pb2

from sava.schemas import protobuf as compiler
from sava.schemas.definition import ProtobufSchema, Validator, compare, fingerprint, read_schema
from sava.schemas.errors import CompilerBusy, CompilerMissing, PayloadInvalid, SchemaInvalid
from sava.schemas.types import SchemaType

PROTO3 = 'syntax = "proto3"; package shop;'
ORDER = PROTO3 + "message Order { string id = 1; int32 amount = 2; }"


def read(source: str | bytes) -> ProtobufSchema:
    definition = source.encode() if isinstance(source, str) else source
    schema = read_schema(SchemaType.PROTOBUF, definition)
    assert isinstance(schema, ProtobufSchema)
    return schema


def order(body: str) -> str:
    return f"{PROTO3} message Order {{ {body} }}"


def proto2(body: str) -> str:
    return f'syntax = "proto2"; package shop; message Order {{ {body} }}'


def backward(old: str, new: str) -> list[str]:
    """The new schema reads what was written with the old one."""
    return compare(read(old), read(new), new_reads_old=True)


def forward(old: str, new: str) -> list[str]:
    return compare(read(old), read(new), new_reads_old=False)


# -- definitions ---------------------------------------------------------------------------------------------


def test_source_and_descriptors_of_the_same_schema_have_one_fingerprint() -> None:
    from_source = read(ORDER)
    files = descriptor_pb2.FileDescriptorSet.FromString(from_source.compiled)
    files.file[0].name = "my/orders.proto"
    files.file[0].source_code_info.location.add(path=[4], span=[1, 2, 3])
    from_set = read(files.SerializeToString())
    assert fingerprint(from_set) == fingerprint(from_source)
    spaced = read(f"// A comment\n\n{ORDER}\n")
    assert fingerprint(spaced) == fingerprint(from_source)
    assert fingerprint(read(order("string id = 1;"))) != fingerprint(from_source)


def test_the_payload_is_the_first_message() -> None:
    schema = read(PROTO3 + "enum E { Z = 0; } message Zebra { message Inner {} } message Apple {}")
    assert schema.descriptors.payload.full_name == "shop.Zebra"


def test_well_known_types_can_be_imported() -> None:
    schema = read(
        PROTO3
        + 'import "google/protobuf/timestamp.proto"; import "google/protobuf/any.proto";'
        + "message Order { google.protobuf.Timestamp at = 1; google.protobuf.Any more = 2; }"
    )
    payload = schema.descriptors.message_class(at={"seconds": 5}).SerializeToString()
    Validator(schema).validate(payload)
    assert len(descriptor_pb2.FileDescriptorSet.FromString(schema.compiled).file) == 1


def test_a_descriptor_set_may_hold_what_it_imports() -> None:
    base = descriptor_pb2.FileDescriptorProto(name="base.proto", syntax="proto3")
    base.message_type.add(name="Money").field.add(name="cents", number=1, type=3, label=1)
    main = descriptor_pb2.FileDescriptorProto(name="main.proto", syntax="proto3", dependency=["base.proto"])
    main.message_type.add(name="Order").field.add(
        name="price", number=1, type=11, label=1, type_name=".Money"
    )
    schema = read(descriptor_pb2.FileDescriptorSet(file=[base, main]).SerializeToString())
    assert schema.descriptors.payload.full_name == "Order"
    with pytest.raises(SchemaInvalid, match="which is not there"):
        read(descriptor_pb2.FileDescriptorSet(file=[main]).SerializeToString())
    with pytest.raises(SchemaInvalid, match="do not fit together"):
        read(descriptor_pb2.FileDescriptorSet(file=[main, base]).SerializeToString())


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (b"", "no message|protoc"),
        (b"\xff\xfe", "UTF-8"),
        (b"message {", "line 1:"),
        (PROTO3.encode(), "no message"),
        (PROTO3.encode() + b'import "other.proto"; message A {}', "other.proto"),
        (PROTO3.encode() + b'import "/etc/passwd"; message A {}', "passwd"),
        (PROTO3.encode() + b"message A { B b = 1; }", "not defined"),
        (PROTO3.encode() + b"message A { int32 a = 1; int32 b = 1; }", "already been used"),
        (b"\n\x05abcde", "UTF-8|protoc|line"),
    ],
)
def test_what_does_not_compile_is_refused_with_the_compilers_words(source: bytes, reason: str) -> None:
    with pytest.raises(SchemaInvalid, match=reason):
        read(source)


def test_the_compiler_has_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "DEADLINE_S", 0.001)
    with pytest.raises(CompilerBusy):
        read(order("string never_compiled_before = 77;"))


def test_a_missing_compiler_is_not_the_callers_fault(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    interpreter = tmp_path / "python"
    interpreter.write_text("#!/bin/sh\necho \"No module named 'grpc_tools'\" >&2\nexit 1\n")
    interpreter.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(interpreter))
    with pytest.raises(CompilerMissing, match="grpcio-tools"):
        read(order("string never_compiled_before = 78;"))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "nothing"))
    with pytest.raises(CompilerMissing, match="cannot be run"):
        read(order("string never_compiled_before = 79;"))


# -- compatibility -------------------------------------------------------------------------------------------

BOTH_WAYS = {
    "nothing": (order("string id = 1;"), order("string id = 1;")),
    "field added": (order("string id = 1;"), order("string id = 1; int32 n = 2;")),
    "field removed": (order("string id = 1; int32 n = 2;"), order("string id = 1;")),
    "field removed and reserved": (order("int32 n = 2;"), order("reserved 2;")),
    "field renamed": (order("string id = 1;"), order("string key = 1;")),
    "varints": (order("int32 n = 1;"), order("uint64 n = 1;")),
    "bool and int": (order("bool n = 1;"), order("int64 n = 1;")),
    "zig-zag": (order("sint32 n = 1;"), order("sint64 n = 1;")),
    "fixed 32": (order("fixed32 n = 1;"), order("sfixed32 n = 1;")),
    "fixed 64": (order("fixed64 n = 1;"), order("sfixed64 n = 1;")),
    "presence": (order("int32 n = 1;"), order("optional int32 n = 1;")),
    "one field into a new oneof": (order("int32 a = 1;"), order("oneof x { int32 a = 1; string b = 2; }")),
    "oneof grows": (order("oneof x { int32 a = 1; }"), order("oneof x { int32 a = 1; string b = 2; }")),
    "oneof renamed": (
        order("oneof x { int32 a = 1; int32 b = 2; }"),
        order("oneof y { int32 a = 1; int32 b = 2; }"),
    ),
    "message type renamed and alike": (
        order("message A { int32 n = 1; } message B { int32 n = 1; } A a = 1;"),
        order("message A { int32 n = 1; } message B { int32 n = 1; } B a = 1;"),
    ),
    "recursive": (order("Order next = 1;"), order("Order next = 1; int32 n = 2;")),
    "map": (order("map<string, int32> m = 1;"), order("map<string, int64> m = 1;")),
    "required stays": (proto2("required int32 n = 1;"), proto2("required int64 n = 1;")),
    "comments and messages elsewhere": (ORDER, ORDER + "message Other { int32 a = 1; }"),
}

NEITHER_WAY = {
    "type changed": (order("string id = 1;"), order("int32 id = 1;"), "string and is now int32"),
    "number used again": (order("string id = 1;"), order("double amount = 1;"), "field 1 was of type string"),
    "zig-zag to varint": (order("sint32 n = 1;"), order("int32 n = 1;"), "read differently"),
    "float to double": (order("float n = 1;"), order("double n = 1;"), "read differently"),
    "group of bytes": (order("fixed32 n = 1;"), order("fixed64 n = 1;"), "read differently"),
    "becomes repeated": (
        order("int32 n = 1;"),
        order("repeated int32 n = 1;"),
        "singular and is now repeated",
    ),
    "becomes singular": (
        order("repeated string n = 1;"),
        order("string n = 1;"),
        "repeated and is now singular",
    ),
    "map to repeated": (
        order("map<string, int32> m = 1;"),
        order("message E { string key = 1; int32 value = 2; } repeated E m = 1;"),
        "a map and is now repeated",
    ),
    "renumbered": (order("string id = 1;"), order("string id = 2;"), "had number 1 and has now 2"),
    "swapped": (order("int32 a = 1; int32 b = 2;"), order("int32 b = 1; int32 a = 2;"), "had number"),
    "reserved number used": (order("reserved 2 to 4;"), order("int32 n = 3;"), "was reserved"),
    "enum value renumbered": (
        order("enum E { Z = 0; A = 1; } E e = 1;"),
        order("enum E { Z = 0; A = 2; B = 1; } E e = 1;"),
        "A was 1 and is now 2",
    ),
    "nested type changed": (
        order("message A { int32 n = 1; } A a = 1;"),
        order("message A { string n = 1; } A a = 1;"),
        r"Order\.A\.n",
    ),
    "map value changed": (order("map<string, int32> m = 1;"), order("map<string, string> m = 1;"), "value"),
    "another payload": (ORDER, PROTO3 + "message New {} message Order { string id = 1; }", "payload message"),
    "payload renamed": (ORDER, ORDER.replace("Order", "Purchase"), "payload message"),
    "package renamed": (ORDER, ORDER.replace("shop", "store"), "payload message"),
    "extension changed": (
        proto2("extensions 100 to 200; } extend Order { optional int32 x = 100;"),
        proto2("extensions 100 to 200; } extend Order { optional string x = 100;"),
        "int32 and is now string",
    ),
}

ONE_WAY = {
    "string to bytes": (order("string s = 1;"), order("bytes s = 1;"), "string and is now bytes"),
    "message to bytes": (order("message A {} A a = 1;"), order("message A {} bytes a = 1;"), "is now bytes"),
    "enum to int": (
        order("enum E { Z = 0; } E e = 1;"),
        order("enum E { Z = 0; } int32 e = 1;"),
        "is now int32",
    ),
    "required is dropped": (
        proto2("required int32 n = 1;"),
        proto2("optional int32 n = 1;"),
        "not always written",
    ),
    "required is removed": (proto2("required int32 n = 1;"), proto2(""), "not always written"),
    "closed enum grows": (
        proto2("enum E { Z = 0; } optional E e = 1;"),
        proto2("enum E { Z = 0; A = 1; } optional E e = 1;"),
        "does not know the value 1",
    ),
    "oneof is split": (
        order("oneof x { int32 a = 1; int32 b = 2; }"),
        order("int32 a = 1; int32 b = 2;"),
        "exclude each other",
    ),
    "oneof is parted": (
        order("oneof x { int32 a = 1; int32 b = 2; }"),
        order("oneof x { int32 a = 1; } oneof y { int32 b = 2; }"),
        "exclude each other",
    ),
}
"""Allowed while the new schema reads, refused while the old one does; and the other way round when old and
new are exchanged."""


@pytest.mark.parametrize(("old", "new"), BOTH_WAYS.values(), ids=BOTH_WAYS.keys())
def test_these_changes_are_free(old: str, new: str) -> None:
    assert backward(old, new) == []
    assert forward(old, new) == []


@pytest.mark.parametrize(("old", "new", "reason"), NEITHER_WAY.values(), ids=NEITHER_WAY.keys())
def test_these_changes_are_never_compatible(old: str, new: str, reason: str) -> None:
    for found in (backward(old, new), forward(old, new)):
        assert any(re.search(reason, each) for each in found), found


@pytest.mark.parametrize(("old", "new", "reason"), ONE_WAY.values(), ids=ONE_WAY.keys())
def test_these_changes_are_compatible_in_one_direction(old: str, new: str, reason: str) -> None:
    assert backward(old, new) == []
    found = forward(old, new)
    assert any(re.search(reason, each) for each in found), found
    assert backward(new, old) != []


def test_values_and_messages_are_removed_at_the_cost_of_old_data() -> None:
    with_both = order("enum E { Z = 0; A = 1; } E e = 1; message Part {}")
    without = order("enum E { Z = 0; } E e = 1;")
    found = backward(with_both, without)
    assert any("does not know the value 1" in each for each in found)
    assert any("shop.Order.Part is gone" in each for each in found)
    assert forward(with_both, without) == []
    assert backward(without, with_both) == forward(without, with_both) == []


def test_several_fields_into_one_oneof_lose_data() -> None:
    apart, together = order("int32 a = 1; int32 b = 2;"), order("oneof x { int32 a = 1; int32 b = 2; }")
    assert any("exclude each other" in each for each in backward(apart, together))
    assert forward(apart, together) == []


# -- payloads ------------------------------------------------------------------------------------------------


def nested(levels: int) -> bytes:
    payload = b""
    for _ in range(levels):
        size, rest = bytearray(), len(payload)
        while rest > 0x7F:
            size.append(rest & 0x7F | 0x80)
            rest >>= 7
        payload = b"\x1a" + bytes((*size, rest)) + payload
    return payload


def test_payloads_are_parsed_to_the_end() -> None:
    validator = Validator(read(order("string id = 1; int32 n = 2; Order next = 3;")))
    validator.validate(b"")
    validator.validate(b"\x0a\x01x\x10\x05" + nested(3))
    validator.validate(b"\x7a\x01x")  # a field of a later version
    for payload, reason in (
        (b"\xff", "corrupt"),
        (b"\x0a\x05x", "corrupt|truncated"),
        (b"\x0a\x02\xff\xff", "UTF-8"),
        (b"\x08\x05", "another type"),
        (nested(5000), "(?i)depth"),
    ):
        with pytest.raises(PayloadInvalid, match=reason):
            validator.validate(payload)


def test_required_fields_must_be_there() -> None:
    validator = Validator(read(proto2("required int32 n = 1; optional Order next = 2;")))
    validator.validate(b"\x08\x05")
    with pytest.raises(PayloadInvalid, match="required"):
        validator.validate(b"")
    with pytest.raises(PayloadInvalid, match="required"):
        validator.validate(b"\x08\x05\x12\x00")
