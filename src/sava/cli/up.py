"""``sava up``: a cluster on this machine, in the foreground, for trying things out; and ``sava wait``, until
a cluster can be used, for scripts and for users who have just started one."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Final

import typer

from sava.api.admin_client import AdminClient
from sava.cli.broker import DEFAULT_DATA_DIR
from sava.cli.connection import DEFAULT_ADMIN, DEFAULT_SERVICE, AdminOption, run
from sava.cli.output import (
    Format,
    Output,
    ProgressLine,
    print_error,
    print_json,
    print_json_line,
    print_line,
    print_progress,
    print_table,
)
from sava.errors import RetryableError
from sava.local_cluster import (
    ADMIN,
    FIRST_DELAY_S,
    MOST_RESTARTS,
    START_TIMEOUT_S,
    LocalBroker,
    LocalCluster,
    LocalClusterFailed,
)
from sava.pipeline.launch import find_java, spark_home
from sava.proto import brokers_pb2 as pb
from sava.security.credentials import token_in
from sava.security.provision import Provision

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
    secure: Annotated[
        bool,
        typer.Option(
            "--secure",
            help="With TLS, and a user of each role, who has a token. The cluster stays secured.",
        ),
    ] = False,
    output: Annotated[
        Format, typer.Option("--output", "-o", help="json (one line when ready) or table.")
    ] = Format.TABLE,
) -> None:
    """Run a cluster on this machine until Ctrl-C or SIGTERM. A later start continues with the same data.
    A broker that dies is reported at once, with its last line and the command that starts it again."""
    os.umask(0o077)
    if pipelines:
        # Before anything is started: without these the runner could not.
        spark_home()
        find_java(os.environ)
    cluster = LocalCluster(
        data_dir,
        brokers=brokers,
        port_base=port_base,
        pipelines=pipelines,
        restart=restart,
        secure=secure,
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
                "cluster": ",".join(broker.admin for broker in cluster.brokers),
                "cluster_id": cluster.cluster_id,
                "data_dir": str(cluster.root),
                "seconds": round(seconds, 2),
                "brokers": [_as_json(broker) for broker in cluster.brokers],
                "runner": {"pid": cluster.runner.pid} if cluster.runner is not None else None,
                **_secrets(cluster),
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
                _service(cluster, broker),
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
    print_line(f"\nThe console, for a browser: http://{cluster.brokers[0].http}/")
    print_line(f"\nTry next, in another terminal:\n{_environment(cluster)}{TRY_NEXT}\n")
    if cluster.secured is not None:
        users = ", ".join(user for user in _users(cluster.secured) if user != ADMIN)
        print_line(
            f"That is the administrator. There is a user of each role as well, with a token in "
            f"{cluster.secured.directory}/NAME.token: {users}.\n"
        )
    print_line("Ctrl-C stops the brokers; the data stays.")


def _service(cluster: LocalCluster, broker: LocalBroker) -> str:
    return f"{'http' if cluster.secured is None else 'https'}://{broker.client}"


def _users(secured: Provision) -> list[str]:
    return [secured.admin, *secured.users]


def _secrets(cluster: LocalCluster) -> dict[str, object]:
    """For programs: the tokens themselves, which are worth something on this machine alone."""
    secured = cluster.secured
    if secured is None:
        return {"secure": False}
    return {
        "secure": True,
        "service": ",".join(_service(cluster, broker) for broker in cluster.brokers),
        "ca": str(secured.ca_file),
        "tokens": {user: token_in(secured.token_file(user)) for user in _users(secured)},
        "token_files": {user: str(secured.token_file(user)) for user in _users(secured)},
    }


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


def _environment(cluster: LocalCluster) -> str:
    """The variables that commands need, unless the first broker is at the default addresses, and open."""
    broker, secured = cluster.brokers[0], cluster.secured
    if secured is not None:
        return (
            f"  export SAVA_CLUSTER={','.join(each.admin for each in cluster.brokers)}\n"
            f"  export SAVA_TLS_CA={secured.ca_file}\n"
            f"  export SAVA_TOKEN_FILE={secured.token_file(ADMIN)}\n"
        )
    service = f"http://{broker.client}"
    if (broker.admin, service) == (DEFAULT_ADMIN, DEFAULT_SERVICE):
        return ""
    return f"  export SAVA_ADMIN={broker.admin} SAVA_SERVICE={service}\n"


# -- sava wait ---------------------------------------------------------------------

# All brokers must be there. A cluster works with fewer, but what is created while some are missing is placed
# on the others, and an operator who restarts brokers one after the other must not stop the next one yet. The
# command says what is missing while it waits, and again if the time is up: a broker that could not start, and
# a port that another program has, look alike from here.

CALL_TIMEOUT_S: Final = 3.0
"""Of one look. A port that listens and never answers is reported before long."""
POLL_S: Final = 0.2
UNREACHABLE: Final = "unreachable"
"""The status of a broker that is a member of the cluster and not there (``brokers.proto``)."""


class NotReady(RetryableError):
    """The time was up before the cluster could be used. The text says what was missing."""


def wait(
    timeout: Annotated[
        float,
        typer.Option(
            "--timeout", min=0, metavar="SECONDS", help="Give up after this long, with exit code 1."
        ),
    ] = START_TIMEOUT_S,
    output: Output = Format.TABLE,
    admin: AdminOption = DEFAULT_ADMIN,
) -> None:
    """Wait until a cluster can be used: it has a leader, and all of its brokers are there."""
    with ProgressLine() as progress:
        brokers = run(admin, lambda client: _until_ready(client, timeout, progress.show))
    if output is Format.JSON:
        print_json({"brokers": brokers})
    else:
        print_line(f"the cluster at {admin} is ready, with {brokers} broker{'s' if brokers > 1 else ''}")


async def _until_ready(client: AdminClient, timeout: float, tell: Callable[[str], None]) -> int:
    """How many brokers there are."""
    missing = "no answer yet"
    try:
        async with asyncio.timeout(timeout):
            while True:
                try:
                    answer = await client.call(
                        client.brokers.ListBrokers, pb.ListBrokersRequest(), timeout=CALL_TIMEOUT_S
                    )
                    missing = missing_of(list(answer.brokers))
                except RetryableError as error:
                    missing = str(error)
                if not missing:
                    return len(answer.brokers)
                tell(f"waiting for the cluster at {client.target}: {missing}")
                await asyncio.sleep(POLL_S)
    except TimeoutError:
        raise NotReady(
            f"the cluster at {client.target} is not ready after {timeout:g} s: {missing}; the output or the "
            "log of what was started says why, and --admin HOST:PORT or SAVA_ADMIN names another"
        ) from None


def missing_of(brokers: list[pb.Broker]) -> str:
    """What keeps a cluster from being used, as one of its brokers sees it; empty if nothing does."""
    if not brokers:
        return "its broker waits for `sava cluster init`"
    if not any(broker.is_leader for broker in brokers):
        return "it has no leader"
    gone = [broker.raft_addr or str(broker.broker_id) for broker in brokers if broker.status == UNREACHABLE]
    return f"not there: {', '.join(gone)}" if gone else ""
