"""What a broker reports of its load, and to whom."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from sava.api.admin import brokers
from sava.api.admin.brokers import LoadMeter, LoadReporter, load_report
from sava.supervisor import Supervisor
from sava.topics.names import TopicName
from sava.topics.topic import Topic
from tests.support.topics import options, publish
from tests.support.waiting import PATIENCE_S, until
from tests.unit.api.site import BrokerAt, Site

ORDERS = TopicName("default", "orders")


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[tuple[BrokerAt, BrokerAt]]:
    site = Site(tmp_path)
    async with site.broker(1) as one, site.broker(2) as two:
        await two.view.wait(lambda: set(two.view.brokers) == {1, 2}, timeout=PATIENCE_S)
        assigning = asyncio.create_task(one.director.assign_new())
        yield one, two
        assigning.cancel()


async def test_rates_are_of_the_time_between_two_reports(pair: tuple[BrokerAt, BrokerAt]) -> None:
    one, _ = pair
    await one.topics.create(ORDERS, reliable=True)
    await until(lambda: ORDERS in one.topics.loaded)
    topic = one.topics.loaded[ORDERS]
    measure = LoadMeter(one.topics)
    consumer = await topic.subscribe(options("s"))
    await publish(topic, *("x" * 1000 for _ in range(50)))

    first = measure.report()
    assert first.broker_id == 1
    assert 0 < first.cpu_percent <= 100
    assert 0 < first.memory_percent < 100
    (load,) = first.topics
    assert (load.topic, load.producers, load.consumers) == ("/default/orders", 1, 1)
    assert load.backlog == 50
    assert load.messages_per_second > 0
    # Bytes as they are stored: a thousand equal letters may be compressed, but not to nothing.
    assert load.megabytes_per_second > 0

    (load,) = measure.report().topics
    assert (load.messages_per_second, load.megabytes_per_second) == (0, 0)
    consumer.close()


async def test_a_topic_that_was_created_again_has_no_negative_rate(pair: tuple[BrokerAt, BrokerAt]) -> None:
    """topic      has published 50 messages, and is reported
    operator   deletes it and creates it again: the same name, the same first epoch, counters from 0
    report     1 − 50 messages: a negative rate, which the leader refuses. On the leader itself the task that
               reports died of it.
    """
    one, _ = pair
    measure = LoadMeter(one.topics)
    for count in 50, 1:
        await one.topics.create(ORDERS, reliable=True)
        await until(lambda: ORDERS in one.topics.loaded)
        await publish(one.topics.loaded[ORDERS], *("x" * 1000 for _ in range(count)))
        (load,) = load_report(measure.report()).topics
        assert load.messages_per_second > 0
        await one.topics.delete(ORDERS)
        await until(lambda: ORDERS not in one.topics.loaded)


async def test_a_topic_that_cannot_be_measured_is_left_out_of_the_report(
    pair: tuple[BrokerAt, BrokerAt], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One bad value neither keeps the load of the other topics from the leader nor ends the task."""
    one, _ = pair
    broken = TopicName("default", "broken")
    for name in ORDERS, broken:
        await one.topics.create(name, reliable=True)
    await until(lambda: one.topics.loaded.keys() == {ORDERS, broken})
    count = Topic.published.fget  # type: ignore[attr-defined]

    def published(topic: Topic) -> tuple[int, int]:
        if topic.name == broken:
            raise KeyError("no counters")
        return count(topic)

    monkeypatch.setattr(Topic, "published", property(published))
    measure = LoadMeter(one.topics)
    for _ in range(3):
        assert [load.topic for load in measure.report().topics] == [str(ORDERS)]
    assert caplog.text.count("load: not measured topic=/default/broken") == 1


async def test_reports_go_to_the_leader_and_at_once_to_a_new_one(
    pair: tuple[BrokerAt, BrokerAt], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broker 2 reports to broker 1; when it leads itself it tells itself. The interval is never over here."""
    monkeypatch.setattr(brokers, "LOOK_S", 0.01)
    one, two = pair
    leader = 0
    reports = LoadReporter(two.topics, two.director.loads, two.forwarder, lambda: leader, interval_s=3600)
    reports.start(Supervisor())
    try:
        leader = 1
        await until(lambda: one.director.loads.of(2) is not None)
        assert two.director.loads.of(2) is None
        leader = 2
        await until(lambda: two.director.loads.of(2) is not None)
    finally:
        await reports.close()


async def test_a_leader_that_cannot_be_reached_is_tried_again(
    pair: tuple[BrokerAt, BrokerAt], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(brokers, "LOOK_S", 0.01)
    caplog.set_level("INFO")
    one, two = pair
    leader = 9
    reports = LoadReporter(two.topics, two.director.loads, two.forwarder, lambda: leader, interval_s=0.05)
    reports.start(Supervisor())
    try:
        await until(lambda: "load: not reported leader=9" in caplog.text)
        leader = 1
        await until(lambda: one.director.loads.of(2) is not None)
    finally:
        await reports.close()
