"""``sava up``: a cluster in one command, as somebody at a terminal sees it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sava.client.blocking import Client
from tests.support.network import free_ports
from tests.support.waiting import PATIENCE_S, OwnTime

READY_S = 10.0
"""What a user is promised on a machine with two cores and nothing else to do."""
COMMAND_S = 0.6
"""What a command that does nothing takes there."""


class Up:
    """The command, running; ready when this exists."""

    def __init__(self, directory: Path, *options: str) -> None:
        self._errors = directory.with_suffix(".err")
        with self._errors.open("wb") as stderr:
            self.process = subprocess.Popen(
                [*SAVA, "up", "--data-dir", str(directory), "-o", "json", *options],
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
            )
        self.ready: dict[str, Any] = {}

    def wait_ready(self) -> None:
        assert self.process.stdout is not None
        # The command bounds its own start; the test's timeout is behind it.
        line = self.process.stdout.readline()
        assert line, self.errors
        self.ready = json.loads(line)

    @property
    def errors(self) -> str:
        return self._errors.read_text()

    @property
    def pids(self) -> list[int]:
        return [broker["pid"] for broker in self.ready["brokers"]]

    def address(self, number: int, port: str) -> str:
        return str(self.ready["brokers"][number - 1][f"{port}_addr"])

    def wait_said(self, text: str, *, times: int = 1) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while self.errors.count(text) < times:
            assert time.monotonic() < deadline, self.errors
            time.sleep(0.02)

    def end(self, number: signal.Signals) -> int:
        self.process.send_signal(number)
        return self.process.wait(timeout=PATIENCE_S)


SAVA = (sys.executable, "-m", "sava.cli")


@contextlib.contextmanager
def up(directory: Path, *options: str) -> Iterator[Up]:
    running = Up(directory, *options)
    try:
        running.wait_ready()
        yield running
    finally:
        if running.process.poll() is None:
            running.process.terminate()
            running.process.wait(timeout=60)
        assert running.process.stdout is not None
        running.process.stdout.close()
        for pid in running.pids if running.ready else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def sava(*arguments: str, admin: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **({"SAVA_ADMIN": admin} if admin else {}), **variables}
    return subprocess.run([*SAVA, *arguments], env=environment, capture_output=True, text=True, timeout=60)


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_cluster_from_its_first_start_to_its_second(tmp_path: Path) -> None:
    data = tmp_path / "data"
    topic = "/default/orders"
    began = time.monotonic()
    sava("--version")
    slowness = max((time.monotonic() - began) / COMMAND_S, 1.0)
    began = time.monotonic()
    with up(data, "--port-base", str(free_ports(12)[0])) as first:
        assert time.monotonic() - began < READY_S * slowness
        assert len(first.ready["brokers"]) == 3
        listed = json.loads(sava("brokers", "list", "-o", "json", admin=first.address(3, "admin")).stdout)
        assert {broker["broker_id"] for broker in listed} == {
            broker["broker_id"] for broker in first.ready["brokers"]
        }
        assert {broker["status"] for broker in listed} == {"active"}

        with (
            Client(f"http://{first.address(1, 'client')}") as one,
            one.producer(topic, name="shop", reliable=True) as producer,
        ):
            producer.send_many([b"%d" % number for number in range(100)])
        assert read(first.address(2, "client"), topic) == list(range(100))

        refused = sava("up", "--data-dir", str(data))
        assert refused.returncode == 1
        assert refused.stderr.startswith(
            f"sava: {data} is in use by another process (pid {first.process.pid})"
        )
        assert refused.stderr.count("\n") == 1

        assert first.end(signal.SIGINT) == 0, first.errors
        assert not any(map(is_running, first.pids))

    with up(data) as second:
        for name in ("cluster_id", "data_dir"):
            assert second.ready[name] == first.ready[name]
        for before, now in zip(first.ready["brokers"], second.ready["brokers"], strict=True):
            assert {**before, "pid": 0} == {**now, "pid": 0}
        assert read(second.address(3, "client"), topic) == list(range(100))

        os.kill(second.pids[2], signal.SIGKILL)
        second.wait_said("sava: broker 3 was killed by SIGKILL")
        assert second.end(signal.SIGTERM) == 0, second.errors
        assert not any(map(is_running, second.pids))


def read(service: str, topic: str) -> list[int]:
    """Everything that the topic has, through one broker."""
    with Client(f"http://{service}") as client, client.reader(topic, end="latest") as reader:
        return [int(message.payload) for message in reader]


def test_without_any_broker_left_it_ends(tmp_path: Path) -> None:
    with up(tmp_path / "data", "--brokers", "1", "--port-base", str(free_ports(4)[0])) as running:
        os.kill(running.pids[0], signal.SIGKILL)
        assert running.process.wait(timeout=PATIENCE_S) == 1
        assert "sava: broker 1 was killed by SIGKILL" in running.errors
        assert running.errors.endswith("sava: all brokers have ended\n")


def test_a_dead_broker_is_reported_with_the_command_that_restarts_it(tmp_path: Path) -> None:
    """The reported command, run as it stands, brings the same broker back into the cluster."""
    data = tmp_path / "data"
    with up(data, "--brokers", "2", "--port-base", str(free_ports(8)[0])) as running:
        os.kill(running.pids[1], signal.SIGKILL)
        running.wait_said("start it again, in another terminal: ")
        line = running.errors.splitlines()[-2]
        log = data / "broker-2.log"
        assert line.startswith(f"sava: broker 2 was killed by SIGKILL; the end of {log}: ")
        assert line.endswith(log.read_text().splitlines()[-1])
        command = running.errors.splitlines()[-1].removeprefix("start it again, in another terminal: ")
        again = subprocess.Popen(shlex.split(command), cwd=tmp_path, stderr=subprocess.DEVNULL)
        try:
            waited = sava("wait", "--timeout", str(PATIENCE_S), admin=running.address(1, "admin"))
            assert waited.returncode == 0, waited.stderr
            assert "with 2 brokers" in waited.stdout
            told = json.loads(
                sava("cluster", "status", "-o", "json", admin=running.address(2, "admin")).stdout
            )
            assert told["self_node_id"] == running.ready["brokers"][1]["broker_id"]
        finally:
            again.terminate()
            again.wait(timeout=PATIENCE_S)


def test_with_restart_a_broker_that_dies_comes_back_by_itself(tmp_path: Path) -> None:
    """Killed twice: the second pause is twice as long. Without its only broker the command continues."""
    options = ("--brokers", "1", "--restart", "--port-base", str(free_ports(4)[0]))
    with up(tmp_path / "data", *options) as running:
        pid = running.pids[0]
        for pause in ("1 s", "2 s"):
            os.kill(pid, signal.SIGKILL)
            running.wait_said(
                f"sava: broker 1 was killed by SIGKILL and is started again in {pause}; the end of"
            )
            started = re.compile(r"broker 1 was started again, as process (\d+)")
            running.wait_said("broker 1 was started again", times=1 if pause == "1 s" else 2)
            pid = int(started.findall(running.errors)[-1])
            waited = sava("wait", "--timeout", str(PATIENCE_S), admin=running.address(1, "admin"))
            assert waited.returncode == 0, waited.stderr
        assert "start it again, in another terminal" not in running.errors
        assert running.end(signal.SIGTERM) == 0, running.errors
        assert not is_running(pid)


def test_a_second_interrupt_does_not_wait_for_a_broker_that_hangs(tmp_path: Path) -> None:
    with up(tmp_path / "data", "--brokers", "1", "--port-base", str(free_ports(4)[0])) as running:
        os.kill(running.pids[0], signal.SIGSTOP)
        running.process.send_signal(signal.SIGINT)
        running.wait_said("stopping the brokers")
        own = OwnTime(running.process.pid)
        assert running.end(signal.SIGINT) == 1
        assert own.seconds < 10
        assert not is_running(running.pids[0])


def test_a_broker_that_cannot_start_is_told_with_its_reason(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    (data / "sava.yml").write_text("brokr: {}\n")
    refused = sava("up", "--data-dir", str(data), "--brokers", "1", "--port-base", str(free_ports(4)[0]))
    assert refused.returncode == 1
    assert "sava: broker 1 ended with code 1; the end of" in refused.stderr
    assert "brokr: unknown key" in refused.stderr


# -- secured -----------------------------------------------------------------------------


def test_a_secured_cluster_has_a_user_of_each_role(tmp_path: Path) -> None:
    """Three variables are all that commands need, and a second start has the same keys and tokens."""
    data = tmp_path / "data"
    base = str(free_ports(12)[0])
    with up(data, "--secure", "--brokers", "1", "--port-base", base) as first:
        ready = first.ready
        assert ready["secure"]
        assert {"admin", "producer", "consumer", "reader", "operator", "monitoring"} <= {*ready["tokens"]}

        def as_user(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
            variables = {"SAVA_CLUSTER": ready["cluster"], "SAVA_TLS_CA": ready["ca"]}
            return sava(*arguments, SAVA_TOKEN=ready["tokens"][name], **variables)

        assert as_user("admin", "topics", "create", "/default/orders").returncode == 0
        assert as_user("producer", "produce", "/default/orders", "tea").returncode == 0
        taken = as_user("consumer", "consume", "/default/orders", "--subscription", "s", "--count", "1")
        assert "tea" in taken.stdout, taken.stderr
        listed = as_user("monitoring", "brokers", "list")
        assert listed.returncode == 0, listed.stderr

        for name, refused in (
            ("consumer", as_user("consumer", "produce", "/default/orders", "coffee")),
            ("producer", as_user("producer", "consume", "/default/orders", "--count", "1")),
            ("monitoring", as_user("monitoring", "topics", "delete", "/default/orders", "--yes")),
            ("operator", as_user("operator", "auth", "bindings", "create", "operator", "admin")),
        ):
            assert refused.returncode == 1
            assert f"user:{name} has no permission" in refused.stderr
        stranger = sava("topics", "list", SAVA_CLUSTER=ready["cluster"], SAVA_TLS_CA=ready["ca"])
        assert "this cluster wants to know its callers" in stranger.stderr
        open_to = {path.name for path in [data, *data.rglob("*")] if path.stat().st_mode & 0o077}
        assert open_to == set()
        who = json.loads(as_user("reader", "auth", "whoami", "-o", "json").stdout)
        assert (who["principal"], who["credential"], who["is_enforced"]) == ("user:reader", "token", True)

    log = (data / "broker-1.log").read_text()
    assert not [token for token in ready["tokens"].values() if token in log + first.errors]
    with up(data) as second:  # without the option: what was secured stays so
        assert {name: second.ready[name] for name in ("tokens", "ca", "cluster")} == {
            name: ready[name] for name in ("tokens", "ca", "cluster")
        }
        assert as_user("consumer", "auth", "can-i", "consume", "/default/orders").returncode == 0


def test_settings_with_a_section_of_their_own_are_left_alone(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    (data / "sava.yml").write_text("auth: {clock_skew_seconds: 5}\n")
    refused = sava("up", "--secure", "--data-dir", str(data), "--port-base", str(free_ports(12)[0]))
    assert refused.returncode == 1
    assert "has a section auth of its own" in refused.stderr
    assert (data / "sava.yml").read_text() == "auth: {clock_skew_seconds: 5}\n"
