"""``sava brokers``: which there are, how topics are spread over them, and taking a broker out of service."""

from __future__ import annotations

from typing import Annotated

import typer

from sava.api.admin_client import AdminClient
from sava.cli import namespaces
from sava.cli.connection import DEFAULT_ADMIN, AdminOption, all_brokers, id_of, run
from sava.cli.output import (
    Format,
    Output,
    as_dict,
    print_answer,
    print_json,
    print_line,
    print_progress,
    print_table,
)
from sava.errors import Outcome, RetryableError
from sava.metadata.errors import OutcomeUnknown, Unavailable
from sava.proto import brokers_pb2 as pb

app = typer.Typer(no_args_is_help=True)

DRAIN_TIMEOUT_S = 300
DRAIN_GRACE_S = 60.0
"""For the moves that are under way when a drain's time is over: each has a timeout of its own."""
REBALANCE_TIMEOUT_S = 600.0

Broker = Annotated[
    str, typer.Argument(metavar="BROKER", help="Id of the broker, or the address of one of its ports.")
]
BrokerId = Annotated[str, typer.Option("--broker-id", hidden=True, help="As BROKER, for Danube's users.")]


class TopicsRemain(RetryableError):
    """A drain ended while the broker still had topics that were to go."""

    outcome = Outcome.PARTLY


class MovesFailed(RetryableError):
    """Of the moves of a round of rebalancing, some were not made."""

    outcome = Outcome.PARTLY


@app.command(name="list")
def list_(output: Output = Format.TABLE, admin: AdminOption = DEFAULT_ADMIN) -> None:
    """List the brokers: state, addresses, number of topics."""
    found = run(admin, all_brokers)
    if output is Format.JSON:
        print_json([as_dict(broker) for broker in found])
        return
    print_table(
        ("BROKER_ID", "STATUS", "LEADER", "TOPICS", "CLIENT", "ADMIN", "RAFT", "HTTP"),
        [
            (
                *(broker.broker_id, broker.status, "yes" if broker.is_leader else "-", broker.topics),
                *(broker.client_addr or "-", broker.admin_addr or "-"),
                *(broker.raft_addr or "-", broker.http_addr or "-"),
            )
            for broker in found
        ],
    )


@app.command()
def leader(output: Output = Format.TABLE, admin: AdminOption = DEFAULT_ADMIN) -> None:
    """Show the broker that leads the cluster: it decides which topic goes where."""
    found = next((broker for broker in run(admin, all_brokers) if broker.is_leader), None)
    if found is None:
        raise Unavailable("the cluster has no leader at the moment")
    print_answer(
        found, output, f"broker {found.broker_id} leads, admin {found.admin_addr}, client {found.client_addr}"
    )


