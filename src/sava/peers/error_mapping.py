"""Errors on the wire: a gRPC status for tools, and Sava's own stable ``code`` in the trailing metadata for
programs.

The text of an error is for people and may change; the code and the number beside it are the contract. What
arrives is turned back into the same type that was raised, so a caller handles ``Compacted`` alike whether
the store is in its process or far away.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Final, NoReturn, cast

import grpc
from grpc import aio

from sava.connecting import Cause, cause_of
from sava.errors import MAX_TEXT_CHARS, CallerError, HostError, Outcome, RetryableError, SavaError, cut
from sava.metadata import peer
from sava.metadata.errors import OutcomeUnknown, Unavailable
from sava.metadata.peer import detail_of, error_from
from sava.security.permissions import PermissionDenied, Unauthenticated
from sava.security.quotas import QuotaExceeded
from sava.topics.errors import LimitReached, NotController, NotOwner, OwnedByAnother

Trailing = tuple[tuple[str, str | bytes], ...]

LEAST_S: Final = 0.05

CODE_KEY = "sava-code"
DETAIL_KEY = "sava-detail"
OUTCOME_KEY = "sava-outcome"
"""What became of the request (``sava.errors.Outcome``). A receiver that does not know the code of an error
knows by this whether the request may be repeated."""

ELSEWHERE: Final = (NotOwner, NotController)
"""Not an answer yet: whatever serves the call (``forwarding``) lets the right broker answer it."""


class Relayed(SavaError):
    """What another broker answered, or how the call to it ended; passed on as it came. ``code`` is Sava's
    name of the error, empty if the other broker gave none."""

    outcome = Outcome.UNKNOWN

    def __init__(self, status: grpc.StatusCode, text: str, trailing: Trailing = ()) -> None:
        super().__init__(text)
        self.status = status
        self.trailing = trailing
        code = dict(trailing).get(CODE_KEY, "")
        self.code = code if isinstance(code, str) else ""

    @property
    def outcome_there(self) -> Outcome:
        """What the other broker says of the request. Without its word a refusal is known by its status, and
        any other end leaves the outcome open."""
        outcome = dict(self.trailing).get(OUTCOME_KEY)
        return _OUTCOMES.get(outcome, Outcome.NOT_DONE if self.status in REFUSALS else Outcome.UNKNOWN)


class BrokerUnreachable(Unavailable):
    """No connection to the broker was made, so that nothing was sent; ``cause`` gives gRPC's reason."""

    def __init__(self, target: str, cause: Cause) -> None:
        super().__init__(f"{target} cannot be reached: {cause}")
        self.target = target
        self.cause = cause


class CallUnknown(CallerError):
    """The other side does not know the call: it is no admin port, or a broker of another version."""


class CallRefused(CallerError):
    """The call was refused with a gRPC status, and without a name for the error."""


class CallFailed(RetryableError):
    """A call that only reads was answered with the gRPC status of a fault."""


def relayed(error: aio.AioRpcError, *, target: str) -> Relayed:
    trailing = cast(Trailing, tuple(error.trailing_metadata() or ()))
    answer = Relayed(error.code(), error.details() or error.code().name, trailing)
    if answer.code or answer.status not in TRANSPORT:
        return answer
    # A broker that stops cancels calls; to a caller who did not, it is unavailable.
    text = f"{target} did not answer: {answer.status.name.lower()}: {cause_of(error.details()).text}"
    return Relayed(grpc.StatusCode.UNAVAILABLE, text, trailing)


TRANSPORT: Final = frozenset(
    (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.DEADLINE_EXCEEDED)
)
"""How a call ends that nothing has answered."""
REFUSALS: Final = frozenset(
    (
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.ALREADY_EXISTS,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.OUT_OF_RANGE,
        grpc.StatusCode.UNIMPLEMENTED,
    )
)
"""Statuses with which a server says that it did not do it."""


_OUTCOMES: Final[dict[str | bytes | None, Outcome]] = {each.value: each for each in Outcome}
_CAPITAL = re.compile(r"(?<!^)(?=[A-Z])")


@cache
def _snake_case(name: str) -> str:
    return _CAPITAL.sub("_", name).lower()


def code_of(error: SavaError) -> str:
    """The code under which the metadata store knows the error, otherwise the name of its type:
    ``TopicUnknown`` is ``topic_unknown``."""
    known = peer.code_of(error)
    return known if known != peer.INTERNAL else _snake_case(type(error).__name__)


