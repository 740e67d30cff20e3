"""A change that was made, and whose description failed: the caller is not told that nothing was done."""

from __future__ import annotations

from pathlib import Path

import pytest

from sava.api.admin.descriptions import Partitions
from sava.metadata.errors import OutcomeUnknown, Unavailable
from sava.proto import topics_admin_pb2 as pb
from sava.topics.names import TopicName
from tests.unit.api.site import Site

ORDERS = TopicName("default", "orders")


async def test_a_topic_that_was_created_and_cannot_be_described(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broker writes the topic's record. Then it loses its majority, and cannot read what it describes."""

    async def settle(*_: object) -> None:
        raise Unavailable("no majority confirmed the read within 5 s")

    monkeypatch.setattr(Partitions, "settle", settle)
    site = Site(tmp_path)
    async with site.broker(1) as broker:
        client = broker.client
        with pytest.raises(OutcomeUnknown) as failed:
            await client.call(client.topics.CreateTopic, pb.CreateTopicRequest(name=str(ORDERS)))
        assert ORDERS in await broker.topics.registry.list("default")
    assert "topic /default/orders exists now, but it could not be described" in str(failed.value)
    assert "`sava topics describe /default/orders` shows which" in str(failed.value)
