"""What ``sava bench`` does once its options are known. Apart from them because of what it imports."""

from __future__ import annotations

import csv
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, fields
from typing import Any, Final

import typer
from rich.filesize import decimal

from sava.cli.bench import SECONDS, Output
from sava.cli.client_port import tls_for
from sava.cli.connection import auth_from_environment
from sava.cli.interrupts import run_to_end
from sava.cli.output import print_json, print_line, print_progress, print_table
from sava.cli.progress import Progress
from sava.client import Client, TopicUnknown
from sava.client.consumer import SubscriptionType
from sava.errors import RetryableError, SavaError
from sava.load import runs
from sava.load.consuming import Consumption
from sava.load.figures import Flow, Outcome
from sava.load.metadata import Calls, Operation
from sava.load.payload import HEADER_BYTES, draw_run
from sava.load.producing import Production
from sava.load.tally import Tally
from sava.proto import topics_admin_pb2 as pb
from sava.services.admin_client import AdminClient

LARGEST: Final = 8 << 20

Work = Callable[[runs.Tell], Coroutine[Any, Any, None]]


class LoadNotBorne(RetryableError):
    """Messages were lost, came twice or out of order, or calls failed."""


@dataclass(frozen=True, slots=True)
class Amount:
    """How much, as the options say it."""

    seconds: float | None
    count: int | None
    rate: float | None

    @property
    def duration(self) -> float | None:
        return SECONDS if self.seconds is None and self.count is None else self.seconds


def production(topic: str, amount: Amount, *, size: str, **options: Any) -> Production:
    return Production(
        topic=topic,
        run=draw_run(),
        count=amount.count,
        seconds=amount.duration,
        rate=amount.rate,
        size=_sizes(size),
        **options,
    )


def consumption(topic: str, amount: Amount, *, subscription: str | None, **options: Any) -> Consumption:
    return Consumption(
        topic=topic,
        subscription=subscription or f"bench-{draw_run():08x}",
        count=amount.count,
        seconds=amount.seconds,
        **options,
    )


def produce(service: str, load: Production, output: Output) -> None:
    run = runs.ProduceRun(load)
    _carry_out(run, _with_client(service, run.go), output)


def consume(service: str, admin: str, load: Consumption, output: Output, *, is_new: bool) -> None:
    # Of a subscription that was there before, or that begins with what is new, nobody knows what is missing
    # at the beginning.
    from_start = is_new and load.start == "earliest"
    tally = Tally(by_key=load.type == "key_shared", from_start=from_start)
    run = runs.ConsumeRun(load, tally, draw_run())

    async def work(client: Client, tell: runs.Tell) -> None:
        async with _forgetting(admin, load) if is_new else nullcontext():
            await run.go(client, tell)

    _carry_out(run, _with_client(service, work), output)


def latency(
    service: str, admin: str, load: Production, kind: SubscriptionType, consumers: int, output: Output
) -> None:
    consumption = Consumption(
        topic=load.topic, subscription=f"bench-{load.run:08x}", type=kind, consumers=consumers
    )

    run = runs.LatencyRun(load, consumption)

    async def work(client: Client, tell: runs.Tell) -> None:
        async with _forgetting(admin, consumption):
            await run.go(client, tell)

    _carry_out(run, _with_client(service, work), output)


def metadata(
    admin: str,
    amount: Amount,
    *,
    operation: Operation,
    callers: int,
    keys: int,
    value_size: int,
    output: Output,
) -> None:
    load = Calls(
        run=draw_run(),
        operation=operation,
        callers=callers,
        keys=keys,
        value_size=value_size,
        count=amount.count,
        seconds=amount.duration,
        rate=amount.rate,
    )
    run = runs.MetadataRun(load)

    async def work(tell: runs.Tell) -> None:
        async with AdminClient(admin, auth_from_environment()) as client:
            await run.go(client, tell)

    _carry_out(run, work, output)


def _with_client(service: str, work: Callable[[Client, runs.Tell], Awaitable[None]]) -> Work:
    async def connected(tell: runs.Tell) -> None:
        async with Client(service, tls=tls_for(service)) as client:
            await work(client, tell)

    return connected


def _carry_out(run: runs.Run, work: Work, output: Output) -> None:
    """Raises LoadNotBorne when all has been shown; KeyboardInterrupt when what was found until then has."""
    try:
        with Progress() as progress:
            run_to_end(work(progress.tell))
    except KeyboardInterrupt:
        _show(run.outcome(), output)
        raise
    outcome = run.outcome()
    _show(outcome, output)
    if complaint := outcome.complaint():
        raise LoadNotBorne(f"run {outcome.run}: {complaint}")


@asynccontextmanager
async def _forgetting(admin: str, load: Consumption) -> AsyncIterator[None]:
    """A subscription that nobody consumes keeps its topic from being trimmed, so a run leaves none."""
    is_there = True
    try:
        yield
    except TopicUnknown:
        is_there = False
        raise
    finally:
        if is_there:
            await _forget(admin, load)


async def _forget(admin: str, load: Consumption) -> None:
    request = pb.DeleteSubscriptionRequest(topic=load.topic, subscription=load.subscription)
    try:
        async with AdminClient(admin, auth_from_environment()) as client:
            await client.call(client.subscriptions.DeleteSubscription, request)
    except SavaError as error:
        print_progress(f"sava: subscription {load.subscription} of {load.topic} was not deleted: {error}")


def _sizes(text: str) -> tuple[int, int]:
    low, _, high = text.partition("-")
    if not low.isdigit() or not (high or low).isdigit():
        raise typer.BadParameter(f"--size {text!r}: a number of bytes, or two as in 100-2000")
    sizes = int(low), int(high or low)
    if not HEADER_BYTES <= sizes[0] <= sizes[1] <= LARGEST:
        raise typer.BadParameter(
            f"--size {text}: {HEADER_BYTES} (what a message is recognized by) to {LARGEST}, the lower first"
        )
    return sizes


# -- telling ---------------------------------------------------------------------------------


def _show(outcome: Outcome, output: Output) -> None:
    if output is Output.JSON:
        print_json(outcome.as_dict())
    elif output is Output.CSV:
        row = outcome.flat()
        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerows([row.keys(), row.values()])
        sys.stdout.flush()
    else:
        _show_tables(outcome)


def _show_tables(outcome: Outcome) -> None:
    print_table(
        ("", "COUNT", "FAILED", "SECONDS", "PER_SECOND", "BYTES_PER_SECOND"),
        [
            (
                *(name, f"{flow.count:,}", f"{flow.failed:,}", f"{flow.seconds:.2f}", f"{flow.rate:,.0f}"),
                decimal(int(flow.size / flow.seconds)) if flow.seconds else "-",
            )
            for name, flow in outcome.flows.items()
        ],
    )
    timed = {name: flow for name, flow in outcome.flows.items() if flow.latency}
    if timed:
        print_line("")
        _show_latencies(timed)
    if outcome.count is not None:
        print_line("")
        count = outcome.count
        names = [each.name for each in fields(count)]
        print_table([name.upper() for name in names], [[f"{getattr(count, name):,}" for name in names]])


def _show_latencies(flows: dict[str, Flow]) -> None:
    columns = list(next(iter(flows.values())).latency)
    print_table(
        ("LATENCY_MS", *(name.upper() for name in columns)),
        [(name, *(f"{flow.latency[column]:,.3f}" for column in columns)) for name, flow in flows.items()],
    )
