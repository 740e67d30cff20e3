"""Hosts of our own: network namespaces, and a router in Python between them.

Each host is a network namespace with one TUN device. The router is a process that holds the other end of all
of them: it reads IP packets, and forwards, drops, delays, duplicates or reorders them, for each ordered pair
of hosts as it was told last. So TCP meets what a bad network does to it, and brokers and clients need no
special setting.

    orchestrator ──socket──▶ router ◀──tun──▶ b1, b2, b3, west, s3, clients, operator

A namespace has no name: it lives as long as a process or an open descriptor is in it, and vanishes with the
last one however the run ends. The process that makes the network becomes the host ``operator`` itself.
Without root, user namespaces do the same where the machine allows them.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import itertools
import json
import os
import random
import select
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

import msgspec

CLONE_NEWNS: Final = 0x00020000
CLONE_NEWUSER: Final = 0x10000000
CLONE_NEWNET: Final = 0x40000000
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_SET_FLAGS, _SET_ADDRESS, _SET_MASK, _SET_MTU = 0x8914, 0x8916, 0x891C, 0x8922
_UP_RUNNING = 0x41
MTU: Final = 9000
"""Larger than Ethernet's: the router pays per packet, and brokers send batches."""
NETWORK: Final = "10.77.0."
OPERATOR: Final = "operator"
QUEUE_S: Final = 0.5
"""A limited link drops what would wait longer than this, as a router with a bounded queue does."""
ANSWER_S: Final = 60.0
"""For the router's answer to an order: it waits for a core as everything does on a busy machine."""
_ASK: Final = b"?"
_BURST: Final = 64
"""Packets of one host before the next host has its turn."""

_ENTER: Final = (
    "import ctypes, os, signal, sys; c = ctypes.CDLL(None, use_errno=True)\n"
    "c.prctl(1, signal.SIGKILL)\n"
    "fd = int(sys.argv[1])\n"
    f"fd >= 0 and c.setns(fd, {CLONE_NEWNET}) and sys.exit(f'setns: {{os.strerror(ctypes.get_errno())}}')\n"
    "os.getppid() == int(sys.argv[2]) or sys.exit('the parent has ended')\n"
    "os.execvp(sys.argv[3], sys.argv[3:])"
)
"""Enter a namespace and become the program. The program dies with the orchestrator, even if that is killed
with SIGKILL."""

_libc = ctypes.CDLL(None, use_errno=True)


class Conditions(msgspec.Struct, frozen=True):
    """What happens to packets from one host to another."""

    is_cut: bool = False
    loss: float = 0.0
    duplicate: float = 0.0
    reorder: float = 0.0
    delay_ms: float = 0.0
    jitter_ms: float = 0.0
    kbit: float = 0.0
    """Kilobits per second; 0: no limit."""


FINE: Final = Conditions()


class NoNamespaces(Exception):
    """The machine does not let this process make network namespaces or TUN devices."""


def _unshare(flags: int) -> None:
    if _libc.unshare(flags) != 0:
        raise NoNamespaces(f"unshare: {os.strerror(ctypes.get_errno())}")


def isolate() -> None:
    """Give this process mounts and users of its own, so that everything it makes vanishes with it. Must be
    called before any thread is started. Raises NoNamespaces."""
    if os.geteuid() == 0:
        _unshare(CLONE_NEWNS)
    else:
        user, group = os.getuid(), os.getgid()
        _unshare(CLONE_NEWUSER | CLONE_NEWNS)
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {user} 1")
        Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    _libc.mount(b"none", b"/", None, ctypes.c_ulong(0x44000), None)  # MS_REC | MS_PRIVATE


def _configure(device: str, address: str, mtu: int) -> None:
    """Give the device of the current namespace its address and bring it up."""

    def request(packed: bytes) -> bytes:
        return struct.pack("16s", device.encode()) + packed

    def inet(text: str) -> bytes:
        return struct.pack("HH4s8x", socket.AF_INET, 0, socket.inet_aton(text))

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        if address:
            fcntl.ioctl(control, _SET_ADDRESS, request(inet(address)))
            fcntl.ioctl(control, _SET_MASK, request(inet("255.255.255.0")))
            fcntl.ioctl(control, _SET_MTU, request(struct.pack("i12x", mtu)))
        fcntl.ioctl(control, _SET_FLAGS, request(struct.pack("h14x", _UP_RUNNING)))


