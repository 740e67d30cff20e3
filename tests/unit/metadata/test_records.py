"""RecordStore: what becomes of an update when others write, when answers are lost, and when it is refused."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import msgspec
import pytest

from sava.errors import CallerError
from sava.metadata import records
from sava.metadata.commands import Compare, Delete, DeletePrefix, KeyValue, Operation, Put, TxnResult
from sava.metadata.errors import OutcomeUnknown, Unavailable
from sava.metadata.records import RecordChange, RecordStore, Versioned, absent, present
from sava.tasks import Backoff
from tests.support.memory_store import MemoryStore

KEY = "/tests/record"
OTHER = "/tests/other"


class Setting(msgspec.Struct, frozen=True):
    text: str
    by: str = "us"


class Refusal(CallerError):
    pass


class Fenced(CallerError):
    pass


Event = Callable[[], Awaitable[object]]


class Unsteady(MemoryStore):
    """Does as the script says: one entry per transaction with conditions; after the last, as told at once."""

    def __init__(self) -> None:
        super().__init__(clock=lambda: 0)
        self.before: list[Event | None] = []
        """Another writer, just before the transaction."""
        self.answers: list[str] = []
        """'applied': the answer is lost; 'dropped': the transaction is lost."""
        self.after: list[Event | None] = []
        """Another writer, just after the transaction."""
        self.reads_without_answer = 0
        self.writes = 0

    async def txn(
        self,
        compare: Sequence[Compare],
        then: Sequence[Operation],
        otherwise: Sequence[Operation] = (),
        *,
        fence_term: int = 0,
        batched: bool = False,
        timeout: float = 1.0,
    ) -> TxnResult:
        if not compare:
            return await super().txn(compare, then, otherwise)
        self.writes += 1
        if self.before and (event := self.before.pop(0)):
            await event()
        answer = self.answers.pop(0) if self.answers else ""
        result = None
        if answer != "dropped":
            result = await super().txn(compare, then, otherwise, batched=batched, fence_term=fence_term)
        if self.after and (event := self.after.pop(0)):
            await event()
        if answer or result is None:
            raise OutcomeUnknown("the answer was lost")
        return result

    async def get(self, key: str, **options: object) -> KeyValue | None:
        if self.writes and self.reads_without_answer:
            self.reads_without_answer -= 1
            raise Unavailable("no leader")
        return await super().get(key)

    def rival(self, text: str, by: str = "rival") -> Event:
        return lambda: self.put(KEY, records.encode(Setting(text, by)))


@pytest.fixture
def store() -> Unsteady:
    return Unsteady()


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    paused: list[float] = []

    async def pause(backoff: Backoff) -> None:
        paused.append(backoff.next())

    monkeypatch.setattr(Backoff, "pause", pause)
    return paused


class Goal:
    """``decide``: the record is to say this. Remembers what it saw."""

    def __init__(self, text: str, *operations: Operation, creates: bool = False) -> None:
        self.text = text
        self.operations = operations
        self.creates = creates
        self.seen: list[str | None] = []

    def __call__(self, found: Versioned[Setting]) -> RecordChange[Setting] | None:
        self.seen.append(found.value.text if found.value else None)
        if self.creates and found.value is not None:
            raise Refusal("it is there already")
        if found.value is not None and found.value.text == self.text:
            return None
        return RecordChange(Setting(self.text), self.operations)


async def stored(store: MemoryStore) -> Setting | None:
    return (await RecordStore(store).get(KEY, Setting)).value


# -- with answers --------------------------------------------------------------------------------------------


async def test_a_record_is_created_changed_left_alone_and_deleted(store: Unsteady) -> None:
    typed = RecordStore(store)
    assert await typed.get(KEY, Setting) == Versioned(KEY, None)
    created = await typed.update(KEY, Setting, Goal("a"))
    assert (created.value, created.is_changed) == (Setting("a"), True)
    found = await typed.get(KEY, Setting)
    assert (found.value, found.revision) == (Setting("a"), created.revision)
    assert typed.known(KEY, Setting) == found

    same = await typed.update(KEY, Setting, Goal("a"))
    assert (same.revision, same.is_changed) == (created.revision, False)
    deleted = await typed.update(KEY, Setting, lambda found: RecordChange(None))
    assert (deleted.value, deleted.is_changed) == (None, True)
    assert await stored(store) is None


async def test_decide_may_wait_and_write_other_keys_under_conditions(store: Unsteady) -> None:
    async def decide(found: Versioned[Setting]) -> RecordChange[Setting]:
        operations = (Put(OTHER, b"beside"),)
        return RecordChange(Setting("a"), operations, (absent(OTHER),))

    await RecordStore(store).update(KEY, Setting, decide, batched=True)
    other = await store.get(OTHER)
    assert other is not None
    assert other.value == b"beside"
    with pytest.raises(records.RecordBusy):
        await RecordStore(store).update(KEY, Setting, decide)


async def test_a_lease_of_a_record_deletes_it(store: Unsteady) -> None:
    lease = await store.grant_lease(1000)
    await RecordStore(store).update(KEY, Setting, lambda found: RecordChange(Setting("a"), lease=lease))
    assert (await RecordStore(store).get(KEY, Setting)).lease == lease
    await store.revoke_lease(lease)
    assert await stored(store) is None


async def test_a_conflict_is_decided_anew_after_a_pause(store: Unsteady, no_pause: list[float]) -> None:
    store.before = [store.rival("b"), store.rival("c"), None]
    goal = Goal("a")
    assert (await RecordStore(store).update(KEY, Setting, goal)).is_changed
    assert goal.seen == [None, "b", "c"]
    assert await stored(store) == Setting("a")
    assert len(no_pause) == 2


async def test_all_pauses_together_are_short(store: Unsteady, no_pause: list[float]) -> None:
    store.before = [store.rival(str(n)) for n in range(records.ATTEMPTS)]
    with pytest.raises(records.RecordBusy):
        await RecordStore(store).update(KEY, Setting, Goal("a"))
    assert len(no_pause) == records.ATTEMPTS - 1
    assert sum(no_pause) < 1


async def test_a_refusal_of_decide_changes_nothing(store: Unsteady) -> None:
    await store.rival("b")()
    with pytest.raises(Refusal):
        await RecordStore(store).update(KEY, Setting, Goal("a", creates=True))
    assert await stored(store) == Setting("b", "rival")


async def test_after_too_many_conflicts_the_record_is_busy(store: Unsteady) -> None:
    store.before = [store.rival(str(n)) for n in range(records.ATTEMPTS)]
    with pytest.raises(records.RecordBusy, match="mode of broker 7 changed under 8 attempts"):
        await RecordStore(store).update(KEY, Setting, Goal("a"), what="the mode of broker 7")
    assert store.writes == records.ATTEMPTS
    assert await stored(store) == Setting(str(records.ATTEMPTS - 1), "rival")


async def test_another_condition_that_fails_is_named_by_the_caller(store: Unsteady) -> None:
    async def refused() -> None:
        if await store.get(OTHER) is None:
            raise Refusal("the other one is gone")

    def decide(found: Versioned[Setting]) -> RecordChange[Setting]:
        return RecordChange(Setting("a"), conditions=(present(OTHER),))

    with pytest.raises(Refusal):
        await RecordStore(store).update(KEY, Setting, decide, on_refused=refused)
    assert store.writes == 1
    await store.put(OTHER, b"x")
    assert (await RecordStore(store).update(KEY, Setting, decide, on_refused=refused)).is_changed


async def test_a_record_that_cannot_be_read_is_an_error(store: Unsteady) -> None:
    await store.put(KEY, b"{")
    with pytest.raises(records.RecordCorrupt, match=KEY):
        await RecordStore(store).get(KEY, Setting)
    with pytest.raises(records.RecordCorrupt):
        await RecordStore(store).update(KEY, Setting, Goal("a"))


async def test_a_record_that_cannot_be_read_is_replaced_or_deleted_on_request(store: Unsteady) -> None:
    for value in (Setting("a"), None):
        await store.put(KEY, b"{")
        change = RecordChange(value)
        seen: list[Versioned[Setting]] = []

        def decide(found: Versioned[Setting], change=change, seen=seen) -> RecordChange[Setting]:
            seen.append(found)
            return change

        await RecordStore(store).update(KEY, Setting, decide, repairs=True)
        assert seen[0].value is None
        assert seen[0].kv is not None
        assert await stored(store) == value


async def test_a_damaged_record_is_not_taken_for_a_deletion_that_took_effect(store: Unsteady) -> None:
    """Schedule: the deletion is lost, and another writes something that cannot be read."""
    await store.rival("b")()
    store.answers, store.before = ["dropped"], [lambda: store.put(KEY, b"{")]
    await RecordStore(store).update(KEY, Setting, lambda found: RecordChange(None), repairs=True)
    assert await stored(store) is None
    assert store.writes == 2


# -- without answers -----------------------------------------------------------------------------------------


async def test_a_write_that_took_effect_is_found_and_not_repeated(store: Unsteady) -> None:
    store.answers = ["applied"]
    goal = Goal("a", Put(OTHER, b"beside"), creates=True)
    updated = await RecordStore(store).update(KEY, Setting, goal)
    assert updated.is_changed
    assert updated.revision == (await RecordStore(store).get(KEY, Setting)).revision
    assert (store.writes, goal.seen) == (1, [None])


class Settings(msgspec.Struct, frozen=True):
    given: dict[str, object]


async def test_a_write_is_known_by_its_bytes_not_by_what_is_read_from_them(store: Unsteady) -> None:
    """A tuple in a value of any kind is read back as a list."""
    store.answers = ["applied"]
    wanted = Settings({"topics": ("a", "b")})
    updated = await RecordStore(store).update(KEY, Settings, lambda found: RecordChange(wanted))
    assert updated.is_changed
    assert store.writes == 1


async def test_a_deletion_that_took_effect_is_found(store: Unsteady) -> None:
    await store.rival("b")()
    store.answers = ["applied"]
    updated = await RecordStore(store).update(KEY, Setting, lambda found: RecordChange(None))
    assert updated.is_changed
    assert store.writes == 1


async def test_a_write_that_did_not_take_effect_is_repeated(store: Unsteady) -> None:
    store.answers = ["dropped"]
    assert (await RecordStore(store).update(KEY, Setting, Goal("a", creates=True))).is_changed
    assert store.writes == 2
    assert await stored(store) == Setting("a")


async def test_a_write_that_takes_effect_late_is_found_by_the_refused_repetition(store: Unsteady) -> None:
    async def late() -> None:
        await store.put(KEY, records.encode(Setting("a")))

    store.answers, store.before = ["dropped"], [None, late]
    updated = await RecordStore(store).update(KEY, Setting, Goal("a", creates=True))
    assert updated.is_changed
    assert store.writes == 2


async def test_a_write_that_another_overtook_is_refused_as_it_is(store: Unsteady) -> None:
    """It changed once, and not to what was written: it never will take effect, so nothing is unknown."""
    await store.rival("b")()
    store.answers, store.before = ["dropped"], [store.rival("c")]

    def decide(found: Versioned[Setting]) -> RecordChange[Setting]:
        if found.value is not None and found.value.text == "c":
            raise Refusal("c is final")
        return RecordChange(Setting("a"))

    with pytest.raises(Refusal):
        await RecordStore(store).update(KEY, Setting, decide)


@pytest.mark.parametrize("answer", ["applied", "dropped"])
async def test_a_refusal_over_a_later_change_is_no_failure(store: Unsteady, answer: str) -> None:
    """Created by us and changed by another, or created by another: what is there does not tell which."""
    store.answers, store.after = [answer], [store.rival("b")]
    with pytest.raises(OutcomeUnknown) as raised:
        await RecordStore(store).update(KEY, Setting, Goal("a", creates=True))
    assert isinstance(raised.value.__cause__, Refusal)


async def test_the_same_record_with_other_operations_is_not_ours(store: Unsteady) -> None:
    """Two registrations write the same counters, and each its own entry beside them."""

    async def rival() -> None:
        await MemoryStore.txn(store, (), (Put(KEY, records.encode(Setting("a"))), Put(OTHER, b"rival")))

    store.answers, store.before = ["dropped"], [rival]
    goal = Goal("a", Put(OTHER, b"ours"))
    assert not (await RecordStore(store).update(KEY, Setting, goal)).is_changed
    assert goal.seen == [None, "a"]


async def test_operations_are_compared_too(store: Unsteady) -> None:
    await store.put("/tests/old", b"x")
    store.answers = ["applied"]
    goal = Goal("a", Put(OTHER, b"ours"), Delete("/tests/old"))
    assert (await RecordStore(store).update(KEY, Setting, goal)).is_changed
    assert store.writes == 1


async def test_a_removed_prefix_is_compared_too(store: Unsteady) -> None:
    await store.put("/tests/below/x", b"x")
    store.answers = ["applied"]
    goal = Goal("a", DeletePrefix("/tests/below/"), creates=True)
    assert (await RecordStore(store).update(KEY, Setting, goal)).is_changed
    assert store.writes == 1


async def test_the_same_record_under_another_lease_is_not_ours(store: Unsteady) -> None:
    """A holder of the same name has come back, under a lease of its own, before our write."""
    ours, theirs = await store.grant_lease(1000), await store.grant_lease(1000)

    async def rival() -> None:
        await store.put(KEY, records.encode(Setting("a")), lease=theirs)

    def decide(found: Versioned[Setting]) -> RecordChange[Setting] | None:
        return None if found.value is not None else RecordChange(Setting("a"), lease=ours)

    store.answers, store.before = ["dropped"], [rival]
    updated = await RecordStore(store).update(KEY, Setting, decide)
    assert (updated.is_changed, updated.lease) == (False, theirs)


@pytest.mark.parametrize("answer", ["applied", "dropped"])
async def test_no_answer_to_the_read_leaves_the_outcome_unknown(store: Unsteady, answer: str) -> None:
    store.answers, store.reads_without_answer = [answer], 1
    with pytest.raises(OutcomeUnknown) as raised:
        await RecordStore(store).update(KEY, Setting, Goal("a"))
    assert isinstance(raised.value.__cause__, Unavailable)


async def test_a_changed_mind_leaves_an_open_write_unknown(store: Unsteady) -> None:
    answers = iter([RecordChange(Setting("a"))])
    store.answers = ["dropped"]
    with pytest.raises(OutcomeUnknown):
        await RecordStore(store).update(KEY, Setting, lambda found: next(answers, None))
    assert store.writes == 1


async def test_a_decision_that_saw_more_than_the_record_waits_until_it_is_read(store: Unsteady) -> None:
    """Schedule: the record is read; the lost write takes effect; decide reads another key, which has it."""
    lost: list[Setting] = []

    async def decide(found: Versioned[Setting]) -> RecordChange[Setting] | None:
        if lost and found.value is None:
            await store.put(KEY, records.encode(lost[0]))
            return None
        lost.append(Setting("a"))
        return RecordChange(Setting("a"))

    store.answers = ["dropped"]
    assert (await RecordStore(store).update(KEY, Setting, decide)).is_changed
    assert store.writes == 1


@pytest.mark.parametrize("answer", ["applied", "dropped"])
async def test_decide_learns_that_an_attempt_may_have_taken_effect(store: Unsteady, answer: str) -> None:
    """Schedule: the record is created, the answer lost, and another changes it: to add once more might be
    to add twice."""
    seen: list[bool] = []

    def decide(found: Versioned[Setting]) -> RecordChange[Setting] | None:
        seen.append(found.is_in_doubt)
        return None if found.is_in_doubt else RecordChange(Setting("a"))

    store.answers, store.after = [answer], [store.rival("b")]
    assert not (await RecordStore(store).update(KEY, Setting, decide)).is_changed
    assert seen == [False, True]


async def test_only_a_conclusive_refusal_outweighs_an_unknown_outcome(store: Unsteady) -> None:
    for kind, expected in ((Fenced, Fenced), (Refusal, OutcomeUnknown)):
        errors = iter([None, kind("no")])
        store.answers = ["dropped"]

        def decide(found: Versioned[Setting], errors=errors) -> RecordChange[Setting]:
            if error := next(errors):
                raise error
            return RecordChange(Setting("a"))

        with pytest.raises(expected):
            await RecordStore(store).update(KEY, Setting, decide, conclusive=(Fenced,))


async def test_at_the_limit_an_unknown_outcome_stays_unknown(store: Unsteady) -> None:
    store.answers = ["dropped"] * records.ATTEMPTS
    with pytest.raises(OutcomeUnknown, match="may or may not"):
        await RecordStore(store).update(KEY, Setting, Goal("a"))
    assert store.writes == records.ATTEMPTS


async def test_a_lost_answer_to_an_attempt_after_a_conflict_is_found(store: Unsteady) -> None:
    store.before, store.answers = [store.rival("b"), None], ["", "applied"]
    goal = Goal("a")
    assert (await RecordStore(store).update(KEY, Setting, goal)).is_changed
    assert goal.seen == [None, "b"]
