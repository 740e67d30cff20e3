"""JSON from strangers: text in, values out, or ValueError; never a crash of the interpreter.

The limit of depth is what makes every recursive function behind it safe: Avro and JSON Schema are defined by
recursion, and their libraries recurse as deep as they are told to.
"""

from __future__ import annotations

import json
from typing import Any, Final

import msgspec

MAX_DEPTH: Final = 64
"""Levels of arrays and objects within each other; documents for people have fewer than ten."""


def decode_definition(text: bytes) -> Any:
    """A schema: strict, and slower than a payload. A key that comes twice is refused, since two readers would
    take a different one of them."""
    _check_depth(text)
    try:
        return json.loads(text.decode(), object_pairs_hook=_unique, parse_constant=_refuse_constant)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def decode_payload(text: bytes) -> Any:
    _check_depth(text)
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(str(error)) from None
    except RecursionError:
        raise ValueError("nested too deeply") from None


def canonical(value: Any, *, sort_keys: bool = True) -> bytes:
    """The same bytes for the same value, whatever the spacing and (sorted) the order of keys were."""
    text = json.dumps(value, sort_keys=sort_keys, separators=(",", ":"), ensure_ascii=False)
    return text.encode(errors="surrogatepass")


def comparable(value: Any) -> Any:
    """Hashable, and equal exactly for values that are equal in JSON: 1 and 1.0 are, 1 and true are not."""
    if isinstance(value, dict):
        return ("object", frozenset((key, comparable(item)) for key, item in value.items()))
    if isinstance(value, list):
        return ("array", tuple(comparable(item) for item in value))
    return ("boolean", value) if isinstance(value, bool) else value


def _check_depth(text: bytes) -> None:
    """Counting all opening brackets is quick and mostly enough; only a document with many of them is looked
    at bracket by bracket."""
    if text.count(b"[") + text.count(b"{") <= MAX_DEPTH:
        return
    depth = 0
    in_string = escaped = False
    for byte in text:
        if in_string:
            if escaped:
                escaped = False
            elif byte == 0x5C:
                escaped = True
            elif byte == 0x22:
                in_string = False
        elif byte == 0x22:
            in_string = True
        elif byte in b"[{":
            depth += 1
            if depth > MAX_DEPTH:
                raise ValueError(f"nested more than {MAX_DEPTH} levels deep")
        elif byte in b"]}":
            depth -= 1


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("an object has the same key twice")
    return found


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
