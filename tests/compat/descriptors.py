"""The interface that generated protobuf modules define, in a form that can be compared and read.

Danube's client and Sava define the same full names, and one process can hold only one definition of a name.
So ``interface_of`` asks a child process, which is this module run as a program: it imports the modules it is
given and prints their descriptors as JSON. Every message, enumeration and method then becomes a line or a
few, in the notation that the tables of ``beyond_the_client`` are written in.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent
CHILD_DEADLINE = 60

# What a field says that the notation has a place for, and what follows from the rest.
_TOLD = {"name", "number", "type", "typeName", "label", "proto3Optional", "oneofIndex", "jsonName"}


@dataclass
class Interface:
    """By full name: the fields of each message in order of their numbers, the values of each enumeration,
    and what each method (named by its path) takes and gives."""

    messages: dict[str, tuple[str, ...]] = field(default_factory=dict)
    enums: dict[str, tuple[str, ...]] = field(default_factory=dict)
    methods: dict[str, tuple[str, str]] = field(default_factory=dict)

    def __or__(self, other: Interface) -> Interface:
        return Interface(
            self.messages | other.messages, self.enums | other.enums, self.methods | other.methods
        )


def interface_of(*modules: str) -> Interface:
    """The interface that these modules define, as a process of its own sees it."""
    child = subprocess.run(
        [sys.executable, "-m", __name__, *modules],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=CHILD_DEADLINE,
        check=False,
    )
    assert child.returncode == 0, child.stderr
    interface = Interface()
    for file in json.loads(child.stdout):
        assert file["syntax"] == "proto3"
        interface |= _interface_of_file(file)
    return interface


def _interface_of_file(file: dict[str, Any]) -> Interface:
    package = file["package"]
    interface = Interface()
    for enum in file.get("enumType", []):
        interface.enums[f"{package}.{enum['name']}"] = _values(enum)
    for name, message in _messages(package, file.get("messageType", [])):
        interface.messages[name] = _fields(package, name, message)
        for enum in message.get("enumType", []):
            interface.enums[f"{name}.{enum['name']}"] = _values(enum)
    for service in file.get("service", []):
        for method in service["method"]:
            interface.methods[f"/{package}.{service['name']}/{method['name']}"] = _method(package, method)
    return interface


def _messages(scope: str, messages: list[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    for message in messages:
        if _is_map_entry(message):
            continue  # shown as the type of the field that it is for
        name = f"{scope}.{message['name']}"
        yield name, message
        yield from _messages(name, message.get("nestedType", []))


def _is_map_entry(message: dict[str, Any]) -> bool:
    return bool(message.get("options", {}).get("mapEntry"))


def _values(enum: dict[str, Any]) -> tuple[str, ...]:
    return tuple(f"{value['number']} {value['name']}" for value in enum["value"])


def _fields(package: str, name: str, message: dict[str, Any]) -> tuple[str, ...]:
    by_number = sorted(message.get("field", []), key=lambda field: field["number"])
    return tuple(_field(package, name, message, field) for field in by_number)


def _field(package: str, name: str, message: dict[str, Any], field: dict[str, Any]) -> str:
    entries = {
        f".{name}.{nested['name']}": nested
        for nested in message.get("nestedType", [])
        if _is_map_entry(nested)
    }
    text = f"{field['number']} {field['name']}: "
    if entry := entries.get(field.get("typeName", "")):
        key, value = sorted(entry["field"], key=lambda part: part["number"])
        text += f"map<{_type(package, key)}, {_type(package, value)}>"
    else:
        text += _type(package, field)
        if field["label"] == "LABEL_REPEATED":
            text += " (repeated)"
    if field.get("proto3Optional"):
        text += " (optional)"
    elif "oneofIndex" in field:
        text += f" (oneof {message['oneofDecl'][field['oneofIndex']]['name']})"
    rest = {key: value for key, value in field.items() if key not in _TOLD}
    return f"{text} {rest}" if rest else text


def _type(package: str, field: dict[str, Any]) -> str:
    named: str = field.get("typeName", "")
    return named.removeprefix(f".{package}.") or field["type"].removeprefix("TYPE_").lower()


def _method(package: str, method: dict[str, Any]) -> tuple[str, str]:
    takes, gives = (method[side].removeprefix(f".{package}.") for side in ("inputType", "outputType"))
    takes = f"stream {takes}" if method.get("clientStreaming") else takes
    gives = f"stream {gives}" if method.get("serverStreaming") else gives
    return takes, gives


def _dump(modules: list[str]) -> None:
    from google.protobuf import descriptor_pb2, json_format

    files = []
    for module in modules:
        file = descriptor_pb2.FileDescriptorProto()
        importlib.import_module(module).DESCRIPTOR.CopyToProto(file)
        files.append(json_format.MessageToDict(file))
    json.dump(files, sys.stdout)


if __name__ == "__main__":
    _dump(sys.argv[1:])
