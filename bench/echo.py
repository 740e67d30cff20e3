"""A gRPC server that returns what it gets, on grpc.aio: the floor under every RPC that Sava serves.

``python -m bench.echo PORT`` is the process that the context rows call. Bytes in, bytes out, no protobuf.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
import uvloop

UNARY = "/bench.Echo/Unary"
STREAM = "/bench.Echo/Stream"


async def _unary(request: bytes, _: Any) -> bytes:
    return request


async def _stream(requests: AsyncIterator[bytes], _: Any) -> AsyncIterator[bytes]:
    async for request in requests:
        yield request


async def serve(port: int) -> None:
    server = grpc.aio.server()
    handlers = {
        "Unary": grpc.unary_unary_rpc_method_handler(_unary),
        "Stream": grpc.stream_stream_rpc_method_handler(_stream),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bench.Echo", handlers),))
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    await server.wait_for_termination()


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1])))
