"""``HealthCheck``: whether a producer or consumer may go on, asked by every client every five seconds.

Danube's Python client gives up asking after one error, so nothing here fails. CLOSE is said only when it is
certain that the broker does not know the client (any more): a consumer that was told so, and whose stream
then ends, subscribes again. Not knowing for lack of the metadata store is not certainty.
"""

# ruff: noqa: N802 (gRPC names the methods)

from __future__ import annotations

from typing import Any

from sava.broker.errors import MessageInvalid
from sava.proto import danube_api_pb2 as pb
from sava.proto import danube_api_pb2_grpc as rpc
from sava.services.danube.codes import told
from sava.services.danube.producers import Producers
from sava.services.danube.seats import Seats

_OK = pb.HealthCheckResponse(status=pb.HealthCheckResponse.OK)
_CLOSE = pb.HealthCheckResponse(status=pb.HealthCheckResponse.CLOSE)


class HealthService(rpc.HealthCheckServicer):
    def __init__(self, producers: Producers, seats: Seats) -> None:
        self._producers = producers
        self._seats = seats

    @told
    async def HealthCheck(self, request: pb.HealthCheckRequest, context: Any) -> pb.HealthCheckResponse:
        match request.client:
            case pb.HealthCheckRequest.Producer:
                is_known = self._producers.get(request.id) is not None
            case pb.HealthCheckRequest.Consumer:
                is_known = await self._seats.is_known(request.id)
            case number:
                raise MessageInvalid(f"client {number} is not one of Producer (0), Consumer (1)")
        return _OK if is_known else _CLOSE
