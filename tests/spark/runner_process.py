"""``sava pipelines run`` in a process of its own, and what it has to do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from sava.cli.pipelines import spec_of
from sava.client.connection import Connection, Tls
from sava.client.loop_thread import LoopThread
from sava.proto import pipelines_pb2 as pb
from sava.proto.pipelines_pb2_grpc import PipelinesStub
from tests.spark.processes import has_started, of_session, running
from tests.support.waiting import PATIENCE_S, wait_until

ROOT = Path(__file__).parents[2]
READY_S = 200.0
"""Seconds are enough on a quiet machine."""


class RunnerProcess:
    """Its Spark has two cores and little memory."""

    def __init__(self, directory: Path, admin: str, name: str, *options: str) -> None:
        self.log = directory / f"{name}.log"
        command = [
            *(sys.executable, "-m", "sava.cli", "pipelines", "run", "--admin", admin),
            *("--master", "local[2]", "--python-path", str(ROOT)),
            *("--checkpoints", str(directory / "checkpoints")),
            *("--allow-function", "tests.spark.runner_functions:*"),
            *("--conf", "spark.driver.memory=512m", "--conf", "spark.sql.shuffle.partitions=2"),
            *("--conf", f"spark.local.dir={directory / 'local'}"),
            *("--conf", f"spark.sql.warehouse.dir={directory / 'warehouse'}"),
            *options,
        ]
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                cwd=directory,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def reached(self, condition: Callable[[], bool], what: str) -> None:
        """Wait for the condition while the runner runs."""

        def is_there() -> bool:
            assert self.is_running, f"the runner has ended:\n{self.said}"
            return condition()

        wait_until(is_there, lambda: f"{what}\n{self.said}", timeout=READY_S, poll_s=0.1)

    @property
    def said(self) -> str:
        return self.log.read_text()[-6000:]

    def kill(self) -> None:
        """kill -9 of the runner alone: its Java has to notice."""
        self._process.kill()
        self._process.wait()

    def stop(self) -> int:
        """SIGTERM; the exit code."""
        self._process.terminate()
        return self._process.wait(timeout=READY_S)

    def ended(self) -> int:
        """The exit code, when it ends by itself."""
        return self._process.wait(timeout=READY_S)

    def parts(self, program: str) -> list[int]:
        """Processes that it has started, with this word in their command."""
        return [pid for pid in running(program) if has_started({self.pid}, pid)]

    def sweep(self) -> None:
        """Whatever is left of it. For the end of a test."""
        for pid in of_session(self.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()

    def wait_gone(self) -> None:
        """Until nothing of it runs any more: neither Java nor Python's workers."""
        wait_until(
            lambda: not of_session(self.pid),
            lambda: f"of {self.log.stem} {of_session(self.pid)} run",
            poll_s=0.1,
        )


class Pipelines:
    """The pipelines of a cluster, by its admin port: starting a command for each look would take longer than
    what is looked at."""

    def __init__(self, admin: str, tls: Tls | None = None) -> None:
        self._connection = Connection(admin, token=None, tls=tls, timeout=PATIENCE_S)
        self._loop = LoopThread("pipelines of a test")

    def close(self) -> None:
        self._loop.run(self._connection.close())
        self._loop.close()

    def apply(self, name: str, **settings: Any) -> None:
        settings = {key.rstrip("_"): value for key, value in settings.items()}
        spec = spec_of(name, "custom", settings)
        self._call("ApplyPipeline", pb.ApplyPipelineRequest(spec=spec))

    def pause(self, name: str) -> None:
        self._call("PausePipeline", pb.PipelineName(name=name))

    def resume(self, name: str) -> None:
        self._call("ResumePipeline", pb.PipelineName(name=name))

    def delete(self, name: str) -> None:
        """Its runner stops it later."""
        self._call("DeletePipeline", pb.PipelineName(name=name))

    @property
    def names(self) -> list[str]:
        found = self._call("ListPipelines", pb.ListPipelinesRequest())
        return [each.spec.name for each in found.pipelines]

    def status(self, name: str) -> pb.PipelineStatus:
        found: pb.ListPipelinesResponse = self._call("ListPipelines", pb.ListPipelinesRequest())
        (status,) = [each.status for each in found.pipelines if each.spec.name == name]
        return status

    @property
    def runners(self) -> list[str]:
        return [each.runner for each in self._call("ListRunners", pb.ListRunnersRequest()).runners]

    def _call(self, method: str, request: Any) -> Any:
        return self._loop.run(self._connection.ask(method, request, service=PipelinesStub))
