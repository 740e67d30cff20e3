"""Errors of the metadata store, by whose fault they are. Each has a stable ``code`` that survives the
wire.
"""

from __future__ import annotations

from typing import ClassVar

from sava.errors import CallerError, HostError, Outcome, RetryableError, SavaError


class InvalidRequest(CallerError):
    """A key, value, prefix, transaction or range that the store will never accept; says which limit."""

    code: ClassVar[str] = "invalid"


class LeaseNotFound(CallerError):
    """The lease expired or was revoked; what it held is gone. Grant a new one and register again."""

    code: ClassVar[str] = "lease_not_found"

    def __init__(self, lease: int) -> None:
        super().__init__(f"lease {lease} does not exist: it expired or was revoked; grant a new one")
        self.lease = lease


class Compacted(CallerError):
    """Events before ``floor`` are no longer held. Read the range again, compare, and watch from its revision
    + 1."""

    code: ClassVar[str] = "compacted"

    def __init__(self, floor: int) -> None:
        super().__init__(
            f"events before revision {floor} are compacted; read the range again and watch from there"
        )
        self.floor = floor


class NoSpace(CallerError):
    """The store's byte quota is used up. Deletes are still accepted."""

    code: ClassVar[str] = "no_space"


class SessionExpired(CallerError):
    """The session that made this request was closed by the cluster; whether an earlier attempt took effect is
    unknown."""

    outcome = Outcome.UNKNOWN

    code: ClassVar[str] = "session_expired"


class RequestForgotten(SessionExpired):
    """The session is open, but the answer to this request is no longer kept. The request is not executed a
    second time."""

    code: ClassVar[str] = "request_forgotten"


class Deposed(RetryableError):
    """A leader-only command reached the log in another term than its author's: the author no longer leads."""

    code: ClassVar[str] = "deposed"


class Unavailable(RetryableError):
    """No leader, no quorum or no room in a queue until the deadline. The request had no effect."""

    code: ClassVar[str] = "unavailable"


class Unfinished(Unavailable):
    """The request was begun and was not finished in time: it may take effect yet. Repeating it is safe."""

    outcome = Outcome.UNKNOWN

    code: ClassVar[str] = "unfinished"


class NotInitialized(RetryableError):
    """This node waits for ``sava cluster init`` (or to be added to a cluster)."""

    code: ClassVar[str] = "not_initialized"


class OutcomeUnknown(SavaError):
    """The request was appended somewhere and its fate was not learned in time: it may or may not take
    effect."""

    outcome = Outcome.UNKNOWN

    code: ClassVar[str] = "outcome_unknown"


class IdentityConflict(HostError):
    """Node id, cluster id or data directory do not belong together."""

    code: ClassVar[str] = "identity"


class NotAuthenticated(HostError):
    """A broker does not prove that it is one of this cluster: its secret, or its certificate, is another
    one."""

    code: ClassVar[str] = "not_authenticated"


class UnknownCommand(HostError):
    """The log holds a command that this version does not know. The node stops; upgrade it.

    Skipping it would make replicas differ."""

    code: ClassVar[str] = "unknown_command"


class SnapshotCorrupt(HostError):
    """A snapshot is damaged, cut short, or of a format that this version does not read; the node stops.

    Starting from it would give a state that no other replica has."""

    code: ClassVar[str] = "snapshot_corrupt"


_BY_CODE: dict[str, type[SavaError]] = {
    error.code: error
    for error in (
        InvalidRequest,
        NoSpace,
        SessionExpired,
        RequestForgotten,
        Deposed,
        Unavailable,
        Unfinished,
        NotInitialized,
        OutcomeUnknown,
    )
}


def refusal(code: str, message: str, detail: int = 0) -> SavaError:
    """The typed error of a ``Refused`` result (or of a code that came over the wire). A code of a newer
    version becomes ``InvalidRequest``: the request had no effect, and repeating it unchanged is not known to
    help."""
    if code == LeaseNotFound.code:
        return LeaseNotFound(detail)
    if code == Compacted.code:
        return Compacted(detail)
    return _BY_CODE.get(code, InvalidRequest)(message)
