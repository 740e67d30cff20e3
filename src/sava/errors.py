"""The root of every error that Sava raises on purpose.

Errors are types with fields, split by whose fault they are, and callers never tell them apart by their text:

* ``CallerError``: the request is wrong; repeating it unchanged cannot help.
* ``RetryableError``: the request may be fine; the same request can succeed later.
* ``HostError``: this process cannot continue (disk, corruption, foreign data); an operator must act.

Beside its family, every error type carries its ``outcome``: what became of the request that raised it. A
caller that takes an unknown outcome for a failure repeats what was done, or reports a loss that is none.
``OutcomeUnknown`` (in ``sava.metadata.errors`` and ``sava.client``) belongs to no family: the request may or
may not have taken effect, and only the caller can decide what that means.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

SHOWN_CHARS: Final = 200


MAX_TEXT_CHARS: Final = 4000
"""Of a whole error text, with which it still fits into the header of an answer."""


def cut(text: str, limit: int = SHOWN_CHARS) -> str:
    """The text, at most ``limit`` characters of it: as ``shown``, for what is a name otherwise."""
    return text if len(text) <= limit else f"{text[:limit]}…"


def shown(value: object, limit: int = SHOWN_CHARS) -> str:
    """What a caller gave, for an error's text: as Python writes it, at most ``limit`` characters of it. A
    name of megabytes must not become an answer of megabytes."""
    if isinstance(value, str | bytes):
        return repr(value) if len(value) <= limit else f"{value[:limit]!r}…"
    text = repr(value)
    return text if len(text) <= limit else f"{text[:limit]}…"


class Outcome(StrEnum):
    """What became of the request that an error ends."""

    NOT_DONE = "not done"
    """It had no effect, and will have none."""
    PARTLY = "partly done"
    """Some of it was done and stays; the text says which part was not."""
    DONE_BEFORE = "done before"
    """An earlier attempt of the same request took effect; this one had nothing left to do."""
    UNKNOWN = "unknown"
    """It may have taken effect, or may yet. Only a read can tell."""


class SavaError(Exception):
    """Base of all errors raised on purpose. An error of this very type came over the wire with a code that
    this version does not know, so that its outcome is unknown unless the broker has sent that as well."""

    outcome: Outcome = Outcome.UNKNOWN


class CallerError(SavaError):
    """The request itself is wrong."""

    outcome = Outcome.NOT_DONE


class RetryableError(SavaError):
    """The same request may succeed later."""

    outcome = Outcome.NOT_DONE


class HostError(SavaError):
    """This process or its machine cannot serve: disk, corruption, foreign data, a lock held by another."""

    outcome = Outcome.NOT_DONE