@app.command()
def drain(
    broker: Broker = "",
    parallel: Annotated[
        int, typer.Option("--parallel", "--max-parallel", min=0, help="Topics that move at a time; 0: 8.")
    ] = 0,
    timeout: Annotated[
        int,
        typer.Option(
            "--timeout",
            "--timeout-seconds",
            min=1,
            metavar="SECONDS",
            help="After this long no further topic moves.",
        ),
    ] = DRAIN_TIMEOUT_S,
    include: Annotated[
        list[str] | None,
        typer.Option(
            "--include-namespace",
            "--namespaces-include",
            metavar="NAMESPACE",
            help="Only topics of this one. Repeatable.",
        ),
    ] = None,
    exclude: Annotated[
        list[str] | None,
        typer.Option(
            "--exclude-namespace",
            "--namespaces-exclude",
            metavar="NAMESPACE",
            help="Not the topics of this one. Repeatable.",
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would be moved.")] = False,
    output: Output = Format.TABLE,
    broker_id: BrokerId = "",
    admin: AdminOption = DEFAULT_ADMIN,
) -> None:
    """Move the topics of BROKER to others, and give it no new ones until it is activated."""
    name = _one_of(broker, broker_id)

    async def work(client: AdminClient) -> tuple[int, pb.DrainProgress]:
        request = pb.DrainBrokerRequest(
            broker_id=await id_of(client, name),
            parallel=parallel,
            timeout_seconds=timeout,
            namespaces_include=include or [],
            namespaces_exclude=exclude or [],
            dry_run=dry_run,
        )
        return request.broker_id, await _follow_drain(client, request)

    drained, outcome = run(admin, work)
    if output is Format.JSON:
        print_json(as_dict(outcome))
    elif dry_run:
        print_table(("TOPIC",), [(topic,) for topic in outcome.topics])
    if dry_run:
        return
    _require_all_moved(drained, outcome)
    if output is not Format.JSON:
        print_line(f"broker {drained} is {outcome.status}, {_topics(outcome.succeeded)} moved")


@app.command()
def activate(
    broker: Broker = "",
    reason: Annotated[str, typer.Option("--reason", help="The reason, for later readers.")] = "",
    output: Output = Format.TABLE,
    broker_id: BrokerId = "",
    admin: AdminOption = DEFAULT_ADMIN,
) -> None:
    """Give BROKER topics again: new ones, and those that rebalancing moves."""
    name = _one_of(broker, broker_id)

    async def work(client: AdminClient) -> tuple[int, pb.ActivateBrokerResponse]:
        request = pb.ActivateBrokerRequest(broker_id=await id_of(client, name), reason=reason)
        return request.broker_id, await client.call(client.brokers.ActivateBroker, request)

    activated, response = run(admin, work)
    print_answer(
        response, output, f"broker {activated} {'was active already' if response.was_active else 'is active'}"
    )


@app.command()
def balance(output: Output = Format.TABLE, admin: AdminOption = DEFAULT_ADMIN) -> None:
    """Show how evenly the brokers are loaded."""
    response = run(admin, lambda client: client.call(client.brokers.GetBalance, pb.GetBalanceRequest()))
    if output is Format.JSON:
        print_json(as_dict(response))
    else:
        _show_balance(response)


@app.command()
def rebalance(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would be moved.")] = False,
    max_moves: Annotated[
        int, typer.Option("--max-moves", min=0, help="At most this many; 0: as the configuration says.")
    ] = 0,
    output: Output = Format.TABLE,
    admin: AdminOption = DEFAULT_ADMIN,
) -> None:
    """Move topics from loaded brokers to others, one round, now."""
    request = pb.RebalanceRequest(dry_run=dry_run, max_moves=max_moves)
    response = run(
        admin, lambda client: client.call(client.brokers.Rebalance, request, timeout=REBALANCE_TIMEOUT_S)
    )
    if output is Format.JSON:
        print_json(as_dict(response))
    else:
        _show_round(response, dry_run=dry_run)
    failed = [move for move in response.moves if move.error]
    if failed and not dry_run:
        raise MovesFailed(
            f"{len(failed)} of {_topics(len(response.moves))} not moved: {failed[0].topic}: {failed[0].error}"
        )


# Danube's administrators know these under other names.
app.command(name="unload", hidden=True)(drain)
app.command(name="leader-broker", hidden=True)(leader)
app.command(name="namespaces", hidden=True)(namespaces.list_)


async def _follow_drain(client: AdminClient, request: pb.DrainBrokerRequest) -> pb.DrainProgress:
    """The outcome; stderr shows what happens until then."""
    timeout = request.timeout_seconds + DRAIN_GRACE_S
    progress: pb.DrainProgress | None = None
    try:
        async for progress in client.stream(client.brokers.DrainBroker, request, timeout=timeout):
            if progress.done or request.dry_run:
                return progress
            if progress.waiting:
                print_progress(f"waiting: {progress.waiting}")
            elif progress.total:
                print_progress(
                    f"{progress.succeeded} of {_topics(progress.total)} moved, {progress.pending} to go, "
                    f"{progress.failed} failed"
                )
    except (RetryableError, OutcomeUnknown) as error:
        if progress is None:
            raise
        raise _cut_off(request, str(error)) from error
    raise _cut_off(request, "the answer ended before the drain did")


def _cut_off(request: pb.DrainBrokerRequest, cause: str) -> OutcomeUnknown:
    return OutcomeUnknown(
        f"{cause}; the cluster continues the drain of broker {request.broker_id}, repeat the command to "
        "follow it"
    )


def _require_all_moved(broker: int, outcome: pb.DrainProgress) -> None:
    if not outcome.failed and not outcome.pending:
        return
    names = f" ({', '.join(outcome.failed_topics)})" if outcome.failed_topics else ""
    raise TopicsRemain(
        f"broker {broker} is {outcome.status}: {outcome.succeeded} of {_topics(outcome.total)} moved, "
        f"{outcome.failed} failed{names}, {outcome.pending} not moved in time; `sava topics describe` says "
        "why one was not, and repeating the command tries again"
    )


def _show_balance(shown: pb.Balance) -> None:
    print_line(f"{'strategy':<25} {shown.strategy}")
    print_line(f"{'coefficient_of_variation':<25} {_variation(shown)}")
    for name in ("mean_load", "max_load", "min_load", "std_deviation"):
        print_line(f"{name:<25} {getattr(shown, name):.2f}")
    print_line(f"{'rebalancing':<25} {'enabled' if shown.rebalancing_enabled else 'by hand only'}")
    print_line(f"{'moves_last_hour':<25} {shown.moves_last_hour}")
    print_line("")
    print_table(
        ("BROKER_ID", "LOAD", "TOPICS", "CPU_%", "MEMORY_%", "MB/S", "STATE"),
        [
            (
                *(load.broker_id, f"{load.load:.2f}", load.topics),
                *(f"{load.cpu_percent:.0f}", f"{load.memory_percent:.0f}"),
                *(f"{load.megabytes_per_second:.1f}", _state(load)),
            )
            for load in shown.brokers
        ],
    )


def _show_round(response: pb.RebalanceResponse, *, dry_run: bool) -> None:
    if not response.moves:
        before = response.before
        is_even = before.coefficient_of_variation <= before.threshold
        why = (
            ""
            if is_even
            else "; topics that have just come to a broker, or are excluded, stay where they are"
        )
        print_line(f"nothing to move: coefficient of variation {_variation(before)}{why}")
        return
    done = "would be moved" if dry_run else "moved"
    print_table(
        ("TOPIC", "FROM", "TO", "LOAD", "RESULT"),
        [
            (
                *(move.topic, move.from_broker_id, move.to_broker_id),
                *(f"{move.load:.2f}", f"failed: {move.error}" if move.error else done),
            )
            for move in response.moves
        ],
    )
    print_line(
        f"coefficient of variation {response.before.coefficient_of_variation:.3f} before, "
        f"{response.after.coefficient_of_variation:.3f} after"
    )


def _variation(shown: pb.Balance) -> str:
    return f"{shown.coefficient_of_variation:.3f} (balanced up to {shown.threshold:.3f})"


def _state(load: pb.BrokerLoad) -> str:
    if load.overloaded:
        return "overloaded"
    return "underloaded" if load.underloaded else "ok"


def _topics(count: int) -> str:
    return f"{count} topic{'' if count == 1 else 's'}"


def _one_of(broker: str, broker_id: str) -> str:
    if bool(broker) == bool(broker_id):
        raise typer.BadParameter("name one broker: its id, or the address of one of its ports")
    return broker or broker_id
