"""Limits, and the rules that a proposal must keep before it may enter the log.

Checked by the node that accepts a request, so that a refused request costs no log entry and no fsync, and so
that applying never meets something that it cannot do. A store without limits is filled by the first caller
with a bug: one value of a gigabyte stalls every heartbeat behind it.

The limits that apply itself reads (the byte quota, the caps on prefix deletion, sessions and leases) are part
of the replicated protocol, not configuration: two nodes with different numbers would apply the same entry
differently and diverge. Change them only together with the cluster version.
"""

from __future__ import annotations

import msgspec

from sava.metadata.commands import (
    AllocateId,
    Command,
    Delete,
    DeletePrefix,
    LeaseExpire,
    LeaseGrant,
    LeaseRevoke,
    LeaseTouch,
    Operation,
    Proposal,
    Put,
    SessionOpen,
    Txn,
    TxnBatch,
)
from sava.metadata.errors import InvalidRequest

MAX_INT = (1 << 63) - 1
"""Every number that is stored stays encodable (msgpack ends at 64 bits) and fits a signed field on the
wire."""


class Limits(msgspec.Struct, frozen=True):
    """Checked before proposing (a refused request costs no log entry) and the quota again at apply."""

    max_key_bytes: int = 1024
    max_value_bytes: int = 1 << 20
    max_txn_operations: int = 512
    max_txn_bytes: int = 4 << 20
    """Also of a batch, all its transactions together."""
    max_batch_operations: int = 2048
    """Comparisons and operations of all transactions of a batch: one entry is applied in one turn of the
    event loop, and this many take a few milliseconds."""
    max_total_bytes: int = 512 << 20
    max_sessions: int = 4096
    max_session_window: int = 1024
    max_session_bytes: int = 256 << 10
    """Remembered answers of one session; the newest is kept even when it alone is larger."""
    max_delete_keys: int = 10_000
    """Keys that the prefix deletions of one transaction may remove: all their events are one indivisible
    batch."""
    max_delete_bytes: int = 16 << 20
    max_leases: int = 65_536
    min_ttl_ms: int = 500
    max_ttl_ms: int = 3_600_000
    max_nonce_bytes: int = 64


DEFAULT_LIMITS = Limits()


def key_bytes(key: str) -> int:
    """Length as encoded; most keys are ASCII, where it is the number of characters."""
    return len(key) if key.isascii() else len(key.encode())


def is_prefix(text: str) -> bool:
    """A prefix ends on a segment boundary: ``/a/`` covers ``/a/b`` and never ``/ab``."""
    return text.endswith("/")


def check_key(key: str, limits: Limits) -> None:
    _check_path(key, "key", limits)
    if key.endswith("/"):
        raise InvalidRequest(f"key {_shown(key)} must not end in '/': that names a prefix")


def check_prefix(prefix: str, limits: Limits) -> None:
    _check_path(prefix, "prefix", limits)
    if not is_prefix(prefix):
        raise InvalidRequest(
            f"prefix {_shown(prefix)} must end in '/': otherwise '/a' would also cover '/ab'"
        )


def check_key_or_prefix(text: str, limits: Limits) -> None:
    """What a range or a watch may name."""
    if is_prefix(text):
        check_prefix(text, limits)
    else:
        check_key(text, limits)


def check_proposal(proposal: Proposal, limits: Limits) -> None:
    """Raise InvalidRequest naming the key and the limit."""
    for name, value in (
        ("stamp_ms", proposal.stamp_ms),
        ("session", proposal.session),
        ("seq", proposal.seq),
        ("low", proposal.low),
        ("fence_term", proposal.fence_term),
    ):
        if not 0 <= value <= MAX_INT:
            raise InvalidRequest(f"{name} {value} is outside 0..{MAX_INT}")
    if proposal.session and proposal.seq < 1:
        raise InvalidRequest(
            "a request of a session is numbered from 1: without a number a retry cannot be recognised"
        )
    _check_command(proposal.command, limits)


