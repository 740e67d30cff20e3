"""Pipelines are one runner's at a time, whoever dies, pauses, deletes or changes them."""

from __future__ import annotations

from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from sava.api.metrics.cluster import PipelinesCollector
from sava.cluster.pipelines import (
    MAX_SETTINGS_BYTES,
    PipelineExists,
    PipelineForeign,
    PipelineInvalid,
    Pipelines,
    PipelineState,
    PipelineStatus,
    PipelineStopping,
    PipelineUnknown,
    RunnerRecord,
    RunnerUnknown,
    claim_key,
    status_key,
)
from sava.metadata.commands import TxnResult
from sava.metadata.errors import OutcomeUnknown
from sava.topics.names import InvalidName
from tests.unit.cluster.fakes import FaultyStore

TTL_MS = 10_000
ALL = RunnerRecord(kinds=("custom",))
RUNNING = PipelineStatus(state=PipelineState.RUNNING, rows=7, rate=1.5, lag_messages=3, lag_seconds=0.5)


class Clock:
    def __init__(self) -> None:
        self.now = 0

    def __call__(self) -> int:
        return self.now


@pytest.fixture
def store() -> FaultyStore:
    return FaultyStore(clock=Clock())


@pytest.fixture
def pipelines(store: FaultyStore) -> Pipelines:
    return Pipelines(store)


async def _claimed(pipelines: Pipelines, name: str = "copy", runner: str = "a") -> int:
    await pipelines.join(runner, ALL, ttl_ms=TTL_MS)
    claimed = await pipelines.claim(name, runner)
    assert claimed.is_granted
    return claimed.number


async def test_applying_the_same_again_changes_nothing(pipelines: Pipelines) -> None:
    first = await pipelines.apply("copy", "custom", {"to": {"topic": "/default/a"}})
    again = await pipelines.apply("copy", "custom", {"to": {"topic": "/default/a"}})
    other = await pipelines.apply("copy", "custom", {"to": {"topic": "/default/b"}})
    assert first.revision == again.revision < other.revision
    assert other.status.state is PipelineState.WAITING
    assert [each.name for each in await pipelines.list()] == ["copy"]


async def test_a_pipeline_is_the_request_of_who_applied_it_last(pipelines: Pipelines) -> None:
    settings = {"to": {"topic": "/default/a"}}
    first = await pipelines.apply("copy", "custom", settings, created_by="user:ann")
    again = await pipelines.apply("copy", "custom", settings, created_by="user:ann")
    other = await pipelines.apply("copy", "custom", settings, created_by="user:bob")
    assert first.revision == again.revision < other.revision
    assert other.record.created_by == "user:bob"
    paused = await pipelines.pause("copy", is_paused=True)
    assert paused.record.created_by == "user:bob"


async def test_a_runner_acts_for_the_creator_while_it_holds_the_claim(pipelines: Pipelines) -> None:
    await pipelines.apply("copy", "custom", {}, created_by="user:ann")
    await pipelines.join("a", ALL, ttl_ms=TTL_MS)
    claim = (await pipelines.claim("copy", "a")).number
    assert pipelines.is_delegated("user:ann", "copy", claim)
    assert not pipelines.is_delegated("user:bob", "copy", claim)
    assert not pipelines.is_delegated("user:ann", "copy", claim + 1)
    assert not pipelines.is_delegated("user:ann", "a/b", claim)
    await pipelines.apply("copy", "custom", {}, created_by="user:bob")
    assert not pipelines.is_delegated("user:ann", "copy", claim)
    assert pipelines.is_delegated("user:bob", "copy", claim)
    await pipelines.leave("a")
    assert not pipelines.is_delegated("user:bob", "copy", claim)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"from": {"token": "s3cr3t"}}, "option token is the runner's own"),
        ({"to": {"TlsKey": "/etc/key"}}, "option TlsKey is the runner's own"),
        ({"a": {"b": {"c": {"d": {}}}}}, "nested"),
        ({"from": ["x"]}, "by name are needed"),
    ],
)
async def test_settings_that_cannot_be_are_not_stored(
    pipelines: Pipelines, settings: dict[str, Any], text: str
) -> None:
    with pytest.raises(PipelineInvalid, match=text) as refused:
        await pipelines.apply("copy", "custom", settings)
    assert "s3cr3t" not in str(refused.value)


async def test_people_make_no_pipeline_of_a_policy(pipelines: Pipelines) -> None:
    with pytest.raises(PipelineInvalid, match="sava replication set"):
        await pipelines.apply("mine", "replicate", {"remote": "west"})


async def test_what_cannot_be_applied_is_refused(pipelines: Pipelines) -> None:
    await pipelines.apply("copy", "custom", {})
    with pytest.raises(PipelineExists):
        await pipelines.apply("copy", "custom", {}, create_only=True)
    with pytest.raises(InvalidName):
        await pipelines.apply("a/b", "custom", {})
    with pytest.raises(PipelineInvalid, match="bytes"):
        await pipelines.apply("large", "custom", {"x": "y" * MAX_SETTINGS_BYTES})
    with pytest.raises(PipelineUnknown):
        await pipelines.pause("missing", is_paused=True)
    with pytest.raises(PipelineUnknown):
        await pipelines.delete("a/b")


