"""What can go wrong for a client, as types; and the way from a gRPC status to one of them.

A broker names its errors by a stable code in the trailing metadata; texts are for people. What a broker
refuses stays refused however often it is repeated (``Refused`` and its kin). What it cannot do now is tried
again by the client itself, and reaches the application as ``Unavailable`` or ``Timeout`` only when the time
for that is up: then nothing has happened. After ``OutcomeUnknown`` (of messages and acks) and ``Unanswered``
(of all else) something may have happened.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, Self, cast

import grpc
from grpc import aio

from sava.connecting import cause_of
from sava.errors import CallerError, Outcome, RetryableError, SavaError

CODE_KEY: Final = "sava-code"
OUTCOME_KEY: Final = "sava-outcome"


class ClientError(SavaError):
    """Base of all errors of the client. ``code`` is the broker's name for it, empty when the client itself
    found it."""

    def __init__(self, text: str, code: str = "") -> None:
        super().__init__(text, code)
        self.code = code

    def __str__(self) -> str:
        return str(self.args[0])

    @property
    def is_elsewhere(self) -> bool:
        """Nothing is wrong with the broker: it has not, or no longer, the topic. A look-up tells who has."""
        return self.code in ELSEWHERE

    def again(self) -> Self:
        """An error of its own for each of many waiters: a shared one would collect all their tracebacks."""
        return copy.copy(self)


class Refused(ClientError, CallerError):
    """The broker, or the client for it, will never accept this; says why."""


class Denied(Refused):
    """The client may not do this, or has not shown who it is: see its certificate and token."""


class Unauthenticated(Denied):
    """The broker does not accept the token or certificate, or wants one: it has ended, was revoked, or
    comes from another issuer."""


class PermissionDenied(Denied):
    """The broker knows the caller, who has no permission for this. The text has the command by which an
    administrator grants it."""


class TopicUnknown(Refused):
    """The topic does not exist, and could not be created. ``sava topics create`` does, if the namespace is
    there."""


class ProducerFenced(Refused):
    """A producer of the same name was opened after this one and has taken its place. Give each its own
    name."""


class ConsumerReplaced(Refused):
    """Another consumer of the same name has taken this one's place. Give each its own name."""


class Closed(ClientError, CallerError):
    """Used after ``close``."""


class Unavailable(ClientError, RetryableError):
    """No broker could do it within the time for retries. Nothing has happened; ``sava doctor`` says whether
    the cluster is well."""


class NotReached(Unavailable):
    """Could not connect to any broker; only gRPC's words say why."""


class Unanswered(Unavailable):
    """A request that changes something was sent, and no broker has answered it within the time for retries:
    it may have happened."""

    outcome = Outcome.UNKNOWN


class Timeout(ClientError, RetryableError):
    """It did not happen in time, and will not happen later."""


class OutcomeUnknown(ClientError):
    """The messages or acks were sent and no answer came: they may be stored or not. Sending messages again
    may store them twice; a reader can look."""

    outcome = Outcome.UNKNOWN


class DuplicateForgotten(ClientError):
    """Inside the client only: a repeated batch is in the topic, and the broker no longer knows where."""

    outcome = Outcome.DONE_BEFORE


ELSEWHERE: Final = frozenset({"not_owner", "topic_moved"})
"""Codes that say so."""

_BY_CODE: Final[dict[str, type[ClientError]]] = {
    "topic_unknown": TopicUnknown,
    "producer_fenced": ProducerFenced,
    "consumer_replaced": ConsumerReplaced,
    "duplicate_forgotten": DuplicateForgotten,
    # What follows says that the stream must be opened again, possibly elsewhere; opening it tells the rest.
    "sequence_gap": Unavailable,
    "outcome_unknown": Unavailable,
    "fenced": Unavailable,
    "epoch_taken": Unavailable,
    "topic_sealed": Unavailable,
}

_REFUSALS: Final = frozenset(
    {
        grpc.StatusCode.ALREADY_EXISTS,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.OUT_OF_RANGE,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.UNIMPLEMENTED,
    }
)
"""Every other status may be the connection's doing, and another attempt can succeed."""


_DENIALS: Final[dict[grpc.StatusCode, type[Denied]]] = {
    grpc.StatusCode.PERMISSION_DENIED: PermissionDenied,
    grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
}


def error_of(error: aio.AioRpcError, target: str) -> ClientError:
    trailing = dict(cast("tuple[tuple[str, str | bytes], ...]", error.trailing_metadata() or ()))
    code = trailing.get(CODE_KEY)
    code = code if isinstance(code, str) else ""
    status = error.code()
    refusal = _DENIALS.get(status, Refused)
    kind = _BY_CODE.get(code, refusal if status in _REFUSALS else Unavailable)
    if code:
        return kind(error.details() or status.name, code)
    cause = cause_of(error.details())
    if status is grpc.StatusCode.UNAVAILABLE:
        failure = kind if cause.remedy else NotReached
        return failure(f"broker {target} cannot be reached: {cause}")
    return kind(f"broker {target}: {status.name}: {cause}")


_UNSENT: Final = "failed to connect"
"""How gRPC's text begins when it has found no connection to send a call on. The text is no contract: with
another one the outcome is called unknown, which is never wrong, only less useful."""


def of_change(error: aio.AioRpcError, target: str) -> ClientError:
    """As ``error_of``, for a request that changes something: if it may have reached the broker, and the
    broker has not said what became of it, it is Unanswered."""
    failure = error_of(error, target)
    trailing = dict(cast("tuple[tuple[str, str | bytes], ...]", error.trailing_metadata() or ()))
    outcome = trailing.get(OUTCOME_KEY)
    is_open = outcome == Outcome.UNKNOWN if failure.code else not (error.details() or "").startswith(_UNSENT)
    if isinstance(failure, Unavailable) and is_open:
        return Unanswered(f"{failure}; it may have happened", failure.code)
    return failure


@contextmanager
def translated(target: str) -> Iterator[None]:
    """gRPC's errors that are raised inside become the client's."""
    try:
        yield
    except aio.AioRpcError as error:
        raise error_of(error, target) from None