def _check_command(command: Command, limits: Limits) -> None:
    match command:
        case Txn():
            _check_txn(command, limits)
        case TxnBatch(txns):
            _check_batch(txns, limits)
        case LeaseGrant(ttl_ms):
            if not limits.min_ttl_ms <= ttl_ms <= limits.max_ttl_ms:
                raise InvalidRequest(
                    f"ttl of {ttl_ms} ms is outside the limits {limits.min_ttl_ms}..{limits.max_ttl_ms} ms"
                )
        case LeaseRevoke(lease) | LeaseExpire(lease) | LeaseTouch(lease):
            if not 1 <= lease <= MAX_INT:
                raise InvalidRequest(f"{lease} is not a lease id")
        case SessionOpen(nonce):
            if not 1 <= len(nonce) <= limits.max_nonce_bytes:
                raise InvalidRequest(
                    f"a nonce of {len(nonce)} bytes is outside the limits 1..{limits.max_nonce_bytes}"
                )
        case _:
            for name in command.__struct_fields__:
                _check_number(getattr(command, name), name)


def _check_batch(txns: tuple[Txn, ...], limits: Limits) -> None:
    count = size = 0
    for txn in txns:
        check_batchable(txn)
        size += _check_txn(txn, limits)
        count += len(txn.compare) + len(txn.then)
    if count > limits.max_batch_operations:
        raise InvalidRequest(
            f"{count} comparisons and operations in one batch; the limit is {limits.max_batch_operations}"
        )
    if size > limits.max_txn_bytes:
        raise InvalidRequest(f"a batch of {size} bytes; the limit is {limits.max_txn_bytes}")


def check_batchable(txn: Txn) -> None:
    """Raise InvalidRequest unless the transaction may be one of a batch."""
    if txn.otherwise or not all(isinstance(operation, Put | Delete) for operation in txn.then):
        raise InvalidRequest("a transaction of a batch holds puts and deletes only, and no 'otherwise'")


def _check_txn(txn: Txn, limits: Limits) -> int:
    """The bytes of the transaction."""
    count = len(txn.compare) + len(txn.then) + len(txn.otherwise)
    if count > limits.max_txn_operations:
        raise InvalidRequest(
            f"{count} comparisons and operations in one transaction; the limit is {limits.max_txn_operations}"
        )
    size = 0
    for compare in txn.compare:
        check_key(compare.key, limits)
        _check_number(compare.operand, f"operand for key {compare.key!r}")
        size += key_bytes(compare.key)
    for operation in (*txn.then, *txn.otherwise):
        size += _check_operation(operation, limits)
    if size > limits.max_txn_bytes:
        raise InvalidRequest(f"a transaction of {size} bytes; the limit is {limits.max_txn_bytes}")
    return size


def _check_operation(operation: Operation, limits: Limits) -> int:
    """The bytes that the operation adds to its transaction."""
    match operation:
        case DeletePrefix(prefix):
            check_prefix(prefix, limits)
            return key_bytes(prefix)
        case Put(key, value, lease):
            check_key(key, limits)
            if len(value) > limits.max_value_bytes:
                raise InvalidRequest(
                    f"value of key {key!r} has {len(value)} bytes; the limit is {limits.max_value_bytes}"
                )
            _check_number(lease, f"lease of key {key!r}")
            return key_bytes(key) + len(value)
        case AllocateId(key, count):
            check_key(key, limits)
            if not 1 <= count <= MAX_INT:
                raise InvalidRequest(f"cannot allocate {count} ids from key {key!r}")
            return key_bytes(key)
        case _:
            check_key(operation.key, limits)
            return key_bytes(operation.key)


def _check_path(text: str, what: str, limits: Limits) -> None:
    try:
        size = key_bytes(text)
    except UnicodeEncodeError:
        raise InvalidRequest(f"{what} {_shown(text)} is not valid UTF-8") from None
    if size > limits.max_key_bytes:
        raise InvalidRequest(f"{what} {_shown(text)} has {size} bytes; the limit is {limits.max_key_bytes}")
    if not text.startswith("/"):
        raise InvalidRequest(f"{what} {_shown(text)} must begin with '/'")
    if "\0" in text:
        raise InvalidRequest(f"{what} {_shown(text)} must not hold a NUL")
    if "//" in text:
        raise InvalidRequest(f"{what} {_shown(text)} must not hold an empty segment ('//')")


def _check_number(value: int, name: str) -> None:
    if not 0 <= value <= MAX_INT:
        raise InvalidRequest(f"{name} {value} is outside 0..{MAX_INT}")


def _shown(text: str) -> str:
    """For messages: escaped, and never longer than a line."""
    return ascii(text) if len(text) <= 80 else f"{text[:77]!a}..."
