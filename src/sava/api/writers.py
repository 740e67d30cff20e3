"""The service ``Writers`` of the client port: writes that are published whole and once.

Any broker takes a commit, and any broker lists writers: what is known of them is in the metadata store. A
part of a batch is published by the owner of its topic, which is asked as for any call about a topic; but a
call that has no answer is made again here, since publishing what is there already does nothing.
"""

# ruff: noqa: N802 (gRPC names the methods)

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any, Final

import grpc

from sava.api.messages import from_message, to_message
from sava.cluster.writer_records import Commit, StagedLost
from sava.cluster.writers import Writers
from sava.errors import RetryableError, SavaError
from sava.metadata.errors import Unavailable, Unfinished
from sava.peers import error_mapping
from sava.peers.error_mapping import Relayed
from sava.peers.partition_calls import PartitionCall, PartitionCalls
from sava.proto import writers_pb2 as pb
from sava.proto import writers_pb2_grpc as rpc
from sava.storage import staging
from sava.storage.errors import StagedInvalid
from sava.storage.staging import Part, Section
from sava.topics.errors import TopicMismatch, TopicUnknown
from sava.topics.names import TopicName, check_name
from sava.topics.publishing import Run, Stage
from sava.topics.served import ServedTopics
from sava.topics.topic import Topic

METHOD: Final = "/sava.writers.Writers/PublishStaged"
CHECK_S: Final = 20.0
PUBLISH_S: Final = 60.0
"""For the part of one topic, finding its owner included. What is not done by then is tried again later."""
PAUSE_S: Final = 0.2
COMMIT_S: Final = 120.0
"""For callers that have set no deadline."""


class LocalStaged:
    """Topics that this broker has."""

    def __init__(self, topics: ServedTopics, stage: Stage) -> None:
        self._topics = topics
        self._stage = stage

    async def do(self, request: pb.PublishStagedRequest) -> pb.PublishStagedResponse:
        """Raises NotOwner, and what the topic refuses."""
        name, sections = TopicName.parse(request.topic), sections_of(request.sections)
        if request.check_only:
            topic = await self._topics.get(name)
            await topic.check_staged(self._stage, request.writer, sections)
            return pb.PublishStagedResponse(topic_id=topic.topic_id)
        try:
            topic = await self._topics.get(name)
            if topic.topic_id != request.topic_id:
                raise TopicUnknown(name)
            await topic.staged.publish(self._stage, Run(request.producer_id, request.ordinal, sections))
        except (TopicUnknown, TopicMismatch):
            await self.check_gone(name, request.topic_id)
            return pb.PublishStagedResponse(is_gone=True)
        return pb.PublishStagedResponse(topic_id=topic.topic_id, next_offset=_end(topic))

    async def check_gone(self, name: TopicName, topic_id: int) -> None:
        """Raise Unavailable unless the topic does not exist any more. That this broker knows no such topic,
        or one of another id, may only mean that it is behind; what was for the topic would be lost."""
        with suppress(TopicUnknown):
            if (await self._topics.registry.locate(name)).spec.topic_id == topic_id:
                raise Unavailable(f"topic {name} is not known here yet")


