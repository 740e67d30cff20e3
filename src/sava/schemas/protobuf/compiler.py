"""From a definition to descriptors.

A definition is ``.proto`` source text, or a serialized ``FileDescriptorSet`` (``protoc --descriptor_set_out
--include_imports``). Source is compiled by ``protoc`` in a child process: a compiler written in C++ that
reads what strangers send is better off where it can crash or run for ever without taking the broker along.
The child has a deadline, a directory of its own with nothing else in it, and sees only Google's well-known
types.

What comes out is one canonical ``FileDescriptorSet``: without source positions, without the well-known types
(every reader has its own), and with the main file last under a fixed name. It is stored next to the
definition, so that only the broker that registers a schema compiles it.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
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
    source_context_pb2,
    struct_pb2,
    timestamp_pb2,
    type_pb2,
    wrappers_pb2,
)
from google.protobuf.message import DecodeError

from sava.schemas.errors import CompilerBusy, CompilerMissing, SchemaInvalid, SchemaTooLarge, shortened
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
    """With what it imports itself, which must be there first."""
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
    """None when it is something else. Source text can begin with the same byte (a line feed), but its next
    bytes are not the length of a file that has a name."""
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
    """In the words of the compiler about the source, without its warnings and the name of our file."""
    place = f"{MAIN_FILE}:"
    found = [line.removeprefix(place) for line in complaints.splitlines() if line.startswith(place)]
    if not found and "No module named" in complaints:
        return CompilerMissing("the package grpcio-tools is not installed")
    return SchemaInvalid(shortened("; ".join(f"line {line}" for line in found) or complaints or "refused"))
