"""``HealthCheck``: whether a producer or consumer may go on, asked by every client every five seconds.

Danube's Python client gives up asking after one error, so nothing here fails. CLOSE is said only when it is
certain that the broker does not know the client (any more): a consumer that was told so, and whose stream
then ends, subscribes again. Not knowing for lack of the metadata store is not certainty. Of clients whose
topic another broker has, that broker is asked; as long as it does not answer, they may go on.
"""

# ruff: noqa: N802 (gRPC names the methods)

from __future__ import annotations

from typing import Any, Final

from sava.api.danube.codes import told
from sava.api.danube.producers import Producers
from sava.api.danube.seats import Seats
from sava.errors import SavaError
from sava.peers.forwarding import Forwarder, is_forwarded
from sava.proto import danube_api_pb2 as pb
from sava.proto import danube_api_pb2_grpc as rpc
from sava.topics.errors import MessageInvalid, NotOwner, TopicUnknown
from sava.topics.names import TopicName

HEALTH_CHECK: Final = "/danube.HealthCheck/HealthCheck"
ASK_S: Final = 3.0
"""For the other broker's answer: less than the time between two questions."""

_OK = pb.HealthCheckResponse(status=pb.HealthCheckResponse.OK)
_CLOSE = pb.HealthCheckResponse(status=pb.HealthCheckResponse.CLOSE)


class HealthService(rpc.HealthCheckServicer):
    def __init__(self, producers: Producers, seats: Seats, forwarder: Forwarder) -> None:
        self._producers = producers
        self._seats = seats
        self._forwarder = forwarder

    @told
    async def HealthCheck(self, request: pb.HealthCheckRequest, context: Any) -> pb.HealthCheckResponse:
        try:
            is_known = await self._is_known(request)
        except NotOwner as error:
            topic = TopicName.parse(error.topic)
            is_known = is_forwarded(context) or await self._is_known_elsewhere(request, topic)
        return _OK if is_known else _CLOSE

    async def _is_known(self, request: pb.HealthCheckRequest) -> bool:
        """Raises NotOwner."""
        match request.client:
            case pb.HealthCheckRequest.Producer:
                if self._producers.get(request.id) is not None:
                    return True
                topic = self._producers.topic_elsewhere(request.id)
                if topic is not None:
                    raise NotOwner(topic, 0)
                return False
            case pb.HealthCheckRequest.Consumer:
                return await self._seats.is_known(request.id)
            case number:
                raise MessageInvalid(f"client {number} is not one of Producer (0), Consumer (1)")

    async def _is_known_elsewhere(self, request: pb.HealthCheckRequest, topic: TopicName) -> bool:
        try:
            answer = await self._forwarder.ask(
                "client", HEALTH_CHECK, request, pb.HealthCheckResponse, topic=topic, timeout=ASK_S
            )
        except TopicUnknown:
            return False
        except SavaError:
            return True
        if answer.status != pb.HealthCheckResponse.CLOSE:
            return True
        if request.client == pb.HealthCheckRequest.Consumer:
            self._seats.release(request.id)
        return False