class RoutedStaged:
    """Topics of all brokers: ``StagedTopics`` of ``sava.cluster.writers``."""

    def __init__(self, here: LocalStaged, owners: PartitionCalls) -> None:
        self._here = here
        self._owners = owners

    async def check(self, writer: str, topic: TopicName, sections: Sequence[Section]) -> int:
        request = pb.PublishStagedRequest(
            topic=str(topic), writer=writer, sections=map(_section, sections), check_only=True
        )
        return int((await self._ask(topic, request, CHECK_S)).topic_id)

    async def publish(self, writer: str, part: Part, *, producer_id: int, ordinal: int) -> None:
        request = pb.PublishStagedRequest(
            topic=part.topic,
            topic_id=part.topic_id,
            writer=writer,
            producer_id=producer_id,
            ordinal=ordinal,
            sections=map(_section, part.sections),
        )
        topic = TopicName.parse(part.topic)
        try:
            await self._ask(topic, request, PUBLISH_S)
        except (TopicUnknown, TopicMismatch):
            await self._here.check_gone(topic, part.topic_id)

    async def _ask(
        self, topic: TopicName, request: pb.PublishStagedRequest, timeout: float
    ) -> pb.PublishStagedResponse:
        """Again and again until it is answered, or the time is over."""
        asked = PartitionCall(
            topic=topic,
            method=METHOD,
            request=request,
            reply=pb.PublishStagedResponse,
            here=lambda: self._here.do(request),
            port="client",
        )
        clock = asyncio.get_running_loop().time
        deadline = clock() + timeout
        while True:
            try:
                return await self._owners.do(asked, timeout=deadline - clock())
            except Relayed as error:
                if error.code == "object_missing":
                    raise StagedLost(str(error)) from error
                failure: SavaError = error
                may_pass = error.status is grpc.StatusCode.UNAVAILABLE
            except RetryableError as error:
                failure, may_pass = error, True
            if not may_pass or clock() + PAUSE_S >= deadline:
                raise failure
            await asyncio.sleep(PAUSE_S)


class WritersService(rpc.WritersServicer):
    def __init__(self, writers: Writers, here: LocalStaged, *, store_url: str) -> None:
        self._writers = writers
        self._here = here
        self._store_url = store_url

    async def Staging(self, request: pb.StagingRequest, context: Any) -> pb.StagingResponse:
        writer = check_name(request.writer, "writer")
        if self._store_url.startswith("memory:"):
            raise StagedInvalid(
                "nothing can be staged: storage.url is memory://, which no other process reaches"
            )
        return pb.StagingResponse(
            store_url=self._store_url,
            prefix=staging.parts_prefix(writer),
            expires_s=int(self._writers.usable_s),
        )

    async def Commit(self, request: pb.CommitRequest, context: Any) -> pb.CommitResponse:
        try:
            async with asyncio.timeout(error_mapping.remaining(context, COMMIT_S)):
                done = await self._writers.commit(_commit(request))
        except TimeoutError:
            raise Unfinished(
                f"batch {request.batch} of writer {request.writer} is not published in time; if it was "
                "decided it will be, and repeating the commit waits for that"
            ) from None
        published = [to_message(pb.Published, each) for each in done.published]
        return pb.CommitResponse(decided_now=done.decided_now, published=published)

    async def PublishStaged(self, request: pb.PublishStagedRequest, context: Any) -> pb.PublishStagedResponse:
        """Asked by other brokers; the guard lets no client do this."""
        return await self._here.do(request)

    async def ListWriters(self, request: pb.ListWritersRequest, context: Any) -> pb.ListWritersResponse:
        found = await self._writers.list()
        return pb.ListWritersResponse(
            writers=[to_message(pb.WriterInfo, record, writer=writer) for writer, record in found]
        )

    async def ForgetWriter(self, request: pb.ForgetWriterRequest, context: Any) -> pb.ForgetWriterResponse:
        await self._writers.forget(request.writer, force=request.force)
        return pb.ForgetWriterResponse()


def _commit(request: pb.CommitRequest) -> Commit:
    parts: dict[TopicName, list[pb.Section]] = {}
    for section in request.sections:
        parts.setdefault(TopicName.parse(section.topic), []).append(section)
    return Commit(
        writer=request.writer,
        run=request.run,
        query=request.query,
        batch=request.batch,
        parts=[(topic, sections_of(sections)) for topic, sections in parts.items()],
    )


def _end(topic: Topic) -> int:
    return topic.log.next_offset if topic.log is not None else 0


def sections_of(messages: Iterable[pb.Section]) -> list[Section]:
    return [from_message(Section, each) for each in messages]


def _section(section: Section) -> pb.Section:
    """Of the topic that is asked."""
    return to_message(pb.Section, section, topic=None)