def _make_host(address: str) -> tuple[int, int]:
    """Descriptors of a new namespace and of its TUN device; this thread is in the namespace afterwards."""
    try:
        _unshare(CLONE_NEWNET)
        tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(tun, _TUNSETIFF, struct.pack("16sH22x", b"tun0", _IFF_TUN | _IFF_NO_PI))
        _configure("tun0", address, MTU)
        _configure("lo", "", 0)
    except OSError as error:
        raise NoNamespaces(f"TUN device: {error.strerror}") from error
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY), tun


def mortal(command: Sequence[str], *, namespace: int = -1) -> list[str]:
    """The command so that it dies with this process, in a namespace of which it gets the descriptor."""
    return [sys.executable, "-S", "-E", "-c", _ENTER, str(namespace), str(os.getpid()), *command]


class Network:
    """The orchestrator's side. Owned by the orchestrator's main thread, which becomes ``operator``."""

    has_packets: Final = True

    def __init__(self, hosts: Sequence[str], *, seed: int, log: Path) -> None:
        """Raises NoNamespaces, and leaves the process where it was."""
        self.hosts = [*hosts, OPERATOR]
        self._namespaces: dict[str, int] = {}
        self._conditions: dict[tuple[str, str], Conditions] = {}
        tuns: list[int] = []
        before = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        try:
            for host in self.hosts:
                self._namespaces[host], tun = _make_host(self.address(host))
                tuns.append(tun)
        except NoNamespaces:
            _libc.setns(before, CLONE_NEWNET)
            raise
        finally:
            os.close(before)
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        arguments = [str(seed), str(theirs.fileno()), *map(str, tuns)]
        with log.open("ab") as output:
            self._router = subprocess.Popen(
                self.command(OPERATOR, [sys.executable, "-m", "tests.torture.network", *arguments]),
                pass_fds=[theirs.fileno(), *self.descriptors(OPERATOR), *tuns],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=Path(__file__).parents[2],
            )
        theirs.close()
        for tun in tuns:
            os.close(tun)

    @property
    def router_pid(self) -> int:
        return self._router.pid

    def address(self, host: str) -> str:
        return f"{NETWORK}{self.hosts.index(host) + 1}"

    def command(self, host: str, command: Sequence[str]) -> list[str]:
        """The command as it is started on a host; the child needs the ``descriptors`` of the host."""
        return mortal(command, namespace=self._namespaces[host])

    def descriptors(self, host: str) -> list[int]:
        return [self._namespaces[host]]

    def set(self, pairs: Iterable[tuple[str, str]], conditions: Conditions) -> None:
        """For packets from the first host of each pair to the second. The router has applied it when this
        returns: otherwise packets that are sent next could pass under the former conditions."""
        for pair in pairs:
            self._conditions[pair] = conditions
        self._tell()

    def heal(self, pairs: Iterable[tuple[str, str]]) -> None:
        self.set(pairs, FINE)

    def heal_all(self) -> None:
        self._conditions.clear()
        self._tell()

    def _tell(self) -> None:
        """All of it each time: the router needs no memory of what was said before."""
        told = [
            [self.hosts.index(source), self.hosts.index(target), msgspec.structs.asdict(conditions)]
            for (source, target), conditions in self._conditions.items()
            if conditions != FINE
        ]
        self._order(json.dumps(told).encode())

    def counters(self) -> dict[str, int]:
        """What the router has done so far."""
        return self._order(_ASK)

    def _order(self, order: bytes) -> dict[str, int]:
        """The router answers each order with its counters when it has obeyed."""
        self._control.settimeout(ANSWER_S)
        self._control.send(order)
        answer = self._control.recv(1 << 16)
        if not answer:
            raise ConnectionError("the router has ended; its log says why")
        counted: dict[str, int] = json.loads(answer)
        return counted

    def close(self) -> None:
        self._control.close()
        try:
            self._router.wait(5)
        except subprocess.TimeoutExpired:
            self._router.kill()
            self._router.wait()
        for descriptor in self._namespaces.values():
            os.close(descriptor)


# -- the router ----------------------------------------------------------------------------------------------


