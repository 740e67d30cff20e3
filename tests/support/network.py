"""Links that can be cut: a TCP proxy in front of every broker's Raft port.

Members know each other by the proxies' addresses, so all their traffic passes here. Who opened a connection
is found out from the kernel (the socket's inode among the file descriptors of the brokers' processes), so
each direction of each pair is a link of its own and the brokers need no special setting.

Raft and the copies of journals share the port, each with connections of its own that say what they are for
when they are opened; so one can be cut without the other.

A cut link behaves like a lost network, not like a refused connection: bytes stop, nothing is reset. When it
heals, the connections that stood still are reset, as middleboxes do with connections they have forgotten.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from sava.peer_connection import GREETING, BadFrame, FrameDecoder, OpenLedgers, decode_handshake

RAFT, LEDGERS = KINDS = ("raft", "journals")


@dataclass(eq=False)
class Link:
    flowing: asyncio.Event = field(default_factory=asyncio.Event)
    writers: set[asyncio.StreamWriter] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.flowing.set()


class Links:
    """``pids`` tells which process is which node, at the time of asking."""

    def __init__(self, pids: Callable[[], dict[int, int]]) -> None:
        self._pids = pids
        self._links: dict[tuple[int, int, str], Link] = {}
        self._servers: list[asyncio.Server] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def expose(self, node: int, port: int) -> int:
        """Open a proxy in front of ``port`` of ``node``; returns the proxy's port."""

        async def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            try:
                await self._relay(node, port, reader, writer)
            except (ConnectionError, OSError):
                return
            finally:
                writer.close()

        server = await asyncio.start_server(accepted, "127.0.0.1", 0)
        self._servers.append(server)
        return int(server.sockets[0].getsockname()[1])

    def link(self, source: int, target: int, kind: str = RAFT) -> Link:
        return self._links.setdefault((source, target, kind), Link())

    def cut(self, source: int, target: int, kinds: Iterable[str] = KINDS) -> None:
        for kind in kinds:
            self.link(source, target, kind).flowing.clear()

    def isolate(self, node: int, others: Iterable[int], kinds: Iterable[str] = KINDS) -> None:
        """In both directions."""
        for other in others:
            self.cut(node, other, kinds)
            self.cut(other, node, kinds)

    def partition(self, *groups: Iterable[int]) -> None:
        """Nodes hear only those of their own group."""
        sides = [set(group) for group in groups]
        for side in sides:
            for other in sides:
                if side is not other:
                    for source in side:
                        for target in other:
                            self.cut(source, target)

    def heal(self) -> None:
        for link in self._links.values():
            if not link.flowing.is_set():
                for writer in link.writers:
                    writer.transport.abort()
                link.flowing.set()

    async def close(self) -> None:
        for server in self._servers:
            server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _relay(
        self, node: int, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        source = self._source_of(writer)
        first = await reader.read(1 << 16)
        link = self.link(source, node, _kind_of(first))
        await link.flowing.wait()
        up_reader, up_writer = await asyncio.open_connection("127.0.0.1", port)
        link.writers |= {writer, up_writer}
        try:
            up_writer.write(first)
            async with asyncio.TaskGroup() as group:
                group.create_task(_pump(reader, up_writer, link))
                group.create_task(_pump(up_reader, writer, link))
        except* (ConnectionError, OSError):
            pass
        finally:
            link.writers -= {writer, up_writer}
            up_writer.close()

    def _source_of(self, writer: asyncio.StreamWriter) -> int:
        """The node that opened the connection; 0 for anybody else (the test itself)."""
        inode = _inode_of(writer.get_extra_info("peername")[1], writer.get_extra_info("sockname")[1])
        for pid, node in self._pids().items():
            if inode and _holds(pid, inode):
                return node
        return 0


def _kind_of(first: bytes) -> str:
    """Of a connection, by the bytes that it begins with; those of TLS tell nothing."""
    if not first.startswith(GREETING):
        return RAFT
    try:
        payloads = FrameDecoder().feed(first[len(GREETING) :])
        return LEDGERS if payloads and isinstance(decode_handshake(payloads[0]), OpenLedgers) else RAFT
    except BadFrame:
        return RAFT


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, link: Link) -> None:
    while data := await reader.read(1 << 16):
        await link.flowing.wait()
        writer.write(data)
        await writer.drain()
    writer.transport.abort()
    raise ConnectionResetError


def _inode_of(local_port: int, remote_port: int) -> str:
    wanted = (f"0100007F:{local_port:04X}", f"0100007F:{remote_port:04X}")
    for family in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{family}").read_text().splitlines()[1:]:
            fields = line.split()
            if (fields[1][-13:], fields[2][-13:]) == wanted:
                return fields[9]
    return ""


def _holds(pid: int, inode: str) -> bool:
    try:
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            try:
                if str(entry.readlink()) == f"socket:[{inode}]":
                    return True
            except FileNotFoundError:
                continue
    except (FileNotFoundError, PermissionError):
        return False
    return False
