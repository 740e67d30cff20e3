"""The machine against a model that is too simple to be wrong: a dict that is copied for every transaction."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from hypothesis import given, settings
from hypothesis import strategies as st

from sava.metadata.commands import (
    AllocateId,
    BatchResult,
    CommandRefused,
    Compare,
    Delete,
    DeletePrefix,
    Event,
    Get,
    KeyValue,
    LeaseExpire,
    LeaseGrant,
    LeaseRevoke,
    LeaseTouch,
    Operation,
    Proposal,
    Put,
    Relation,
    Target,
    Txn,
    TxnBatch,
    TxnResult,
)
from sava.metadata.machine.state_machine import StateMachine


@dataclass
class Model:
    kvs: dict[str, KeyValue] = field(default_factory=dict)
    leases: dict[int, int] = field(default_factory=dict)
    revision: int = 0
    granted: int = 0

    def apply(self, command: object) -> tuple[Event, ...]:
        before = dict(self.kvs)
        match command:
            case Txn():
                self._txn(command)
            case TxnBatch(txns):
                for txn in txns:
                    self._txn(txn)
            case LeaseGrant():
                self.granted += 1
                self.leases[self.granted] = 1
            case LeaseTouch(lease):
                if lease in self.leases:
                    self.leases[lease] += 1
            case LeaseRevoke(lease):
                self._end(lease)
            case LeaseExpire(lease, generation):
                if self.leases.get(lease) == generation:
                    self._end(lease)
        return self._events(before)

    def _txn(self, txn: Txn) -> None:
        before = dict(self.kvs)
        chosen = txn.then if all(self._holds(c) for c in txn.compare) else txn.otherwise
        if any(isinstance(op, Put) and op.lease and op.lease not in self.leases for op in chosen):
            return
        for operation in chosen:
            self._run(operation)
        for kv in self.kvs.values():
            if kv.lease and before.get(kv.key) is not kv:
                self.leases[kv.lease] += 1

    def _events(self, before: dict[str, KeyValue]) -> tuple[Event, ...]:
        changed = [key for key in sorted({*before, *self.kvs}) if before.get(key) is not self.kvs.get(key)]
        if changed:
            self.revision += 1
        return tuple(Event(self.revision, key, self.kvs.get(key), before.get(key)) for key in changed)

    def _end(self, lease: int) -> None:
        if self.leases.pop(lease, None) is not None:
            self.kvs = {key: kv for key, kv in self.kvs.items() if kv.lease != lease}

    def _holds(self, compare: Compare) -> bool:
        kv = self.kvs.get(compare.key, KeyValue(compare.key, b"", 0, 0, 0))
        actual = (kv.version, kv.create_revision, kv.mod_revision, kv.lease)[compare.target]
        return (
            actual == compare.operand,
            actual != compare.operand,
            actual < compare.operand,
            actual > compare.operand,
        )[compare.relation]

    def _run(self, operation: Operation) -> None:
        match operation:
            case Put(key, value, lease):
                self._put(key, value, lease)
            case Delete(key):
                self.kvs.pop(key, None)
            case DeletePrefix(prefix):
                self.kvs = {key: kv for key, kv in self.kvs.items() if not key.startswith(prefix)}
            case AllocateId(key, count):
                old = self.kvs.get(key)
                total = (int(old.value) if old else 0) + count
                self._put(key, str(total).encode(), old.lease if old else 0)

    def _put(self, key: str, value: bytes, lease: int) -> None:
        old, revision = self.kvs.get(key), self.revision + 1
        created = old.create_revision if old else revision
        self.kvs[key] = KeyValue(key, value, created, revision, (old.version if old else 0) + 1, lease)


KEYS = st.sampled_from(["/a", "/ab", "/a/1", "/a/2", "/a/1/x", "/b"])
LEASES = st.integers(0, 3)
OPERATIONS: st.SearchStrategy[Operation] = st.one_of(
    st.builds(Put, KEYS, st.binary(max_size=3), st.one_of(st.just(0), LEASES)),
    st.builds(Delete, KEYS),
    st.builds(DeletePrefix, st.sampled_from(["/", "/a/", "/a/1/"])),
    st.builds(AllocateId, st.sampled_from(["/n", "/a/n"]), st.integers(1, 3)),
    st.builds(Get, KEYS),
)
LISTS = st.lists(OPERATIONS, max_size=4).map(tuple)
COMPARES = st.lists(
    st.builds(Compare, KEYS, st.sampled_from(Target), st.sampled_from(Relation), st.integers(0, 4)),
    max_size=2,
).map(tuple)
CHANGES = st.lists(OPERATIONS.filter(lambda each: isinstance(each, Put | Delete)), max_size=3).map(tuple)
COMMANDS = st.one_of(
    st.builds(Txn, COMPARES, LISTS, LISTS),
    st.builds(TxnBatch, st.lists(st.builds(Txn, COMPARES, CHANGES), max_size=4).map(tuple)),
    st.builds(Txn, st.just(()), LISTS),
    st.builds(LeaseGrant, st.just(9_000)),
    st.builds(LeaseTouch, LEASES),
    st.builds(LeaseRevoke, LEASES),
    st.builds(LeaseExpire, LEASES, st.integers(1, 4)),
)


@settings(max_examples=250, deadline=None)
@given(st.lists(COMMANDS, max_size=25))
def test_the_machine_does_what_the_model_does(commands: list[Txn]) -> None:
    machine, model = StateMachine(), Model()
    for command in commands:
        applied = machine.apply(Proposal(command), 1)
        unchanged = replace(model)
        events = model.apply(command)
        if isinstance(applied.result, CommandRefused):
            assert applied.events == events == ()
            assert model == unchanged
        assert applied.events == events
        assert machine.revision == model.revision
        if isinstance(applied.result, TxnResult | BatchResult):
            assert applied.result.revision == model.revision
        assert list(machine.range("/")[0]) == [model.kvs[key] for key in sorted(model.kvs)]
    attached = {x.lease: (x.generation, x.keys) for x in machine.leases}
    assert attached == {
        lease: (generation, sorted(kv.key for kv in model.kvs.values() if kv.lease == lease))
        for lease, generation in model.leases.items()
    }
    assert StateMachine.restore(machine.freeze().chunks()).digest() == machine.digest()
