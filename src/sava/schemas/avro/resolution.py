"""Schema resolution: can data that was written with one schema be read with another?

The rules are those of the Avro specification. A writer's union must be readable in each of its branches,
since any of them may be in the data. Named types match by unqualified name, or because the reader has the
writer's full name as an alias. Beyond the specification, two logical types that differ are reported (the
specification compares decimals only): milliseconds read as microseconds are read without an error.
"""

from __future__ import annotations

from typing import Final

from sava.schemas.avro.model import (
    Array,
    Enum,
    Fixed,
    Map,
    Named,
    Node,
    Primitive,
    Record,
    Union,
    branch_name,
)
from sava.schemas.fixpoint import Fixpoint

_PROMOTIONS: Final = {
    "int": ("long", "float", "double"),
    "long": ("float", "double"),
    "float": ("double",),
    "string": ("bytes",),
    "bytes": ("string",),
}
"""What a reader may have where the writer has the key."""


def find_problems(reader: Node, writer: Node) -> list[str]:
    """Why ``reader`` cannot read all that ``writer`` can write, in words; empty when it can."""
    comparison = _Resolution()
    return comparison.fixpoint.solve(lambda: comparison.resolve(reader, writer, "$"))


class _Resolution:
    def __init__(self) -> None:
        self.fixpoint = Fixpoint()

    def resolve(self, reader: Node, writer: Node, path: str) -> list[str]:
        return self.fixpoint.pair((id(reader), id(writer)), lambda: self._resolve(reader, writer, path))

    def _resolve(self, reader: Node, writer: Node, path: str) -> list[str]:
        if isinstance(writer, Union):
            return [
                problem
                for branch in writer.branches
                for problem in self.resolve(reader, branch, f"{path}({branch_name(branch)})")
            ]
        if isinstance(reader, Union):
            for branch in reader.branches:
                if not self.resolve(branch, writer, path):
                    return []
            return [f"{path}: no branch of the reader's union reads {branch_name(writer)}"]
        match reader, writer:
            case Primitive(), Primitive():
                return _compare_primitives(reader, writer, path)
            case Array(items), Array(written):
                return self.resolve(items, written, f"{path}[]")
            case Map(values), Map(written):
                return self.resolve(values, written, f"{path}{{}}")
            case Enum(), Enum():
                return _compare_names(reader, writer, path) or _compare_symbols(reader, writer, path)
            case Fixed(), Fixed():
                return _compare_names(reader, writer, path) or _compare_fixed(reader, writer, path)
            case Record(), Record():
                return _compare_names(reader, writer, path) or self._compare_fields(reader, writer, path)
            case _:
                return [f"{path}: {branch_name(writer)} cannot be read as {branch_name(reader)}"]

    def _compare_fields(self, reader: Record, writer: Record, path: str) -> list[str]:
        written = {each.name: each for each in writer.fields}
        problems = []
        for each in reader.fields:
            names = (name for name in (each.name, *each.aliases) if name in written)
            name = next(names, None)
            if name is not None:
                problems += self.resolve(each.type, written[name].type, f"{path}.{each.name}")
            elif not each.has_default:
                problems.append(f"{path}.{each.name}: the writer has no such field and the reader no default")
        return problems


def _compare_primitives(reader: Primitive, writer: Primitive, path: str) -> list[str]:
    if reader.name != writer.name and reader.name not in _PROMOTIONS.get(writer.name, ()):
        return [f"{path}: {writer.name} cannot be read as {reader.name}"]
    return _compare_logical(reader, writer, path)


def _compare_logical(reader: Primitive | Fixed, writer: Primitive | Fixed, path: str) -> list[str]:
    if reader.logical and writer.logical and reader.logical != writer.logical:
        return [f"{path}: logical type {writer.logical} would be read as {reader.logical}"]
    return []


def _compare_names(reader: Named, writer: Named, path: str) -> list[str]:
    if _short(reader.name) == _short(writer.name) or writer.name in reader.aliases:
        return []
    return [f"{path}: the writer's type is named {writer.name}, the reader's {reader.name}, without an alias"]


def _compare_symbols(reader: Enum, writer: Enum, path: str) -> list[str]:
    unknown = [symbol for symbol in writer.symbols if symbol not in reader.symbols]
    if unknown and reader.default is None:
        return [f"{path}: the reader knows no symbol {', '.join(unknown[:10])} and has no default"]
    return []


def _compare_fixed(reader: Fixed, writer: Fixed, path: str) -> list[str]:
    if reader.size != writer.size:
        return [f"{path}: {writer.size} bytes cannot be read as {reader.size}"]
    return _compare_logical(reader, writer, path)


def _short(name: str) -> str:
    return name.rpartition(".")[2]
