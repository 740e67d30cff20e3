"""The process of a runner: one Spark application, from its session to its exit code.

The driver is this process, and Spark's Java is its child: this process gets a signal, and the queries end in
order. If this process is killed, Java notices the closed connection and ends, long before the runner's
claims.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import signal
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final, NoReturn

from sava.client.connection import Tls
from sava.client.errors import ClientError
from sava.pipeline.cluster import ClusterAccess
from sava.pipeline.launch import DEFAULT_MASTER, JavaGone, java_of_spark, open_session
from sava.pipeline.replicate.background import RemoteSecrets
from sava.pipeline.runner.allowing import AllowList
from sava.pipeline.runner.control import TTL_S, AdminRunnerControl
from sava.pipeline.runner.kinds import Custom, PipelineKind
from sava.pipeline.runner.runner import STUCK_S, NotStopped, PipelineRunner

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log = logging.getLogger(__name__)

STEP_S: Final = 0.2
SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
KINDS: Final = ("custom", "replicate")
LOST: Final = 70
"""Exit code: a pipeline did not stop before its claim ended, or Java has ended by itself. A service manager
may start the process again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerOptions:
    """The options of ``sava pipelines run``."""

    admin: str
    master: str = DEFAULT_MASTER
    only: Sequence[str] = ()
    allowed: AllowList
    python_path: Sequence[Path] = ()
    conf: Mapping[str, str] = field(default_factory=dict)
    """Spark settings; they override those of the runner."""
    tls: Tls | None = None
    token: str = field(default="", repr=False)
    token_file: str = ""
    """In place of ``token``."""
    remotes: RemoteSecrets = field(default_factory=RemoteSecrets)
    ttl_s: float = TTL_S
    stuck_s: float = STUCK_S


def run(options: RunnerOptions) -> int:
    """Run until a signal and return the exit code. Raises SparkMissing, SparkRefused."""
    stop_asked = threading.Event()
    for number in SIGNALS:
        signal.signal(number, lambda *_: stop_asked.set())
    try:
        spark = open_session(
            "sava pipelines", options.master, conf=options.conf, python_path=options.python_path
        )
    except JavaGone as error:
        return _code_without_java(error, was_asked=stop_asked.is_set())
    name = f"{_host()}-{os.getpid()}-{secrets.token_hex(3)}"
    access = ClusterAccess.by_files("", options.tls, token=options.token, token_file=options.token_file)
    control = AdminRunnerControl(
        options.admin,
        name,
        kinds=KINDS,
        only=options.only,
        tls=options.tls,
        token=access.bearer,
        ttl_s=options.ttl_s,
    )
    runner = PipelineRunner(
        name,
        control,
        _kinds(options, name, spark, control, access),
        only=options.only,
        stuck_s=options.stuck_s,
    )

    def stop(*_: object) -> None:
        stop_asked.set()
        runner.stop()

    for number in SIGNALS:
        signal.signal(number, stop)
    if stop_asked.is_set():  # while Java was being started
        stop()
    log.info("pipelines: this runner is ready runner=%s master=%s", name, spark.sparkContext.master)
    try:
        while not runner.is_done:
            _require_java()
            runner.step()
            time.sleep(STEP_S)
    except NotStopped as error:
        _end_at_once(error)
    except JavaGone as error:
        code = _code_without_java(error, was_asked=stop_asked.is_set())
        with suppress(ClientError):
            control.leave()
        os._exit(code)  # Spark's own way to end would wait for Java
    control.close()
    spark.stop()
    log.info("pipelines: this runner has ended runner=%s", name)
    return 0


def _kinds(
    options: RunnerOptions,
    runner: str,
    spark: SparkSession,
    control: AdminRunnerControl,
    access: ClusterAccess,
) -> dict[str, PipelineKind]:
    """An instance for each of KINDS."""
    from sava.pipeline.replicate.job import Replicate

    def session() -> SparkSession:
        return spark

    def service() -> str:
        return control.service

    def admin() -> str:
        return control.admin

    return {
        "custom": Custom(session, service, options.allowed, access=access.options()),
        "replicate": Replicate(
            session,
            service,
            runner=runner,
            admin=admin,
            tls=options.tls,
            access=access,
            remotes=options.remotes,
        ),
    }


def _require_java() -> None:
    java = java_of_spark()
    if java is not None and java.poll() is not None:
        raise JavaGone(
            f"Spark's Java has ended with code {java.returncode}, and with it all queries; start it again"
        )


def _code_without_java(error: JavaGone, *, was_asked: bool) -> int:
    """0 after a stop request, LOST otherwise. A signal to all processes of a job, as a shell's ``kill %1``
    and a service manager send it, ends Java at once; that is a requested stop and no reason for a restart."""
    if was_asked:
        log.warning("pipelines: Java got the signal too; the next runner repeats the current batches")
        return 0
    log.critical("pipelines: %s", error)
    return LOST


def _end_at_once(error: NotStopped) -> NoReturn:
    """Kill Java and exit without waiting: what still runs there has lost its claim."""
    log.critical("pipelines: %s", error)
    if (java := java_of_spark()) is not None:
        java.kill()
    os._exit(LOST)


def _host() -> str:
    return re.sub(r"[^A-Za-z0-9_-]", "-", socket.gethostname())[:64].strip("-") or "runner"
