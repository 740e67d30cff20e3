"""Brokers that want to know their callers, and callers with tokens.

async with secured(2, tmp_path) as cluster:
    await cluster.bind("user:ann", "producer", topic="/sales/orders")
    await cluster.call(broker, "ann", "/sava.streams.Streams/LookUp", request)
"""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

import grpc
from google.protobuf import message_factory
from google.protobuf.message import Message
from grpc import aio

import sava.proto
from sava.config import Auth, TokenIssuerSettings
from sava.proto import security_pb2 as pb
from sava.proto import topics_admin_pb2 as topics_pb
from sava.security.credentials import Credentials
from sava.security.principal import Principal
from sava.security.tokens import create_token, new_secret, write_private
from tests.support.brokers import BrokerProcess, Brokers

ISSUER: Final = "tests"
ADMIN: Final = Principal("user", "root")
CLIENT_PORT: Final = ("sava.streams", "sava.writers", "sava.replica", "danube.", "danube_schema.")
"""Packages of the services that are on the client port; of the others, the admin port."""


class Rpc(NamedTuple):
    """A call, as the descriptors of the protocol have it."""

    path: str
    request: type[Message]
    reply: type[Message]
    client_streams: bool
    server_streams: bool

    @property
    def is_on_client_port(self) -> bool:
        return self.path[1:].startswith(CLIENT_PORT)


def rpcs() -> Iterator[Rpc]:
    """Every call of every service."""
    for file in sorted(Path(sava.proto.__path__[0]).glob("*_pb2.py")):
        module: Any = importlib.import_module(f"sava.proto.{file.stem}")
        for service in module.DESCRIPTOR.services_by_name.values():
            for method in service.methods:
                yield Rpc(
                    f"/{service.full_name}/{method.name}",
                    message_factory.GetMessageClass(method.input_type),
                    message_factory.GetMessageClass(method.output_type),
                    method.client_streaming,
                    method.server_streaming,
                )


RPCS: Final = {rpc.path: rpc for rpc in rpcs()}


class Issuer:
    """Signs tokens for the tests."""

    def __init__(self, directory: Path, name: str = ISSUER) -> None:
        self.name = name
        self.secret = new_secret()
        self.file = directory / f"{name}.secret"
        write_private(self.file, self.secret + b"\n")
        self.settings = TokenIssuerSettings(issuer=name, secret_file=self.file)

    def token(self, who: str, *, ttl_s: float = 600.0, audience: str = "") -> str:
        return create_token(self.name, Principal.parse(who), ttl_s, self.secret, audience=audience)


class Secured(Brokers):
    """Brokers that accept the tokens of one issuer, and ``user:root`` as their administrator."""

    issuer: Issuer

    def headers(self, who: str | None) -> tuple[tuple[str, str], ...]:
        return () if who is None else (("authorization", f"Bearer {self.issuer.token(who)}"),)

    def channel(self, broker: BrokerProcess, rpc: Rpc) -> aio.Channel:
        target = broker.client_url.partition("//")[2] if rpc.is_on_client_port else broker.admin
        key = target
        if key not in self._channels:
            self._channels[key] = aio.insecure_channel(target)
        return self._channels[key]

    @property
    def _channels(self) -> dict[str, aio.Channel]:
        found: dict[str, aio.Channel] = self.__dict__.setdefault("_open_channels", {})
        return found

    async def close(self) -> None:
        for channel in self._channels.values():
            await channel.close(None)
        self._channels.clear()
        await super().close()

    def open(
        self, broker: BrokerProcess, path: str, request: Message, metadata: Any, *, timeout: float = 10.0
    ) -> Any:
        """The call, as gRPC has it; of a stream of two directions, without its opening written."""
        rpc = RPCS[path]
        channel: Any = self.channel(broker, rpc)
        serialize, parse = rpc.request.SerializeToString, rpc.reply.FromString
        options = {"metadata": metadata, "timeout": timeout}
        if rpc.client_streams:
            return channel.stream_stream(path, serialize, parse)(**options)
        if rpc.server_streams:
            return channel.unary_stream(path, serialize, parse)(request, **options)
        return channel.unary_unary(path, serialize, parse)(request, **options)

    async def call(self, broker: BrokerProcess, who: str | None, path: str, request: Message) -> Any:
        """The answer; of a stream, its first. Raises AioRpcError."""
        return await self.call_with(broker, self.headers(who), path, request)

    async def call_with(self, broker: BrokerProcess, metadata: Any, path: str, request: Message) -> Any:
        rpc = RPCS[path]
        call = self.open(broker, path, request, metadata)
        if rpc.client_streams:
            # If the call has ended, reading tells how.
            with suppress(aio.AioRpcError, asyncio.InvalidStateError):
                await call.write(request)
        if rpc.client_streams or rpc.server_streams:
            try:
                return await call.read()
            finally:
                call.cancel()
        return await call

    async def status(self, broker: BrokerProcess, who: str | None, path: str, request: Message) -> str:
        """How the call ends: ``OK``, or the name of its status."""
        return await status_of(self.call(broker, who, path, request))

    async def bind(
        self, who: str, role: str, *, topic: str = "", namespace: str = "", through: int = 0
    ) -> pb.Binding:
        scope = "topic" if topic else "namespace" if namespace else "cluster"
        client = self.brokers[through].client
        binding = pb.Binding(principal=who, role=role, scope=scope, resource=topic or namespace)
        made: pb.Binding = await client.call(client.security.CreateBinding, binding)
        return made

    async def unbind(self, binding: pb.Binding, *, through: int = 0) -> None:
        client = self.brokers[through].client
        await client.call(client.security.DeleteBinding, pb.DeleteBindingRequest(id=binding.id))

    async def create_namespace(self, name: str) -> None:
        client = self.brokers[0].client
        await client.call(client.namespaces.CreateNamespace, topics_pb.CreateNamespaceRequest(namespace=name))


async def status_of(call: Any) -> str:
    try:
        await call
    except aio.AioRpcError as error:
        return error.code().name
    return grpc.StatusCode.OK.name


@asynccontextmanager
async def secured(size: int, directory: Path, **settings: Any) -> AsyncIterator[Secured]:
    issuer = Issuer(directory)
    auth = Auth(tokens=(issuer.settings,), super_admins=(str(ADMIN),))
    credentials = Credentials(token=issuer.token(str(ADMIN)))
    cluster = Secured(size, directory, auth=auth, credentials=credentials, **settings)
    cluster.issuer = issuer
    async with cluster:
        yield cluster
