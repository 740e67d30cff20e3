"""Names of types, modes and policies as people write them, and the limits of what comes with a schema."""

from __future__ import annotations

import subprocess
import sys

import pytest

from sava.schemas.errors import (
    ModeUnknown,
    PolicyUnknown,
    SchemaIncompatible,
    SchemaTooLarge,
    SubjectInvalid,
    TypeUnknown,
)
from sava.schemas.types import (
    CompatibilityMode,
    Policy,
    SchemaType,
    check_subject,
    check_tags,
    check_text,
    parse_mode,
    parse_policy,
    parse_type,
)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("bytes", SchemaType.BYTES),
        ("String", SchemaType.STRING),
        ("NUMBER", SchemaType.NUMBER),
        ("int", SchemaType.NUMBER),
        ("int64", SchemaType.NUMBER),
        ("float", SchemaType.NUMBER),
        ("double", SchemaType.NUMBER),
        ("json", SchemaType.JSON_SCHEMA),
        ("json_schema", SchemaType.JSON_SCHEMA),
        ("JsonSchema", SchemaType.JSON_SCHEMA),
        ("avro", SchemaType.AVRO),
        ("proto", SchemaType.PROTOBUF),
        (" Protobuf ", SchemaType.PROTOBUF),
    ],
)
def test_types_have_aliases_and_no_case(text: str, kind: SchemaType) -> None:
    assert parse_type(text) is kind


def test_unknown_words_are_typed_errors() -> None:
    with pytest.raises(TypeUnknown, match="thrift"):
        parse_type("thrift")
    with pytest.raises(ModeUnknown, match="sideways"):
        parse_mode("sideways")
    with pytest.raises(PolicyUnknown, match="hope"):
        parse_policy("hope")
    assert parse_policy("Enforce") is Policy.ENFORCE


@pytest.mark.parametrize(
    ("text", "backward", "forward", "transitive"),
    [
        ("NONE", False, False, False),
        ("Backward", True, False, False),
        ("forward", False, True, False),
        ("FULL", True, True, False),
        ("BACKWARD_TRANSITIVE", True, False, True),
        ("forward_transitive", False, True, True),
        ("Full_Transitive", True, True, True),
    ],
)
def test_modes_say_what_they_ask_for(text: str, backward: bool, forward: bool, transitive: bool) -> None:
    mode = parse_mode(text)
    assert (mode.is_backward, mode.is_forward, mode.is_transitive) == (backward, forward, transitive)
    assert str(mode) == text.lower()


@pytest.mark.parametrize(
    "subject", ["orders", "com.example.Order-value", "/default/orders", "nar.o#c", "a b"]
)
def test_subjects_may_be_any_printable_ascii(subject: str) -> None:
    assert check_subject(subject) == subject


@pytest.mark.parametrize(
    "subject", ["", " orders", "orders ", "a\nb", "a\0b", "\ud800", "naro\u010dila", "\u0430dmin"]
)
def test_other_subjects_are_refused(subject: str) -> None:
    with pytest.raises(SubjectInvalid):
        check_subject(subject)


def test_what_comes_with_a_schema_is_bounded() -> None:
    with pytest.raises(SchemaTooLarge, match="subject"):
        check_subject("z" * 256)
    with pytest.raises(SchemaTooLarge, match="description"):
        check_text("description", "x" * 11, 10)
    with pytest.raises(SchemaTooLarge, match="33 tags"):
        check_tags(("t",) * 33)
    assert check_tags(("a", "b")) == ("a", "b")


def test_an_incompatibility_names_its_problems() -> None:
    error = SchemaIncompatible("orders", ["one", "two"])
    assert error.problems == ("one", "two")
    assert "one; two" in str(error)


def test_the_default_mode_is_backward() -> None:
    from sava.schemas.types import DEFAULT_MODE

    assert DEFAULT_MODE is CompatibilityMode.BACKWARD


def test_a_client_uses_schemas_without_the_metadata_store() -> None:
    program = (
        "import sys, sava.schemas.codecs, sava.schemas.definition;"
        "heavy = ('sava.metadata', 'sava.raft', 'grpc', 'asyncio');"
        "print([name for name in sys.modules if name.startswith(heavy)])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"
