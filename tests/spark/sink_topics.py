"""Topics as tests of the sink see them: through the client, not through Spark."""

from __future__ import annotations

import itertools

from sava.client.blocking import Client
from sava.records import Message
from tests.support.brokers import Standalone
from tests.support.waiting import PATIENCE_S

_numbers = itertools.count()


def new_topic() -> str:
    return f"/default/sink-{next(_numbers)}"


def create(broker: Standalone, topic: str, *, partitions: int | None = None, reliable: bool = True) -> None:
    with (
        Client(broker.url, timeout=PATIENCE_S) as client,
        client.producer(topic, partitions=partitions, reliable=reliable),
    ):
        pass


def read(broker: Standalone, topic: str) -> list[Message]:
    """Everything that is in it now."""
    with Client(broker.url, timeout=PATIENCE_S) as client, client.reader(topic, end="latest") as reader:
        return list(reader)