async def test_a_pipeline_of_a_policy_is_left_to_the_policy(pipelines: Pipelines) -> None:
    await pipelines.apply("replicate-west", "replicate", {"remote": "west"}, made_by="replication")
    with pytest.raises(PipelineForeign):
        await pipelines.apply("replicate-west", "replicate", {"remote": "east"})
    with pytest.raises(PipelineForeign):
        await pipelines.delete("replicate-west")
    await pipelines.pause("replicate-west", is_paused=True)
    same = await pipelines.apply("replicate-west", "replicate", {"remote": "west"}, made_by="replication")
    assert same.record.is_paused, "a policy does not resume what a person has paused"
    assert await pipelines.delete("replicate-west", made_by="replication")
    assert await pipelines.list() == []


async def test_one_runner_has_it_until_it_is_not_heard_any_more(
    pipelines: Pipelines, store: FaultyStore
) -> None:
    await pipelines.apply("copy", "custom", {})
    first = await _claimed(pipelines)
    await pipelines.join("b", ALL, ttl_ms=TTL_MS)
    refused = await pipelines.claim("copy", "b")
    assert (refused.is_granted, refused.holder) == (False, "a")
    assert (await pipelines.claim("copy", "a")) == (True, first, "a"), "asking again gives the same claim"

    # a is heard no more, b is
    for _ in range(5):
        store.advance(TTL_MS // 4)
        await pipelines.join("b", ALL, ttl_ms=TTL_MS)
    second = await pipelines.claim("copy", "b")
    assert second.is_granted
    assert second.number > first
    assert not (await pipelines.report("copy", "a", first, RUNNING)).is_held
    await pipelines.release("copy", "a", first, RUNNING)
    assert (await pipelines.get("copy")).claim is not None, "an old holder releases nothing"
    await pipelines.apply("other", "custom", {})
    with pytest.raises(RunnerUnknown):
        await pipelines.claim("other", "a")


async def test_a_runner_that_was_gone_gets_another_lease(pipelines: Pipelines, store: FaultyStore) -> None:
    first = await pipelines.join("a", ALL, ttl_ms=TTL_MS)
    store.advance(TTL_MS // 2)
    assert (await pipelines.join("a", ALL, ttl_ms=TTL_MS)).lease == first.lease
    store.advance(TTL_MS * 3)
    assert (await pipelines.join("a", ALL, ttl_ms=TTL_MS)).lease != first.lease


async def test_a_runner_and_its_claim_whose_answers_are_lost_are_found(
    pipelines: Pipelines, store: FaultyStore
) -> None:
    """Schedule: each write takes effect and its answer is lost."""
    await pipelines.apply("copy", "custom", {})
    store.lost["txn"] = 1
    joined = await pipelines.join("a", ALL, ttl_ms=TTL_MS)
    assert [runner.name for runner in joined.runners] == ["a"]
    store.lost["txn"] = 1
    claimed = await pipelines.claim("copy", "a")
    assert claimed.is_granted
    assert (await pipelines.claim("copy", "a")).number == claimed.number
    store.lost["txn"] = 1
    await pipelines.release("copy", "a", claimed.number, RUNNING)
    assert (await pipelines.get("copy")).claim is None


async def test_changes_of_a_pipeline_survive_lost_answers(pipelines: Pipelines, store: FaultyStore) -> None:
    """Schedule: each write takes effect and its answer is lost. A creation that is repeated after that would
    find its own pipeline and be refused."""
    store.lost["txn"] = 1
    await pipelines.apply("copy", "custom", {}, create_only=True)
    store.lost["txn"] = 1
    assert (await pipelines.pause("copy", is_paused=True)).record.is_paused
    store.lost["txn"] = 1
    assert await pipelines.delete("copy")
    with pytest.raises(PipelineUnknown):
        await pipelines.get("copy")


async def test_a_deletion_survives_a_lost_answer_while_the_runner_stops(
    pipelines: Pipelines, store: FaultyStore
) -> None:
    """Schedule: the mark is written and its answer lost; the runner sees the mark, stops, and removes the
    record; the record is read again."""
    await pipelines.apply("copy", "custom", {})
    claim = await _claimed(pipelines)
    txn = store.txn

    async def losing(*args: Any, **options: Any) -> TxnResult:
        await txn(*args, **options)
        store.txn = txn  # type: ignore[method-assign]
        await pipelines.release("copy", "a", claim, RUNNING)
        raise OutcomeUnknown("the answer was lost")

    store.txn = losing  # type: ignore[method-assign]
    assert await pipelines.delete("copy")


async def test_reports_are_what_is_shown_until_the_runner_is_gone(
    pipelines: Pipelines, store: FaultyStore
) -> None:
    await pipelines.apply("copy", "custom", {})
    claim = await _claimed(pipelines)
    assert (await pipelines.get("copy")).status.state is PipelineState.STARTING
    reported = await pipelines.report("copy", "a", claim, RUNNING)
    assert reported.is_held
    assert reported.is_wanted
    status = (await pipelines.get("copy")).status
    assert (status.state, status.runner, status.rows, status.lag_messages) == (
        PipelineState.RUNNING,
        "a",
        7,
        3,
    )
    store.advance(3 * TTL_MS)
    status = (await pipelines.get("copy")).status
    assert (status.state, status.runner, status.rows) == (PipelineState.WAITING, "", 7)
    assert status.rate == 0
    assert status.lag_messages == status.lag_seconds == -1, "never 0 because it is down"


async def test_a_report_without_news_is_not_written_down(pipelines: Pipelines, store: FaultyStore) -> None:
    await pipelines.apply("copy", "custom", {})
    claim = await _claimed(pipelines)
    await pipelines.report("copy", "a", claim, RUNNING)
    written = store.local.get(status_key("copy"))
    await pipelines.report("copy", "a", claim, RUNNING)
    assert store.local.get(status_key("copy")) == written
    await pipelines.report("copy", "a", claim, PipelineStatus(state=PipelineState.RUNNING, rows=8))
    assert store.local.get(status_key("copy")) != written


async def test_pausing_asks_the_runner_to_stop_and_keeps_others_away(pipelines: Pipelines) -> None:
    await pipelines.apply("copy", "custom", {})
    claim = await _claimed(pipelines)
    await pipelines.pause("copy", is_paused=True)
    assert not (await pipelines.report("copy", "a", claim, RUNNING)).is_wanted
    await pipelines.release("copy", "a", claim, PipelineStatus(state=PipelineState.STOPPED, rows=9))
    status = (await pipelines.get("copy")).status
    assert (status.state, status.rows) == (PipelineState.PAUSED, 9)
    assert not (await pipelines.claim("copy", "a")).is_granted
    await pipelines.pause("copy", is_paused=False)
    assert (await pipelines.claim("copy", "a")).is_granted


async def test_a_deleted_pipeline_is_nobodys_until_its_runner_has_stopped(pipelines: Pipelines) -> None:
    """Deleted and created anew while its runner is at work: the successor must not begin before that runner
    has stopped."""
    await pipelines.apply("copy", "custom", {})
    claim = await _claimed(pipelines)
    assert not await pipelines.delete("copy")
    assert not await pipelines.delete("copy"), "asking again changes nothing"
    with pytest.raises(PipelineStopping, match="runner a"):
        await pipelines.apply("copy", "custom", {"new": True})
    with pytest.raises(PipelineStopping):
        await pipelines.pause("copy", is_paused=True)
    assert not (await pipelines.report("copy", "a", claim, RUNNING)).is_wanted
    assert (await pipelines.get("copy")).status.state is PipelineState.DELETING
    await pipelines.release("copy", "a", claim, RUNNING)
    assert await pipelines.list() == []
    await pipelines.apply("copy", "custom", {"new": True})
    assert (await pipelines.get("copy")).status.rows == 0


async def test_a_deleted_pipeline_goes_with_a_runner_that_never_comes_back(
    pipelines: Pipelines, store: FaultyStore
) -> None:
    await pipelines.apply("copy", "custom", {})
    await _claimed(pipelines)
    await pipelines.delete("copy")
    store.advance(3 * TTL_MS)
    assert await pipelines.list() == []
    await pipelines.apply("copy", "custom", {})


async def test_a_runner_that_leaves_lets_go_of_everything_at_once(
    pipelines: Pipelines, store: FaultyStore
) -> None:
    await pipelines.apply("copy", "custom", {})
    await _claimed(pipelines)
    await pipelines.leave("a")
    assert store.local.get(claim_key("copy")) is None
    assert await pipelines.runners() == []
    await pipelines.leave("a")


async def test_runners_know_of_each_other(pipelines: Pipelines) -> None:
    await pipelines.apply("copy", "custom", {})
    await _claimed(pipelines)
    only = RunnerRecord(kinds=("custom",), only=("other",))
    seen = (await pipelines.join("b", only, ttl_ms=TTL_MS)).runners
    assert [(each.name, each.claims) for each in seen] == [("a", 1), ("b", 0)]
    assert [(each.record.kinds, each.record.only) for each in seen] == [
        (("custom",), ()),
        (("custom",), ("other",)),
    ]


async def test_metrics_say_what_was_reported_and_nothing_beyond(
    pipelines: Pipelines, store: FaultyStore
) -> None:
    await pipelines.apply("copy", "custom", {})
    claim = await _claimed(pipelines)
    await pipelines.report("copy", "a", claim, RUNNING)
    is_leading = True

    def page() -> str:
        registry = CollectorRegistry()
        registry.register(PipelinesCollector(pipelines, lambda: is_leading))
        return generate_latest(registry).decode()

    assert 'sava_pipeline_lag_messages{kind="custom",pipeline="copy"} 3.0' in page()
    assert 'sava_pipeline_state{kind="custom",pipeline="copy",state="running"} 1.0' in page()
    store.advance(3 * TTL_MS)
    assert "sava_pipeline_lag_messages{" not in page()
    assert 'sava_pipeline_rows_total{kind="custom",pipeline="copy"} 7.0' in page()
    is_leading = False
    assert "sava_pipeline" not in page()
