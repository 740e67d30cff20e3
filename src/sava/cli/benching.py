"""What ``sava bench`` does once its options are known. Apart from them because of what it imports."""

from __future__ import annotations

import csv
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, fields
from typing import Any, Final

import typer
from rich.filesize import decimal

from sava.api.admin_client import AdminClient
from sava.cli.bench import SECONDS, Output
from sava.cli.client_port import tls_for
from sava.cli.connection import auth_from_environment
from sava.cli.interrupts import run_to_end
from sava.cli.output import print_json, print_line, print_progress, print_table
from sava.cli.progress import Progress
from sava.client import Client
from sava.client.consumer import SubscriptionType
from sava.errors import RetryableError, SavaError
from sava.load import runs
from sava.load.consuming import Consumption, LoadSubscription
from sava.load.figures import Flow, LoadOutcome
from sava.load.metadata import MetadataCalls, Operation
from sava.load.payload import HEADER_BYTES, draw_run
from sava.load.producing import Production
from sava.topics.errors import SubscriptionUnknown, TopicUnknown

LARGEST: Final = 8 << 20

Work = Callable[[Progress], Coroutine[Any, Any, None]]


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

    async def work(progress: Progress) -> None:
        async with Client(service, tls=tls_for(service)) as client:
            await run.go(client, progress)

    _carry_out(run, work, output)


def consume(service: str, admin: str, load: Consumption, output: Output, *, is_new: bool) -> None:
    run = runs.ConsumeRun(load, draw_run())
    _consume(service, admin, load, run, output, is_kept=not is_new)


def latency(
    service: str, admin: str, load: Production, kind: SubscriptionType, consumers: int, output: Output
) -> None:
    name = f"bench-{load.run:08x}"
    consumption = Consumption(
        topic=load.topic, subscription=name, type=kind, consumers=consumers, start="latest"
    )
    run = runs.LatencyRun(load, consumption)
    _consume(service, admin, consumption, run, output, is_kept=False)


def _consume(
    service: str,
    admin: str,
    load: Consumption,
    run: runs.ConsumeRun | runs.LatencyRun,
    output: Output,
    *,
    is_kept: bool,
) -> None:
    async def work(progress: Progress) -> None:
        async with (
            AdminClient(admin, auth_from_environment()) as asked,
            Client(service, tls=tls_for(service)) as client,
        ):
            subscription = LoadSubscription(asked, load.topic, load.subscription)
            async with nullcontext() if is_kept else _forgetting(subscription):
                await run.go(client, subscription, progress)

    _carry_out(run, work, output)


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
    load = MetadataCalls(
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

    async def work(progress: Progress) -> None:
        async with AdminClient(admin, auth_from_environment()) as client:
            await run.go(client, progress)

    _carry_out(run, work, output)


def _carry_out(run: runs.LoadRun, work: Work, output: Output) -> None:
    """Raises LoadNotBorne when all has been shown. Whatever ends a run before, KeyboardInterrupt too, is
    raised when what was found until then has been shown."""
    try:
        with Progress() as progress:
            run_to_end(work(progress))
    except KeyboardInterrupt:
        _show(run.outcome(), output)
        raise
    except SavaError:
        if not run.outcome().is_empty:
            _show(run.outcome(), output)
        raise
    outcome = run.outcome()
    _show(outcome, output)
    if complaint := outcome.complaint():
        raise LoadNotBorne(f"run {outcome.run}: {complaint}")


@asynccontextmanager
async def _forgetting(subscription: LoadSubscription) -> AsyncIterator[None]:
    """A subscription that nobody consumes keeps its topic from being trimmed, so a run leaves none."""
    try:
        yield
    finally:
        if subscription.is_used:
            await _forget(subscription)


async def _forget(subscription: LoadSubscription) -> None:
    topic, name = subscription.topic, subscription.name
    try:
        await subscription.delete()
    except (SubscriptionUnknown, TopicUnknown):
        pass  # it was refused, or somebody else has deleted it
    except SavaError as error:
        print_progress(
            f"sava: subscription {name} of {topic} was not deleted: {error}; "
            f"`sava subscriptions delete {topic} {name}` does it"
        )


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


def _show(outcome: LoadOutcome, output: Output) -> None:
    if outcome.note:
        print_progress(f"sava: {outcome.note}")
    if output is Output.JSON:
        print_json(outcome.as_dict())
    elif output is Output.CSV:
        row = outcome.flat()
        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerows([row.keys(), row.values()])
        sys.stdout.flush()
    else:
        _show_tables(outcome)


def _show_tables(outcome: LoadOutcome) -> None:
    print_table(
        ("", "COUNT", "FAILED", "SECONDS", "PER_SECOND", "BYTES_PER_SECOND"),
        [
            (
                *(name, f"{flow.count:,}", f"{flow.failed:,}", f"{flow.seconds:.2f}"),
                "-" if flow.rate is None else f"{flow.rate:,.0f}",
                "-" if flow.bytes_per_second is None else decimal(int(flow.bytes_per_second)),
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
