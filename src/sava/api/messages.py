"""Records as protobuf messages and back, by the names of their fields.

Most records that the admin port shows have the fields of their message. ``to_message`` and ``from_message``
copy those, so that a call site names only the fields that differ. Neither guesses: each field of the result
comes from a field of the same name or from an override, and a field that has neither is a TypeError at the
first use, whatever the values are. The pairs are few and fixed, so they are compared once each.

Not for what happens per message or per batch: there, the fields are written out.
"""

from __future__ import annotations

import base64
from collections.abc import MutableSequence
from typing import Any, Final, TypeVar

from google.protobuf.message import Message

_M = TypeVar("_M", bound=Message)
_R = TypeVar("_R")

_copied: Final[dict[tuple[object, ...], tuple[str, ...]]] = {}
"""The fields that a pair has in common, by the pair and its overrides. Bounded by the call sites."""


def to_message(kind: type[_M], record: object, **overrides: Any) -> _M:
    """The message with the fields of the record. An override of None leaves its field unset."""
    pair = kind, type(record), *overrides
    names = _copied.get(pair)
    if names is None:
        source = type(record)
        names = tuple(name for name in kind.DESCRIPTOR.fields_by_name if name not in overrides)
        if missing := [name for name in names if name not in _fields(source) and not hasattr(source, name)]:
            raise TypeError(f"{source.__name__} has no {', '.join(missing)} for {kind.DESCRIPTOR.full_name}")
        _copied[pair] = names
    return kind(**{name: getattr(record, name) for name in names}, **overrides)


def from_message(kind: type[_R], message: Message, **overrides: Any) -> _R:
    """The record with the fields of the message; a repeated field becomes a tuple. A field that may be absent
    has to be an override: only the caller knows what its absence means."""
    pair = kind, type(message), *overrides
    names = _copied.get(pair)
    if names is None:
        source = message.DESCRIPTOR.fields_by_name
        names = tuple(name for name in _fields(kind) if name not in overrides)
        if missing := [name for name in names if name not in source or source[name].has_presence]:
            raise TypeError(
                f"{message.DESCRIPTOR.full_name} has no certain {', '.join(missing)} for {kind.__name__}"
            )
        _copied[pair] = names
    values: dict[str, Any] = {name: getattr(message, name) for name in names}
    for name, value in values.items():
        if isinstance(value, MutableSequence):
            values[name] = tuple(value)
    return kind(**values, **overrides)


def _fields(record: type) -> tuple[str, ...]:
    """Of a msgspec struct, a NamedTuple or a dataclass."""
    for attribute in ("__struct_fields__", "_fields", "__dataclass_fields__"):
        if hasattr(record, attribute):
            return tuple(getattr(record, attribute))
    raise TypeError(f"{record.__name__} is no record")


# -- as JSON, for people and programs ------------------------------------------------------------

_ID_FIELDS = frozenset(
    {"voters", "learners", "lease", "founders", "incarnation", "topic_ids", "remote_topic_ids"}
)


def as_dict(message: Message) -> dict[str, Any]:
    """All fields, also those with their default value; absent messages and optional fields are None."""
    return {field.name: _field(message, field) for field in message.DESCRIPTOR.fields}


def _field(message: Message, field: Any) -> Any:
    value = getattr(message, field.name)
    if field.is_repeated:
        return [_value(item, field) for item in value]
    if field.has_presence and not message.HasField(field.name):
        return None
    return _value(value, field)


def _value(value: Any, field: Any) -> Any:
    if isinstance(value, Message):
        return as_dict(value)
    if isinstance(value, bytes):
        return text_of(value)
    if isinstance(value, int) and (field.name.endswith("_id") or field.name in _ID_FIELDS):
        return str(value)
    return value


def text_of(value: bytes) -> str:
    """Values are opaque bytes, in practice text; what is not UTF-8 is shown as base64 behind its name."""
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError:
        return "base64:" + base64.b64encode(value).decode("ascii")
