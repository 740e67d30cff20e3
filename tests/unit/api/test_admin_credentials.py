"""The admin client's token: asked for with each call, and once more when a broker refuses it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
import pytest
from grpc import aio

from sava.api.admin_client import AdminClient
from sava.errors import SavaError
from sava.proto import admin_pb2, admin_pb2_grpc
from sava.security.credentials import Credentials


class Guarded(admin_pb2_grpc.ClusterServicer):
    """Accepts one token, and remembers what was shown."""

    def __init__(self) -> None:
        self.accepted = "Bearer first"
        self.shown: list[str] = []

    async def Status(self, request: Any, context: Any) -> admin_pb2.StatusResponse:  # noqa: N802 (gRPC names it)
        given = {key: str(value) for key, value in context.invocation_metadata()}
        self.shown.append(given.get("authorization", ""))
        if self.shown[-1] != self.accepted:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "the token has expired")
        return admin_pb2.StatusResponse(cluster_id="c")


@pytest.fixture
async def guarded() -> AsyncIterator[tuple[Guarded, str]]:
    service, server = Guarded(), aio.server()
    admin_pb2_grpc.add_ClusterServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield service, f"127.0.0.1:{port}"
    await server.stop(None)


async def test_a_refused_token_is_asked_for_once_more(guarded: tuple[Guarded, str]) -> None:
    service, address = guarded
    tokens: Iterator[str] = iter(["stale", "first", "first", "stale", "staler", "stalest"])
    async with AdminClient(address, Credentials(token=lambda: next(tokens))) as client:
        assert (await client.status()).cluster_id == "c"
        assert (await client.status()).cluster_id == "c"
        with pytest.raises(SavaError, match="expired"):
            await client.status()
    assert service.shown == [f"Bearer {each}" for each in ("stale", "first", "first", "stale", "staler")]


async def test_a_text_is_sent_once(guarded: tuple[Guarded, str]) -> None:
    service, address = guarded
    async with AdminClient(address, Credentials(token="stale")) as client:
        with pytest.raises(SavaError, match="expired") as caught:
            await client.status()
    assert service.shown == ["Bearer stale"]
    assert "stale" not in str(caught.value)
