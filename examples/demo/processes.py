"""Processes: clusters and runners of the demo, each started with the ``sava`` command and stopped by its id.

Each has a process group of its own. So Ctrl-C comes to the demo alone, which stops what it started in good
order, and a process that does not end can be killed together with its children.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from examples.demo.interrupts import Interrupts
from examples.demo.steps import StepFailed

SAVA = (sys.executable, "-m", "sava.cli")
COMMAND_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 60.0
"""A runner lets its batches end, a broker hands over its topics."""
HURRY_S = 5.0
"""When nobody will look at what they leave."""


class Process:
    """What it says on standard error is in ``log``."""

    def __init__(
        self,
        *command: str,
        log: Path,
        environment: Mapping[str, str] | None = None,
        stdout: int | None = None,
    ) -> None:
        with log.open("ab") as said:
            self._process = subprocess.Popen(
                command,
                env={**os.environ, **(environment or {})},
                stdin=subprocess.DEVNULL,
                stdout=said if stdout is None else stdout,
                stderr=said,
                text=True,
                process_group=0,
            )
        self._log = log

    @property
    def output(self) -> IO[str]:
        assert self._process.stdout is not None
        return self._process.stdout

    def require_running(self, name: str) -> None:
        if self._process.poll() is not None:
            raise StepFailed(
                f"{name} to run",
                f"that it ended with code {self._process.returncode}: {last_words(self._log)}",
            )

    def finish(self, timeout: float = COMMAND_TIMEOUT_S) -> tuple[int, str]:
        """Exit code and output."""
        try:
            said, _ = self._process.communicate(timeout=timeout)
        finally:
            self._kill()
        return self._process.returncode, said

    def stop(self, timeout: float) -> None:
        """SIGTERM, and SIGKILL for the whole group if that does not help."""
        self._process.terminate()
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self._kill()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def _kill(self) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


class Processes:
    """All that run for the demo. Whatever is started is in here before anybody can be interrupted."""

    def __init__(self, root: Path, interrupts: Interrupts) -> None:
        self.root = root
        self._interrupts = interrupts
        self._running: list[Process] = []

    def start(
        self,
        *command: str,
        log: str,
        environment: Mapping[str, str] | None = None,
        stdout: int | None = None,
    ) -> Process:
        """``log``: the name of a file below ``root``."""
        with self._interrupts.held():
            process = Process(*command, log=self.root / log, environment=environment, stdout=stdout)
            self._running.append(process)
        return process

    def run(self, *command: str, log: str = "commands.log", environment: Mapping[str, str]) -> str:
        """The output of a command, which must succeed. What it complains of goes to ``log``."""
        process = self.start(*command, log=log, environment=environment, stdout=subprocess.PIPE)
        code, said = process.finish()
        self._running.remove(process)
        if code != 0:
            shown = " ".join(command).replace(" ".join(SAVA), "sava")
            raise StepFailed(f"`{shown}` to succeed", f"exit code {code}: {last_words(self.root / log)}")
        return said

    def stop(self, *, is_kept: bool) -> None:
        """The last one first: a runner's batches end in the topics of brokers that were there before it.
        ``is_kept``: what they have written is looked at later."""
        while self._running:
            self._running.pop().stop(STOP_TIMEOUT_S if is_kept else HURRY_S)


class Broker:
    """One of a cluster, as ``sava up`` tells of it."""

    def __init__(self, told: Mapping[str, Any]) -> None:
        self.number: int = told["broker"]
        self.broker_id: str = told["broker_id"]
        self.pid: int = told["pid"]
        self.service = f"http://{told['client_addr']}"
        self.admin: str = told["admin_addr"]
        self.metrics = f"http://{told['http_addr']}/metrics"

    @property
    def is_running(self) -> bool:
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        return True


class Cluster:
    """``sava up``: brokers on this machine, each a process with its own directory below the root."""

    def __init__(self, name: str, processes: Processes, *, brokers: int, port_base: int) -> None:
        self.name = name
        self.directory = processes.root / name
        self._processes = processes
        self._log = f"{name}.log"
        self._up = processes.start(
            *(*SAVA, "up", "--brokers", str(brokers), "--data-dir", str(self.directory)),
            *("--port-base", str(port_base), "--output", "json"),
            log=self._log,
            environment={"SAVA__CLUSTER_NAME": name},
            stdout=subprocess.PIPE,
        )
        self.brokers: list[Broker] = []
        """Without those that were killed."""

    def wait_ready(self) -> None:
        """The command bounds its own start."""
        line = self._up.output.readline()
        if not line:
            raise StepFailed(f"cluster {self.name} to start", last_words(self._processes.root / self._log))
        self.brokers = [Broker(told) for told in json.loads(line)["brokers"]]

    @property
    def service(self) -> str:
        """Any of these addresses will do; a client finds the others."""
        return ",".join(broker.service for broker in self.brokers)

    @property
    def environment(self) -> dict[str, str]:
        """Where the ``sava`` command looks for a cluster."""
        broker = self.brokers[0]
        return {"SAVA_ADMIN": broker.admin, "SAVA_SERVICE": broker.service}

    def sava(self, *arguments: str) -> str:
        """Run one command at this cluster, and return what it prints."""
        return self._processes.run(*SAVA, *arguments, environment=self.environment)

    def ask(self, *arguments: str) -> Any:
        return json.loads(self.sava(*arguments, "--output", "json"))

    def broker(self, broker_id: str) -> Broker:
        for broker in self.brokers:
            if broker.broker_id == broker_id:
                return broker
        raise StepFailed(f"a broker of {self.name} that runs", f"broker {broker_id}")

    def owner(self, topic: str) -> Broker:
        """Who serves the topic."""
        return self.broker(self.ask("topics", "describe", topic)["broker_id"])

    def kill(self, broker: Broker) -> None:
        """As the kernel or a power cut does it: without a word. It stays dead."""
        os.kill(broker.pid, signal.SIGKILL)
        self.brokers.remove(broker)

    def run_pipelines(self) -> Process:
        """``sava pipelines run``: a Spark application that copies what policies say."""
        return self._processes.start(
            *(*SAVA, "pipelines", "run", "--admin", ",".join(each.admin for each in self.brokers)),
            *("--master", "local[2]", "--checkpoints", str(self._processes.root / "checkpoints")),
            log="runner.log",
        )


def last_words(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()
    return lines[-1] if lines else "nothing in its log"
