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
    (OutcomeUnknown, "Unknown", "The request may or may not have taken effect."),
    (HostError, "A process or a machine", "It stops; an operator must act."),
    (SavaError, "Others", ""),
)
STATUS: Final = {
    OutcomeUnknown: grpc.StatusCode.UNKNOWN,
    CallerError: grpc.StatusCode.FAILED_PRECONDITION,
    RetryableError: grpc.StatusCode.UNAVAILABLE,
    HostError: grpc.StatusCode.FAILED_PRECONDITION,
    SavaError: grpc.StatusCode.INTERNAL,
}
OUTCOMES: Final = {
    Outcome.NOT_DONE: ("It had no effect, and will have none.", "Repeat it, or drop it."),
    Outcome.PARTLY: (
        "Some of it is done and stays; the text says what is missing.",
        "Repeat it: what is done is left as it is.",
    ),
    Outcome.DONE_BEFORE: ("An earlier attempt of the same request took effect.", "Nothing."),
    Outcome.UNKNOWN: (
        "It may have taken effect, or may yet: the deadline passed, or the connection broke, after the "
        "request was sent.",
        "Read first. The text of an admin call names the command that shows the state.",
    ),
}
"""What each outcome means, and what a caller does about it."""
_CAPITAL: Final = re.compile(r"(?<!^)(?=[A-Z])")

PRINTED: Final = ("sava.cli.", "sava.load.", "sava.local_cluster")
"""Modules whose errors no caller gets: a command prints them."""

INTRODUCTION: Final = """
Errors are types, told apart by whose fault they are, never by their text. On the wire an error has a gRPC
status and, in the trailing metadata, its code as `sava-code` (Sava's services; [Danube's](../danube.md) have
Danube's codes). The code is the type's name in snake case, `batch_corrupt` for `BatchCorrupt`, unless its row
names another. Brokers and commands raise the type again. Sava's client has few types of its own, which say
[what became of the request](../client.md#send); their `code` is the broker's.

The text of an error names the thing, the cause and the way out; errors that only a command prints have
nothing else and are not listed. In italics: a text that needs no explanation, with an ellipsis for what
differs.

## Not done, or unknown

Every error type says what became of the request, as `outcome`; brokers send it as `sava-outcome` beside the
code. The command line ends with code 4 if the outcome is unknown, and with 1 otherwise. An error is *not
done* unless its row says otherwise: an error before anything was sent (no connection), a refusal by the
broker, a lost answer to a call that only reads.

{outcomes}
"""


def render() -> str:
    listed = [kind for kind in kinds() if not kind.__module__.startswith(PRINTED) and not is_base(kind)]
    left = sorted(listed, key=lambda kind: (kind.__name__, kind.__module__))
    sections = []
    for family, title, meaning in FAMILIES:
        members = [kind for kind in left if issubclass(kind, family)]
        left = [kind for kind in left if kind not in members]
        rows = {kind.__name__: (f"`{kind.__name__}`", _row(kind)) for kind in reversed(members)}
        head = f"## {title}\n\n`{family.__name__}`, gRPC status `{STATUS[family].name}`. {meaning}".rstrip()
        sections.append(f"{head}\n\n" + table(("error", "meaning"), reversed(rows.values())))
    outcomes = table(
        ("outcome", "the request", "what to do"),
        [(f"**{outcome.value}**", *texts) for outcome, texts in OUTCOMES.items()],
    )
    return page("Errors", INTRODUCTION.replace("{outcomes}", outcomes), *sections)


def is_base(kind: type[SavaError]) -> bool:
    """Of no use by itself: only its subclasses are raised."""
    return first_sentences(kind.__dict__.get("__doc__")).startswith("Base of")


def _row(kind: type[SavaError]) -> str:
    """What is not the rule comes first: an outcome, a code that is not the name."""
    other = [] if kind.outcome is Outcome.NOT_DONE else [f"**{kind.outcome.value}**"]
    if code_of(kind) != _snake(kind):
        other.append(f"code `{code_of(kind)}`")
    return f"{', '.join(other)}: {meaning_of(kind)}" if other else meaning_of(kind)


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
    """As ``sava.peers.error_mapping`` sends it."""
    return next((peer._CODES[each] for each in kind.__mro__ if each in peer._CODES), _snake(kind))


def _snake(kind: type[SavaError]) -> str:
    return _CAPITAL.sub("_", kind.__name__).lower()


def meaning_of(kind: type[SavaError]) -> str:
    """The docstring, or else the text that the error always has."""
    text = text_of(kind)
    return first_sentences(kind.__dict__.get("__doc__")) or (f"*{text}*" if text else "")


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
