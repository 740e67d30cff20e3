"""``sava wait``: until a cluster can be used, for scripts and for whoever has just started one.

All of its brokers must be there. A cluster works with fewer, but what is created while some are missing is
placed on the others, and who restarts brokers one after the other must not stop the next one yet. What is
missing is told while it is waited for, and in the end if it does not come: a broker that could not start, and
a port that is another program's, look alike to whoever only waits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Annotated, Final

import typer

from sava.api.admin_client import AdminClient
from sava.cli.connection import DEFAULT_ADMIN, AdminOption, run
from sava.cli.output import Format, Output, print_json, print_line
from sava.errors import RetryableError
from sava.local_cluster import START_TIMEOUT_S
from sava.proto import brokers_pb2 as pb

CALL_TIMEOUT_S: Final = 3.0
"""Of one look. What listens and never answers is to be told of before long."""
POLL_S: Final = 0.2
UNREACHABLE: Final = "unreachable"
"""The status of a broker that is a member of the cluster and not there (``brokers.proto``)."""


class NotReady(RetryableError):
    """The time was up before the cluster could be used. The text says what was missing."""


def wait(
    timeout: Annotated[
        float,
        typer.Option("--timeout", min=0, metavar="SECONDS", help="Give up after so long, with exit code 1."),
    ] = START_TIMEOUT_S,
    output: Output = Format.TABLE,
    admin: AdminOption = DEFAULT_ADMIN,
) -> None:
    """Wait until a cluster can be used: it has a leader, and all of its brokers are there."""
    # Only here: other commands start faster without what draws a line that changes.
    from sava.cli.progress import Progress

    with Progress() as progress:
        brokers = run(admin, lambda client: _until_ready(client, timeout, progress.tell))
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
