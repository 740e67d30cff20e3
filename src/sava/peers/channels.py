"""PeerChannels: gRPC channels to the client and admin ports of the other brokers.

A broker is known by its registration, which says where its ports are and which incarnation of it this is.
There is one channel for each port of each broker, made when it is first needed. A registration of another
incarnation, or with another address, makes a new one: what the former has under way belongs to a broker
that is gone, and may end. When a registration is lost, its calls are ended (``look``): a broker that was
stopped closes no connection, and what it served is taken up by another one, where the caller should be.

A call is sent only over a connection that stands. So a broker that could not be connected to is distinguished
from one that vanished under a call: to the first nothing was sent, and the call may be made elsewhere; of the
second it is unknown what it has done.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, Literal

import grpc
from grpc import aio

from sava.cluster.records import Registration
from sava.cluster.view import TopicRouter
from sava.config import Auth
from sava.errors import RetryableError
from sava.peers import tls
from sava.records import MAX_BATCH_BYTES
from sava.tasks import cancelled, spawn

Port = Literal["client", "admin"]

CONNECT_S: Final = 2.0
LOOK_S: Final = 0.05
"""How often to look whether a broker that is being connected to is still registered."""
GONE_S: Final = 0.5
"""For calls under way to a broker whose registration is gone: one that leaves in order still answers."""
GRACE_S: Final = 5.0
"""For calls under way on a channel that was replaced."""
ROTATED_S: Final = 3600.0
"""For calls under way on a channel that shows a certificate which was replaced since: streams may be long."""
MAX_MESSAGE_BYTES: Final[dict[str, int]] = {"client": MAX_BATCH_BYTES + (1 << 20), "admin": 64 << 20}

_OPTIONS: Final[tls.Options] = (
    # A broker that vanished without closing its connections is noticed within seconds, as its clients are.
    ("grpc.keepalive_time_ms", 2_000),
    ("grpc.keepalive_timeout_ms", 2_000),
    ("grpc.http2.ping_timeout_ms", 2_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    # The time that an attempt to connect has; gRPC's name for it says something else.
    ("grpc.min_reconnect_backoff_ms", 2_000),
    ("grpc.max_reconnect_backoff_ms", 500),
    # Two channels to one address would share a connection, also a broken one.
    ("grpc.use_local_subchannel_pool", 1),
)


PINGS_ALLOWED: Final[tls.Options] = (
    ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
    ("grpc.http2.max_ping_strikes", 0),
)
"""For the ports that peers call: a gRPC server hangs up on those who ask too often whether it is there."""


class Unreachable(RetryableError):
    """A broker is not registered, or cannot be connected to. Nothing was sent to it."""


class PeerChannel:
    """The channel to one port of one broker. Messages are bytes."""

    def __init__(
        self, channel: aio.Channel, registration: Registration, name: str, generation: int = 0
    ) -> None:
        self.channel = channel
        self.registration = registration
        self.name = name
        self.generation = generation
        """Of the certificates that it was opened with."""
        self._calls: dict[str, Any] = {}

    # A callable of gRPC costs more to make than to call.
    def unary(self, method: str) -> Any:
        return self._calls.get(method) or self._made(self.channel.unary_unary, method)

    def server_stream(self, method: str) -> Any:
        return self._calls.get(method) or self._made(self.channel.unary_stream, method)

    def both_ways(self, method: str) -> Any:
        return self._calls.get(method) or self._made(self.channel.stream_stream, method)

    def _made(self, kind: Callable[..., Any], method: str) -> Any:
        call = self._calls[method] = kind(method, None, None)
        return call

    @property
    def is_ready(self) -> bool:
        return self.channel.get_state() is grpc.ChannelConnectivity.READY


class PeerChannels:
    """Owned by the event loop."""

    def __init__(self, brokers: TopicRouter, auth: Auth) -> None:
        self._brokers = brokers
        self._auth = auth
        self._links: dict[tuple[int, Port], PeerChannel] = {}
        self._closing: dict[asyncio.Task[None], PeerChannel] = {}

    async def close(self) -> None:
        links = [*self._links.values(), *self._closing.values()]
        self._links.clear()
        await cancelled(*self._closing)
        await asyncio.gather(*(link.channel.close(None) for link in links))

    def look(self) -> None:
        """Registrations may have changed: end the calls to brokers that have none any more."""
        for key, link in list(self._links.items()):
            if self._brokers.registration(key[0]) is None:
                del self._links[key]
                self._retire(link, GONE_S)

    async def link(self, broker: int, port: Port, *, timeout: float) -> PeerChannel:
        """One that is connected. Raises Unreachable."""
        link = self._link(broker, port)
        if link.is_ready:
            return link
        try:
            async with asyncio.timeout(min(timeout, CONNECT_S)):
                await self._connect(link, broker)
        except TimeoutError:
            raise Unreachable(f"{link.name} cannot be reached") from None
        except aio.UsageError:
            raise Unreachable(f"{link.name} was registered again") from None
        return link

    async def _connect(self, link: PeerChannel, broker: int) -> None:
        """A broker whose registration ends meanwhile is waited for no longer: what it had is another's then,
        and those who wait for it can be served there."""
        while not link.is_ready:
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await link.channel.channel_ready()
            if self._brokers.registration(broker) is None:
                raise Unreachable(f"{link.name} is gone")

    def _link(self, broker: int, port: Port) -> PeerChannel:
        registration = self._brokers.registration(broker)
        link = self._links.get((broker, port))
        if link is not None and registration is not None:
            is_same = link.registration is registration or _is_same(link.registration, registration)
            if is_same and link.generation == tls.generation(self._auth):
                return link
            del self._links[broker, port]
            self._retire(link, ROTATED_S if is_same else GRACE_S)
        elif link is not None:
            del self._links[broker, port]
            self._retire(link, GRACE_S)
        if registration is None:
            raise Unreachable(f"broker {broker} is not there: it has no registration")
        return self._open(registration, broker, port)

    def _open(self, registration: Registration, broker: int, port: Port) -> PeerChannel:
        target = registration.client if port == "client" else registration.admin
        size = MAX_MESSAGE_BYTES[port]
        options = (
            ("grpc.max_send_message_length", size),
            ("grpc.max_receive_message_length", size),
            *_OPTIONS,
        )
        channel = tls.open_channel(target, self._auth, options)
        link = self._links[broker, port] = PeerChannel(
            channel, registration, f"broker {broker} ({port} port {target})", tls.generation(self._auth)
        )
        return link

    def _retire(self, link: PeerChannel, grace_s: float) -> None:
        task = spawn(link.channel.close(grace_s), name="peers: closing a channel")
        self._closing[task] = link
        task.add_done_callback(lambda _: self._closing.pop(task, None) and None)


def _is_same(one: Registration, other: Registration) -> bool:
    return (one.incarnation, one.client, one.admin) == (other.incarnation, other.client, other.admin)
