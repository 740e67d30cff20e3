"""``python -m tests.torture``: three brokers, a second cluster, clients of all kinds, and everything that can
happen to them, for half an hour; then the oracles. Exit code 1 if they find anything (docs/testing.md)."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from sava.pipeline.launch import SparkMissing, find_java
from sava.proto import replication_pb2
from tests.support.waiting import until
from tests.torture import oracles
from tests.torture.cluster import CLIENTS, ROOT, WEST, Cluster, Surroundings, ended
from tests.torture.faults import Nemesis, Operator
from tests.torture.history import Recorder, read
from tests.torture.load import SETTLE_S, Status
from tests.torture.oracles import Finding, History
from tests.torture.report import Report, gaps, totals

TOPICS: Final = {
    "/default/exclusive": "exclusive",
    "/default/shared": "shared",
    "/default/failover": "failover",
    "/default/keyed": "key_shared",
}
SHARED_NAME: Final = "/default/shared-name"
DANUBE: Final = "/default/danube"
SPARK: Final = "/default/spark"
COPIED: Final = "/default/exclusive"
LINE_S: Final = 10.0
WARM_UP_S: Final = 5.0
OPERATIONS_FROM_S: Final = 300.0
"""In a run as long as this, each kind of an operator's work must have succeeded."""


class Run:
    def __init__(self, options: argparse.Namespace, around: Surroundings) -> None:
        self._options = options
        self._around = around
        self._directory = around.directory
        self._recorder = Recorder(around.directory / "events.jsonl")
        self._cluster = Cluster(around, self._recorder)
        self._link: subprocess.Popen[bytes] | None = None
        self._failures: list[Finding] = []
        self._others = [
            topic for topic, is_wanted in ((DANUBE, options.danube), (SPARK, options.spark)) if is_wanted
        ]
        self._programs: dict[str, subprocess.Popen[bytes]] = {}
        """Clients that end when they read a line, in the order in which they are to end."""
        topics = [*TOPICS, SHARED_NAME, *self._others]
        self._nemesis = Nemesis(self._cluster, [*TOPICS], self._recorder, self._status, options.seed)
        self._operator = Operator(self._cluster, topics, self._recorder, options.seed)
        self._topics = topics

    def _status(self) -> Status:
        return Status.read(self._directory / "load.status")

    async def run(self) -> Report:
        began = time.monotonic()
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        router: dict[str, int] = {}
        try:
            await self._cluster.start()
            for topic in self._topics:
                await self._cluster.create(topic)
            if self._options.link:
                await self._begin_link()
            self._start_clients()
            await self._warm_up()
            until = time.monotonic() + self._options.minutes * 60
            await self._torture(until)
            await self._end_clients()
            router = self._around.network.counters()
        finally:
            for process in (*self._programs.values(), *([self._link] if self._link else [])):
                if process.poll() is None:
                    process.kill()
                    process.wait()
            await self._cluster.close()
            self._recorder.close()
        return self._judge(time.monotonic() - began, router)

    # -- clients ---------------------------------------------------------------------------------

    def _start_clients(self) -> None:
        options, files = self._options, self._around.tls_files
        self._cluster.plan(
            TOPICS,
            seed=options.seed,
            copied=[COPIED] if options.link else [],
            shared_name=SHARED_NAME,
            others=self._others,
            pause_s=options.pause,
        )
        urls = [broker.client_url for broker in self._cluster.brokers]
        if options.spark:
            self._start("spark", "spark_program", str(self._directory), SPARK, ",".join(urls), *files)
        if options.danube:
            self._start("danube", "danube_program", str(self._directory), DANUBE, urls[0], *files)
        # The last one: it reads the topics of the others, too.
        self._start("load", "load", str(self._directory / "plan.json"))

    def _start(self, name: str, module: str, *arguments: str) -> None:
        command = [sys.executable, "-m", f"tests.torture.{module}", *arguments]
        log, environment = self._directory / f"{name}.log", self._cluster.store.environment
        self._programs[name] = self._around.start(
            CLIENTS, command, log, environment=environment, stdin=subprocess.PIPE
        )

    async def _begin_link(self) -> None:
        """The replication of one topic to the other cluster, by a runner without Spark."""
        cluster, files = self._cluster, self._around.tls_files
        client = cluster.brokers[0].client
        west = cluster.west
        service = west.client_url.partition("//")[2]
        remote = replication_pb2.Remote(name=WEST, service=service)
        if files:
            remote.service = west.client_url
            remote.tls_ca, remote.tls_cert, remote.tls_key = files
        await cluster.create(COPIED, on=west)
        await client.call(client.replication.AddRemote, remote, timeout=10.0)
        policy = replication_pb2.ReplicationPolicy(remotes=[WEST])
        request = replication_pb2.SetReplicationRequest(scope=COPIED, policy=policy, skip_checks=True)
        await client.call(client.replication.SetReplication, request, timeout=10.0)
        admins = ",".join(broker.admin for broker in cluster.brokers)
        services = ",".join(broker.client_url for broker in cluster.brokers)
        command = [sys.executable, "-m", "tests.torture.link", admins, services, WEST, *files]
        self._link = self._around.start(CLIENTS, command, self._directory / "link.log")

    async def _warm_up(self) -> None:
        """Until every topic takes messages, and Spark, which takes longer, has committed its first batch."""

        async def has_begun() -> bool:
            is_writing = (self._directory / "spark/checkpoint/commits/0").exists() or not self._options.spark
            return is_writing and all(topic in self._status().last_ack for topic in TOPICS)

        await until(has_begun, "all clients have begun", timeout=180.0, poll_s=0.1)
        await asyncio.sleep(WARM_UP_S)

    # -- the torture -----------------------------------------------------------------------------

    async def _torture(self, until: float) -> None:
        operating = asyncio.create_task(self._operator.run())
        showing = asyncio.create_task(self._show_progress())
        kinds = self._options.faults or [*self._nemesis.harms]
        try:
            await self._nemesis.run(until, kinds, doubles=self._options.doubles)
        finally:
            for task in (operating, showing):
                task.cancel()
            await asyncio.gather(operating, showing, return_exceptions=True)
        self._around.network.heal_all()

    async def _show_progress(self) -> None:
        began = time.monotonic()
        while True:
            await asyncio.sleep(LINE_S)
            status, now = self._status(), time.monotonic()
            oldest = max((now - at for at in status.last_ack.values()), default=0.0)
            print(
                f"{now - began:6.0f} s  acked {status.acked}  received {status.received}  "
                f"calls {status.calls}  errors {status.errors}  faults {sum(self._nemesis.done.values())}  "
                f"operator {sum(self._operator.done.values())}  oldest ack {oldest:.1f} s  "
                f"{self._nemesis.current}",
                flush=True,
            )

    async def _end_clients(self) -> None:
        """Producers stop, consumers get the rest, everything is read."""
        for name, process in self._programs.items():
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(b"stop\n")
                process.stdin.flush()
            with contextlib.suppress(TimeoutError):
                await ended(process, timeout=3 * SETTLE_S)
            if process.poll() != 0:
                what = f"ended with {process.poll()}; see {name}.log"
                self._failures.append(Finding("clients", name, what))

    # -- the verdict -----------------------------------------------------------------------------

    def _judge(self, seconds: float, router: dict[str, int]) -> Report:
        print("the oracles are at work", flush=True)
        history = History(read(*sorted(self._directory.glob("*.jsonl"))))
        copies = [COPIED] if self._options.link else []
        judgement = oracles.judge(history, subscriptions=TOPICS.items(), copies=copies)
        # That no broker ended by itself is what the oracle is for.
        may_be_idle = ("exit",) if copies else ("exit", "copy")
        findings = [*judgement.findings, *judgement.idle(but=may_be_idle), *self._silent_clients(history)]
        if self._options.minutes * 60 >= OPERATIONS_FROM_S:
            idle = [kind for kind in self._operator.failed if not self._operator.done[kind]]
            findings += [Finding("operator", kind, "never succeeded") for kind in idle]
        return Report(
            seed=self._options.seed,
            seconds=seconds,
            commit=_commit(),
            missing=self._around.missing,
            around=self._around.described(),
            faults=len(history.faults),
            faults_by_kind=dict(self._nemesis.done),
            power_losses=self._nemesis.power_losses,
            operations=dict(self._operator.done),
            operations_failed=dict(self._operator.failed),
            router=router,
            gaps=gaps(history.faults, {topic: history.acked[topic] for topic in TOPICS}),
            checked=judgement.checked,
            findings=self._failures + findings,
            directory=str(self._directory),
            **totals(history),
        )

    def _silent_clients(self, history: History) -> list[Finding]:
        """A client that got nothing acknowledged was not under the torture, whatever its oracles say."""
        silent = [topic for topic in self._topics if not history.acked[topic]]
        return [Finding("clients", topic, "no message was acknowledged") for topic in silent]


