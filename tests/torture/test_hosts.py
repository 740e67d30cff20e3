"""The torture's own tools do what they say: the router's bad network, the disk that loses power, the file
that holds writes back. What this machine does not allow is skipped, with the reason.

Namespaces are for a whole process, so each test runs itself again as a program: ``python -m
tests.torture.test_hosts NAME DIRECTORY``.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.torture.broker_child import HeldFile
from tests.torture.cluster import ROOT
from tests.torture.disks import ImageDisk, NoMounts
from tests.torture.network import OPERATOR, Conditions, Network, NoNamespaces, isolate

ECHO = """
import socket
server = socket.create_server(("0.0.0.0", 5000))
print("listening", flush=True)
connection, _ = server.accept()
while data := connection.recv(1 << 20):
    connection.sendall(data[-1:])
"""


def run(name: str, directory: Path) -> dict[str, Any]:
    """What the program of this name has found out. Skips the test if the machine does not allow it."""
    command = [sys.executable, "-m", "tests.torture.test_hosts", name, str(directory)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    if "missing" in found:
        pytest.skip(found["missing"])
    return found


# -- the router ------------------------------------------------------------------------------------


def test_the_router_is_a_network_that_can_be_bad(tmp_path: Path) -> None:
    found = run("network", tmp_path)
    print(found)
    assert found["good"] == {"cut": 0, "lost": 0, "duplicated": 0, "delayed": 0, "reordered": 0, "full": 0}
    assert found["delayed_s"] >= 5 * 0.03, "five round trips, each late by 30 ms on its way there"
    assert found["lost"] > 0
    assert found["duplicated"] > 0
    assert found["reordered"] > 0
    assert found["bad_is_whole"], "TCP repairs what the network does"
    assert found["cut_s"] is None, "nothing comes through a cut"
    assert found["healed"], "what was sent meanwhile comes when the cut heals"
    assert found["limited_s"] > 0.5, "100 kB at 1,000 kbit/s take 0.8 s"


def network(directory: Path) -> dict[str, Any]:
    isolate()
    net = Network(["server"], seed=1, log=directory / "router.log")
    server = subprocess.Popen(
        net.command("server", [sys.executable, "-c", ECHO]),
        pass_fds=net.descriptors("server"),
        stdout=subprocess.PIPE,
    )
    assert server.stdout is not None
    server.stdout.readline()
    there = [(OPERATOR, "server")]
    with socket.create_connection((net.address("server"), 5000), timeout=20) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        _round_trips(connection, 300)
        counted = net.counters()
        assert counted.pop("forwarded") >= 600
        found: dict[str, Any] = {"good": counted}
        net.set(there, Conditions(delay_ms=30.0))
        found["delayed_s"] = _round_trips(connection, 5)
        net.set(there, Conditions(loss=0.1, duplicate=0.2, reorder=0.2))
        _round_trips(connection, 60)
        found["bad_is_whole"] = True
        found |= net.counters()
        net.set(there, Conditions(is_cut=True))
        connection.settimeout(0.5)
        found["cut_s"] = _try_round_trip(connection)
        net.heal_all()
        connection.settimeout(20)
        found["healed"] = connection.recv(1) == b"x"
        net.set(there, Conditions(kbit=1000.0))
        began = time.monotonic()
        connection.sendall(bytes(100_000) + b"y")
        while b"y" not in connection.recv(1 << 16):
            pass
        found["limited_s"] = time.monotonic() - began
    server.wait(10)
    net.close()
    return found


def test_conditions_hold_when_they_are_set(tmp_path: Path) -> None:
    """The router stands still; the orchestrator sets conditions. It waits for the router: if it went on at
    once, its next packets could pass before the router knows of the conditions."""
    assert run("setting", tmp_path) == {"waits": True, "returns": True}


def setting(directory: Path) -> dict[str, Any]:
    isolate()
    net = Network(["server"], seed=1, log=directory / "router.log")
    net.counters()  # it has started
    os.kill(net.router_pid, signal.SIGSTOP)
    told = threading.Thread(target=net.set, args=([(OPERATOR, "server")], Conditions(is_cut=True)))
    told.start()
    told.join(0.5)
    found = {"waits": told.is_alive()}
    os.kill(net.router_pid, signal.SIGCONT)
    told.join(50)
    net.close()
    return found | {"returns": not told.is_alive()}


def _round_trips(connection: socket.socket, count: int) -> float:
    began = time.monotonic()
    for _ in range(count):
        connection.sendall(b"x")
        assert connection.recv(1) == b"x"
    return time.monotonic() - began


def _try_round_trip(connection: socket.socket) -> float | None:
    try:
        return _round_trips(connection, 1)
    except TimeoutError:
        return None


# -- disks -----------------------------------------------------------------------------------------


def test_a_power_loss_takes_what_was_not_synced(tmp_path: Path) -> None:
    found = run("power", tmp_path)
    assert found == {"synced": "1" * 100, "names": ["lost+found", "synced"], "is_empty": ["lost+found"]}


def power(directory: Path) -> dict[str, Any]:
    isolate()
    disk = ImageDisk("d", directory / "mounts", directory, megabytes=32)
    with (disk.path / "synced").open("wb", buffering=0) as file:
        file.write(b"1" * 100)
        os.fsync(file.fileno())
        folder = os.open(disk.path, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)
        file.write(b"2" * 100)
        (disk.path / "unsynced").write_bytes(b"3" * 100)
        disk.cut_power()
    disk.return_power()
    names = sorted(os.listdir(disk.path))  # noqa: PTH208 (names are what is asked for)
    found = {"synced": (disk.path / "synced").read_text(), "names": names}
    disk.wipe()
    found["is_empty"] = os.listdir(disk.path)  # noqa: PTH208
    disk.close()
    return found


def test_a_full_disk_has_room_again(tmp_path: Path) -> None:
    assert run("fullness", tmp_path) == {"full": "No space left on device", "written": 1 << 16}


def fullness(directory: Path) -> dict[str, Any]:
    isolate()
    disk = ImageDisk("d", directory / "mounts", directory, megabytes=32)
    disk.fill()
    found: dict[str, Any] = {"full": ""}
    try:
        (disk.path / "file").write_bytes(bytes(1 << 16))
    except OSError as error:
        found["full"] = error.strerror
    disk.empty()
    found["written"] = (disk.path / "file").write_bytes(bytes(1 << 16))
    disk.close()
    return found


def test_a_held_file_keeps_unsynced_writes_to_its_process(tmp_path: Path) -> None:
    """A second handle sees them, the kernel does not before the sync."""
    path = tmp_path / "log"
    file = HeldFile(path, os.open(path, os.O_RDWR | os.O_CREAT), is_new=True)
    other = HeldFile(path, os.open(path, os.O_RDWR), is_new=False)
    file.write(0, (b"abc", b"def"))
    assert (other.read(1, 10), other.size(), path.read_bytes()) == (b"bcdef", 6, b"")
    file.sync()
    assert path.read_bytes() == b"abcdef"
    other.write(4, (b"XYZ",))
    assert file.read(0, 10) == b"abcdXYZ"
    assert path.read_bytes() == b"abcdef"
    file.truncate(5)
    assert (file.read(0, 10), path.read_bytes()) == (b"abcdX", b"abcdX")
    for each in (file, other):
        each.close()


if __name__ == "__main__":
    program, place = sys.argv[1:]
    try:
        told = {"network": network, "setting": setting, "power": power, "fullness": fullness}[program](
            Path(place)
        )
    except (NoNamespaces, NoMounts) as error:
        told = {"missing": str(error)}
    print(json.dumps(told))
