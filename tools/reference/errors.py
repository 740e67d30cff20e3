"""docs/reference/errors.md, from the types of the errors."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import re
import textwrap
from typing import Final

import grpc

import sava
from sava.errors import CallerError, HostError, RetryableError, SavaError
from sava.metadata import failures
from sava.metadata.errors import OutcomeUnknown
from tools.reference.pages import first_sentences, page, table

FAMILIES: Final = (
    (CallerError, "The request is wrong", "Repeating it unchanged cannot help."),
    (RetryableError, "May pass", "The request had no effect, and the same one can succeed later."),
    (OutcomeUnknown, "Not known", "The request may or may not have taken effect."),
    (HostError, "A process or a machine", "It cannot go on; an operator must act."),
    (SavaError, "Others", "Told as they are."),
)
STATUS: Final = {
    OutcomeUnknown: grpc.StatusCode.UNKNOWN,
    CallerError: grpc.StatusCode.FAILED_PRECONDITION,
    RetryableError: grpc.StatusCode.UNAVAILABLE,
    HostError: grpc.StatusCode.FAILED_PRECONDITION,
    SavaError: grpc.StatusCode.INTERNAL,
}
_CAPITAL: Final = re.compile(r"(?<!^)(?=[A-Z])")

INTRODUCTION: Final = """
Errors are types, told apart by whose fault they are, never by their text. On the wire an error has a gRPC
status, and its own name as `sava-code` in the trailing metadata (Sava's services; [Danube's](../danube.md)
have the codes of Danube). Brokers and commands raise the type again. Sava's client has few types of its own,
which say [what became of the request](../client.md#send), with that name as their `code`.

The text of an error names the thing, the cause and the way out. Where it is always the same it is told here
in italics, with an ellipsis for what differs.
"""


def render() -> str:
    left = sorted(kinds(), key=lambda kind: (kind.__name__, kind.__module__))
    sections = []
    for family, title, meaning in FAMILIES:
        members = [kind for kind in left if issubclass(kind, family)]
        left = [kind for kind in left if kind not in members]
        if members:
            rows = [
                (
                    f"`{kind.__name__}`",
                    f"`{code_of(kind)}`",
                    f"`{kind.__module__}`",
                    meaning_of(kind),
                )
                for kind in members
            ]
            head = f"## {title}\n\n`{family.__name__}`, gRPC status `{STATUS[family].name}`. {meaning}"
            sections.append(f"{head}\n\n" + table(("error", "code", "defined in", "meaning"), rows))
    return page("Errors", INTRODUCTION, *sections)


def kinds() -> list[type[SavaError]]:
    """All that any part of Sava can raise, but for the families themselves."""
    for module in pkgutil.walk_packages(sava.__path__, "sava."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    found: set[type[SavaError]] = set()
    waiting: list[type[SavaError]] = [SavaError]
    while waiting:
        for kind in waiting.pop().__subclasses__():
            if kind not in found and kind.__module__.startswith("sava."):
                found.add(kind)
                waiting.append(kind)
    roots = {CallerError, RetryableError, HostError}
    return [kind for kind in found if kind not in roots and not kind.__name__.startswith("_")]


def code_of(kind: type[SavaError]) -> str:
    """As ``sava.services.faults`` tells it."""
    known = next((failures._CODES[each] for each in kind.__mro__ if each in failures._CODES), None)
    return known or _CAPITAL.sub("_", kind.__name__).lower()


def meaning_of(kind: type[SavaError]) -> str:
    """What it stands for, and the text that it is always made with, which tells the way out."""
    text = text_of(kind)
    told = [first_sentences(kind.__dict__.get("__doc__")), f"*{text}*" if text else ""]
    return " ".join(filter(None, told))


def text_of(kind: type[SavaError]) -> str:
    """Empty if whoever raises it gives the text."""
    for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(kind)))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
            text = _template(node.args[0]) if node.func.attr == "__init__" else ""
            if re.search(r"[a-z]", text):
                return text
    return ""


def _template(node: ast.expr) -> str:
    """A text with the names of what is put into it."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
    return ""