def _commit() -> str:
    asked = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return asked.stdout.strip()


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.torture", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0, help="of faults; some more for start and end")
    parser.add_argument("--seed", type=int, default=0, help="of faults and clients; default: drawn")
    parser.add_argument("--faults", nargs="+", metavar="KIND", help="these kinds only, such as 'power all'")
    parser.add_argument(
        "--doubles", type=float, default=0.3, help="share of rounds with two faults at a time"
    )
    parser.add_argument("--pause", type=float, default=0.02, help="seconds between a producer's messages")
    parser.add_argument("--report", type=Path, metavar="FILE", help="write the report as JSON")
    parser.add_argument("--directory", type=Path, help="for logs and histories; default: a temporary one")
    parser.add_argument("--keep", action="store_true", help="keep the files of a run without findings")
    for name in ("tls", "namespaces", "link", "danube", "spark"):
        parser.add_argument(f"--no-{name}", dest=name, action="store_false")
    options = parser.parse_args(arguments)
    options.seed = options.seed or random.randrange(1, 1 << 32)
    return options


def _no_spark() -> str:
    """Why there is none on this machine; empty: there is one."""
    if importlib.util.find_spec("pyspark") is None:
        return "pyspark is not installed"
    try:
        os.environ["JAVA_HOME"] = str(find_java(os.environ))
    except SparkMissing as error:
        return str(error)
    return ""


def main(arguments: Sequence[str]) -> int:
    options = parse(arguments)
    name = f"sava-torture-{os.getpid()}-"
    directory = options.directory or Path(tempfile.mkdtemp(prefix=name))
    directory.mkdir(exist_ok=True, parents=True)
    print(f"seed {options.seed}, files in {directory}", flush=True)
    around = Surroundings.make(directory, seed=options.seed, tls=options.tls, namespaces=options.namespaces)
    if options.spark and (why := _no_spark()):
        around.missing.append(f"Spark ({why}): its sink does not write")
        options.spark = False
    for each in around.missing:
        print(f"without {each}", flush=True)
    try:
        report = asyncio.run(Run(options, around).run())
    finally:
        around.close()
    print("\n".join(report.lines()), flush=True)
    if options.report is not None:
        options.report.write_bytes(msgspec.json.format(msgspec.json.encode(report)))
    if not report.findings and not options.keep:
        shutil.rmtree(directory, ignore_errors=True)
    return 1 if report.findings else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
