"""A switch with a cable to each node, made of network namespaces, so that a cable can be pulled.

Each node has a namespace of its own and one interface there; the other end of its cable is a port of a bridge
beside which the benchmark and its clients run. ``cut`` takes the port out of the bridge: packets vanish
silently in both directions, no connection is reset, and no interface of the node goes down. That is what a
dead switch port, or a machine whose power fails, looks like to its peers.

Namespaces need root, or a user namespace in which this process is root (``ALTERNATIVE``). Without them the
nodes share the loopback interface and no cable can be pulled.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from typing import Final, Self

ALTERNATIVE: Final = "unshare -Urnm sh -c 'mount -t tmpfs none /run; ip link set lo up; exec make bench'"
"""How a user without root gets there, where the kernel lets users make namespaces."""

COMMAND_S: Final = 10.0


class NetworkError(Exception):
    """A command of ``ip`` failed; the message is what it said."""


def is_possible() -> bool:
    return os.geteuid() == 0 and shutil.which("ip") is not None


class Network:
    """``with Network(3) as network``: node numbers count from 0."""

    def __init__(self, nodes: int) -> None:
        # 198.18.0.0/15 is set aside for benchmarks (RFC 2544). Two runs at a time differ by their process id;
        # interface names hold 15 characters.
        self._run = os.getpid() % 1_000_000
        self._subnet = f"198.18.{self._run % 256}"
        self._bridge = f"svb{self._run}"
        self._nodes = nodes
        self._made: list[str] = []

    @property
    def here(self) -> str:
        """The address of the benchmark."""
        return f"{self._subnet}.254"

    def host(self, number: int) -> str:
        return f"{self._subnet}.{number + 1}"

    def within(self, number: int) -> list[str]:
        """What stands before a command that runs on this node. It is replaced by the command, so that the
        process id is the command's."""
        return ["ip", "netns", "exec", self._namespace(number)]

    def __enter__(self) -> Self:
        try:
            _ip("link", "add", "name", self._bridge, "type", "bridge")
            _ip("address", "add", f"{self.here}/24", "dev", self._bridge)
            _ip("link", "set", "dev", self._bridge, "up")
            for number in range(self._nodes):
                self._plug_in(number)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for number, namespace in enumerate(self._made):
            # A namespace goes later, when its last process has gone, and its cable would stay until then: the
            # next network, which has the same names, could not be made.
            with contextlib.suppress(NetworkError):
                _ip("link", "delete", "dev", self._port(number))
            with contextlib.suppress(NetworkError):
                _ip("netns", "delete", namespace)
        with contextlib.suppress(NetworkError):
            _ip("link", "delete", "dev", self._bridge)

    def _plug_in(self, number: int) -> None:
        namespace, port = self._namespace(number), self._port(number)
        _ip("netns", "add", namespace)
        self._made.append(namespace)
        _ip("link", "add", "name", port, "type", "veth", "peer", "name", "eth0", "netns", namespace)
        _ip("link", "set", "dev", port, "master", self._bridge, "up")
        for interface in ("lo", "eth0"):
            _ip("-n", namespace, "link", "set", "dev", interface, "up")
        _ip("-n", namespace, "address", "add", f"{self.host(number)}/24", "dev", "eth0")

    def cut(self, number: int) -> None:
        _ip("link", "set", "dev", self._port(number), "nomaster")

    def heal(self, number: int) -> None:
        _ip("link", "set", "dev", self._port(number), "master", self._bridge)

    def _namespace(self, number: int) -> str:
        return f"svn{self._run}-{number}"

    def _port(self, number: int) -> str:
        return f"svp{self._run}-{number}"


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False, timeout=COMMAND_S)
    if done.returncode:
        raise NetworkError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
