"""``sava brokers``: which there are, how topics are spread over them, and taking a broker out of service."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Final

import typer

from sava.api.admin_client import AdminClient
from sava.cli import topics
from sava.cli.connection import AdminSession, all_brokers, command, id_of
from sava.cli.output import (
    as_dict,
    print_fields,
    print_json,
    print_line,
    print_progress,
    print_rows,
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


@command(app, "list")
def list_(session: AdminSession) -> None:
    """List the brokers: state, addresses, number of topics."""
    session.show_list(
        session.run(all_brokers),
        *("broker_id", "status"),
        leader=lambda broker: "yes" if broker.is_leader else "-",
        topics="topics",
        client="client_addr",
        admin="admin_addr",
        raft="raft_addr",
        http="http_addr",
    )


@command(app)
def leader(session: AdminSession) -> None:
    """Show the broker that leads the cluster: it decides which topic goes where."""
    found = next((broker for broker in session.run(all_brokers) if broker.is_leader), None)
    if found is None:
        raise Unavailable("the cluster has no leader at the moment")
    session.answer(
        found, f"broker {found.broker_id} leads, admin {found.admin_addr}, client {found.client_addr}"
    )


@command(app)
def drain(
    session: AdminSession,
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
    broker_id: BrokerId = "",
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

    drained, outcome = session.run(work)
    if session.is_json:
        print_json(as_dict(outcome))
    elif dry_run:
        print_table(("TOPIC",), [(topic,) for topic in outcome.topics])
    if dry_run:
        return
    _require_all_moved(drained, outcome)
    if not session.is_json:
        print_line(f"broker {drained} is {outcome.status}, {_topics(outcome.succeeded)} moved")


@command(app)
def activate(
    session: AdminSession,
    broker: Broker = "",
    reason: Annotated[str, typer.Option("--reason", help="The reason, for later readers.")] = "",
    broker_id: BrokerId = "",
) -> None:
    """Give BROKER topics again: new ones, and those that rebalancing moves."""
    name = _one_of(broker, broker_id)

    async def work(client: AdminClient) -> tuple[int, pb.ActivateBrokerResponse]:
        request = pb.ActivateBrokerRequest(broker_id=await id_of(client, name), reason=reason)
        return request.broker_id, await client.ask(request)

    activated, response = session.run(work)
    session.answer(
        response, f"broker {activated} {'was active already' if response.was_active else 'is active'}"
    )


@command(app)
def balance(session: AdminSession) -> None:
    """Show how evenly the brokers are loaded."""
    response = session.ask(pb.GetBalanceRequest())
    if session.is_json:
        print_json(as_dict(response))
    else:
        _show_balance(response)


@command(app)
def rebalance(
    session: AdminSession,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would be moved.")] = False,
    max_moves: Annotated[
        int, typer.Option("--max-moves", min=0, help="At most this many; 0: as the configuration says.")
    ] = 0,
) -> None:
    """Move topics from loaded brokers to others, one round, now."""
    request = pb.RebalanceRequest(dry_run=dry_run, max_moves=max_moves)
    response = session.ask(request, timeout=REBALANCE_TIMEOUT_S)
    if session.is_json:
        print_json(as_dict(response))
    else:
        _show_round(response, dry_run=dry_run)
    failed = [move for move in response.moves if move.error]
    if failed and not dry_run:
        raise MovesFailed(
            f"{len(failed)} of {_topics(len(response.moves))} not moved: {failed[0].topic}: {failed[0].error}"
        )


# Danube's administrators know these under other names.
command(app, "unload", hidden=True)(drain)
command(app, "leader-broker", hidden=True)(leader)
command(app, "namespaces", hidden=True)(topics.list_namespaces)


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
    loads = {name: f"{getattr(shown, name):.2f}" for name in _LOADS}
    print_fields(
        {
            "strategy": shown.strategy,
            "coefficient_of_variation": _variation(shown),
            **loads,
            "rebalancing": "enabled" if shown.rebalancing_enabled else "by hand only",
            "moves_last_hour": shown.moves_last_hour,
        }
    )
    print_line("")
    columns: dict[str, Callable[[pb.BrokerLoad], object]] = {
        "load": lambda each: f"{each.load:.2f}",
        "topics": lambda each: each.topics,
        "cpu_%": lambda each: f"{each.cpu_percent:.0f}",
        "memory_%": lambda each: f"{each.memory_percent:.0f}",
        "mb/s": lambda each: f"{each.megabytes_per_second:.1f}",
        "state": _state,
    }
    print_rows(shown.brokers, "broker_id", **columns)


_LOADS: Final = ("mean_load", "max_load", "min_load", "std_deviation")


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
    print_rows(
        response.moves,
        "topic",
        **{"from": "from_broker_id", "to": "to_broker_id"},
        load=lambda move: f"{move.load:.2f}",
        result=lambda move: f"failed: {move.error}" if move.error else done,
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
