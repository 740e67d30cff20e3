"""Commands: what the replicated log carries, and what applying one returns.

A log entry holds one ``Proposal``: a command, the time at which the leader accepted it, and the session that
makes a retry harmless. Everything that an apply may depend on is inside the proposal or the state machine;
nothing is read from the node that applies it.

Encoding is canonical: tagged msgpack arrays with a fixed field order. New fields go to the end with a
default; a new command gets a new tag and is proposed only once the replicated cluster version allows it.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import msgspec

from sava.metadata.errors import InvalidRequest, UnknownCommand


class KeyValue(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A key with its history in numbers: the global revisions at which it was created and last changed, and
    how many times it was written since its creation (1 = just created). ``lease`` is 0 or the lease that will
    delete it."""

    key: str
    value: bytes
    create_revision: int
    mod_revision: int
    version: int
    lease: int = 0


class Event(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One change. ``kv`` is None for a deletion. All events of one revision are delivered together, sorted by
    key."""

    revision: int
    key: str
    kv: KeyValue | None
    prev: KeyValue | None


# -- operations inside a transaction -------------------------------------------------------------------------


class Put(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Without a lease the key is detached from any lease that it had."""

    key: str
    value: bytes
    lease: int = 0


class Delete(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Deleting a missing key changes nothing: no revision, no event."""

    key: str


class DeletePrefix(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """``prefix`` ends in '/', so that deleting ``/a/`` cannot touch ``/ab``."""

    prefix: str


class AllocateId(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """Add ``count`` to the counter stored under ``key`` (decimal text, absent = 0); returns the first new id.
    Ids are unique and grow; gaps are allowed."""

    key: str
    count: int = 1


class Get(msgspec.Struct, frozen=True, array_like=True, tag=5):
    key: str


Operation = Put | Delete | DeletePrefix | AllocateId | Get


class Target(IntEnum):
    VERSION = 0
    """0 means absent: ``Compare(key, Target.VERSION, Relation.EQUAL, 0)`` is 'must not exist'."""
    CREATE_REVISION = 1
    MOD_REVISION = 2
    LEASE = 3


class Relation(IntEnum):
    EQUAL = 0
    NOT_EQUAL = 1
    LESS = 2
    GREATER = 3


class Compare(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Compare a number of the key's history (0 when absent) — never its value: a value that went A → B → A
    would pass."""

    key: str
    target: Target
    relation: Relation
    operand: int


# -- commands ------------------------------------------------------------------------------------------------


class Txn(msgspec.Struct, frozen=True, array_like=True, tag=10):
    """If all comparisons hold, do ``then``, else ``otherwise``; atomically, under one revision."""

    compare: tuple[Compare, ...] = ()
    then: tuple[Operation, ...] = ()
    otherwise: tuple[Operation, ...] = ()


class TxnBatch(msgspec.Struct, frozen=True, array_like=True, tag=18):
    """Many transactions in one log entry, in order, under one revision. Each takes effect as a whole or not
    at all by its own comparisons: one that is refused does not hold up the others. They hold puts and deletes
    only and have no ``otherwise``, because the result does not carry what operations return: a session
    remembers results, and those of a thousand puts would push out all others."""

    txns: tuple[Txn, ...]


class LeaseGrant(msgspec.Struct, frozen=True, array_like=True, tag=11):
    ttl_ms: int


class LeaseRevoke(msgspec.Struct, frozen=True, array_like=True, tag=12):
    """Deletes exactly the keys attached to the lease, under one revision."""

    lease: int


class LeaseExpire(msgspec.Struct, frozen=True, array_like=True, tag=13):
    """Proposed by the leader. Has no effect unless ``generation`` is still the lease's: a touch that was
    committed between the leader's look at the clock and this entry keeps the lease alive."""

    lease: int
    generation: int


class LeaseTouch(msgspec.Struct, frozen=True, array_like=True, tag=14):
    """A keep-alive that must be ordered against an expiry already in the log; increments the generation."""

    lease: int


class SessionOpen(msgspec.Struct, frozen=True, array_like=True, tag=15):
    """Returns a new session id. ``nonce`` is drawn by the opener: repeating the open returns the same
    session."""

    nonce: bytes


class SessionExpire(msgspec.Struct, frozen=True, array_like=True, tag=16):
    """Proposed by the leader: forget sessions that proposed nothing since ``before_ms`` (stamp time)."""

    before_ms: int


class SetVersion(msgspec.Struct, frozen=True, array_like=True, tag=17):
    """Raise the cluster version; commands of that version may be proposed afterwards. Never lowers."""

    version: int


Command = (
    Txn
    | TxnBatch
    | LeaseGrant
    | LeaseRevoke
    | LeaseExpire
    | LeaseTouch
    | SessionOpen
    | SessionExpire
    | SetVersion
)


class Proposal(msgspec.Struct, frozen=True, array_like=True):
    """One log entry's payload.

    ``stamp_ms`` is set by the leader that appends it (wall clock, information only; the machine's clock is
    the largest stamp seen). ``session``/``seq`` name the request for exactly-once; ``low`` says that the
    session will never ask again about anything below it. ``fence_term`` != 0 makes it a leader-only command:
    it applies only if appended in that term."""

    command: Command
    stamp_ms: int = 0
    session: int = 0
    seq: int = 0
    low: int = 0
    fence_term: int = 0


# -- results -------------------------------------------------------------------------------------------------


class PutResult(msgspec.Struct, frozen=True, array_like=True, tag=1):
    prev: KeyValue | None


class DeleteResult(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """``prev`` holds what was deleted, sorted by key (empty: nothing was there)."""

    prev: tuple[KeyValue, ...]


class AllocateResult(msgspec.Struct, frozen=True, array_like=True, tag=3):
    first: int
    count: int


class GetResult(msgspec.Struct, frozen=True, array_like=True, tag=4):
    kv: KeyValue | None


OperationResult = PutResult | DeleteResult | AllocateResult | GetResult


class TxnResult(msgspec.Struct, frozen=True, array_like=True, tag=10):
    succeeded: bool
    revision: int
    """The store's revision after this transaction (its own, when it changed something)."""
    results: tuple[OperationResult, ...]


class LeaseResult(msgspec.Struct, frozen=True, array_like=True, tag=11):
    lease: int
    ttl_ms: int
    revision: int


class SessionResult(msgspec.Struct, frozen=True, array_like=True, tag=12):
    session: int


class Done(msgspec.Struct, frozen=True, array_like=True, tag=13):
    """For commands without a value. ``changed`` is False when there was nothing to do."""

    changed: bool
    revision: int


class CommandRefused(msgspec.Struct, frozen=True, array_like=True, tag=14):
    """The command was applied and had no effect, for the reason named by ``code`` (see
    ``metadata.errors``)."""

    code: str
    message: str
    detail: int = 0


class BatchResult(msgspec.Struct, frozen=True, array_like=True, tag=15):
    """``outcomes``: of each transaction, in order: whether its comparisons held, or why it was refused."""

    revision: int
    """The store's revision after the batch; that of every key that it changed."""
    outcomes: tuple[bool | CommandRefused, ...]


Result = TxnResult | BatchResult | LeaseResult | SessionResult | Done | CommandRefused


# -- encoding ------------------------------------------------------------------------------------------------

UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""All that decoding hostile bytes can raise (a string that is not UTF-8 is no DecodeError)."""

_encoder = msgspec.msgpack.Encoder()
_proposal_decoder = msgspec.msgpack.Decoder(Proposal)
_result_decoder: msgspec.msgpack.Decoder[Result] = msgspec.msgpack.Decoder(Result)


def encode(value: Any) -> bytes:
    return _encoder.encode(value)


def decode_proposal(data: bytes) -> Proposal:
    """Raises UnknownCommand: an entry in the log that this version cannot read must stop the node, not be
    skipped."""
    try:
        return _proposal_decoder.decode(data)
    except UNREADABLE as error:
        raise UnknownCommand(
            f"the log holds a command that this version cannot read ({error}); upgrade this node"
        ) from error


def decode_result(data: bytes) -> Result:
    try:
        return _result_decoder.decode(data)
    except UNREADABLE as error:
        raise InvalidRequest(f"malformed result: {error}") from error
