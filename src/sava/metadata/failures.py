"""Errors by name: the stable code of every error that may leave a node, and the way back from a code to the
error.

A request may fail on another node, or inside an applied command (``Refused``); either way its caller gets
the type that would have been raised here. Unknown codes, from a newer node, become the base class: never a
guess.
"""

from __future__ import annotations

from sava.errors import SavaError
from sava.metadata import errors
from sava.metadata.commands import Refused
from sava.metadata.errors import Compacted, LeaseNotFound, OutcomeUnknown
from sava.metadata.peer import Failed
from sava.raft.errors import Busy, MembershipBusy, MembershipRefused, NotLeader, TransferRefused, Transferring
from sava.raft.types import NodeId
from sava.wal.errors import DiskFull

INTERNAL = "internal"

_BY_TEXT: dict[str, type[SavaError]] = {
    **{
        kind.code: kind
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, SavaError) and hasattr(kind, "code")
    },
    "busy": Busy,
    "membership_busy": MembershipBusy,
    "membership_refused": MembershipRefused,
    "transfer_refused": TransferRefused,
    "disk_full": DiskFull,
}
"""Errors that are made from their text."""

_CODES: dict[type[SavaError], str] = {
    **{kind: code for code, kind in _BY_TEXT.items()},
    NotLeader: "not_leader",
    Transferring: "transferring",
}


def code_of(error: SavaError) -> str:
    return next((_CODES[kind] for kind in type(error).__mro__ if kind in _CODES), INTERNAL)


def detail_of(error: SavaError) -> int:
    """The number that belongs to the error, 0 when it has none."""
    match error:
        case LeaseNotFound():
            return error.lease
        case Compacted():
            return error.floor
        case NotLeader():
            return error.leader
        case Transferring():
            return error.target
        case _:
            return 0


def error_from(code: str, message: str, detail: int = 0) -> SavaError:
    match code:
        case LeaseNotFound.code:
            return LeaseNotFound(detail)
        case Compacted.code:
            return Compacted(detail)
        case "not_leader":
            return NotLeader(NodeId(detail))
        case "transferring":
            return Transferring(NodeId(detail))
        case _:
            return _BY_TEXT.get(code, SavaError)(message)


def error_of(reply: Failed | Refused) -> SavaError:
    if isinstance(reply, Failed) and reply.maybe_applied:
        return OutcomeUnknown(reply.message)
    return error_from(reply.code, reply.message, reply.detail)
