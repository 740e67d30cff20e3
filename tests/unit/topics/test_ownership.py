"""The table of what may become of a topic's ownership: every state with every step."""

from __future__ import annotations

import itertools

import msgspec
import pytest

from sava.topics import ownership, specs
from sava.topics.names import TopicName
from sava.topics.ownership import WrongState
from sava.topics.specs import Ownership, OwnershipState
from tests.support.memory_store import MemoryStore

ORDERS = TopicName("default", "orders")

S = OwnershipState

TABLE = {
    ("assign", S.UNASSIGNED): (S.ASSIGNED, 1),
    ("assign", S.SEALED): (S.ASSIGNED, 1),
    ("take", S.ASSIGNED): (S.ASSIGNED, 1),
    ("take", S.ORPHAN): (S.ASSIGNED, 1),
    ("move", S.ASSIGNED): (S.MOVING, 0),
    ("seal", S.MOVING): (S.SEALED, 0),
    ("roll_back", S.MOVING): (S.ASSIGNED, 1),
    ("give_back", S.ASSIGNED): (S.SEALED, 0),
    ("orphan", S.ASSIGNED): (S.ORPHAN, 0),
    ("orphan", S.MOVING): (S.ORPHAN, 0),
    ("recover", S.ORPHAN): (S.SEALED, 0),
    ("release", S.DELETING): (S.DELETING, 0),
    **{("delete", state): (S.DELETING, 1) for state in S},
}
"""Where each step leads from each state, and by how much it raises the epoch. Whatever is not here is
refused. Written out a second time on purpose: this is the contract, and ``STEPS`` keeps it."""

FULL = Ownership(
    epoch=5,
    owner=1,
    incarnation=7,
    target=2,
    from_broker=3,
    end=40,
    store_id="store",
    reason="unload",
    timeout_ms=1000,
    failures=4,
    error="it did not answer",
    since_ms=1,
)


@pytest.mark.parametrize(("step", "state"), list(itertools.product(ownership.STEPS, S)))
def test_every_step_from_every_state(step: str, state: OwnershipState) -> None:
    before = msgspec.structs.replace(FULL, state=state)
    if (step, state) not in TABLE:
        with pytest.raises(WrongState) as refused:
            ownership.after(step, ORDERS, before)
        assert refused.value.state is state
        assert str(ORDERS) in str(refused.value)
        return
    target, raised = TABLE[step, state]
    after = ownership.after(step, ORDERS, before)
    assert (after.state, after.epoch) == (target, 5 + raised)
    assert after.since_ms > before.since_ms
    assert (after.from_broker, after.end, after.store_id) == (3, 40, "store")


def test_the_table_has_every_step() -> None:
    assert {step for step, _ in TABLE} == set(ownership.STEPS)


@pytest.mark.parametrize("step", ["seal", "give_back", "recover", "release"])
def test_whoever_gives_a_topic_up_is_no_longer_its_owner(step: str) -> None:
    (source,) = ownership.STEPS[step].sources
    after = ownership.after(step, ORDERS, msgspec.structs.replace(FULL, state=source))
    assert (after.owner, after.incarnation) == (ownership.NO_OWNER, 0)


@pytest.mark.parametrize("step", ["move", "orphan", "delete", "roll_back"])
def test_whoever_has_it_stays_its_owner_until_it_has_released_it(step: str) -> None:
    source = S.MOVING if step == "roll_back" else S.ASSIGNED
    assert ownership.after(step, ORDERS, msgspec.structs.replace(FULL, state=source)).owner == 1


def test_serving_is_what_ends_a_row_of_failures() -> None:
    assigned = ownership.after("assign", ORDERS, msgspec.structs.replace(FULL, state=S.SEALED), owner=2)
    assert (assigned.owner, assigned.incarnation, assigned.failures) == (2, 0, 4)
    taken = ownership.after("take", ORDERS, assigned, incarnation=9)
    assert (taken.incarnation, taken.failures) == (9, 0)


async def test_a_topic_without_a_record_is_unassigned() -> None:
    store = MemoryStore()
    assert ownership.known(store.local, ORDERS) == ownership.KnownOwnership(ownership.UNASSIGNED, 0)
    await store.put(specs.ownership_key(ORDERS), specs.encode(FULL))
    record, revision = ownership.known(store.local, ORDERS)
    assert (record, revision) == (FULL, store.local.revision)
