"""``make demo``: three brokers on this machine, what they survive, and what was measured.

Every step runs the ``sava`` command or kills a real process; a step that fails says so and the exit code is
1. Everything that is started is stopped again, by its process id.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from rich.console import Console
from rich.table import Table

from sava.blocking import Client
from sava.errors import SavaError

BROKERS = 3
START_TIMEOUT_S = 20.0
TOPIC = "/default/orders"
MESSAGES = 100_000
CRASH_TOPIC = "/default/through-a-crash"
PUBLISHED = 2_000
console = Console(highlight=False)


class StepFailed(Exception):
    """A step did not show what it claims."""


class Broker:
    def __init__(self, directory: Path, config: Path, ports: list[int]) -> None:
        client, admin, raft, http = ports
        self.admin, self.raft = f"127.0.0.1:{admin}", f"127.0.0.1:{raft}"
        self.service = f"http://127.0.0.1:{client}"
        self._http = http
        self._log = directory.with_suffix(".log")
        self._arguments = [
            "broker",
            "--config",
            str(config),
            "--data-dir",
            str(directory),
            "--host",
            "127.0.0.1",
        ]
        for name, port in (("port", client), ("admin-port", admin), ("raft-port", raft), ("http-port", http)):
            self._arguments += [f"--{name}", str(port)]
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "sava.cli", *self._arguments], stdout=log, stderr=log
            )

    def wait_listening(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            if self.process is not None and self.process.poll() is not None:
                raise StepFailed(f"a broker stopped at start; its log:\n{self._log.read_text()}")
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self._http), timeout=1):
                return
            time.sleep(0.05)
        raise StepFailed(f"no broker on {self.admin} after {START_TIMEOUT_S:.0f} s")

    def stop(self, how: signal.Signals) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(how)
            try:
                self.process.wait(timeout=15)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


def sava(broker: Broker, *arguments: str) -> str:
    """Run one command against one broker, as a user would, and return what it prints."""
    done = subprocess.run(
        [sys.executable, "-m", "sava.cli", *arguments],
        env={**os.environ, "SAVA_ADMIN": broker.admin, "SAVA_SERVICE": broker.service},
        capture_output=True,
        text=True,
        timeout=60,
    )
    if done.returncode != 0:
        raise StepFailed(f"sava {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout.strip()


class Demo:
    def __init__(self, root: Path) -> None:
        config = root / "sava.yml"
        config.write_text("cluster_name: demo\n")
        ports = _free_ports(4 * BROKERS)
        self.brokers = [
            Broker(root / f"broker-{number + 1}", config, ports[4 * number : 4 * number + 4])
            for number in range(BROKERS)
        ]
        self.alive = list(self.brokers)

    def steps(self) -> Iterator[tuple[str, Callable[[], str]]]:
        yield "three brokers form a cluster with one command", self.found
        yield "a value written through one broker is read through another", self.read_elsewhere
        yield "compare-and-swap: of two claims on one key, one wins", self.claim
        yield "messages are published durably and read back in order", self.produce
        yield "Danube's own client, unmodified, works with the same broker", self.use_danube_client
        yield "the broker is killed with SIGKILL while a client publishes", self.kill_while_publishing
        yield "the leader is killed with SIGKILL; a survivor takes writes", self.kill_leader
        yield "nothing acknowledged was lost, and the killed broker catches up", self.rejoin
        yield "all brokers are stopped and started; everything is there", self.restart_all

    def found(self) -> str:
        started = time.monotonic()
        for broker in self.brokers:
            broker.start()
        for broker in self.brokers:
            broker.wait_listening()
        sava(self.brokers[0], "cluster", "init", "--nodes", ",".join(broker.raft for broker in self.brokers))
        return f"{time.monotonic() - started:.1f} s from nothing to a leader"

    def read_elsewhere(self) -> str:
        for number in range(3):
            sava(self.brokers[number], "meta", "put", f"/demo/key-{number}", f"value-{number}")
        found = json.loads(sava(self.brokers[2], "meta", "range", "/demo/", "-o", "json"))
        keys = [kv["key"] for kv in found]
        _require(keys == [f"/demo/key-{number}" for number in range(3)], f"read {keys}")
        return f"{len(keys)} keys, each written through another broker"

    def claim(self) -> str:
        sava(self.brokers[0], "meta", "put", "/demo/owner", "broker-1", "--if-absent")
        try:
            sava(self.brokers[1], "meta", "put", "/demo/owner", "broker-2", "--if-absent")
        except StepFailed:
            return "the second one was refused"
        raise StepFailed("both claims succeeded")

    def produce(self) -> str:
        broker = self.brokers[0]
        published = json.loads(
            sava(broker, "produce", TOPIC, "--count", str(MESSAGES), "--size", "100", "-o", "json")
        )
        read = sava(
            broker, "consume", TOPIC, "--subscription", "demo", "--count", str(MESSAGES), "-o", "json"
        )
        offsets = [json.loads(line)["offset"] for line in read.splitlines()]
        _require(
            offsets == list(range(MESSAGES)), f"read {len(offsets)} messages, not 0..{MESSAGES} in order"
        )
        rate = published["messages"] / published["seconds"]
        return f"{MESSAGES:,} messages of 100 bytes, {rate:,.0f} a second, each on disk when acknowledged"

    def use_danube_client(self) -> str:
        """In a process of its own, as any Danube application."""
        done = subprocess.run(
            [sys.executable, str(Path(__file__).with_name("danube_client.py")), self.brokers[0].service],
            capture_output=True,
            text=True,
            timeout=60,
        )
        if done.returncode != 0:
            raise StepFailed(done.stderr.strip())
        return done.stdout.strip()

    def kill_while_publishing(self) -> str:
        """The client sends on through the crash; every message that it was told of must be there, once."""
        broker = self.brokers[0]
        acknowledged: list[int] = []
        with ThreadPoolExecutor(1) as publisher:
            publishing = publisher.submit(_publish, broker.service, acknowledged)
            _wait_for(lambda: len(acknowledged) > PUBLISHED // 4, publishing)
            broker.stop(signal.SIGKILL)
            broker.start()
            broker.wait_listening()
            publishing.result(timeout=60)
        with Client(broker.service) as client, client.reader(CRASH_TOPIC, end=PUBLISHED) as reader:
            found = [int(message.payload) for message in reader]
        _require(
            found == list(range(PUBLISHED)), f"{len(found)} messages are there, not {PUBLISHED} in order"
        )
        return f"{PUBLISHED:,} acknowledged messages: none lost, none twice, all in order"

    def kill_leader(self) -> str:
        leader = self._leader()
        leader.stop(signal.SIGKILL)
        self.alive.remove(leader)
        started = time.monotonic()
        sava(self.alive[0], "meta", "put", "/demo/after-the-kill", "still here")
        return f"the next write succeeded {time.monotonic() - started:.1f} s after the kill"

    def rejoin(self) -> str:
        returning = next(broker for broker in self.brokers if broker not in self.alive)
        returning.start()
        returning.wait_listening()
        self.alive.append(returning)
        return self._check_all(returning)

    def restart_all(self) -> str:
        for broker in self.brokers:
            broker.stop(signal.SIGTERM)
        started = time.monotonic()
        for broker in self.brokers:
            broker.start()
        for broker in self.brokers:
            broker.wait_listening()
        return f"{self._check_all(self.brokers[0])}, {time.monotonic() - started:.1f} s after the start"

    def _leader(self) -> Broker:
        for broker in self.alive:
            status = json.loads(sava(broker, "cluster", "status", "-o", "json"))
            if status["leader_id"] == status["self_node_id"]:
                return broker
        raise StepFailed("no broker says that it leads")

    def _check_all(self, broker: Broker) -> str:
        found = json.loads(sava(broker, "meta", "range", "/demo/", "-o", "json"))
        keys = {kv["key"] for kv in found}
        expected = {"/demo/key-0", "/demo/key-1", "/demo/key-2", "/demo/owner", "/demo/after-the-kill"}
        _require(keys == expected, f"expected {sorted(expected)}, found {sorted(keys)}")
        return f"all {len(keys)} keys are there"


def _publish(service: str, acknowledged: list[int]) -> None:
    with (
        Client(service) as client,
        client.producer(CRASH_TOPIC, name="demo", reliable=True, timeout=60) as producer,
    ):
        for number in range(PUBLISHED):
            producer.send(b"%d" % number)
            acknowledged.append(number)


def _wait_for(condition: Callable[[], bool], work: Future[None]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        if work.done():
            work.result()
        _require(time.monotonic() < deadline, "publishing does not get on")
        time.sleep(0.01)


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise StepFailed(message)


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def main() -> int:
    table = Table("step", "result", title="Sava: what was shown")
    failed = False
    with tempfile.TemporaryDirectory(prefix="sava-demo-") as root:
        demo = Demo(Path(root))
        try:
            for claim, step in demo.steps():
                with console.status(claim):
                    try:
                        result = step()
                    except (
                        StepFailed,
                        SavaError,
                        subprocess.TimeoutExpired,
                        OSError,
                        KeyError,
                        TypeError,
                        ValueError,
                    ) as error:
                        result, failed = f"FAILED: {error}", True
                console.print(f"• {claim}: {result}")
                table.add_row(claim, result)
                if failed:
                    break
        finally:
            for broker in demo.brokers:
                broker.stop(signal.SIGTERM)
    console.print(table)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
