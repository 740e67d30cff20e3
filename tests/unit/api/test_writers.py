"""The part of a batch that is for one topic: whose it is when topics come and go, and what is asked again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import grpc
import pytest

from sava.api import writers
from sava.api.writers import LocalStaged, RoutedStaged
from sava.cluster.view import NotServed
from sava.cluster.writer_records import StagedLost
from sava.errors import SavaError
from sava.metadata.errors import Unavailable
from sava.peers import error_mapping
from sava.peers.error_mapping import Relayed
from sava.peers.partition_calls import PartitionCalls
from sava.proto import writers_pb2 as pb
from sava.storage import staging
from sava.storage.staging import Part, Section
from sava.topics.errors import TopicUnknown
from sava.topics.publishing import Stage
from sava.topics.served import ServedTopics
from tests.support.objects import batch, message, section_of
from tests.support.storage import contents
from tests.support.topics import ORDERS, World


class Place:
    """One broker, and what it is asked for."""

    def __init__(self, world: World, topics: ServedTopics) -> None:
        self.world = world
        self.topics = topics
        self.here = LocalStaged(topics, Stage(world.store))

    async def section(self, *payloads: bytes) -> Section:
        data, section = section_of(
            f"{staging.parts_prefix('w')}/{payloads[0].decode()}", 0, [batch(payloads)]
        )
        await self.world.store.put_new(section.key, data)
        return section

    async def create(self) -> int:
        return (await self.topics.get_or_create(ORDERS, True)).topic_id

    async def publish(self, topic_id: int, section: Section, ordinal: int = 1) -> pb.PublishStagedResponse:
        return await self.here.do(
            pb.PublishStagedRequest(
                topic=str(ORDERS),
                topic_id=topic_id,
                writer="w",
                producer_id=5,
                ordinal=ordinal,
                sections=[message("", section)],
            )
        )

    async def read(self) -> list[str]:
        log = (await self.topics.get(ORDERS)).log
        assert log is not None
        return await contents(log)


@pytest.fixture
async def place(tmp_path: Path) -> AsyncIterator[Place]:
    world = World(tmp_path)
    async with world.topics() as topics:
        yield Place(world, topics)


async def test_a_check_tells_which_topic_it_is_and_publishing_is_for_that_one(place: Place) -> None:
    topic_id = await place.create()
    section = await place.section(b"a", b"b")
    checked = await place.here.do(
        pb.PublishStagedRequest(
            topic=str(ORDERS), writer="w", sections=[message("", section)], check_only=True
        )
    )
    assert checked.topic_id == topic_id
    assert await place.read() == []
    assert (await place.publish(topic_id, section)).next_offset == 2
    assert await place.read() == ["a", "b"]


async def test_the_part_for_a_topic_that_was_deleted_is_done_with(place: Place) -> None:
    topic_id = await place.create()
    section = await place.section(b"a")
    await place.topics.delete(ORDERS)
    assert (await place.publish(topic_id, section)).is_gone


async def test_a_topic_that_was_created_anew_gets_nothing_of_an_older_batch(place: Place) -> None:
    """Decided for the topic with id 1; deleted; another of the name is there when it is published."""
    topic_id = await place.create()
    section = await place.section(b"a")
    await place.topics.delete(ORDERS)
    assert await place.create() > topic_id
    assert (await place.publish(topic_id, section)).is_gone
    assert await place.read() == []


@pytest.mark.parametrize("is_known", [True, False])
async def test_a_broker_that_is_behind_does_not_call_a_topic_gone(
    place: Place, monkeypatch: pytest.MonkeyPatch, is_known: bool
) -> None:
    """It still knows the topic of before, or none; the cluster knows better."""
    topic_id = await place.create()
    section = await place.section(b"a")
    topic = await place.topics.get(ORDERS)

    async def behind(_: object) -> Any:
        if not is_known:
            raise TopicUnknown(ORDERS)
        return type("Older", (), {"topic_id": topic_id - 1})

    monkeypatch.setattr(place.topics, "get", behind)
    with pytest.raises(Unavailable):
        await place.publish(topic_id, section)
    assert topic.log is not None
    assert topic.log.next_offset == 0


async def test_a_topic_that_is_deleted_under_it_is_gone(place: Place) -> None:
    topic_id = await place.create()
    section = await place.section(b"a")
    topic = await place.topics.get(ORDERS)
    topic._publisher._held = asyncio.Event()
    publishing = asyncio.create_task(place.publish(topic_id, section))
    for _ in range(20):
        await asyncio.sleep(0)
    await place.topics.delete(ORDERS)
    assert (await publishing).is_gone


# -- asking others -----------------------------------------------------------------------------


class Answers:
    """``PartitionCalls`` whose answers are given one by one."""

    def __init__(self, *answers: SavaError | pb.PublishStagedResponse) -> None:
        self.answers = list(answers)
        self.asked: list[Any] = []

    async def do(self, part: Any, *, timeout: float) -> pb.PublishStagedResponse:
        self.asked.append(part)
        answer = self.answers.pop(0)
        if isinstance(answer, SavaError):
            raise answer
        return answer


DONE = pb.PublishStagedResponse(topic_id=1)
PART = Part(str(ORDERS), 1, (Section("staging/parts/w/a", 0, 10, 1, 1, 0),))


def relayed(status: grpc.StatusCode, code: str) -> Relayed:
    return Relayed(status, "what the other broker said", ((error_mapping.CODE_KEY, code),))


def anywhere(owners: Answers, here: Any = None) -> RoutedStaged:
    return RoutedStaged(here, cast(PartitionCalls, owners))


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writers, "PAUSE_S", 0.001)


async def test_what_has_no_answer_is_asked_again() -> None:
    """The owner may have died with the messages in its journal or not: to ask again is safe."""
    owners = Answers(
        relayed(grpc.StatusCode.UNAVAILABLE, ""),
        NotServed(ORDERS, "it moves"),
        Unavailable("no leader"),
        DONE,
    )
    await anywhere(owners).publish("w", PART, producer_id=5, ordinal=3)
    assert len(owners.asked) == 4
    request = owners.asked[0].request
    assert (request.topic, request.producer_id, request.ordinal, owners.asked[0].port) == (
        str(ORDERS),
        5,
        3,
        "client",
    )


async def test_what_is_refused_is_not_asked_again() -> None:
    owners = Answers(relayed(grpc.StatusCode.FAILED_PRECONDITION, "message_too_large"))
    with pytest.raises(Relayed):
        await anywhere(owners).check("w", ORDERS, PART.sections)


async def test_it_is_not_asked_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writers, "PUBLISH_S", 0.05)
    owners = Answers(*[Unavailable("down")] * 1000)
    with pytest.raises(Unavailable):
        await anywhere(owners).publish("w", PART, producer_id=5, ordinal=3)


async def test_parts_that_the_owner_does_not_find_are_lost() -> None:
    owners = Answers(relayed(grpc.StatusCode.FAILED_PRECONDITION, "object_missing"))
    with pytest.raises(StagedLost):
        await anywhere(owners).publish("w", PART, producer_id=5, ordinal=3)


@pytest.mark.parametrize("is_gone", [True, False])
async def test_a_topics_part_is_given_up_only_if_no_broker_knows_the_topic(is_gone: bool) -> None:
    class Here:
        async def check_gone(self, *_: object) -> None:
            if not is_gone:
                raise Unavailable("it is not known here yet")

    publishing = anywhere(Answers(TopicUnknown(ORDERS)), Here()).publish("w", PART, producer_id=5, ordinal=3)
    if is_gone:
        await publishing
    else:
        with pytest.raises(Unavailable):
            await publishing