class Router:
    """Forwards packets until the orchestrator closes its end of the control socket."""

    def __init__(self, seed: int, control: socket.socket, tuns: Sequence[int]) -> None:
        self._chance = random.Random(seed)
        self._control = control
        self._tuns = tuns
        self._pairs: dict[tuple[int, int], Conditions] = {}
        self._waiting: list[tuple[float, int, int, bytes]] = []
        """A heap of (due, order, target, packet)."""
        self._order = itertools.count()
        self._last_due: dict[tuple[int, int], float] = {}
        self._free_at: dict[tuple[int, int], float] = {}
        self.counters = dict.fromkeys(
            ("forwarded", "cut", "lost", "duplicated", "delayed", "reordered", "full"), 0
        )

    def run(self) -> None:
        poll = select.epoll()
        poll.register(self._control, select.EPOLLIN)
        sources = {tun: number for number, tun in enumerate(self._tuns)}
        for tun in self._tuns:
            poll.register(tun, select.EPOLLIN)
        while True:
            wait = max(0.0, self._waiting[0][0] - time.monotonic()) if self._waiting else -1
            for descriptor, _ in poll.poll(wait):
                if descriptor in sources:
                    self._read(descriptor, sources[descriptor])
                elif not self._obey():
                    return
            now = time.monotonic()
            while self._waiting and self._waiting[0][0] <= now:
                _, _, target, packet = heapq.heappop(self._waiting)
                self._write(target, packet)

    def _obey(self) -> bool:
        """One order, which is answered; False: the orchestrator has gone."""
        try:
            order = self._control.recv(1 << 18)
        except ConnectionError:
            return False
        if not order:
            return False
        if order != _ASK:
            self._pairs = {
                (source, target): msgspec.convert(told, Conditions)
                for source, target, told in json.loads(order)
            }
        try:
            self._control.send(json.dumps(self.counters).encode())
        except OSError:
            return False
        return True

    def _read(self, tun: int, source: int) -> None:
        for _ in range(_BURST):
            try:
                packet = os.read(tun, 65536)
            except BlockingIOError:
                return
            target = packet[19] - 1
            if packet[0] >> 4 != 4 or not 0 <= target < len(self._tuns):
                continue  # IPv6 says hello to its neighbours, and has none
            conditions = self._pairs.get((source, target))
            if conditions is None:
                self._write(target, packet)
            else:
                self._treat(source, target, packet, conditions)

    def _treat(self, source: int, target: int, packet: bytes, conditions: Conditions) -> None:
        draw = self._chance.random
        if conditions.is_cut or draw() < conditions.loss:
            self.counters["cut" if conditions.is_cut else "lost"] += 1
            return
        now = time.monotonic()
        due, pair = now, (source, target)
        if conditions.kbit:
            due = max(now, self._free_at.get(pair, 0.0))
            if due - now > QUEUE_S:
                self.counters["full"] += 1
                return
            self._free_at[pair] = due = due + len(packet) / (conditions.kbit * 125.0)
        due += (conditions.delay_ms + conditions.jitter_ms * draw()) / 1000.0
        if draw() < conditions.reorder:
            self.counters["reordered"] += 1
            due += 0.005 + 0.045 * draw()
        else:
            # Jitter alone keeps the order: packets of one path queue behind each other.
            due = self._last_due[pair] = max(due, self._last_due.get(pair, 0.0))
        self._later(due, now, target, packet)
        if draw() < conditions.duplicate:
            self.counters["duplicated"] += 1
            self._later(due + 0.02 * draw(), now, target, packet)

    def _later(self, due: float, now: float, target: int, packet: bytes) -> None:
        if due <= now:
            self._write(target, packet)
            return
        self.counters["delayed"] += 1
        heapq.heappush(self._waiting, (due, next(self._order), target, packet))

    def _write(self, target: int, packet: bytes) -> None:
        try:
            os.write(self._tuns[target], packet)
            self.counters["forwarded"] += 1
        except BlockingIOError:
            self.counters["full"] += 1  # TCP sends it again


def main() -> None:
    seed, control, *tuns = map(int, sys.argv[1:])
    with socket.socket(fileno=control) as told:
        Router(seed, told, tuns).run()


if __name__ == "__main__":
    main()
