"""LocalCluster: several brokers on this machine, each in a process of its own, started and stopped together.

Everything is below one directory:

    local-cluster.json   the ports of each broker
    sava.yml             settings of all brokers; written once, then the user's
    segments/            the object store, one for all: that is what lets topics move between them
    broker-1/ …          identity, Raft log and journal of each
    broker-1.log …       what each says
    checkpoints/         how far pipelines are, if there is a runner beside the brokers
    pipelines.log        what that says
    secure/              keys, certificates, and a token for a user of each role, if the cluster is secured

Ports are chosen once. A member of a cluster is known by its address, so a second start uses the same ones and
is refused when another process has taken one meanwhile. Two do not run on one directory: this process holds
its lock, and each broker that of its own directory, which also shows a broker that survived a kill -9 of the
process that started it.

The brokers are in the process group of the process that starts them, so that what ends that group ends them.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import msgspec
import yaml

from sava.api.admin_client import AdminClient
from sava.config import Config
from sava.errors import HostError, RetryableError
from sava.metadata.errors import OutcomeUnknown
from sava.metadata.identity import NODE_ID
from sava.proto import admin_pb2 as pb
from sava.proto import security_pb2
from sava.security.credentials import PLAIN, Credentials, Tls
from sava.security.permissions import ROLES
from sava.security.provision import Provision
from sava.wal.disk import LocalDisk
from sava.wal.errors import DirectoryLocked

HOST: Final = "127.0.0.1"
LAYOUT: Final = "local-cluster.json"
SETTINGS: Final = "sava.yml"
DEFAULT_BROKERS: Final = 3
SECURE: Final = "secure"
TOKEN_S: Final = 365 * 86400.0
RENEW_S: Final = 30 * 86400.0
"""A token that ends within this time is made again at a start."""
ADMIN: Final = "admin"
START_TIMEOUT_S: Final = 120.0
"""Ready within some four seconds by themselves; a busy machine was seen to take a minute. A broker that ends
is not waited for."""
STOP_TIMEOUT_S: Final = 20.0
"""A broker bounds its own end by less."""
RUNNER_STOP_TIMEOUT_S: Final = 50.0
"""A runner lets batches end before it does."""
FIRST_DELAY_S: Final = 1.0
LONGEST_DELAY_S: Final = 60.0
"""Before a process is started again, twice as long each time. One that has run for the longest begins with
the first again."""
MOST_RESTARTS: Final = 8
"""Of a broker, in a row: some three minutes. One that cannot run then needs an operator."""
CALL_TIMEOUT_S: Final = 5.0
POLL_S: Final = 0.05
PORTS_TRIED: Final = 1000
"""From the wanted port upwards."""


class LocalClusterFailed(HostError):
    """The cluster cannot run here. The text says why and what to do."""


class Ports(msgspec.Struct, frozen=True, kw_only=True):
    client: int
    admin: int
    raft: int
    http: int


USUAL: Final = Ports(client=6650, admin=50051, raft=7650, http=9040)


class Layout(msgspec.Struct, frozen=True):
    brokers: tuple[Ports, ...]
    port_base: int | None = None
    """As it was asked for at the first start; asking for the same again is allowed."""


class LocalProcess:
    def __init__(self, name: str, log: Path, command: list[str]) -> None:
        self.name = name
        self.log = log
        self.environment: dict[str, str] = {}
        """Beside that of this process."""
        self._command = command
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """0: it was not started."""
        return self._process.pid if self._process is not None else 0

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        with self.log.open("ab") as log:
            # Not asyncio's: the caller may run on uvloop, which runs Python between fork and exec.
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **self.environment},
            )

    def send(self, number: signal.Signals) -> None:
        if self._process is not None:
            self._process.send_signal(number)

    @property
    def code(self) -> int | None:
        """With which it has ended."""
        return self._process.poll() if self._process is not None else None

    @property
    def how(self) -> str:
        """It ended, in words."""
        code = self.code
        if code and code < 0:
            return f"was killed by {signal.Signals(-code).name}"
        return f"ended with code {code}"

    def end(self) -> str:
        """How it ended, and the last that it said."""
        lines = self.log.read_text(errors="replace").splitlines()
        return f"{self.name} {self.how}; the end of {self.log}: {lines[-1] if lines else '(empty)'}"


class RestartedProcess(LocalProcess):
    """A process that is started again when it has ended by itself or was killed, after a pause that grows.
    One that ended on request (code 0) stays away. ``most``: how often in a row; a process that has run for
    the longest pause begins a new row."""

    def __init__(self, name: str, log: Path, command: list[str], *, most: float = math.inf) -> None:
        super().__init__(name, log, command)
        self._most = most
        self._in_a_row = 0
        self._started_at = 0.0
        self._delay = FIRST_DELAY_S
        self._again_in: float | None = None
        """Since it has ended; None: it is not to be started again."""
        self._ended_at = 0.0

    @property
    def is_coming_back(self) -> bool:
        return self._again_in is not None

    @property
    def how(self) -> str:
        how = super().how
        if self._again_in is not None:
            return f"{how} and is started again in {self._again_in:g} s"
        if self.code and 0 < self._most <= self._in_a_row:
            return f"{how} and is not started again: it was, {self._in_a_row} times in a row"
        return how

    def start(self) -> None:
        self._started_at, self._again_in = time.monotonic(), None
        super().start()

    def note_end(self) -> None:
        if self.code == 0:
            return
        self._ended_at = time.monotonic()
        if self._ended_at - self._started_at >= LONGEST_DELAY_S:
            self._delay, self._in_a_row = FIRST_DELAY_S, 0
        if self._in_a_row >= self._most:
            return
        self._in_a_row += 1
        self._again_in, self._delay = self._delay, min(2 * self._delay, LONGEST_DELAY_S)

    def start_if_due(self) -> bool:
        """Whether it was started now."""
        if self._again_in is None or time.monotonic() < self._ended_at + self._again_in:
            return False
        self.start()
        return True


class LocalRunner(RestartedProcess):
    """What does pipelines. It ends by itself when its Java has died, or when a query cannot be stopped."""

    def __init__(self, root: Path, command: list[str]) -> None:
        super().__init__("the runner of pipelines", root / "pipelines.log", command)


class LocalBroker(RestartedProcess):
    """One broker; its number counts from 1, its id is drawn by itself and known once it has started."""

    def __init__(self, root: Path, number: int, ports: Ports, *, restart: bool = False) -> None:
        self.number = number
        self.ports = ports
        self.broker_id = 0
        self.client = f"{HOST}:{ports.client}"
        self.admin = f"{HOST}:{ports.admin}"
        self.raft = f"{HOST}:{ports.raft}"
        self.http = f"{HOST}:{ports.http}"
        self.directory = root / f"broker-{number}"
        command = [
            *(sys.executable, "-P", "-m", "sava.cli", "broker", "--config", str(root / SETTINGS)),
            *("--data-dir", str(self.directory), "--storage-url", (root / "segments").as_uri()),
            *("--host", HOST, "--port", str(ports.client), "--admin-port", str(ports.admin)),
            *("--raft-port", str(ports.raft), "--http-port", str(ports.http)),
        ]
        most = MOST_RESTARTS if restart else 0
        super().__init__(f"broker {number}", root / f"broker-{number}.log", command, most=most)

    def end(self) -> str:
        """With the command that starts it again, unless that happens by itself."""
        said = super().end()
        if self.is_coming_back:
            return said
        return f"{said}\nstart it again, in another terminal: {shlex.join(self._command)}"

    async def answers(self, path: str) -> int:
        """The HTTP port's status for a page; 0: it does not listen yet."""
        try:
            async with asyncio.timeout(CALL_TIMEOUT_S):
                reader, writer = await asyncio.open_connection(HOST, self.ports.http)
                try:
                    writer.write(f"GET {path} HTTP/1.0\r\n\r\n".encode())
                    words = (await reader.readline()).split()
                finally:
                    writer.close()
        except (OSError, TimeoutError):
            return 0
        return int(words[1]) if len(words) > 1 and words[1].isdigit() else 0


