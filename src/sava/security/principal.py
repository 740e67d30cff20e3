"""Principal: who makes a call.

A principal has a kind and a name, written ``user:alice``. It comes from a token or a certificate; a caller
that shows neither is ``anonymous:anonymous``, where that is allowed. ``broker:ID`` is another broker of the
cluster, which calls for itself; a broker that passes on a client's call passes on the client's principal.

The principal of a call is in a context variable while its handler runs (``current``), and so in the tasks
that the handler starts.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Final, NamedTuple

from sava.errors import CallerError

USER: Final = "user"
BROKER: Final = "broker"


class PrincipalInvalid(CallerError):
    """A text names no principal."""


class Principal(NamedTuple):
    kind: str
    name: str

    def __str__(self) -> str:
        return f"{self.kind}:{self.name}"

    @staticmethod
    def parse(text: str) -> Principal:
        """``user:alice``, or ``alice``, which means the same. Raises PrincipalInvalid."""
        # The first colon: names of service accounts have some of their own.
        kind, _, name = text.partition(":") if ":" in text else (USER, ":", text)
        if not kind or not name:
            raise PrincipalInvalid(f"{text[:200]!r} is not a principal; write user:NAME")
        return Principal(kind, name)


ANONYMOUS: Final = Principal("anonymous", "anonymous")
current: Final[ContextVar[Principal]] = ContextVar("principal", default=ANONYMOUS)
"""Who makes the call that this task works for."""
is_admin: Final[ContextVar[bool]] = ContextVar("principal_is_admin", default=False)
"""Whether that principal may manage the topic that the call is about. What others own is then open to it."""
