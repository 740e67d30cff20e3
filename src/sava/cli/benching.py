"""What ``sava bench`` does once its options are known. Apart from them because of what it imports."""

from __future__ import annotations

import csv
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final

import typer
from rich.filesize import decimal

from sava.cli.bench import SECONDS, Output
from sava.cli.client_port import tls_for
from sava.cli.connection import auth_from_environment, run
from sava.cli.interrupts import run_to_end
from sava.cli.output import print_json, print_line, print_progress, print_table
from sava.cli.progress import Progress
from sava.client import Client
from sava.client.consumer import SubscriptionType
from sava.errors import CallerError, RetryableError, SavaError
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
    _finish(_with_client(service, lambda client, tell: runs.run_produce(client, load, tell)), output)


def consume(service: str, admin: str, load: Consumption, output: Output, *, is_new: bool) -> None:
    # Of a subscription that was there before, or that begins with what is new, nobody knows what is missing
    # at the beginning.
    from_start = is_new and load.start == "earliest"
    tally = Tally(by_key=load.type == "key_shared", from_start=from_start)

    async def work(client: Client, tell: runs.Tell) -> Outcome:
        try:
            return await runs.run_consume(client, load, tally, draw_run(), tell)
        finally:
            if is_new:
                await _forget(admin, load)

    _finish(_with_client(service, work), output)


def latency(
    service: str, admin: str, load: Production, kind: SubscriptionType, consumers: int, output: Output
) -> None:
    consumption = Consumption(
        topic=load.topic, subscription=f"bench-{load.run:08x}", type=kind, consumers=consumers
    )

    async def work(client: Client, tell: runs.Tell) -> Outcome:
        try:
            return await runs.run_latency(client, load, consumption, tell)
        finally:
            await _forget(admin, consumption)

    _finish(_with_client(service, work), output)


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
    with Progress() as progress:
        outcome = run(admin, lambda client: runs.run_metadata(client, load, progress.tell))
    _finish(outcome, output)


def _with_client(service: str, work: Callable[[Client, runs.Tell], Awaitable[Outcome]]) -> Outcome:
    with Progress() as progress:

        async def connected() -> Outcome:
            async with Client(service, tls=tls_for(service)) as client:
                return await work(client, progress.tell)

        return run_to_end(connected())


async def _forget(admin: str, load: Consumption) -> None:
    """A subscription that nobody consumes keeps its topic from being trimmed, so a run leaves none."""
    request = pb.DeleteSubscriptionRequest(topic=load.topic, subscription=load.subscription)
    try:
        async with AdminClient(admin, auth_from_environment()) as client:
            await client.call(client.subscriptions.DeleteSubscription, request)
    except CallerError:
        pass  # it did not come to that
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


def _finish(outcome: Outcome, output: Output) -> None:
    """Raises LoadNotBorne when all has been shown."""
    if output is Output.JSON:
        print_json(outcome.as_dict())
    elif output is Output.CSV:
        row = outcome.flat()
        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerows([row.keys(), row.values()])
        sys.stdout.flush()
    else:
        _show(outcome)
    if complaint := outcome.complaint():
        raise LoadNotBorne(f"run {outcome.run}: {complaint}")


def _show(outcome: Outcome) -> None:
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
        names = ("received", "lost", "duplicates", "reordered", "late", "foreign", "uncertain", "open_ended")
        print_table([name.upper() for name in names], [[f"{getattr(count, name):,}" for name in names]])


def _show_latencies(flows: dict[str, Flow]) -> None:
    columns = list(next(iter(flows.values())).latency)
    print_table(
        ("LATENCY_MS", *(name.upper() for name in columns)),
        [(name, *(f"{flow.latency[column]:,.3f}" for column in columns)) for name, flow in flows.items()],
    )
