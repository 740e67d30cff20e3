"""A batch is decided once and published once, whoever decides, dies, or comes too late."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from sava.cluster import writer_maintenance
from sava.cluster.writer_maintenance import WriterMaintenance
from sava.cluster.writer_records import (
    MAX_EARLIER,
    MAX_RECENT,
    SWEEP,
    BatchOutOfOrder,
    Commit,
    StagedLost,
    WriterBusy,
    WriterFenced,
    WriterRecord,
    WriterReused,
    WriterUnknown,
    now_ms,
    writer_key,
)
from sava.cluster.writers import CommitResult, Writers
from sava.errors import SavaError
from sava.metadata.errors import OutcomeUnknown, Unavailable
from sava.metadata.records import RecordCorrupt
from sava.storage import staging
from sava.storage.errors import StagedExpired, StagedInvalid
from sava.storage.objectstore import ObjectStore
from sava.storage.staging import Part, Section
from sava.topics import specs
from sava.topics.errors import MessageTooLarge
from sava.topics.names import InvalidName, TopicName
from tests.support.objects import batch, new_object
from tests.unit.cluster.fakes import FaultyStore

ORDERS, PAYMENTS = "/default/orders", "/default/payments"
EXPIRY_S = 1000.0


class FakeTopics:
    """Topics that remember runs as real ones do, and keep what they were given."""

    def __init__(self, objects: ObjectStore) -> None:
        self._objects = objects
        self.published: dict[str, list[bytes]] = {}
        self.runs: dict[tuple[str, int], int] = {}
        self.refusals: dict[str, SavaError] = {}
        """Of checks, by topic."""
        self.failures: dict[str, SavaError] = {}
        """Of publishing, by topic."""
        self.calls: list[tuple[str, int]] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.reached = asyncio.Event()

    async def check(self, writer: str, topic: TopicName, sections: Sequence[Section]) -> int:
        if str(topic) in self.refusals:
            raise self.refusals[str(topic)]
        return 1

    async def publish(self, writer: str, part: Part, *, producer_id: int, ordinal: int) -> None:
        self.calls.append((part.topic, ordinal))
        self.reached.set()
        await self.gate.wait()
        if part.topic in self.failures:
            raise self.failures[part.topic]
        if self.runs.get((part.topic, producer_id), 0) >= ordinal:
            return
        payloads = [
            payload
            async for each in staging.read_batches(self._objects, part.sections)
            for payload in each.payloads()
        ]
        if self.runs.get((part.topic, producer_id), 0) >= ordinal:
            return
        self.runs[part.topic, producer_id] = ordinal
        self.published.setdefault(part.topic, []).extend(payloads)


class Story:
    """One cluster of as many brokers as are asked for: they share everything but memory."""

    def __init__(self) -> None:
        self.store = FaultyStore()
        self.objects = ObjectStore.open("memory://")
        self.topics = FakeTopics(self.objects)
        self.brokers: list[Writers] = []
        self.writers = self.broker()

    def broker(self) -> Writers:
        made = Writers(self.store, self.objects, self.topics, expiry_s=EXPIRY_S)
        self.brokers.append(made)
        return made

    def leader(self) -> WriterMaintenance:
        return WriterMaintenance(self.broker(), self.store, self.objects, expiry_s=EXPIRY_S)

    async def staged(
        self, number: int, *, writer: str = "w", run: str = "run-1", query: str = "q", **parts: list[bytes]
    ) -> Commit:
        """A commit of what was just staged: orders and payments, if not said otherwise."""
        given = parts or {"orders": [b"order %d" % number], "payments": [b"payment %d" % number]}
        batches = {f"/default/{topic}": [batch(payloads)] for topic, payloads in given.items()}
        key, data, sections = new_object(staging.parts_prefix(writer), batches)
        await self.objects.put_new(key, data)
        named = [(TopicName.parse(topic), [section]) for topic, section in sections]
        return Commit(writer=writer, run=run, query=query, batch=number, parts=named)

    async def commit(self, number: int, **changes: Any) -> CommitResult:
        return await self.writers.commit(await self.staged(number, **changes))

    async def record(self, writer: str = "w") -> WriterRecord:
        kv = await self.store.get(writer_key(writer))
        assert kv is not None
        return specs.decode(kv, WriterRecord)

    async def keys(self) -> list[str]:
        """Of everything that is staged, when nobody is removing any of it."""
        await asyncio.gather(*(task for broker in self.brokers for task in broker._tidying))
        return [info.key async for info in self.objects.list(staging.PREFIX)]

    def orders(self) -> list[bytes]:
        return self.topics.published.get(ORDERS, [])


@pytest.fixture
async def story() -> Any:
    made = Story()
    yield made
    for broker in made.brokers:
        await broker.close()
    made.store.close()


async def test_a_batch_is_published_and_nothing_of_it_is_left(story: Story) -> None:
    done = await story.commit(0)
    assert done.decided_now
    assert dict(done.published) == {ORDERS: 1, PAYMENTS: 1}
    assert story.topics.published == {ORDERS: [b"order 0"], PAYMENTS: [b"payment 0"]}
    record = await story.record()
    assert (record.batch, record.is_published, record.messages) == (0, True, 2)
    assert await story.keys() == []


async def test_batches_may_be_numbered_as_the_writer_likes_as_long_as_they_grow(story: Story) -> None:
    for number in (3, 1000, 2**63):
        await story.commit(number, orders=[b"%d" % number])
    assert story.orders() == [b"3", b"1000", b"%d" % 2**63]
    assert [ordinal for _, ordinal in story.topics.calls] == [1, 2, 3]


async def test_a_repeated_commit_publishes_nothing_whatever_it_names(story: Story) -> None:
    """The driver dies with the answer under way and does the batch again, from other input."""
    await story.commit(0)
    again = await story.commit(0, run="run-2", orders=[b"something else"])
    assert again == CommitResult(False, ())
    assert story.orders() == [b"order 0"]
    await story.commit(1, run="run-2")
    late = await story.commit(0, run="run-2", orders=[b"something else"])
    assert not late.decided_now
    assert story.orders() == [b"order 0", b"order 1"]


async def test_of_two_commits_at_once_one_decides_and_both_are_answered(story: Story) -> None:
    first, second = await story.staged(0, orders=[b"a"]), await story.staged(0, orders=[b"b"])
    done = await asyncio.gather(story.writers.commit(first), story.broker().commit(second))
    assert sorted(each.decided_now for each in done) == [False, True]
    assert story.orders() in ([b"a"], [b"b"])


async def test_many_drivers_and_brokers_at_once_publish_each_batch_once(story: Story) -> None:
    for number in range(10):
        commits = [
            (story.broker(), await story.staged(number, orders=[b"%d" % number], payments=[b"%d" % number]))
            for _ in range(4)
        ]
        done = await asyncio.gather(*(broker.commit(commit) for broker, commit in commits))
        assert sum(each.decided_now for each in done) == 1
    assert story.orders() == [b"%d" % number for number in range(10)]
    assert story.topics.published[PAYMENTS] == story.orders()


async def test_a_run_that_was_followed_by_another_is_fenced(story: Story) -> None:
    """Two drivers on one checkpoint: the second repeats the last batch of the first, which then is too
    late, also to repeat what it had done itself."""
    await story.commit(0, run="run-1")
    await story.commit(0, run="run-2")
    for number in (0, 1):
        with pytest.raises(WriterFenced):
            await story.commit(number, run="run-1")
    await story.commit(1, run="run-2")
    assert story.orders() == [b"order 0", b"order 1"]


async def test_fenced_runs_are_remembered_up_to_a_limit(story: Story) -> None:
    for number in range(2 * MAX_EARLIER):
        await story.commit(0, run=f"run-{number}")
    record = await story.record()
    assert len(record.earlier) == MAX_EARLIER
    with pytest.raises(WriterFenced):
        await story.commit(1, run=f"run-{MAX_EARLIER}")


async def test_a_writer_id_of_another_query_is_refused_and_no_repetition(
    story: Story,
) -> None:
    """The checkpoint was deleted: the query has a new id, and counts from 0 again."""
    for number in range(3):
        await story.commit(number)
    with pytest.raises(WriterReused, match="sava writers forget w"):
        await story.commit(0, query="another", run="run-2")
    await story.writers.forget("w")
    done = await story.commit(0, query="another", run="run-2", orders=[b"anew"])
    assert done.decided_now
    assert story.orders()[-1] == b"anew"


async def test_a_skipped_number_is_refused_and_no_repetition(story: Story) -> None:
    """Somebody numbers batches by date, and writes an earlier day later."""
    for number in (20260101, 20260103):
        await story.commit(number)
    with pytest.raises(BatchOutOfOrder):
        await story.commit(20260102)
    assert not (await story.commit(20260101)).decided_now
    for number in range(20260104, 20260104 + MAX_RECENT):
        await story.commit(number)
    with pytest.raises(BatchOutOfOrder):
        await story.commit(20260101)  # it was, and nobody remembers
    assert not (await story.commit(20260103)).decided_now


async def test_a_forgotten_writer_is_another_one_to_topics(story: Story) -> None:
    """They remember run 2 of it: with the same producer id the new run 1 would be taken for done."""
    await story.commit(0)
    await story.commit(1)
    before = (await story.record()).producer_id
    await story.writers.forget("w")
    await story.commit(0, orders=[b"anew"])
    assert (await story.record()).producer_id != before
    assert story.orders() == [b"order 0", b"order 1", b"anew"]


async def test_what_a_topic_refuses_is_not_decided(story: Story) -> None:
    story.topics.refusals[PAYMENTS] = MessageTooLarge("a message has 2000 bytes")
    with pytest.raises(MessageTooLarge):
        await story.commit(0)
    assert story.topics.published == {}
    assert await story.store.get(writer_key("w")) is None
    del story.topics.refusals[PAYMENTS]
    assert (await story.commit(0)).decided_now


async def test_a_batch_without_messages_is_decided_too(story: Story) -> None:
    empty = Commit("w", "run-1", "q", 0, [])
    assert await story.writers.commit(empty) == CommitResult(True, [])
    assert not (await story.writers.commit(empty)).decided_now


@pytest.mark.parametrize(
    "change", [{"writer": "a/b"}, {"writer": ""}, {"run": ""}, {"run": "x" * 300}, {"query": "x" * 300}]
)
async def test_names_are_checked(story: Story, change: dict[str, str]) -> None:
    given: dict[str, Any] = {**change, "parts": []}
    commit = (await story.staged(0))._replace(**given)
    with pytest.raises(InvalidName):
        await story.writers.commit(commit)


async def test_objects_of_others_are_not_published_and_not_removed(story: Story) -> None:
    theirs = await story.staged(0, writer="other")
    with pytest.raises(StagedInvalid):
        await story.writers.commit(theirs._replace(writer="w"))
    assert (await story.writers.commit(theirs)).decided_now


async def test_a_part_that_never_came_or_is_too_short_is_refused(story: Story) -> None:
    commit = await story.staged(0)
    topic, (section,) = commit.parts[0]
    for wrong in (
        Section(section.key + "x", 0, section.end, 1, 1, 0),
        Section(section.key, 0, section.end + 10_000, 1, 1, 0),
    ):
        with pytest.raises((StagedExpired, StagedInvalid)):
            await story.writers.commit(commit._replace(parts=[(topic, [wrong])]))
    assert story.topics.published == {}


async def test_a_part_that_was_staged_long_ago_is_refused(
    story: Story, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = await story.staged(0)
    in_time, late = now_ms() + 499_000, now_ms() + 501_000
    monkeypatch.setattr("sava.cluster.writers.now_ms", lambda: late)
    with pytest.raises(StagedExpired, match="staging_expiry_seconds"):
        await story.writers.commit(commit)
    monkeypatch.setattr("sava.cluster.writers.now_ms", lambda: in_time)
    assert (await story.writers.commit(commit)).decided_now


# -- somebody dies -----------------------------------------------------------------------------


async def dies_before_publishing(story: Story, number: int = 0, **changes: Any) -> None:
    """The broker that decided ends with nothing published."""
    story.topics.gate.clear()
    story.topics.reached.clear()
    broker = story.broker()
    task = asyncio.create_task(broker.commit(await story.staged(number, **changes)))
    await story.topics.reached.wait()
    await broker.close()
    with pytest.raises(Unavailable):
        await task
    story.topics.gate.set()


async def test_a_repeated_commit_publishes_what_a_dead_broker_decided(story: Story) -> None:
    await dies_before_publishing(story, orders=[b"first"])
    assert story.orders() == []
    again = await story.commit(0, run="run-2", orders=[b"second"])
    assert not again.decided_now
    assert dict(again.published) == {ORDERS: 1}
    assert story.orders() == [b"first"]


async def test_the_next_batch_first_publishes_what_a_dead_broker_decided(story: Story) -> None:
    await dies_before_publishing(story)
    await story.commit(1)
    assert story.orders() == [b"order 0", b"order 1"]


async def test_a_broker_dies_after_the_decision_and_the_leader_publishes_it(
    story: Story, monkeypatch: pytest.MonkeyPatch
) -> None:
    await dies_before_publishing(story)
    leader = story.leader()
    await leader.run()
    assert story.orders() == []  # it may still be under way
    assert leader.unpublished == 1
    monkeypatch.setattr(writer_maintenance, "LEFT_MS", 0)
    await leader.run()
    assert story.orders() == [b"order 0"]
    assert leader.unpublished == 0
    assert (await story.record()).is_published


async def test_a_commit_whose_caller_gives_up_is_finished(story: Story) -> None:
    story.topics.gate.clear()
    task = asyncio.create_task(story.commit(0))
    await story.topics.reached.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    story.topics.gate.set()
    await story.writers.finish("w", (await story.record()).manifest)
    assert story.orders() == [b"order 0"]
    assert (await story.record()).is_published


async def test_one_topic_that_cannot_be_reached_does_not_hold_up_the_others(story: Story) -> None:
    """They have theirs, and are not asked again; the batch is not over."""
    story.topics.failures[PAYMENTS] = Unavailable("its broker is down")
    with pytest.raises(Unavailable):
        await story.commit(0)
    record = await story.record()
    assert (record.done, record.error, record.is_published) == ((ORDERS,), "its broker is down", False)
    assert story.orders() == [b"order 0"]
    with pytest.raises(Unavailable):
        await story.commit(1)  # not before 0 is over
    story.topics.failures.clear()
    story.topics.calls.clear()
    await story.commit(1)
    assert story.topics.calls[0] == (PAYMENTS, 1)
    assert story.topics.published[PAYMENTS] == [b"payment 0", b"payment 1"]
    assert story.orders() == [b"order 0", b"order 1"]
    assert (await story.record()).error == ""


async def test_whoever_is_late_finds_everything_done(story: Story) -> None:
    """Two finish the same batch; the slower one finds neither manifest nor parts, and no reason to
    complain."""
    await dies_before_publishing(story)
    slow, quick = story.broker(), story.broker()
    story.topics.gate.clear()
    story.topics.reached.clear()
    manifest = (await story.record()).manifest
    finishing = asyncio.create_task(slow.finish("w", manifest))
    await story.topics.reached.wait()
    story.topics.gate.set()
    await quick.finish("w", manifest)
    assert await story.keys() == []
    await finishing
    assert await slow.finish("w", manifest) == ()
    assert story.orders() == [b"order 0"]


async def test_a_late_broker_does_not_take_a_new_writers_batch_for_its_own(
    story: Story,
) -> None:
    """A finishes ordinal 1 and stalls before the mark. B marks it; the writer is forgotten and begins anew;
    its ordinal 1 is decided, and its broker dies. A wakes up and must not mark that one."""
    slow = story.broker()
    committing = asyncio.create_task(slow.commit(await story.staged(0, orders=[b"old"])))
    stalled, go_on = await stall_at_txn(story, skip=1)
    await stalled.wait()
    await story.broker().finish("w", (await story.record()).manifest)
    await story.writers.forget("w")
    await dies_before_publishing(story, orders=[b"new"])
    go_on.set()
    await committing
    assert not (await story.record()).is_published
    await story.commit(0, run="run-2")
    assert story.orders() == [b"old", b"new"]


async def stall_at_txn(story: Story, *, skip: int = 0) -> tuple[asyncio.Event, asyncio.Event]:
    """One transaction, after so many others, waits until it may go on."""
    stalled, go_on = asyncio.Event(), asyncio.Event()
    left = skip

    async def stall() -> None:
        nonlocal left
        if left:
            left -= 1
            return
        del story.store.before["txn"]  # nobody else
        stalled.set()
        await go_on.wait()

    story.store.before["txn"] = stall
    return stalled, go_on


@pytest.mark.parametrize("lost", [1, 2, 3])
async def test_lost_answers_of_the_metadata_store_change_nothing(story: Story, lost: int) -> None:
    """The decision took effect, or the mark, and nobody was told."""
    story.store.lost["txn"] = lost
    await story.commit(0)
    await story.commit(1)
    assert story.orders() == [b"order 0", b"order 1"]
    assert (await story.record()).is_published


async def test_a_refusal_after_a_lost_decision_does_not_refuse_the_batch(story: Story) -> None:
    """Schedule: the decision is sent and its answer lost; the next attempt finds the record as it was and is
    refused by a topic. The first decision may take effect yet: nobody may say that nothing was published."""

    async def lose() -> None:
        story.topics.refusals[ORDERS] = StagedInvalid("too large")
        raise OutcomeUnknown("the answer was lost")

    commit = await story.staged(0)
    story.store.before["txn"] = lose
    with pytest.raises(OutcomeUnknown) as raised:
        await story.writers.commit(commit)
    assert isinstance(raised.value.__cause__, StagedInvalid)


async def test_a_writer_whose_forgetting_has_no_answer_is_forgotten(story: Story) -> None:
    """Schedule: the record is removed and the answer lost; asked for again, there is no such writer."""
    await story.commit(0)
    story.store.lost["txn"] = 1
    await story.writers.forget("w")
    assert await story.writers.list() == []


async def test_what_was_decided_and_then_removed_by_somebody_is_said_to_be_lost(story: Story) -> None:
    await dies_before_publishing(story)
    await story.objects.delete(await story.keys())
    with pytest.raises(StagedLost):
        await story.commit(1)
    assert "cannot be published" in (await story.record()).error
    with pytest.raises(WriterBusy, match="--force"):
        await story.writers.forget("w")
    await story.writers.forget("w", force=True)
    assert (await story.commit(1)).decided_now


async def test_only_known_writers_can_be_forgotten(story: Story) -> None:
    with pytest.raises(WriterUnknown):
        await story.writers.forget("w")
    await story.commit(0)
    assert [(writer, record.batch) for writer, record in await story.writers.list()] == [("w", 0)]
    await story.writers.forget("w")
    assert await story.writers.list() == []


# -- sweeping ----------------------------------------------------------------------------------


def later(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """For the leader, and the object store."""
    moment = now_ms() + round(seconds * 1000)

    async def store_time_ms(_: ObjectStore) -> int:
        return moment

    monkeypatch.setattr(writer_maintenance, "now_ms", lambda: moment)
    monkeypatch.setattr(staging, "store_time_ms", store_time_ms)


async def test_the_leaders_own_clock_does_not_age_what_is_staged(
    story: Story, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = await story.staged(0)
    ahead = now_ms() + 10**9
    monkeypatch.setattr(writer_maintenance, "now_ms", lambda: ahead)
    assert await story.leader().sweep() == []
    assert (await story.writers.commit(commit)).decided_now
    assert await story.keys() == []


async def test_what_nobody_commits_is_removed_when_it_is_old(
    story: Story, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = await story.staged(0)
    leader = story.leader()
    assert await leader.sweep() == []
    assert await story.store.get(SWEEP) is None
    later(monkeypatch, EXPIRY_S + 1)
    assert await leader.sweep() == [commit.parts[0][1][0].key]
    with pytest.raises(StagedExpired):
        await story.writers.commit(commit)


async def test_what_was_decided_is_kept_however_old_it_is(
    story: Story, monkeypatch: pytest.MonkeyPatch
) -> None:
    await dies_before_publishing(story)
    orphan = await story.staged(0, writer="other")
    before = set(await story.keys())
    later(monkeypatch, 1000 * EXPIRY_S)
    assert await story.leader().sweep() == [orphan.parts[0][1][0].key]
    assert set(await story.keys()) == before - {orphan.parts[0][1][0].key}
    await story.writers.finish("w", (await story.record()).manifest)
    assert story.orders() == [b"order 0"]


async def test_a_decision_that_looked_before_a_sweep_is_refused(
    story: Story, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A broker looks at the parts, stalls for longer than they are kept, and goes on when they are gone."""
    commit = await story.staged(0)
    stalled, go_on = await stall_at_txn(story)
    deciding = asyncio.create_task(story.writers.commit(commit))
    await stalled.wait()
    later(monkeypatch, EXPIRY_S + 1)
    swept = await story.leader().sweep()
    assert commit.parts[0][1][0].key in swept
    go_on.set()
    with pytest.raises(StagedExpired):
        await deciding
    assert await story.store.get(writer_key("w")) is None
    assert story.topics.published == {}


