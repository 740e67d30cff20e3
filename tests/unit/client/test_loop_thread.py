"""The loop in a thread, beside others of the same process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from grpc import aio

from sava.client.loop_thread import LoopThread

SILENT, ECHO = "/test/Silent", "/test/Echo"


class _Handlers(grpc.GenericRpcHandler):  # type: ignore[type-arg]  # generic in the stubs alone
    """A stream that says nothing until it may end, and a call that is answered at once."""

    def __init__(self) -> None:
        self.may_end = threading.Event()

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        if handler_call_details.method == SILENT:
            return grpc.stream_stream_rpc_method_handler(self._silent)
        return grpc.unary_unary_rpc_method_handler(lambda request, context: request)

    def _silent(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        context.send_initial_metadata(())
        assert self.may_end.wait(60)
        yield from ()


def test_an_event_for_a_loop_that_is_gone_is_no_error_of_another(caplog: pytest.LogCaptureFixture) -> None:
    """One loop waits for a stream and is closed. Then the stream ends. Another loop, which gRPC wakes, finds
    the event, and can hand it to nobody."""
    handlers = _Handlers()
    server = grpc.server(ThreadPoolExecutor(2))
    server.add_generic_rpc_handlers((handlers,))
    target = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    gone, other = asyncio.new_event_loop(), LoopThread()
    kept: list[object] = []

    async def wait_for_silence() -> None:
        channel = aio.insecure_channel(target)
        call = channel.stream_stream(SILENT, None, None)(None)
        await call.initial_metadata()
        kept.extend((channel, call))

    async def echo() -> bytes:
        async with aio.insecure_channel(target) as channel:
            return bytes(await channel.unary_unary(ECHO, None, None)(b"here"))

    try:
        assert other.run(echo()) == b"here"
        gone.run_until_complete(wait_for_silence())
        gone.close()
        handlers.may_end.set()
        # Each call wakes the loop, which takes whatever gRPC has meanwhile.
        assert [other.run(echo()) for _ in range(20)] == [b"here"] * 20
        assert caplog.text == ""
    finally:
        other.close()
        server.stop(None).wait()


def test_an_error_of_ones_own_is_told(caplog: pytest.LogCaptureFixture) -> None:
    def fails() -> None:
        raise RuntimeError("a fault of ours")

    async def begin() -> None:
        asyncio.get_running_loop().call_soon(fails)
        await asyncio.sleep(0)

    thread = LoopThread()
    thread.run(begin())
    thread.close()
    assert "a fault of ours" in caplog.text
