"""Reception: one client's stream of messages, wherever its topic is.

Danube's clients look a topic up at the broker that they were with last, and open a stream that ended again at
once. So a stream that ends because the topic moves, or because its owner died, brings them nothing but the
same broker again. The stream is kept open instead, silent, until somebody has the topic:

    client ═══▶ this broker ───▶ its own seat ─ TopicMoved ─▶ the owner's seat ─ broken ─▶ the next owner's …

What was delivered and not acked comes again from the new owner, as after any broken stream. A stream that
nobody can serve for a while fails, and one whose consumer the owner does not know fails as it would there.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

import grpc

from sava.api.danube.seats import Seats
from sava.cluster.router import NotServed
from sava.errors import SavaError
from sava.peers import forwarding
from sava.peers.channels import Unreachable
from sava.peers.error_mapping import Relayed
from sava.peers.forwarding import Forwarder
from sava.proto import danube_api_pb2 as pb
from sava.topics.errors import NotOwner
from sava.topics.names import TopicName

RECEIVE_MESSAGES: Final = "/danube.ConsumerService/ReceiveMessages"
PATIENCE_S: Final = 15.0
"""So long a stream waits for somebody who has its topic."""
SERVED_S: Final = 1.0
"""What has lasted so long was served."""
PAUSE_S: Final = 0.05
LONGEST_PAUSE_S: Final = 1.0


class Reception:
    """Owned by the event loop."""

    def __init__(
        self, seats: Seats, forwarder: Forwarder, broker_url: str, request: pb.ReceiveRequest, context: Any
    ) -> None:
        self._seats = seats
        self._forwarder = forwarder
        self._broker_url = broker_url
        self._request = request
        self._context = context
        self._loop = asyncio.get_running_loop()
        self._give_up_at = self._loop.time() + PATIENCE_S
        self._pause = PAUSE_S

    async def run(self) -> None:
        """Until its client goes (cancellation) or it cannot be served (raises)."""
        while True:
            try:
                await self._once()
            except SavaError as error:
                if not _is_passing(error) or self._loop.time() >= self._give_up_at:
                    raise
            await asyncio.sleep(self._pause)
            self._pause = min(2 * self._pause, LONGEST_PAUSE_S)

    async def _once(self) -> None:
        began = self._loop.time()
        try:
            await self._seats.serve(self._request.consumer_id, self._context.write, self._broker_url)
        except NotOwner as error:
            self._note(began)
            await self._relay(TopicName.parse(error.topic))

    async def _relay(self, topic: TopicName) -> None:
        left = self._give_up_at - self._loop.time()
        link = await self._forwarder.owner_link(topic, "client", timeout=max(left, 0.0))
        if link is None:
            return  # it has come here
        request, metadata = self._request.SerializeToString(), forwarding.metadata_of(self._context)
        began = self._loop.time()
        try:
            await forwarding.relay_server_stream(
                link, RECEIVE_MESSAGES, request, None, metadata, self._context.write
            )
        finally:
            self._note(began)

    def _note(self, began: float) -> None:
        now = self._loop.time()
        if now - began >= SERVED_S:
            self._give_up_at = now + PATIENCE_S
            self._pause = PAUSE_S


def _is_passing(error: SavaError) -> bool:
    """Whether the topic, here or elsewhere, may be served again soon without the client's doing."""
    if isinstance(error, Relayed):
        if not error.code:
            return True  # the connection broke, or the broker did
        return error.status is grpc.StatusCode.UNAVAILABLE and error.code != "consumer_unknown"
    return isinstance(error, NotOwner | NotServed | Unreachable)
