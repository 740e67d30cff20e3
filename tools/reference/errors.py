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
from sava.errors import CallerError, HostError, Outcome, RetryableError, SavaError
from sava.metadata import peer
from sava.metadata.errors import OutcomeUnknown
from tools.reference.pages import first_sentences, page, table

FAMILIES: Final = (
    (CallerError, "The request is wrong", "Repeating it unchanged cannot help."),
    (RetryableError, "May pass", "The same request can succeed later."),
    (OutcomeUnknown, "Not known", "The request may or may not have taken effect."),
    (HostError, "A process or a machine", "It stops; an operator must act."),
    (SavaError, "Others", "Told as they are."),
)
STATUS: Final = {
    OutcomeUnknown: grpc.StatusCode.UNKNOWN,
    CallerError: grpc.StatusCode.FAILED_PRECONDITION,
    RetryableError: grpc.StatusCode.UNAVAILABLE,
    HostError: grpc.StatusCode.FAILED_PRECONDITION,
    SavaError: grpc.StatusCode.INTERNAL,
}
OUTCOMES: Final = {
    Outcome.NOT_DONE: ("The request had no effect, and will have none.", "It may be repeated, or given up."),
    Outcome.PARTLY: (
        "Some of it was done and stays; the text says what was not.",
        "Repeat it: what is done is left as it is.",
    ),
    Outcome.DONE_BEFORE: ("An earlier attempt of the same request took effect.", "Nothing is left to do."),
    Outcome.UNKNOWN: (
        "It may have taken effect, or may yet: the deadline passed, or the connection broke, after the "
        "request had gone out.",
        "Read first. The text of an admin call names the command that shows which.",
    ),
}
"""What each outcome means, and what a caller does about it."""
_CAPITAL: Final = re.compile(r"(?<!^)(?=[A-Z])")

INTRODUCTION: Final = """
Errors are types, told apart by whose fault they are, never by their text. On the wire an error has a gRPC
status, and its own name as `sava-code` in the trailing metadata (Sava's services; [Danube's](../danube.md)
have the codes of Danube). Brokers and commands raise the type again. Sava's client has few types of its own,
which say [what became of the request](../client.md#send), with that name as their `code`.

## Not done, or unknown

Every error type says what became of the request, as `outcome`; brokers send it as `sava-outcome` beside the
code. The command line ends with code 4 if the outcome is unknown, and with 1 otherwise. An error before
anything was sent (the connection was refused, or did not come about) is always *not done*. So is a refusal of
the broker. A lost answer to a call that only reads is *not done* as well: there was nothing to do.

{outcomes}

The text of an error names the thing, the cause and the way out. Where it is always the same it stands here
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
                    kind.outcome.value,
                    f"`{kind.__module__}`",
                    meaning_of(kind),
                )
                for kind in members
            ]
            head = f"## {title}\n\n`{family.__name__}`, gRPC status `{STATUS[family].name}`. {meaning}"
            sections.append(
                f"{head}\n\n" + table(("error", "code", "outcome", "defined in", "meaning"), rows)
            )
    return page("Errors", INTRODUCTION.replace("{outcomes}", _outcomes()), *sections)


def _outcomes() -> str:
    """Which errors leave a request in which state. Not done is the rule; the others are named."""
    rows = []
    for outcome, (meaning, way_out) in OUTCOMES.items():
        named = sorted({f"`{kind.__name__}`" for kind in kinds() if kind.outcome is outcome})
        errors = "all others" if outcome is Outcome.NOT_DONE else ", ".join(named)
        rows.append((f"**{outcome.value}**", meaning, way_out, errors))
    return table(("outcome", "the request", "what to do", "errors"), rows)


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
    """As ``sava.peers.error_mapping`` tells it."""
    known = next((peer._CODES[each] for each in kind.__mro__ if each in peer._CODES), None)
    return known or _CAPITAL.sub("_", kind.__name__).lower()


def meaning_of(kind: type[SavaError]) -> str:
    """What it stands for, and the text that it is always made with, which tells the way out."""
    text = text_of(kind)
    told = [first_sentences(kind.__dict__.get("__doc__")), f"*{text}*" if text else ""]
    return " ".join(filter(None, told))


def text_of(kind: type[SavaError]) -> str:
    """Empty if the code that raises it gives the text."""
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
