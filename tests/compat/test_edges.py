"""What needs a broker with settings of its own: segments, limits. For TLS and tokens see tests/security."""

from __future__ import annotations

import asyncio
from pathlib import Path

from grpc import StatusCode

from sava.proto import danube_api_pb2 as pb
from tests.compat import raw
from tests.compat.raw import Producer, open_stream, refused, subscribe
from tests.compat.stubs import Stubs
from tests.support.brokers import Standalone
from tests.support.waiting import PATIENCE_S

TOPIC = "/default/topic"


async def test_the_first_segment_is_listed_and_none_is_passed_over(tmp_path: Path) -> None:
    with Standalone(tmp_path, SAVA__STORAGE__UPLOAD_INTERVAL_SECONDS="1") as broker:
        broker.ready()
        async with Stubs(broker) as stubs:
            producer = await Producer.create(stubs, TOPIC)

            async def listed(after: int) -> list[tuple[int, int]]:
                request = pb.ListSegmentDescriptorsRequest(topic=TOPIC, after_offset=after)
                segments = (await stubs.storage.ListSegmentDescriptors(request)).segments
                assert all(
                    each.segment_id and each.size and each.etag and each.created_at for each in segments
                )
                return [(each.start_offset, each.end_offset) for each in segments]

            async def wait_for(end: int) -> list[tuple[int, int]]:
                async with asyncio.timeout(PATIENCE_S):
                    while not (found := await listed(0)) or found[-1][1] < end:  # noqa: ASYNC110 (no event)
                        await asyncio.sleep(0.1)
                return found

            await producer.send_numbers(range(100))
            first = await wait_for(99)
            assert first[0][0] == 0
            await producer.send_numbers(range(50))
            both = await wait_for(149)
            assert both[: len(first)] == first
            assert await listed(99) == both[len(first) :], "after the last offset that one has"
            assert await listed(98) == both[len(first) - 1 :], "what is beyond it is never passed over"
            assert await listed(149) == []
            unknown = pb.ListSegmentDescriptorsRequest(topic=f"{TOPIC}-unknown")
            code, _ = await refused(stubs.storage.ListSegmentDescriptors(unknown))
            assert code is StatusCode.NOT_FOUND


async def test_limits_and_topics_that_nobody_may_create(tmp_path: Path) -> None:
    limits = {
        "SAVA__POLICIES__MAX_PRODUCERS": "2",
        "SAVA__POLICIES__MAX_SUBSCRIPTIONS": "2",
        "SAVA__POLICIES__MAX_CONSUMERS_PER_SUBSCRIPTION": "1",
        "SAVA__POLICIES__MAX_MESSAGE_SIZE": "1000",
    }
    with Standalone(tmp_path, **limits) as broker:
        broker.ready()
        async with Stubs(broker) as stubs:
            producer = await Producer.create(stubs, TOPIC, "a")
            await Producer.create(stubs, TOPIC, "b")
            await Producer.create(stubs, TOPIC, "a")
            too_many = StatusCode.RESOURCE_EXHAUSTED
            assert (await refused(Producer.create(stubs, TOPIC, "c")))[0] is too_many
            stream = await open_stream(stubs, TOPIC, "a", kind=raw.SHARED)
            assert await stream.is_silent()
            assert (await refused(subscribe(stubs, TOPIC, "b", kind=raw.SHARED)))[0] is too_many
            await subscribe(stubs, TOPIC, "a", "second")
            assert (await refused(subscribe(stubs, TOPIC, "a", "third")))[0] is too_many
            assert (await refused(producer.send("x" * 1001)))[0] is StatusCode.INVALID_ARGUMENT
            await producer.send("x" * 1000)
            assert len((await stream.next()).payload) == 1000
        broker.stop()
        broker.set(SAVA__AUTO_CREATE_TOPICS="false")
        broker.start()
        broker.ready()
        async with Stubs(broker) as stubs:
            await Producer.create(stubs, TOPIC, "a")
            assert (await refused(Producer.create(stubs, f"{TOPIC}-new")))[0] is StatusCode.NOT_FOUND
