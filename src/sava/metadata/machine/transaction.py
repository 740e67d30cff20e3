"""Transaction: comparisons, then operations on an overlay, then one commit under one revision.

Operations never touch the key space directly. They read through the overlay (so a later operation sees an
earlier one) and write into it, and only a transaction that succeeded as a whole is committed. A refusal
halfway therefore leaves nothing behind, without undo code: a half-applied transaction on some replicas only
would be the end of them all agreeing.
"""

from __future__ import annotations

from sava.metadata.commands import (
    AllocateId,
    AllocateResult,
    CommandRefused,
    Compare,
    Delete,
    DeletePrefix,
    DeleteResult,
    Event,
    Get,
    GetResult,
    KeyValue,
    Operation,
    OperationResult,
    Put,
    PutResult,
    Relation,
    Target,
)
from sava.metadata.errors import InvalidRequest, LeaseNotFound, NoSpace
from sava.metadata.machine.limits import MAX_INT, Limits, is_prefix
from sava.metadata.machine.tables import KeySpace, LeaseTable, size_of

_COUNTER_DIGITS = 19
"""Enough for MAX_INT; a longer number is not a counter of ours."""


class RefusedError(Exception):
    """Inside this package only: ends a transaction with the result that its caller gets."""

    def __init__(self, refused: CommandRefused) -> None:
        super().__init__(refused.message)
        self.refused = refused


def no_space(total: int, limits: Limits) -> CommandRefused:
    message = (
        f"the store would hold {total} bytes; the limit is {limits.max_total_bytes}; delete something first"
    )
    return CommandRefused(NoSpace.code, message, limits.max_total_bytes)


def lease_not_found(lease: int) -> CommandRefused:
    return CommandRefused(LeaseNotFound.code, str(LeaseNotFound(lease)), lease)


def holds(space: KeySpace, compare: Compare) -> bool:
    """Only numbers of a key's history are compared, 0 when absent. A value that went A → B → A has other
    numbers."""
    kv = space.kvs.get(compare.key)
    actual = 0 if kv is None else _number(kv, compare.target)
    match compare.relation:
        case Relation.EQUAL:
            return actual == compare.operand
        case Relation.NOT_EQUAL:
            return actual != compare.operand
        case Relation.LESS:
            return actual < compare.operand
        case Relation.GREATER:
            return actual > compare.operand


def _number(kv: KeyValue, target: Target) -> int:
    match target:
        case Target.VERSION:
            return kv.version
        case Target.CREATE_REVISION:
            return kv.create_revision
        case Target.MOD_REVISION:
            return kv.mod_revision
        case Target.LEASE:
            return kv.lease


class Transaction:
    """``revision`` is the one that a commit will have if anything changed."""

    __slots__ = ("_deleted_bytes", "_deleted_keys", "_leases", "_limits", "_pending", "_revision", "_space")

    def __init__(self, space: KeySpace, leases: LeaseTable, limits: Limits, revision: int) -> None:
        self._space = space
        self._leases = leases
        self._limits = limits
        self._revision = revision
        self._pending: dict[str, KeyValue | None] = {}
        self._deleted_keys = 0
        self._deleted_bytes = 0

    def run(self, operation: Operation) -> OperationResult:
        """Raises RefusedError; the whole transaction is then dropped."""
        match operation:
            case Put(key, value, lease):
                return PutResult(self._put(key, value, lease))
            case Get(key):
                return GetResult(self._read(key))
            case Delete(key):
                return DeleteResult(self.delete((key,)))
            case DeletePrefix(prefix):
                return self._delete_prefix(prefix)
            case AllocateId(key, count):
                return self._allocate(key, count)

    def delete(self, keys: tuple[str, ...]) -> tuple[KeyValue, ...]:
        """Deletes what is there and returns it. A missing key is no change."""
        gone: list[KeyValue] = []
        for key in keys:
            kv = self._read(key)
            if kv is not None:
                gone.append(kv)
                self._pending[key] = None
        return tuple(gone)

    def commit(self) -> tuple[Event, ...]:
        """Make the overlay real. Events are sorted by key, one per key that differs from before the
        transaction; a key that was created and deleted inside it never existed for anyone else."""
        self._check_quota()
        events: list[Event] = []
        for key in sorted(self._pending):
            new, old = self._pending[key], self._space.kvs.get(key)
            if new is None and old is None:
                continue
            if old is not None and old.lease:
                self._leases.detach(old.lease, key)
            if new is None:
                self._space.remove(key)
            else:
                self._space.store(new)
                if new.lease:
                    self._leases.attach(new.lease, key)
            events.append(Event(self._revision, key, new, old))
        return tuple(events)

    def _check_quota(self) -> None:
        """Refuse growth above the quota; what shrinks the store, or leaves its size, is always accepted: the
        way out of a full store must not be blocked by its being full."""
        grown = 0
        for key, new in self._pending.items():
            old = self._space.kvs.get(key)
            grown += (0 if new is None else size_of(new)) - (0 if old is None else size_of(old))
        total = self._space.total_bytes + grown
        if grown > 0 and total > self._limits.max_total_bytes:
            raise RefusedError(no_space(total, self._limits))

    def _read(self, key: str) -> KeyValue | None:
        if key in self._pending:
            return self._pending[key]
        return self._space.kvs.get(key)

    def _put(self, key: str, value: bytes, lease: int) -> KeyValue | None:
        if lease and lease not in self._leases.by_id:
            raise RefusedError(lease_not_found(lease))
        prev = self._read(key)
        revision = self._revision
        if prev is None:
            self._pending[key] = KeyValue(key, value, revision, revision, 1, lease)
        else:
            self._pending[key] = KeyValue(key, value, prev.create_revision, revision, prev.version + 1, lease)
        return prev

    def _delete_prefix(self, prefix: str) -> DeleteResult:
        if not is_prefix(prefix):
            raise RefusedError(CommandRefused(InvalidRequest.code, f"prefix {prefix!r} must end in '/'"))
        keys = set(self._space.keys_under(prefix))
        keys.update(key for key in self._pending if key.startswith(prefix))
        gone = self.delete(tuple(sorted(keys)))
        self._deleted_keys += len(gone)
        self._deleted_bytes += sum(map(size_of, gone))
        limits = self._limits
        if self._deleted_keys > limits.max_delete_keys or self._deleted_bytes > limits.max_delete_bytes:
            message = (
                f"prefix {prefix!r} covers more than {limits.max_delete_keys} keys "
                f"or {limits.max_delete_bytes} bytes; delete it in parts"
            )
            raise RefusedError(CommandRefused(InvalidRequest.code, message, len(gone)))
        return DeleteResult(gone)

    def _allocate(self, key: str, count: int) -> AllocateResult:
        current = self._read(key)
        text = b"0" if current is None else current.value
        if not (text.isdigit() and len(text) <= _COUNTER_DIGITS):
            raise RefusedError(
                CommandRefused(InvalidRequest.code, f"key {key!r} holds something else than a counter")
            )
        last = int(text) + count
        if count < 1 or last > MAX_INT:
            raise RefusedError(
                CommandRefused(InvalidRequest.code, f"key {key!r} cannot count {count} further")
            )
        self._put(key, b"%d" % last, 0 if current is None else current.lease)
        return AllocateResult(last - count + 1, count)
