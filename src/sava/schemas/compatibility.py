"""May this schema follow those? One question for all types, asked in the direction that the mode demands.

Backward: the new schema must read what was written with the old one. Forward: the old one must read what will
be written with the new one. Full: both. Schemas of the primitive types never change, so they always may.
"""

from __future__ import annotations

from collections.abc import Iterable

from sava.schemas.avro import resolution
from sava.schemas.definition import AvroSchema, JsonSchema, ProtobufSchema, Schema
from sava.schemas.fixpoint import MAX_PROBLEMS
from sava.schemas.json_schema import containment
from sava.schemas.protobuf import wire
from sava.schemas.types import Mode


def find_problems(new: Schema, older: Iterable[tuple[int, Schema]], mode: Mode) -> list[str]:
    """What stands against ``new``, in words. ``older``: the versions that count, with their numbers; of a
    mode that is not transitive, that is the latest only."""
    problems: list[str] = []
    for version, old in older:
        if mode.is_backward:
            problems += [
                f"version {version}, backward: {each}" for each in compare(old, new, new_reads_old=True)
            ]
        if mode.is_forward:
            problems += [
                f"version {version}, forward: {each}" for each in compare(old, new, new_reads_old=False)
            ]
        if len(problems) >= MAX_PROBLEMS:
            break
    return problems[:MAX_PROBLEMS]


def compare(old: Schema, new: Schema, *, new_reads_old: bool) -> list[str]:
    """The problems of one direction between two schemas."""
    if old.type is not new.type:
        return [f"the type was {old.type} and is now {new.type}"]
    match old, new:
        case AvroSchema(), AvroSchema():
            reader, writer = (new, old) if new_reads_old else (old, new)
            return resolution.find_problems(reader.root, writer.root)
        case JsonSchema(), JsonSchema():
            read, written = (new, old) if new_reads_old else (old, new)
            return containment.find_problems(read.document, written.document)
        case ProtobufSchema(), ProtobufSchema():
            return wire.find_problems(old.descriptors, new.descriptors, new_reads_old=new_reads_old)
        case _:
            return []
