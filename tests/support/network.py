"""Loopback as tests use it: free ports, links between brokers that can be cut, a proxy that loses answers."""

from __future__ import annotations

import asyncio
import fcntl
import os
import socket
import tempfile
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Final, Self

from grpc import aio

from sava.peer_connection import GREETING, BadFrame, FrameDecoder
from sava.security.handshake import BadHandshake, Hello, Purpose, decode_dialer

END: object = aio.EOF  # type: ignore[attr-defined]  # which the stubs do not know
"""What ``grpc.aio`` returns at the end of a stream that is read message by message."""
RAFT, LEDGERS = KINDS = ("raft", "journals")


@dataclass(eq=False)
class Link:
    flowing: asyncio.Event = field(default_factory=asyncio.Event)
    writers: set[asyncio.StreamWriter] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.flowing.set()


class Links:
    """Links that can be cut: a TCP proxy in front of every broker's Raft port. ``pids`` tells which process
    is which node, at the time of asking.

    Members know each other by the proxies' addresses, so all their traffic passes here. Who opened a
    connection is found out from the kernel (the socket's inode among the file descriptors of the brokers'
    processes), so each direction of each pair is a link of its own and the brokers need no special setting.

    Raft and the copies of journals share the port, each with connections of its own that say what they are
    for when they are opened; so one can be cut without the other.

    A cut link behaves like a lost network, not like a refused connection: bytes stop, nothing is reset. When
    it heals, the connections that stood still are reset, as middleboxes do with connections they have
    forgotten.
    """

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
        said = decode_dialer(payloads[0]) if payloads else None
    except (BadFrame, BadHandshake):
        return RAFT
    return LEDGERS if isinstance(said, Hello) and said.purpose is Purpose.LEDGERS else RAFT


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


# -- free ports --------------------------------------------------------------------------------

_FIRST, _WIDTH, _RANGES = 12_000, 500, 40
_LOCKS: Final = Path(tempfile.gettempdir()) / f"sava-test-ports-{os.getuid()}"


def _held_range() -> tuple[int, IO[bytes]]:
    """The first port of a range that nobody has, and what holds it until this process ends."""
    _LOCKS.mkdir(exist_ok=True)
    for number in range(_RANGES):
        lock = (_LOCKS / str(number)).open("wb")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
        else:
            return _FIRST + number * _WIDTH, lock
    raise RuntimeError(f"{_RANGES} test processes run on this machine, and have all ports: see {_LOCKS}")


class _Ports:
    """The ports of this process; a child that was forked takes a range of its own.

    Between the choice of a port and the server's start no other process may take it. So they are not of those
    that the kernel gives out by itself (32768 and up on Linux): one of them may become the near end of a
    connection. And each test process has a range of its own, which it holds by a lock on a file: other
    processes of this run, and other runs on this machine, have others. Within it every port has its turn
    before one comes again, so what a process left behind a moment ago, or has not bound yet, is in no one's
    way.
    """

    def __init__(self) -> None:
        self._process = 0
        self._first = self._turn = 0
        self._lock: IO[bytes] | None = None

    def row(self, count: int) -> list[int]:
        if self._process != os.getpid():
            self._first, self._lock = _held_range()
            self._process, self._turn = os.getpid(), 0
        for _ in range(_WIDTH):
            if self._turn + count > _WIDTH:
                self._turn = 0
            row = range(self._first + self._turn, self._first + self._turn + count)
            if all(map(_is_free, row)):
                self._turn += count
                return list(row)
            self._turn += 1
        raise RuntimeError(f"no {count} free ports in a row from {self._first} on")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


_ports: Final = _Ports()


def free_ports(count: int) -> list[int]:
    """Free ports in a row, for servers that a test starts."""
    return _ports.row(count)


# -- lost answers ------------------------------------------------------------------------------


class LostAnswers:
    """A TCP proxy in front of a broker's port (``target``) that loses the answer to one call, and nothing
    else. Callers connect to ``address``.

    The request goes through to the broker, which does what it asks. From then on the proxy keeps what the
    broker sends, until the test cuts the connection or the caller's own deadline passes. A call is recognised
    by its path, which gRPC writes in plain letters the first time that a connection carries it.
    """

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = host, int(port)
        self._path = b""
        self._is_deaf = False
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self.seen = asyncio.Event()
        """The call has passed; its answer does not."""
        self.address = ""

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accepted, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def lose(self, path: str) -> None:
        """From now on the answer to a call of ``path`` is kept back."""
        self._path = path.encode()
        self.seen.clear()

    def forward_nothing(self) -> None:
        """Connections are taken, and nothing passes, as with a host behind a broken network."""
        self._is_deaf = True

    def cut(self) -> None:
        for writer in self._writers:
            writer.transport.abort()

    async def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        self._writers.add(writer)
        with suppress(OSError):
            up_reader, up_writer = await asyncio.open_connection(*self._target)
            try:
                asked = asyncio.create_task(self._ask(reader, up_writer))
                await asyncio.wait(
                    {asked, asyncio.create_task(self._answer(up_reader, writer))},
                    return_when=asyncio.FIRST_COMPLETED,
                )
            finally:
                up_writer.close()
                writer.close()
                self._writers.discard(writer)

    async def _ask(self, reader: asyncio.StreamReader, broker: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            if self._is_deaf:
                continue
            if self._path and self._path in data:
                self.seen.set()
            broker.write(data)
            await broker.drain()

    async def _answer(self, broker: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await broker.read(1 << 16):
            if not self.seen.is_set() and not self._is_deaf:
                writer.write(data)
                await writer.drain()
