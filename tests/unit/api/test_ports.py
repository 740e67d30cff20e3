"""What the ports of a broker allow."""

from __future__ import annotations

import asyncio

from grpc import aio

from sava.peers.channels import PINGS_ALLOWED
from sava.server import ports
from tests.support.waiting import PATIENCE_S

OPENING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
"""What a client says first: the preface, and settings without any."""


def test_both_ports_let_peers_ask_whether_the_broker_is_there() -> None:
    """Otherwise a forwarded stream without traffic ends after some seconds: "too many pings"."""
    for options in (ports.CLIENT_OPTIONS, ports.ADMIN_OPTIONS):
        assert set(PINGS_ALLOWED) <= set(options)


async def test_a_caller_that_vanished_leaves_no_connection_on_the_admin_port() -> None:
    """It has opened its connection, says nothing more, and answers no ping. The times are shortened."""
    hurried = [
        (name, int(value) // 30 if name.endswith("_ms") else value) for name, value in ports.ADMIN_OPTIONS
    ]
    server = aio.server(options=hurried)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(OPENING)
        async with asyncio.timeout(PATIENCE_S):
            await reader.read()  # until the other side closes it
        writer.close()
    finally:
        await server.stop(None)