def status_of(error: SavaError) -> grpc.StatusCode:
    match error:
        case OutcomeUnknown():
            return grpc.StatusCode.UNKNOWN
        case QuotaExceeded():
            return grpc.StatusCode.RESOURCE_EXHAUSTED
        case PermissionDenied():
            return grpc.StatusCode.PERMISSION_DENIED
        case Unauthenticated():
            return grpc.StatusCode.UNAUTHENTICATED
        case OwnedByAnother():
            return grpc.StatusCode.PERMISSION_DENIED
        case LimitReached():
            return grpc.StatusCode.RESOURCE_EXHAUSTED
        case CallerError():
            return grpc.StatusCode.FAILED_PRECONDITION
        case RetryableError():
            return grpc.StatusCode.UNAVAILABLE
        case HostError():
            return grpc.StatusCode.FAILED_PRECONDITION
        case _:
            return grpc.StatusCode.INTERNAL


def trailing_of(error: SavaError) -> Trailing:
    """What goes with an error over the wire."""
    return (
        (CODE_KEY, code_of(error)),
        (DETAIL_KEY, str(detail_of(error))),
        (OUTCOME_KEY, error.outcome.value),
    )


def text_of(error: SavaError) -> str:
    """What a caller reads. Each error cuts what it quotes; this is for those that quote much."""
    return cut(str(error), MAX_TEXT_CHARS)


async def answer(context: Any, error: SavaError) -> NoReturn:
    """End the call with ``error``, whatever it is."""
    if isinstance(error, Relayed):
        await context.abort(error.status, text_of(error), error.trailing)
    await context.abort(status_of(error), text_of(error), trailing_of(error))
    raise AssertionError("abort always raises")


@contextmanager
def after_change(change: str) -> Iterator[None]:
    """Around what follows a change that is made: describing it. An error in there must not say that nothing
    was done, which is all that its own type can say."""
    try:
        yield
    except SavaError as error:
        raise OutcomeUnknown(f"{change}, but it could not be described: {error}") from error


def raised_by(error: aio.AioRpcError, *, target: str, check: str | None = None) -> SavaError:
    """The error that the other side raised, or how the call itself failed. ``check``: the call was a change,
    it may have been sent, and this command shows whether it took effect."""
    answered = _answered(error)
    if answered is not None:
        failure = answered
    elif check is not None and error.code() not in REFUSALS:
        failure = OutcomeUnknown(_silence(error, target))
    else:
        failure = _unanswered(error, target)
    if failure.outcome is not Outcome.UNKNOWN:
        return failure
    if check is not None:
        return OutcomeUnknown(f"{failure}; it may or may not have happened, `{check}` shows which")
    # A read has nothing that could be unknown.
    failure.outcome = Outcome.NOT_DONE
    return failure


def _answered(error: aio.AioRpcError) -> SavaError | None:
    """The error that the other side named; None if it named none."""
    trailing = {item[0]: item[1] for item in cast(Trailing, error.trailing_metadata() or ())}
    code, detail, outcome = (trailing.get(key) for key in (CODE_KEY, DETAIL_KEY, OUTCOME_KEY))
    if not isinstance(code, str):
        return None
    raised = error_from(code, error.details() or code, int(detail) if isinstance(detail, str) else 0)
    if outcome in _OUTCOMES:
        raised.outcome = _OUTCOMES[outcome]
    elif type(raised) is SavaError and error.code() in (*REFUSALS, grpc.StatusCode.UNAVAILABLE):
        # Its family is known by the status, though not its type: it was refused, or could not be done.
        raised.outcome = Outcome.NOT_DONE
    return raised


def _silence(error: aio.AioRpcError, target: str) -> str:
    match error.code():
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return f"{target} did not answer within the deadline"
        case grpc.StatusCode.UNAVAILABLE:
            return f"the answer of {target} was lost: {cause_of(error.details()).text}"
        case status:
            return f"{target} failed with {status.name}: {cause_of(error.details())}"


def _unanswered(error: aio.AioRpcError, target: str) -> SavaError:
    """How a call ended that has changed nothing."""
    status = error.code()
    match status:
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return Unavailable(_silence(error, target))
        case grpc.StatusCode.UNAVAILABLE:
            return BrokerUnreachable(target, cause_of(error.details()))
        case grpc.StatusCode.UNIMPLEMENTED:
            return CallUnknown(
                f"{target} does not know this call: see that it is an admin port (50051 by default), and "
                "of a broker of this version"
            )
        case _:
            kind = CallRefused if status in REFUSALS else CallFailed
            return kind(_silence(error, target))


def remaining(context: Any, default: float) -> float:
    """How long a call may take: what its caller allowed, a little less so that our own error arrives before
    gRPC's, or ``default``. A tenth is kept back, at least 0.1 s and at most 1 s: an answer that says why
    nothing was done is worth more than the last tenth of waiting for it."""
    left: float | None = context.time_remaining()
    if left is None:
        return default
    margin = min(max(left / 10, 0.1), 1.0)
    return max(min(left - margin, default), LEAST_S)
