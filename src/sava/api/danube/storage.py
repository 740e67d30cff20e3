"""``StorageService``: the sealed segments of a topic, for tools that read history without a consumer.

Danube's descriptors name the last offset of a segment, not the one after it, and ``after_offset`` is the
last offset that the caller has. 0 stands for a caller that has nothing, so a first segment is never passed
over; one that holds offset 0 alone is listed again to a caller who has it.
"""

# ruff: noqa: N802 (gRPC names the methods)

from __future__ import annotations

from typing import Any

from sava.api.danube.codes import told, topic_name
from sava.proto import danube_api_pb2 as pb
from sava.proto import danube_api_pb2_grpc as rpc
from sava.storage.types import Segment
from sava.topics.topics import ServedTopics


class StorageService(rpc.StorageServiceServicer):
    def __init__(self, topics: ServedTopics) -> None:
        self._topics = topics

    @told
    async def ListSegmentDescriptors(
        self, request: pb.ListSegmentDescriptorsRequest, context: Any
    ) -> pb.ListSegmentDescriptorsResponse:
        topic = await self._topics.get(topic_name(request.topic))
        first_wanted = request.after_offset + 1 if request.after_offset else 0
        segments = await topic.log.segments(first_wanted) if topic.log is not None else []
        return pb.ListSegmentDescriptorsResponse(segments=map(_descriptor, segments))


def _descriptor(segment: Segment) -> pb.SegmentDescriptorProto:
    return pb.SegmentDescriptorProto(
        segment_id=segment.key,
        start_offset=segment.start,
        end_offset=segment.end - 1,
        size=segment.size,
        etag=f"crc32c:{segment.crc32c:08x}",
        created_at=segment.created_ms // 1000,
    )
