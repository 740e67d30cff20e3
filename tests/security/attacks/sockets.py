"""Connections that never become calls: half an HTTP/2 preface, noise, and as many as a port takes."""

from __future__ import annotations

import asyncio
import time
from typing import Final

from sava.peer_connection import GREETING
from tests.integration.test_strangers import PREFACE, STRANGERS, come
from tests.security.attacks import Attack, Tally, Target

HALF_OPEN: Final = 500
"""On each port of each broker."""
HELD: Final = 1024
"""The Raft port's own limit."""
PATIENCE_S: Final = 10.0
"""Within which a broker drops a connection that says nothing."""


async def _hold(addresses: tuple[str, ...], count: int, says: bytes, seconds: float) -> Tally:
    """Open ``count`` connections to each, say so much, and see which are still there at the end."""
    tally = Tally()
    held: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
    began = time.monotonic()
    for address in addresses:
        host, _, port = address.rpartition(":")
        for _ in range(count):
            try:
                async with asyncio.timeout(1):
                    reader, writer = await asyncio.open_connection(host, int(port))
                writer.write(says)
                held.append((reader, writer))
            except (OSError, TimeoutError):
                tally.refused += 1
    await asyncio.sleep(max(seconds - (time.monotonic() - began), 0))
    for reader, writer in held:
        tally.count(is_accepted=await _is_open(reader))
        writer.transport.abort()
    await asyncio.sleep(0)
    lasted = time.monotonic() - began
    tally.note = f"accepted: still open after up to {lasted:.0f} s"
    return tally


async def _is_open(reader: asyncio.StreamReader) -> bool:
    try:
        async with asyncio.timeout(0.001):
            while await reader.read(1 << 16):
                pass
    except TimeoutError:
        return True
    except OSError:
        return False
    return False


async def half_open(target: Target, seconds: float) -> Tally:
    """M1: half of HTTP/2's preface on the client and admin ports."""
    count = min(HALF_OPEN, round(100 * seconds))
    tally = await _hold((*target.client, *target.admin), count, PREFACE[:12], seconds)
    if seconds < PATIENCE_S:
        tally.note += "; the time was too short to be dropped in"
    return tally


async def held_raft_port(target: Target, seconds: float) -> Tally:
    """Take all connections that a Raft port accepts, again and again."""
    count = min(HELD + 50, round(300 * seconds))
    return await _hold(target.raft, count, GREETING[:4], seconds)


async def garbage(target: Target, seconds: float) -> Tally:
    """Noise of all kinds on every port."""
    tally, until = Tally(), time.monotonic() + seconds
    while time.monotonic() < until:
        for says in STRANGERS.values():
            for address in target.ports:
                await asyncio.gather(*(come(int(address.rpartition(":")[2]), says) for _ in range(10)))
                tally.refused += 10
            if time.monotonic() > until:
                break
    return tally


ATTACKS: Final = (
    Attack("sockets: garbage", garbage, "refused"),
    Attack("sockets: half-open HTTP/2", half_open, "borne"),
    Attack("sockets: held Raft port", held_raft_port, "borne"),
)
