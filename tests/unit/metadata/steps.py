"""Short words for stories about one state machine."""

from __future__ import annotations

from sava.metadata.commands import (
    Command,
    CommandRefused,
    Compare,
    Delete,
    DeletePrefix,
    Event,
    LeaseGrant,
    LeaseResult,
    Operation,
    Proposal,
    Put,
    Relation,
    Result,
    SessionOpen,
    SessionResult,
    Target,
    Txn,
    TxnResult,
)
from sava.metadata.machine.state_machine import Limits, StateMachine

TERM = 3


class Steps:
    """Applies commands and keeps all events, as one node's log would."""

    def __init__(self, limits: Limits | None = None) -> None:
        self.machine = StateMachine(limits or Limits())
        self.events: list[tuple[Event, ...]] = []

    def apply(self, command: Command, **fields: int) -> Result:
        applied = self.machine.apply(Proposal(command, **fields), TERM)
        if applied.events:
            self.events.append(applied.events)
        return applied.result

    def txn(
        self, *then: Operation, compare: tuple[Compare, ...] = (), otherwise: tuple[Operation, ...] = ()
    ) -> TxnResult:
        result = self.apply(Txn(compare, then, otherwise))
        assert isinstance(result, TxnResult), result
        return result

    def refused(self, *then: Operation) -> str:
        result = self.apply(Txn(then=then))
        assert isinstance(result, CommandRefused), result
        return result.code

    def put(self, key: str, value: bytes = b"v", lease: int = 0) -> int:
        return self.txn(Put(key, value, lease)).revision

    def delete(self, key: str) -> TxnResult:
        return self.txn(Delete(key))

    def delete_prefix(self, prefix: str) -> TxnResult:
        return self.txn(DeletePrefix(prefix))

    def grant(self, ttl_ms: int = 9_000) -> int:
        result = self.apply(LeaseGrant(ttl_ms))
        assert isinstance(result, LeaseResult)
        return result.lease

    def session(self, nonce: bytes = b"nonce") -> int:
        result = self.apply(SessionOpen(nonce))
        assert isinstance(result, SessionResult)
        return result.session

    def keys(self, prefix: str = "/") -> list[str]:
        return [kv.key for kv in self.machine.range(prefix)[0]]

    def generation(self, lease: int) -> int:
        found = self.machine.leases.by_id.get(lease)
        assert found is not None
        return found.generation

    def restarted(self) -> Steps:
        """The same node after a restart from its snapshot."""
        other = Steps()
        other.machine = StateMachine.restore(self.machine.freeze().chunks())
        return other


def absent(key: str) -> Compare:
    return Compare(key, Target.VERSION, Relation.EQUAL, 0)


def unchanged(key: str, mod_revision: int) -> Compare:
    return Compare(key, Target.MOD_REVISION, Relation.EQUAL, mod_revision)
