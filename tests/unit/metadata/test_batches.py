"""Many transactions in one log entry: what the machine makes of them, and how callers come to share one."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from sava.metadata.commands import (
    AllocateId,
    BatchResult,
    Command,
    CommandRefused,
    Compare,
    Delete,
    Get,
    Proposal,
    Put,
    Relation,
    Result,
    Target,
    Txn,
    TxnBatch,
    TxnResult,
    encode,
)
from sava.metadata.errors import Deposed, InvalidRequest, NoSpace, OutcomeUnknown, Unavailable
from sava.metadata.machine.limits import Limits
from sava.metadata.store import ENTRIES, TXNS, Batches
from tests.unit.metadata.steps import TERM, Steps


def is_at(key: str, revision: int) -> Compare:
    return Compare(key, Target.MOD_REVISION, Relation.EQUAL, revision)


def put(key: str, value: bytes = b"v", *compare: Compare) -> Txn:
    return Txn(compare, (Put(key, value),))


class TestMachine:
    def test_one_that_is_refused_does_not_hold_up_the_others(self) -> None:
        steps = Steps()
        steps.put("/b")
        result = steps.apply(TxnBatch((put("/a"), put("/b", b"w", is_at("/b", 7)), put("/c"))))
        assert result == BatchResult(2, (True, False, True))
        assert steps.keys() == ["/a", "/b", "/c"]
        assert steps.machine.get("/b").value == b"v"  # type: ignore[union-attr]

    def test_all_changes_are_of_one_revision_and_one_event_each(self) -> None:
        steps = Steps()
        steps.put("/a", b"1")
        before = steps.machine.get("/a")
        steps.apply(TxnBatch((put("/c"), put("/a", b"2"), put("/a", b"3"))))
        first, second = steps.events[-1]
        assert (first.key, first.prev, first.revision) == ("/a", before, 2)
        assert first.kv is not None
        assert (first.kv.value, first.kv.mod_revision, first.kv.version) == (b"3", 2, 3)
        assert (second.key, second.revision) == ("/c", 2)
        assert steps.machine.revision == 2

    def test_each_sees_those_before_it(self) -> None:
        """Two compare-and-swaps of one key that rest on the same revision: the first happens."""
        steps = Steps()
        steps.put("/a")
        result = steps.apply(TxnBatch((put("/a", b"1", is_at("/a", 1)), put("/a", b"2", is_at("/a", 1)))))
        assert result == BatchResult(2, (True, False))
        assert steps.machine.get("/a").value == b"1"  # type: ignore[union-attr]

    def test_what_one_creates_and_another_deletes_never_was(self) -> None:
        steps = Steps()
        result = steps.apply(TxnBatch((put("/a"), Txn(then=(Delete("/a"),)))))
        assert result == BatchResult(0, (True, True))
        assert steps.events == []

    def test_one_that_does_not_fit_is_refused_as_a_whole_and_alone(self) -> None:
        steps = Steps(Limits(max_total_bytes=50))
        result = steps.apply(
            TxnBatch(
                (put("/a"), Txn(then=(Put("/b", b"v"), Put("/c", bytes(60)))), Txn(then=(Put("/d", b"v"),)))
            )
        )
        assert isinstance(result, BatchResult)
        assert (result.outcomes[0], result.outcomes[2]) == (True, True)
        assert isinstance(result.outcomes[1], CommandRefused)
        assert result.outcomes[1].code == NoSpace.code
        assert steps.keys() == ["/a", "/d"]

    def test_in_another_term_nothing_of_it_happens(self) -> None:
        steps = Steps()
        result = steps.apply(TxnBatch((put("/a"),)), fence_term=TERM + 1)
        assert isinstance(result, CommandRefused)
        assert result.code == Deposed.code
        assert steps.keys() == []

    def test_a_copy_gets_the_first_ones_answer_and_has_no_effect(self) -> None:
        steps = Steps()
        session = steps.session()
        batch = TxnBatch((put("/a"), put("/b", b"v", is_at("/b", 5))))
        first = steps.apply(batch, session=session, seq=1)
        steps.delete("/a")
        assert steps.apply(batch, session=session, seq=1) == first
        assert steps.keys() == []

    def test_the_answer_that_a_session_remembers_is_small(self) -> None:
        """What a thousand puts return would push all other answers of the session out of its memory."""
        steps = Steps()
        for number in range(500):
            steps.put(f"/k/{number}", bytes(500))
        result = steps.apply(TxnBatch(tuple(put(f"/k/{number}") for number in range(500))))
        assert len(encode(result)) < 1000

    @pytest.mark.parametrize(
        "txns",
        [
            (Txn(then=(Get("/a"),)),),
            (Txn(then=(AllocateId("/a"),)),),
            (Txn(then=(Put("/a", b""),), otherwise=(Put("/b", b""),)),),
            (Txn(then=(Put("a", b""),)),),
            tuple(put(f"/{number}") for number in range(2049)),
            tuple(put(f"/{number}", bytes(1 << 20)) for number in range(4)),
        ],
        ids=["get", "allocate", "otherwise", "bad key", "too many", "too large"],
    )
    def test_what_is_not_a_batch_is_refused_before_it_is_proposed(self, txns: tuple[Txn, ...]) -> None:
        with pytest.raises(InvalidRequest):
            Steps().machine.check(Proposal(TxnBatch(txns)))


class Log:
    """Answers when it is let, by what the machine says."""

    def __init__(self) -> None:
        self.steps = Steps()
        self.proposed: list[Command] = []
        self.fences: list[int] = []
        self.failure: Exception | None = None
        self.gate = asyncio.Event()
        self.gate.set()

    async def propose(self, command: Command, timeout: float, fence_term: int) -> Result:
        self.proposed.append(command)
        self.fences.append(fence_term)
        await self.gate.wait()
        if self.failure is not None:
            raise self.failure
        return self.steps.apply(command)

    @property
    def sizes(self) -> Sequence[int]:
        return [len(each.txns) if isinstance(each, TxnBatch) else 1 for each in self.proposed]


class TestSharing:
    async def test_callers_of_one_moment_share_an_entry_and_each_has_its_answer(self) -> None:
        log = Log()
        log.steps.put("/k/1")
        batches = Batches(log.propose)
        answers = await asyncio.gather(
            *(
                batches.txn(put(f"/k/{number}", b"w", is_at(f"/k/{number}", 0)), fence_term=0, timeout=5)
                for number in range(3)
            )
        )
        assert log.sizes == [3]
        assert answers == [TxnResult(True, 2, ()), TxnResult(False, 2, ()), TxnResult(True, 2, ())]

    async def test_a_lone_caller_waits_for_nobody(self) -> None:
        log = Log()
        assert await Batches(log.propose).txn(put("/a"), fence_term=0, timeout=5) == TxnResult(True, 1, ())
        assert log.proposed == [put("/a")]

    async def test_while_entries_are_on_their_way_the_next_ones_gather(self) -> None:
        """Without the limit of entries, each caller that comes alone would have an entry of its own."""
        log = Log()
        log.gate.clear()
        batches = Batches(log.propose)
        asked = [await begin(batches, f"/k/{number}") for number in range(20)]
        log.gate.set()
        await asyncio.gather(*asked)
        assert log.sizes == [1] * ENTRIES + [20 - ENTRIES]

    async def test_an_entry_has_a_bound(self) -> None:
        log = Log()
        batches = Batches(log.propose)
        await asyncio.gather(
            *(batches.txn(put(f"/k/{number}"), fence_term=0, timeout=5) for number in range(TXNS + 1)),
            *(
                batches.txn(put(f"/l/{number}", bytes(900_000)), fence_term=0, timeout=5)
                for number in range(2)
            ),
        )
        assert log.sizes == [TXNS, 2, 1]

    async def test_terms_are_not_mixed(self) -> None:
        log = Log()
        batches = Batches(log.propose)
        await asyncio.gather(*(batches.txn(put("/a"), fence_term=term, timeout=5) for term in (0, 3, 3, 0)))
        assert (log.sizes, log.fences) == ([1, 2, 1], [0, 3, 0])

    async def test_one_that_breaks_a_limit_is_refused_alone(self) -> None:
        log = Log()
        batches = Batches(log.propose)
        wrong, right = await asyncio.gather(
            batches.txn(put("wrong"), fence_term=0, timeout=5),
            batches.txn(put("/a"), fence_term=0, timeout=5),
            return_exceptions=True,
        )
        assert isinstance(wrong, InvalidRequest)
        assert right == TxnResult(True, 1, ())

    @pytest.mark.parametrize("failure", [Unavailable("no leader"), OutcomeUnknown("no answer")])
    async def test_what_became_of_the_entry_became_of_each(self, failure: Exception) -> None:
        log = Log()
        log.failure = failure
        batches = Batches(log.propose)
        answers = await asyncio.gather(
            *(batches.txn(put(f"/k/{number}"), fence_term=0, timeout=5) for number in range(3)),
            return_exceptions=True,
        )
        assert answers == [failure] * 3

    async def test_when_time_is_up_it_matters_whether_it_had_left(self) -> None:
        """One that has left may still take effect; one that waits behind it certainly does not."""
        log = Log()
        log.gate.clear()
        batches = Batches(log.propose)
        before = [await begin(batches, f"/k/{number}") for number in range(ENTRIES - 1)]
        sent = await begin(batches, "/sent", timeout=0.01)
        kept = await begin(batches, "/kept", timeout=0.01)
        with pytest.raises(OutcomeUnknown):
            await sent
        with pytest.raises(Unavailable):
            await kept
        log.gate.set()
        await asyncio.gather(*before)
        await batches.txn(put("/later"), fence_term=0, timeout=5)
        found = log.steps.keys()
        assert "/sent" in found
        assert "/kept" not in found

    async def test_a_caller_that_leaves_takes_its_transaction_with_it(self) -> None:
        """If it has not left yet."""
        log = Log()
        log.gate.clear()
        batches = Batches(log.propose)
        before = [await begin(batches, f"/k/{number}") for number in range(ENTRIES)]
        leaves, stays = await begin(batches, "/leaves"), await begin(batches, "/stays")
        leaves.cancel()
        log.gate.set()
        await asyncio.gather(*before, stays)
        found = log.steps.keys()
        assert "/stays" in found
        assert "/leaves" not in found


async def begin(batches: Batches, key: str, *, timeout: float = 5) -> asyncio.Task[TxnResult]:
    """Asked for, and on its way if there is room."""
    task = asyncio.create_task(batches.txn(put(key), fence_term=0, timeout=timeout))
    for _ in range(3):
        await asyncio.sleep(0)
    return task
