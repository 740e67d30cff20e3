"""StateMachine: the replicated state. Every node applies the same proposals in the same order and must arrive
at the same state.

What an apply may look at is the proposal, the entry's term and the state; what it produces is a result and
events. It reads no clock: with one, replicas would store different times, and a restart would stretch every
TTL by replaying the log at a later hour. It knows no watchers: events are returned, and each node's
``WatchHub`` spreads them. It never iterates a set, and a dict only where the order of insertion is itself
replicated or the result is sorted.

Three numbers must not be confused: the *log index* belongs to consensus and is not known here; the
*revision* is global, grows by one for each proposal that changed a key, and survives snapshots and restarts;
the *version* counts the writes of one key.

Parts: ``tables`` (keys, leases, sessions), ``transaction`` (overlay and commit), ``limits`` (what may be
proposed), ``image`` (snapshots).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import msgspec

from sava.metadata.commands import (
    BatchResult,
    Command,
    CommandRefused,
    Done,
    Event,
    KeyValue,
    LeaseExpire,
    LeaseGrant,
    LeaseResult,
    LeaseRevoke,
    LeaseTouch,
    Proposal,
    Put,
    PutResult,
    Result,
    SessionExpire,
    SessionOpen,
    SessionResult,
    SetVersion,
    Txn,
    TxnBatch,
    TxnResult,
    decode_result,
    encode,
)
from sava.metadata.errors import (
    Deposed,
    InvalidRequest,
    NoSpace,
    RequestForgotten,
    SessionExpired,
    Unavailable,
)
from sava.metadata.machine.image import SNAPSHOT_FORMAT, FrozenState, StateReader
from sava.metadata.machine.limits import DEFAULT_LIMITS, MAX_INT, Limits, check_proposal, key_bytes
from sava.metadata.machine.tables import KeySpace, Lease, LeaseTable, SessionTable
from sava.metadata.machine.transaction import RefusedError, Transaction, holds, lease_not_found, no_space

__all__ = ["SNAPSHOT_FORMAT", "Applied", "FrozenState", "Lease", "Limits", "StateMachine", "rolling_digest"]


class Applied(msgspec.Struct, frozen=True):
    result: Result
    events: tuple[Event, ...]
    """Sorted by key, all of one revision; empty when nothing changed."""


class StateMachine:
    """Deterministic: same proposals in the same order, same state, same results, same snapshot bytes, on
    every node, Python version and hash seed. No clock, no chance, no I/O. Applying never fails; what cannot
    be done is ``CommandRefused``."""

    __slots__ = ("_clock_ms", "_kvs", "_limits", "_revision", "_sessions", "_space", "_version", "leases")

    def __init__(self, limits: Limits = DEFAULT_LIMITS) -> None:
        self._limits = limits
        self._revision = 0
        self._clock_ms = 0
        self._version = 0
        self.leases = LeaseTable()
        self._sessions = SessionTable()
        self._space = KeySpace()
        self._kvs = self._space.kvs

    @property
    def revision(self) -> int:
        return self._revision

    @property
    def clock_ms(self) -> int:
        """Largest stamp applied."""
        return self._clock_ms

    @property
    def total_bytes(self) -> int:
        return self._space.total_bytes

    @property
    def limit_bytes(self) -> int:
        return self._limits.max_total_bytes

    @property
    def key_count(self) -> int:
        return len(self._kvs)

    @property
    def version(self) -> int:
        """Cluster version."""
        return self._version

    # -- reading ---------------------------------------------------------------------------------------------

    def get(self, key: str) -> KeyValue | None:
        return self._kvs.get(key)

    def range(
        self, prefix: str, *, limit: int = 0, start_after: str = ""
    ) -> tuple[tuple[KeyValue, ...], bool]:
        """Keys under ``prefix`` (which ends in '/' or names one whole key), in order; and whether more
        follow."""
        return self._space.range(prefix, limit, start_after)

    def check(self, proposal: Proposal) -> None:
        """Raise InvalidRequest when a limit or a rule is broken; called before proposing."""
        check_proposal(proposal, self._limits)

    # -- applying --------------------------------------------------------------------------------------------

    def apply(self, proposal: Proposal, term: int) -> Applied:
        """``term`` is the log entry's term (for ``fence_term``)."""
        stamp = proposal.stamp_ms
        if stamp > self._clock_ms:
            self._clock_ms = stamp
        if proposal.session:
            return self._apply_in_session(proposal, term)
        return self._execute(proposal, term)

    def _apply_in_session(self, proposal: Proposal, term: int) -> Applied:
        """A copy of a request gets the first one's answer, whatever that was; nothing happens twice."""
        seq = proposal.seq
        session = self._sessions.by_id.get(proposal.session)
        if session is None:
            return _refused(
                SessionExpired.code, f"session {proposal.session} does not exist: it was idle too long"
            )
        if proposal.stamp_ms > session.last_stamp:
            session.last_stamp = proposal.stamp_ms
        if seq < session.low:
            return _refused(
                RequestForgotten.code, f"request {seq} is below {session.low}, the session's window"
            )
        if seq > MAX_INT:
            return _refused(InvalidRequest.code, f"request number {seq} is outside 1..{MAX_INT}")
        remembered = session.responses.get(seq)
        if remembered is not None:
            return Applied(decode_result(remembered), ())
        session.forget_below(min(proposal.low, seq))
        applied = self._execute(proposal, term)
        session.remember(seq, encode(applied.result), self._limits)
        return applied

    def _execute(self, proposal: Proposal, term: int) -> Applied:
        fence = proposal.fence_term
        if fence and fence != term:
            return _refused(
                Deposed.code, f"proposed by the leader of term {fence}, appended in term {term}", term
            )
        command = proposal.command
        if type(command) is not Txn:
            return self._apply_other(command, proposal.stamp_ms)
        then = command.then
        if len(then) == 1 and not command.compare and type(then[0]) is Put:
            put = then[0]
            previous = self._kvs.get(put.key)
            if not put.lease and (previous is None or not previous.lease):
                return self._put(put.key, put.value, previous)
        return self._apply_txn(command)

    def _put(self, key: str, value: bytes, previous: KeyValue | None) -> Applied:
        """The most common transaction, without an overlay: one plain put and no lease on either side."""
        revision = self._revision + 1
        space = self._space
        if previous is None:
            grown = key_bytes(key) + len(value)
            kv = KeyValue(key, value, revision, revision, 1)
        else:
            grown = len(value) - len(previous.value)
            kv = KeyValue(key, value, previous.create_revision, revision, previous.version + 1)
        total = space.total_bytes + grown
        if grown > 0 and total > self._limits.max_total_bytes:
            return Applied(no_space(total, self._limits), ())
        if previous is None:
            space.order.add(key)
        space.total_bytes = total
        self._kvs[key] = kv
        self._revision = revision
        return Applied(
            TxnResult(True, revision, (PutResult(previous),)), (Event(revision, key, kv, previous),)
        )

    def _apply_txn(self, txn: Txn) -> Applied:
        succeeded = all(holds(self._space, compare) for compare in txn.compare)
        transaction = self._transaction()
        try:
            results = tuple(map(transaction.run, txn.then if succeeded else txn.otherwise))
            events = transaction.commit()
        except RefusedError as error:
            return Applied(error.refused, ())
        self._advance(events)
        return Applied(TxnResult(succeeded, self._revision, results), events)

    def _apply_batch(self, txns: tuple[Txn, ...]) -> Applied:
        """Each transaction commits before the next one compares, and all of them under the same revision: a
        batch is one proposal. So of a key that two of them change there is one event, from what it was before
        the batch to what it is after it."""
        outcomes: list[bool | CommandRefused] = []
        changes: dict[str, Event] = {}
        for txn in txns:
            is_done: bool | CommandRefused = all(holds(self._space, compare) for compare in txn.compare)
            if is_done:
                transaction = self._transaction()
                try:
                    for operation in txn.then:
                        transaction.run(operation)
                    for event in transaction.commit():
                        first = changes.get(event.key, event)
                        changes[event.key] = Event(event.revision, event.key, event.kv, first.prev)
                except RefusedError as error:
                    is_done = error.refused
            outcomes.append(is_done)
        events = tuple(
            event for _, event in sorted(changes.items()) if event.kv is not None or event.prev is not None
        )
        self._advance(events)
        return Applied(BatchResult(self._revision, tuple(outcomes)), events)

    def _apply_other(self, command: Command, stamp_ms: int) -> Applied:
        match command:
            case TxnBatch(txns):
                return self._apply_batch(txns)
            case LeaseGrant(ttl_ms):
                return self._grant(ttl_ms)
            case LeaseRevoke(lease):
                return self._revoke(lease)
            case LeaseExpire(lease, generation):
                return self._expire(lease, generation)
            case LeaseTouch(lease):
                return self._touch(lease)
            case SessionOpen(nonce):
                return self._open_session(nonce, stamp_ms)
            case SessionExpire(before_ms):
                return self._done(self._sessions.expire(before_ms) > 0)
            case SetVersion(version):
                return self._set_version(version)
            case Txn():
                return self._apply_txn(command)

    def _transaction(self) -> Transaction:
        return Transaction(self._space, self.leases, self._limits, self._revision + 1)

    def _advance(self, events: tuple[Event, ...]) -> None:
        """No change, no revision: a revision without an event would look like a lost one."""
        if events:
            self._revision += 1

    # -- leases ----------------------------------------------------------------------------------------------

    def _grant(self, ttl_ms: int) -> Applied:
        if len(self.leases) >= self._limits.max_leases:
            return _refused(
                NoSpace.code, f"{len(self.leases)} leases exist; the limit is {self._limits.max_leases}"
            )
        lease = self.leases.grant(ttl_ms)
        return Applied(LeaseResult(lease.lease, ttl_ms, self._revision), ())

    def _touch(self, lease: int) -> Applied:
        found = self.leases.by_id.get(lease)
        if found is None:
            return Applied(lease_not_found(lease), ())
        found.generation += 1
        return Applied(LeaseResult(lease, found.ttl_ms, self._revision), ())

    def _revoke(self, lease: int) -> Applied:
        found = self.leases.by_id.get(lease)
        if found is None:
            return Applied(lease_not_found(lease), ())
        return self._end_lease(found)

    def _expire(self, lease: int, generation: int) -> Applied:
        """Only the generation that the leader saw when it looked at its clock may expire. Without this a sign
        of life that was committed in between is ignored and a live broker is declared dead."""
        found = self.leases.by_id.get(lease)
        if found is None or found.generation != generation:
            return self._done(False)
        return self._end_lease(found)

    def _end_lease(self, lease: Lease) -> Applied:
        """Exactly the keys attached now: one that was put again without a lease has left."""
        transaction = self._transaction()
        transaction.delete(tuple(lease.keys))
        events = transaction.commit()
        self.leases.drop(lease.lease)
        self._advance(events)
        return Applied(Done(True, self._revision), events)

    # -- sessions and version --------------------------------------------------------------------------------

    def _open_session(self, nonce: bytes, stamp_ms: int) -> Applied:
        session = self._sessions.find(nonce)
        if session is None:
            if len(self._sessions) >= self._limits.max_sessions:
                return _refused(
                    Unavailable.code, f"{len(self._sessions)} sessions are open; idle ones expire"
                )
            session = self._sessions.open(nonce, stamp_ms)
        return Applied(SessionResult(session.session), ())

    def _set_version(self, version: int) -> Applied:
        raised = version > self._version
        if raised:
            self._version = version
        return self._done(raised)

    def _done(self, changed: bool) -> Applied:
        return Applied(Done(changed, self._revision), ())

    # -- images ----------------------------------------------------------------------------------------------

    def freeze(self) -> FrozenState:
        """A consistent image in O(keys) pointer copies, which later applies do not change."""
        return FrozenState(
            self._revision, self._clock_ms, self._version, self._space, self.leases, self._sessions
        )

    @classmethod
    def restore(cls, chunks: Iterable[bytes], limits: Limits = DEFAULT_LIMITS) -> StateMachine:
        """The inverse of ``FrozenState.chunks``. Raises SnapshotCorrupt on anything malformed."""
        reader = StateReader(chunks)
        machine = cls(limits)
        machine._revision = reader.header.revision
        machine._clock_ms = reader.header.clock_ms
        machine._version = reader.header.version
        machine.leases = reader.leases
        machine._sessions = reader.sessions
        machine._space = reader.space()
        machine._kvs = machine._space.kvs
        return machine

    def bump_revision(self, by: int) -> None:
        """For force-new-cluster only: later revisions can never be confused with those of the lost cluster,
        nor can the ids of leases and sessions that only the lost part had granted."""
        self._revision += by
        self.leases.next_id += by
        self._sessions.next_id += by

    def digest(self) -> bytes:
        """A hash of the whole state, for comparing replicas (tests, simulator)."""
        return self.freeze().digest()


def rolling_digest(previous: bytes, applied: Applied) -> bytes:
    """Hash of a history: two replicas that applied the same entries from the same start hold the same one. A
    few microseconds per entry, so a simulator can compare after every step; it sees results and events,
    ``StateMachine.digest`` sees everything."""
    return hashlib.blake2b(encode((previous, applied.result, applied.events)), digest_size=16).digest()


def _refused(code: str, message: str, detail: int = 0) -> Applied:
    return Applied(CommandRefused(code, message, detail), ())
