"""An Avro schema as a graph: named types are nodes, references to them are edges, so recursion is a cycle.

``read`` follows the specification strictly: what one reader accepts and another refuses would be a schema
that works for half of the consumers. Canonical form is the specification's parsing canonical form; where a
schema has aliases, defaults or logical types they are kept too, because they decide how data is read and a
version that adds one is a new version. Without any of them it is exactly the parsing canonical form.

``find_problems`` is schema resolution: can data that was written with one schema be read with another? The
rules are those of the Avro specification. A writer's union must be readable in each of its branches, since
any of them may be in the data. Named types match by unqualified name, or because the reader has the writer's
full name as an alias. Beyond the specification, two logical types that differ are reported (the specification
compares decimals only): milliseconds read as microseconds are read without an error.

Apache's package ``avro`` has such a reader and such a checker, and ``tests/unit/schemas/test_avro_apache.py``
holds these beside them. Sava does not use the checker, for three reasons: in recursive types it keeps what it
concluded from an assumption that failed later, and then accepts a version that consumers cannot read; it does
not compare logical types, decimals included; and nothing bounds its work: two unions of 400 records, 35 KB of
definition where 256 KiB are allowed, take it 19 s of CPU, and the time grows faster than the square of the
size. It does not use the reader, which takes what fails at the first consumer: a default that is not of its
field's type, an enum or a union without a branch, an alias that is no name, a decimal of a scale above its
precision. What it reads would have to be checked, and copied for the check of payloads, all the same.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, Final

from sava.schemas.bounds import Fixpoint
from sava.schemas.errors import SchemaInvalid, shortened

PRIMITIVES: Final = frozenset(("null", "boolean", "int", "long", "float", "double", "bytes", "string"))
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_NO_DEFAULT: Final = object()
_MAX_EMPTY: Final = 1000
"""The most values that one value without bytes may hold."""


@dataclass(eq=False, slots=True)
class Primitive:
    name: str
    logical: dict[str, Any] = field(default_factory=dict)
    """Holds ``logicalType``, and for decimals ``precision`` and ``scale``."""


@dataclass(eq=False, slots=True)
class Array:
    items: Node


@dataclass(eq=False, slots=True)
class Map:
    values: Node


@dataclass(eq=False, slots=True)
class Union:
    branches: tuple[Node, ...]


@dataclass(eq=False, slots=True)
class Enum:
    name: str
    aliases: tuple[str, ...]
    symbols: tuple[str, ...]
    default: str | None


@dataclass(eq=False, slots=True)
class Fixed:
    name: str
    aliases: tuple[str, ...]
    size: int
    logical: dict[str, Any]


@dataclass(eq=False, slots=True)
class Field:
    name: str
    aliases: tuple[str, ...]
    type: Node
    default: Any = _NO_DEFAULT

    @property
    def has_default(self) -> bool:
        return self.default is not _NO_DEFAULT


@dataclass(eq=False, slots=True)
class AvroRecord:
    name: str
    aliases: tuple[str, ...]
    fields: tuple[Field, ...] = ()


Node = Primitive | Array | Map | Union | Enum | Fixed | AvroRecord
Named = Enum | Fixed | AvroRecord


def read(schema: Any) -> Node:
    """The graph of a decoded schema; raises SchemaInvalid. ``bounds.decode_definition`` has bounded the depth
    of ``schema``."""
    try:
        node = _Reader().read(schema, "")
        _check_whole(node)
    except RecursionError:
        raise SchemaInvalid("the types are nested too deeply") from None
    return node


class _Reader:
    def __init__(self) -> None:
        self._named: dict[str, Named] = {}

    def read(self, schema: Any, namespace: str) -> Node:
        if isinstance(schema, str):
            return self._reference(schema, namespace)
        if isinstance(schema, list):
            return self._union(schema, namespace)
        if not isinstance(schema, dict):
            raise SchemaInvalid(f"{_shown(schema)} is not an Avro schema")
        kind = schema.get("type")
        match kind:
            case "record" | "error":
                return self._record(schema, namespace)
            case "enum":
                return self._enum(schema, namespace)
            case "fixed":
                return self._fixed(schema, namespace)
            case "array":
                return Array(self.read(_need(schema, "items"), namespace))
            case "map":
                return Map(self.read(_need(schema, "values"), namespace))
            case str() if kind in PRIMITIVES:
                return Primitive(kind, _logical(schema))
            case str() | dict() | list():
                return self.read(kind, namespace)
            case _:
                raise SchemaInvalid(f"{_shown(schema)} has no type")

    def _reference(self, name: str, namespace: str) -> Node:
        if name in PRIMITIVES:
            return Primitive(name)
        full = name if "." in name or not namespace else f"{namespace}.{name}"
        found = self._named.get(full) or self._named.get(name)
        if found is None:
            raise SchemaInvalid(f"type {_shown(name)} is not defined (before it is used)")
        return found

    def _union(self, schema: list[Any], namespace: str) -> Union:
        branches = tuple(self.read(branch, namespace) for branch in schema)
        seen = set()
        for branch in branches:
            if isinstance(branch, Union):
                raise SchemaInvalid("a union is directly inside a union")
            name = branch_name(branch)
            if name in seen:
                raise SchemaInvalid(f"a union has {_shown(name)} twice")
            seen.add(name)
        if not branches:
            raise SchemaInvalid("a union has no branch: no value could have it")
        return Union(branches)

    def _record(self, schema: dict[str, Any], namespace: str) -> AvroRecord:
        name, inner = self._name(schema, namespace)
        record = AvroRecord(name, _aliases(schema, inner))
        self._named[name] = record
        entries = _need(schema, "fields")
        if not isinstance(entries, list):
            raise SchemaInvalid(f"the fields of {name} are not a list")
        fields = [self._field(entry, name, inner) for entry in entries]
        if len({each.name for each in fields}) != len(fields):
            raise SchemaInvalid(f"record {name} has two fields of one name")
        record.fields = tuple(fields)
        return record

    def _field(self, entry: Any, record: str, namespace: str) -> Field:
        if not isinstance(entry, dict):
            raise SchemaInvalid(f"a field of {record} is not an object: {_shown(entry)}")
        name = _need(entry, "name")
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise SchemaInvalid(f"{_shown(name)} cannot be the name of a field of {record}")
        aliases = entry.get("aliases", [])
        if not isinstance(aliases, list) or not all(
            isinstance(alias, str) and _NAME.fullmatch(alias) for alias in aliases
        ):
            raise SchemaInvalid(f"the aliases of field {record}.{name} are not a list of names")
        kind = self.read(_need(entry, "type"), namespace)
        return Field(name, tuple(aliases), kind, entry.get("default", _NO_DEFAULT))

    def _enum(self, schema: dict[str, Any], namespace: str) -> Enum:
        name, inner = self._name(schema, namespace)
        symbols = _need(schema, "symbols")
        if not isinstance(symbols, list) or not all(
            isinstance(symbol, str) and _NAME.fullmatch(symbol) for symbol in symbols
        ):
            raise SchemaInvalid(f"the symbols of enum {name} are not a list of names")
        default = schema.get("default")
        if (
            len(set(symbols)) != len(symbols)
            or not symbols
            or (default is not None and default not in symbols)
        ):
            raise SchemaInvalid(
                f"enum {name} has a symbol twice, or none, or a default that is not one of them"
            )
        enum = Enum(name, _aliases(schema, inner), tuple(symbols), default)
        self._named[name] = enum
        return enum

    def _fixed(self, schema: dict[str, Any], namespace: str) -> Fixed:
        name, inner = self._name(schema, namespace)
        size = _need(schema, "size")
        if not isinstance(size, int) or isinstance(size, bool) or not 0 <= size < 1 << 31:
            raise SchemaInvalid(f"{_shown(size)} cannot be the size of fixed {name}")
        fixed = Fixed(name, _aliases(schema, inner), size, _logical(schema))
        self._named[name] = fixed
        return fixed

    def _name(self, schema: dict[str, Any], namespace: str) -> tuple[str, str]:
        """The full name that a definition gives, and the namespace that holds inside of it."""
        name = _need(schema, "name")
        own = schema.get("namespace", namespace)
        if not isinstance(name, str) or not isinstance(own, str):
            raise SchemaInvalid(f"{_shown(name)} is not a name with a namespace")
        full = name if "." in name or not own else f"{own}.{name}"
        if not all(_NAME.fullmatch(part) for part in full.split(".")) or full in PRIMITIVES:
            raise SchemaInvalid(f"{_shown(full)} cannot be the name of a type")
        if full in self._named:
            raise SchemaInvalid(f"type {_shown(full)} is defined twice")
        return full, full.rpartition(".")[0]


def branch_name(node: Node) -> str:
    """The name by which a union distinguishes its branches: the full name, or the kind of an unnamed type."""
    match node:
        case Primitive(name) | Enum(name) | Fixed(name) | AvroRecord(name):
            return name
        case Array():
            return "array"
        case Map():
            return "map"
        case Union():
            return "union"


def empty_weight(node: Node, known: dict[int, int]) -> int:
    """0 for a type whose values take bytes. A value of null, and of what is made of it only, takes none; then
    the number of values in it, which a small schema can make huge. ``known`` is filled on the way."""
    match node:
        case Primitive("null") | Fixed(size=0):
            return 1
        case AvroRecord(fields=fields):
            if id(node) not in known:
                known[id(node)] = 0
                weights = [empty_weight(each.type, known) for each in fields]
                known[id(node)] = 1 + sum(weights) if all(weights) else 0
            return known[id(node)]
        case _:
            return 0


def canonical(node: Node, written: set[str] | None = None) -> Any:
    """The schema as plain lists and dictionaries in canonical order: named types in full where they come
    first, by name afterwards. The codec gives this form to ``fastavro``."""
    written = set() if written is None else written
    match node:
        case Primitive(name, logical):
            return {"type": name, **logical} if logical else name
        case Array(items):
            return {"type": "array", "items": canonical(items, written)}
        case Map(values):
            return {"type": "map", "values": canonical(values, written)}
        case Union(branches):
            return [canonical(branch, written) for branch in branches]
    if node.name in written:
        return node.name
    written.add(node.name)
    plain: dict[str, Any] = {
        "name": node.name,
        "type": "record" if isinstance(node, AvroRecord) else type(node).__name__.lower(),
    }
    match node:
        case AvroRecord(fields=fields):
            plain["fields"] = [_canonical_field(each, written) for each in fields]
        case Enum(symbols=symbols, default=default):
            plain["symbols"] = list(symbols)
            if default is not None:
                plain["default"] = default
        case Fixed(size=size, logical=logical):
            plain |= {"size": size, **logical}
    if node.aliases:
        plain["aliases"] = sorted(node.aliases)
    return plain


def _canonical_field(each: Field, written: set[str]) -> dict[str, Any]:
    plain = {"name": each.name, "type": canonical(each.type, written)}
    if each.has_default:
        plain["default"] = each.default
    if each.aliases:
        plain["aliases"] = sorted(each.aliases)
    return plain


def _check_whole(root: Node) -> None:
    """Checks that need every type to be complete: defaults, and types whose values take no bytes."""
    pending, seen = [root], set[int]()
    weights: dict[int, int] = {}
    while pending:
        node = pending.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        if empty_weight(node, weights) > _MAX_EMPTY:
            raise SchemaInvalid("a value that takes no bytes would hold a vast number of values")
        match node:
            case Array(items):
                if empty_weight(items, weights):
                    raise SchemaInvalid(
                        "the items of an array take no bytes: ten bytes could hold any number of them"
                    )
                pending.append(items)
            case Map(values):
                pending.append(values)
            case Union(branches):
                pending.extend(branches)
            case AvroRecord():
                _check_defaults(node)
                pending.extend(each.type for each in node.fields)
            case _:
                pass


def _check_defaults(record: AvroRecord) -> None:
    for each in record.fields:
        if each.has_default and not _fits(each.default, each.type, {}):
            raise SchemaInvalid(
                f"the default {_shown(each.default)} of field {record.name}.{each.name} is not of its type"
            )


def _fits(value: Any, node: Node, known: dict[tuple[int, int], bool]) -> bool:
    """Whether a default, as JSON, is a value of the type. ``known`` keeps unions in unions from multiplying
    the work at each level."""
    if isinstance(node, Primitive):
        return _fits_primitive(value, node.name)
    key = (id(value), id(node))
    if key not in known:
        known[key] = _fits_composite(value, node, known)
    return known[key]


def _fits_composite(value: Any, node: Node, known: dict[tuple[int, int], bool]) -> bool:
    match node:
        case Array(items):
            return isinstance(value, list) and all(_fits(item, items, known) for item in value)
        case Map(values):
            return isinstance(value, dict) and all(_fits(item, values, known) for item in value.values())
        case Union(branches):
            return any(_fits(value, branch, known) for branch in branches)
        case Enum(symbols=symbols):
            return isinstance(value, str) and value in symbols
        case Fixed(size=size):
            return _is_bytes(value) and len(value) == size
        case AvroRecord(fields=fields):
            return isinstance(value, dict) and all(
                _fits(value[each.name], each.type, known) if each.name in value else each.has_default
                for each in fields
            )
        case _:
            return False


def _fits_primitive(value: Any, name: str) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    match name:
        case "null":
            return value is None
        case "boolean":
            return isinstance(value, bool)
        case "int" | "long":
            bits = 31 if name == "int" else 63
            return is_number and isinstance(value, int) and -(1 << bits) <= value < 1 << bits
        case "float" | "double":
            return is_number or value in ("NaN", "Infinity", "-Infinity")
        case "bytes":
            return _is_bytes(value)
        case _:
            return isinstance(value, str)


def _is_bytes(value: Any) -> bool:
    """Bytes in JSON are a string of the code points 0 to 255."""
    return isinstance(value, str) and all(ord(char) < 256 for char in value)


def _need(schema: dict[str, Any], key: str) -> Any:
    try:
        return schema[key]
    except KeyError:
        raise SchemaInvalid(f"{_shown(schema)} has no {key!r}") from None


def _aliases(schema: dict[str, Any], namespace: str) -> tuple[str, ...]:
    """The full aliases; a short alias is in the namespace of the name."""
    aliases = schema.get("aliases", [])
    if not isinstance(aliases, list) or not all(isinstance(alias, str) for alias in aliases):
        raise SchemaInvalid(f"the aliases {_shown(aliases)} are not a list of names")
    return tuple(alias if "." in alias or not namespace else f"{namespace}.{alias}" for alias in aliases)


def _logical(schema: dict[str, Any]) -> dict[str, Any]:
    """The specification says that a logical type which makes no sense is ignored; a decimal that makes none
    is refused, since it is always a mistake."""
    name = schema.get("logicalType")
    if not isinstance(name, str):
        return {}
    if name != "decimal":
        return {"logicalType": name}
    precision, scale = schema.get("precision"), schema.get("scale", 0)
    if type(precision) is not int or type(scale) is not int or not 0 <= scale <= precision or not precision:
        raise SchemaInvalid("a decimal needs a precision above 0 and a scale from 0 to the precision")
    return {"logicalType": name, "precision": precision, "scale": scale}


def _shown(value: Any) -> str:
    return shortened(repr(value), 100)


_PROMOTIONS: Final = {
    "int": ("long", "float", "double"),
    "long": ("float", "double"),
    "float": ("double",),
    "string": ("bytes",),
    "bytes": ("string",),
}
"""By the writer's type: the types that a reader may have instead."""


def find_problems(reader: Node, writer: Node) -> list[str]:
    """The reasons why ``reader`` cannot read all that ``writer`` can write; empty when it can."""
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
            case AvroRecord(), AvroRecord():
                return _compare_names(reader, writer, path) or self._compare_fields(reader, writer, path)
            case _:
                return [f"{path}: {branch_name(writer)} cannot be read as {branch_name(reader)}"]

    def _compare_fields(self, reader: AvroRecord, writer: AvroRecord, path: str) -> list[str]:
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
