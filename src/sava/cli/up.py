"""``sava up``: a cluster on this machine, in the foreground, for trying things out."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from sava.cli.broker import DEFAULT_DATA_DIR
from sava.cli.connection import DEFAULT_ADMIN, DEFAULT_SERVICE
from sava.cli.output import Format, print_error, print_json_line, print_line, print_progress, print_table
from sava.local_cluster import (
    FIRST_DELAY_S,
    MOST_RESTARTS,
    LocalBroker,
    LocalCluster,
    LocalClusterFailed,
)
from sava.pipeline.launch import find_java, spark_home

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
TRY_NEXT = """\
  sava topics create /default/orders --partitions 3 --if-absent
  seq 1 1000 | sava produce /default/orders
  sava consume /default/orders --subscription billing --start earliest
  sava brokers list"""


def up(
    brokers: Annotated[
        int | None, typer.Option("--brokers", min=1, max=9, help="At the first start; 3 by default.")
    ] = None,
    data_dir: Annotated[
        Path, typer.Option("--data-dir", help="Where everything is kept.")
    ] = DEFAULT_DATA_DIR,
    port_base: Annotated[
        int | None,
        typer.Option(
            "--port-base",
            min=1024,
            max=65000,
            metavar="PORT",
            help="At the first start: all ports in a row from here, instead of the usual ones.",
        ),
    ] = None,
    pipelines: Annotated[
        bool,
        typer.Option(
            "--pipelines", help="Run pipelines as well (`sava pipelines`): Spark, beside the brokers."
        ),
    ] = False,
    restart: Annotated[
        bool,
        typer.Option(
            "--restart",
            help=f"Start a broker again that ends by itself or is killed: after {FIRST_DELAY_S:g} s, then "
            f"twice as long each time, at most {MOST_RESTARTS} times in a row.",
        ),
    ] = False,
    output: Annotated[
        Format, typer.Option("--output", "-o", help="json (one line when ready) or table.")
    ] = Format.TABLE,
) -> None:
    """Run a cluster on this machine until Ctrl-C or SIGTERM. A later start continues with the same data.
    A broker that dies is reported at once, with its last line and the command that starts it again."""
    if pipelines:
        # Before anything is started: without these the runner could not.
        spark_home()
        find_java(os.environ)
    cluster = LocalCluster(
        data_dir, brokers=brokers, port_base=port_base, pipelines=pipelines, restart=restart
    )
    sys.exit(asyncio.run(_run(cluster, output)))


async def _run(cluster: LocalCluster, output: Format) -> int:
    """A first signal stops the brokers, a second one kills them. Returns the exit code: 0 if they ended as
    they should."""
    working = asyncio.create_task(_work(cluster, output))
    signals = 0

    def interrupt() -> None:
        nonlocal signals
        signals += 1
        if signals == 1:
            print_progress("stopping the brokers (once more: kill them)")
            working.cancel()
        else:
            print_progress("killing the brokers; nothing acknowledged is lost")
            cluster.kill()

    loop = asyncio.get_running_loop()
    for number in SIGNALS:
        loop.add_signal_handler(number, interrupt)
    await asyncio.wait({working})
    late = await cluster.stop()
    for process in late:
        print_error(f"{process.name} was killed: it did not end in time; nothing acknowledged is lost")
    if not working.cancelled():
        working.result()
    return 1 if late or signals > 1 else 0


async def _work(cluster: LocalCluster, output: Format) -> None:
    """Raises LocalClusterFailed; ends in no other way."""
    started = time.monotonic()
    cluster.prepare()
    brokers = len(cluster.brokers)
    print_progress(f"starting {brokers} broker{'s' if brokers > 1 else ''} in {cluster.root} …")
    await cluster.start()
    _show(cluster, time.monotonic() - started, output)
    while True:
        print_error((await cluster.next_end(print_progress)).end())
        if cluster.has_ended:
            raise LocalClusterFailed("all brokers have ended")


def _show(cluster: LocalCluster, seconds: float, output: Format) -> None:
    if output is Format.JSON:
        print_json_line(
            {
                "cluster_id": cluster.cluster_id,
                "data_dir": str(cluster.root),
                "seconds": round(seconds, 2),
                "brokers": [_as_json(broker) for broker in cluster.brokers],
                "runner": {"pid": cluster.runner.pid} if cluster.runner is not None else None,
            }
        )
        return
    print_line(
        f"cluster {cluster.cluster_id} is ready after {seconds:.1f} s; data and logs are in {cluster.root}\n"
    )
    print_table(
        ("BROKER", "BROKER_ID", "CLIENT", "ADMIN", "HTTP"),
        [
            (
                broker.number,
                broker.broker_id,
                f"http://{broker.client}",
                broker.admin,
                f"http://{broker.http}",
            )
            for broker in cluster.brokers
        ],
    )
    if cluster.runner is not None:
        print_line(
            f"\nPipelines are run by process {cluster.runner.pid}; what it says is in {cluster.runner.log}"
        )
    print_line(f"\nTry next, in another terminal:\n{_environment(cluster.brokers[0])}{TRY_NEXT}\n")
    print_line("Ctrl-C stops the brokers; the data stays.")


def _as_json(broker: LocalBroker) -> dict[str, object]:
    return {
        "broker": broker.number,
        "broker_id": str(broker.broker_id),
        "pid": broker.pid,
        "client_addr": broker.client,
        "admin_addr": broker.admin,
        "raft_addr": broker.raft,
        "http_addr": broker.http,
    }


def _environment(broker: LocalBroker) -> str:
    """What the commands must be told when the first broker is not where they look."""
    service = f"http://{broker.client}"
    if (broker.admin, service) == (DEFAULT_ADMIN, DEFAULT_SERVICE):
        return ""
    return f"  export SAVA_ADMIN={broker.admin} SAVA_SERVICE={service}\n"
