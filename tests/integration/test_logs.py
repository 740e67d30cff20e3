"""What a real broker writes to its log."""

from __future__ import annotations

import json
from pathlib import Path

from sava.client import Client
from tests.support.brokers import Standalone, sava


async def test_every_event_has_its_broker_and_those_about_a_topic_their_epoch(tmp_path: Path) -> None:
    broker = Standalone(tmp_path, SAVA__LOGGING__FORMAT="json")
    with broker:
        async with Client(broker.url, timeout=60) as client, client.producer("/default/orders") as producer:
            await producer.send(b"hello")
        _, out, _ = await sava("cluster", "status", "-o", "json", admin=broker.admin)
        own = json.loads(out)["self_node_id"]
        broker.stop()
    events = [json.loads(line) for line in broker.log.read_text().splitlines()]
    assert {event["broker"] for event in events} == {own}
    assert {"time", "level", "logger", "message"} <= set.intersection(*map(set, events))
    about = [event for event in events if event.get("topic") == "/default/orders"]
    assert [event["job"] for event in about if "job" in event] == ["take_up"]
    assert all(event["epoch"] >= 1 for event in about)
