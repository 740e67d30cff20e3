"""The root of every error that Sava raises on purpose.

Errors are types with fields, split by whose fault they are, and are never told apart by their text:

* ``CallerError``: the request is wrong; repeating it unchanged cannot help.
* ``RetryableError``: the request may be fine; the same request can succeed later. It had no effect.
* ``HostError``: this process cannot go on (disk, corruption, foreign data); an operator must act.

The one error that belongs to none of them is ``OutcomeUnknown`` (in ``sava.metadata.errors``): the request
may or may not have taken effect, and only the caller can decide what that means.
"""

from __future__ import annotations


class SavaError(Exception):
    """Base of all errors raised on purpose."""


class CallerError(SavaError):
    """The request itself is wrong."""


class RetryableError(SavaError):
    """The request had no effect and may succeed later."""


class HostError(SavaError):
    """This process or its machine cannot serve: disk, corruption, foreign data, a lock held by another."""