async def test_what_is_about_to_be_removed_is_not_decided_at_any_clock(
    story: Story, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The leader has said up to when it sweeps, and read the records, and takes its time to remove. The clock
    of the broker that is asked to commit is behind: to it the parts look fresh, and they are still there."""
    commit = await story.staged(0)
    later(monkeypatch, EXPIRY_S + 100)
    removing, go_on = asyncio.Event(), asyncio.Event()
    delete = story.objects.delete

    async def slowly(keys: Sequence[str]) -> None:
        removing.set()
        await go_on.wait()
        await delete(keys)

    monkeypatch.setattr(story.objects, "delete", slowly)
    sweeping = asyncio.create_task(story.leader().sweep())
    await removing.wait()
    with pytest.raises(StagedExpired):
        await story.writers.commit(commit)
    go_on.set()
    assert await sweeping != []
    # It is never taken back: whoever said it may not be done.
    before = await story.store.get(SWEEP)
    later(monkeypatch, EXPIRY_S + 5)
    await story.staged(0)
    await story.leader().sweep()
    after = await story.store.get(SWEEP)
    assert before is not None
    assert after is not None
    assert after.value == before.value


async def test_single_writes_are_forgotten_after_a_day_and_queries_are_not(
    story: Story, monkeypatch: pytest.MonkeyPatch
) -> None:
    await story.commit(0, writer="single", query="")
    await story.commit(0, writer="stream", query="q")
    leader = story.leader()
    later(monkeypatch, 23 * 3600)
    await leader.run()
    assert len(await story.writers.list()) == 2
    later(monkeypatch, 25 * 3600)
    await leader.run()
    assert [writer for writer, _ in await story.writers.list()] == ["stream"]


async def test_an_unreadable_record_does_not_keep_others_unfinished(
    story: Story, monkeypatch: pytest.MonkeyPatch
) -> None:
    await dies_before_publishing(story)
    await story.store.put(writer_key("broken"), b"{")
    monkeypatch.setattr(writer_maintenance, "LEFT_MS", 0)
    await story.leader()._finish_left()
    assert story.orders() == [b"order 0"]
    later(monkeypatch, EXPIRY_S + 1)
    await story.staged(0, writer="other")
    with pytest.raises(RecordCorrupt):
        await story.leader().sweep()