class LocalCluster:
    """Owned by one task. ``pipelines``: with a runner beside the brokers. ``restart``: a broker that ends by
    itself is started again. ``secure``: with TLS and tokens; a cluster that was secured once stays so."""

    def __init__(
        self,
        root: Path,
        *,
        brokers: int | None = None,
        port_base: int | None = None,
        pipelines: bool = False,
        restart: bool = False,
        secure: bool = False,
    ) -> None:
        self.root = root.absolute()
        self._restart = restart
        self._wants_security = secure
        self.secured: Provision | None = None
        """Its keys and tokens; None: every caller may do everything."""
        self._wanted = brokers
        self._port_base = port_base
        self._disk: LocalDisk | None = None
        self._told: set[int] = set()
        """Processes whose end has been reported."""
        self._has_runner = pipelines
        self.brokers: list[LocalBroker] = []
        self.runner: LocalRunner | None = None
        self.cluster_id = ""

    @property
    def _processes(self) -> list[RestartedProcess]:
        return [*self.brokers, *([self.runner] if self.runner is not None else [])]

    def prepare(self) -> None:
        """All that can be refused before a process is started. Raises LocalClusterFailed. ``stop`` must
        follow, whatever comes of it."""
        self._lock()
        layout = self._layout()
        self.secured = self._provision()
        self.brokers = [
            LocalBroker(self.root, number, ports, restart=self._restart)
            for number, ports in enumerate(layout.brokers, 1)
        ]
        for broker in self.brokers:
            _require_stopped(broker)

    async def start(self) -> None:
        """What is prepared, until all brokers are ready; a runner is not waited for. Raises
        LocalClusterFailed."""
        for broker in self.brokers:
            broker.start()
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                await asyncio.gather(*(self._until(broker, "/healthz") for broker in self.brokers))
                await self._init()
                await asyncio.gather(*(self._until(broker, "/readyz") for broker in self.brokers))
                await asyncio.gather(*(self._identify(broker) for broker in self.brokers))
                await self._grant()
        except TimeoutError as error:
            raise LocalClusterFailed(
                f"the brokers were not ready within {START_TIMEOUT_S:.0f} s; their logs are in {self.root}"
            ) from error
        if self._has_runner:
            self.runner = self._new_runner()
            self.runner.start()

    def _new_runner(self) -> LocalRunner:
        admin = ",".join(broker.admin for broker in self.brokers)
        command = [
            *(sys.executable, "-P", "-m", "sava.cli", "pipelines", "run", "--admin", admin),
            *("--checkpoints", str(self.root / "checkpoints")),
        ]
        runner = LocalRunner(self.root, command)
        if self.secured is not None:
            runner.environment = {
                "SAVA_TLS_CA": str(self.secured.ca_file),
                "SAVA_TOKEN_FILE": str(self.secured.token_file("pipeline-runner")),
            }
        return runner

    async def next_end(self, tell: Callable[[str], None] = lambda text: None) -> LocalProcess:
        """A process that has ended, by itself or by another's hand, and was not returned yet. Meanwhile those
        that come back are started when it is time, and ``tell`` is called for each."""
        while True:
            for process in self._processes:
                if not process.is_running and process.pid not in self._told:
                    self._told.add(process.pid)
                    process.note_end()
                    return process
                if process.start_if_due():
                    tell(f"{process.name} was started again, as process {process.pid}")
            await asyncio.sleep(POLL_S)

    @property
    def has_ended(self) -> bool:
        """No broker runs, and none comes back by itself."""
        return not any(broker.is_running or broker.is_coming_back for broker in self.brokers)

    async def stop(self) -> list[LocalProcess]:
        """Stop all; returns those that did not end in time and were killed. Data stays."""
        late: list[LocalProcess] = []
        if self.runner is not None:
            # First: its batches end in the topics of these brokers.
            late += await self._stop([self.runner], RUNNER_STOP_TIMEOUT_S)
        late += await self._stop(self.brokers, STOP_TIMEOUT_S)
        if self._disk is not None:
            self._disk.unlock()
        return late

    async def _stop(self, processes: Sequence[LocalProcess], timeout: float) -> list[LocalProcess]:
        async def ended() -> None:
            while any(each.is_running for each in processes):  # noqa: ASYNC110 (the kernel sets no event)
                await asyncio.sleep(POLL_S)

        for each in processes:
            if each.is_running:
                each.send(signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await ended()
        late = [each for each in processes if each.is_running]
        for each in late:
            each.send(signal.SIGKILL)
        await ended()
        return late

    def kill(self) -> None:
        """kill -9 of all that run."""
        for process in self._processes:
            if process.is_running:
                process.send(signal.SIGKILL)

    # -- the directory -----------------------------------------------------------------------

    def _lock(self) -> None:
        try:
            disk = LocalDisk(self.root)
            disk.lock()
        except DirectoryLocked as error:
            raise LocalClusterFailed(f"{error}; stop that one, or give another --data-dir") from error
        except HostError as error:
            raise LocalClusterFailed(f"{error}; give another --data-dir") from error
        self._disk = disk
        if (self.root / NODE_ID).exists():
            raise LocalClusterFailed(
                f"{self.root} is the data directory of a single broker; give another --data-dir"
            )

    def _layout(self) -> Layout:
        file = self.root / LAYOUT
        if file.exists():
            return self._known_layout(file)
        ports = _choose_ports(self._wanted or DEFAULT_BROKERS, self._port_base)
        layout = Layout(tuple(ports), self._port_base)
        settings = self.root / SETTINGS
        if not settings.exists():
            settings.write_text("# Settings of all brokers; a change takes effect at the next start.\n")
        draft = file.with_suffix(".draft")
        draft.write_bytes(msgspec.json.format(msgspec.json.encode(layout)))
        draft.replace(file)
        return layout

    def _known_layout(self, file: Path) -> Layout:
        try:
            layout = msgspec.json.decode(file.read_bytes(), type=Layout)
        except (OSError, msgspec.MsgspecError) as error:
            raise LocalClusterFailed(f"{file} cannot be read: {error}") from error
        if self._wanted not in (None, len(layout.brokers)):
            raise LocalClusterFailed(
                f"the cluster in {self.root} has {len(layout.brokers)} brokers, not {self._wanted}; leave "
                "out --brokers, or give another --data-dir"
            )
        if self._port_base not in (None, layout.port_base):
            raise LocalClusterFailed(
                f"the ports of the cluster in {self.root} are chosen, and its members known by them; leave "
                "out --port-base, or give another --data-dir"
            )
        return layout

    # -- security ----------------------------------------------------------------------------

    def _provision(self) -> Provision | None:
        """What is there, or what ``--secure`` adds. Raises LocalClusterFailed."""
        directory, settings = self.root / SECURE, self.root / SETTINGS
        given = yaml.safe_load(settings.read_text()) or {}
        is_done = directory.is_dir() and "auth" in given
        if not is_done and not self._wants_security:
            return None
        if "auth" in given and not is_done:
            raise LocalClusterFailed(
                f"{settings} has a section auth of its own; remove it, or start without --secure"
            )
        provision = Provision(
            directory=directory,
            cluster_name=given.get("cluster_name") or Config().cluster_name,
            admin=ADMIN,
            ttl_s=TOKEN_S,
            has_authority=True,
            brokers=[HOST],
            users=[role for role in ROLES if role != ADMIN],
        )
        if is_done:
            provision.renew_tokens(RENEW_S)
            return provision
        # Last, in one step: a start that ends before it begins again from nothing.
        shutil.rmtree(directory, ignore_errors=True)
        provision.write()
        draft = settings.with_suffix(".draft")
        draft.write_text(f"{settings.read_text()}{provision.section()}")
        draft.replace(settings)
        return provision

    @property
    def credentials(self) -> Credentials:
        """Of its administrator."""
        if self.secured is None:
            return PLAIN
        return Credentials(tls=Tls(self.secured.ca_file), token=self.secured.token_file(ADMIN))

    async def _grant(self) -> None:
        """To one user of each role, that role. Repeating it changes nothing."""
        if self.secured is None:
            return
        async with AdminClient(self.brokers[0].admin, self.credentials) as client:
            for role in ROLES:
                binding = security_pb2.Binding(principal=f"user:{role}", role=role, scope="cluster")
                while True:
                    try:
                        await client.ask(binding, "CreateBinding", timeout=CALL_TIMEOUT_S)
                        break
                    except (RetryableError, OutcomeUnknown):
                        await asyncio.sleep(POLL_S)

    # -- starting ----------------------------------------------------------------------------

    async def _until(self, broker: LocalBroker, page: str) -> None:
        """Until the page is answered with yes."""
        while await broker.answers(page) != 200:
            if not broker.is_running:
                # Without the command: what did not start once does not start the second time either.
                raise LocalClusterFailed(LocalProcess.end(broker))
            await asyncio.sleep(POLL_S)

    async def _init(self) -> None:
        """Repeating it is harmless, so it is repeated until it is known to be done."""
        request = pb.InitRequest(nodes=[broker.raft for broker in self.brokers])
        async with AdminClient(self.brokers[0].admin, self.credentials) as client:
            while not (await client.status(timeout=CALL_TIMEOUT_S)).cluster_id:
                try:
                    await client.call(client.cluster.Init, request, timeout=CALL_TIMEOUT_S)
                except (RetryableError, OutcomeUnknown):
                    await asyncio.sleep(POLL_S)

    async def _identify(self, broker: LocalBroker) -> None:
        async with AdminClient(broker.admin, self.credentials) as client:
            status = await client.status(timeout=CALL_TIMEOUT_S)
        broker.broker_id, self.cluster_id = status.self_node_id, status.cluster_id


def _require_stopped(broker: LocalBroker) -> None:
    """No process may have its directory or its ports. A broker that outlived the process that started it has
    both."""
    disk = LocalDisk(broker.directory)
    try:
        disk.lock()
    except DirectoryLocked as error:
        raise LocalClusterFailed(
            f"{error}: broker {broker.number} of an earlier run; stop it first"
        ) from error
    disk.unlock()
    for name in Ports.__struct_fields__:
        port = getattr(broker.ports, name)
        if not _is_free(port):
            raise LocalClusterFailed(
                f"{name} port {port} of broker {broker.number} is taken by another process, if only for a "
                "connection; stop that one, try again, or start again with another --data-dir"
            )


def _choose_ports(brokers: int, base: int | None) -> list[Ports]:
    """The usual ports for the first broker and the next higher ones for the others, or all in a row from a
    base; a port that is taken is passed over."""
    names = Ports.__struct_fields__
    chosen: set[int] = set()
    layout = []
    for number in range(brokers):
        ports = {}
        for place, name in enumerate(names):
            wanted = getattr(USUAL, name) + number if base is None else base + number * len(names) + place
            ports[name] = _free_port(wanted, chosen)
            chosen.add(ports[name])
        layout.append(Ports(**ports))
    return layout


def _free_port(wanted: int, chosen: set[int]) -> int:
    last = min(wanted + PORTS_TRIED, 1 << 16)
    for port in range(wanted, last):
        if port not in chosen and _is_free(port):
            return port
    raise LocalClusterFailed(f"no port from {wanted} to {last - 1} is free; choose others with --port-base")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        # What connections of an earlier run leave behind for a minute is no obstacle to a server.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True
