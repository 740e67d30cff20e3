"""Partitions: the parts of a topic, found when it is opened and, since a topic can grow, looked for now and
then."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from sava.client.connection import Connection
from sava.client.errors import ClientError, TopicUnknown
from sava.proto import streams_pb2 as pb

log = logging.getLogger(__name__)

LOOK_UP_EVERY_S: Final = 30.0


async def create_partitions(
    connection: Connection, topic: str, count: int, delivery: pb.Delivery.ValueType
) -> pb.LookUpResponse:
    """The topic with at least ``count`` partitions. Asking for a partition is what creates it."""
    try:
        found = await connection.look_up(topic)
    except TopicUnknown:
        found = pb.LookUpResponse()
    if found.partition_count >= count:
        return found
    for index in range(found.partition_count, count):
        await connection.look_up(f"{topic}-part-{index}", create=True, delivery=delivery)
    return await connection.look_up(topic)


async def watch_partitions(
    connection: Connection,
    topic: str,
    known: Callable[[], int],
    grown: Callable[[Sequence[pb.Partition]], Awaitable[None]],
) -> None:
    """Tell of the partitions that come after the ``known`` number of them. Runs until it is cancelled."""
    while True:
        await asyncio.sleep(LOOK_UP_EVERY_S)
        try:
            found = (await connection.look_up(topic)).partitions
            if len(found) > known():
                await grown(found[known() :])
        except ClientError as error:
            log.info("client: partitions of %s not looked up: %s", topic, error)
