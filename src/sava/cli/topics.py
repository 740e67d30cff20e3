"""``sava topics``: create, inspect, move and delete topics, and look at what is in them."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from sava.api.admin_client import AdminClient
from sava.cli import limits, subscriptions
from sava.cli.connection import DEFAULT_ADMIN, DEFAULT_SERVICE, AdminOption, ServiceOption, id_of, run
from sava.cli.messages import instant, parse_position, parse_time
from sava.cli.output import (
    Format,
    Output,
    RawFormat,
    as_dict,
    print_answer,
    print_json,
    print_line,
    print_table,
)
from sava.errors import CallerError, Outcome, RetryableError
from sava.proto import topics_admin_pb2 as pb

app = typer.Typer(no_args_is_help=True)

Name = Annotated[str, typer.Argument(metavar="NAME", help="A topic, such as /default/orders.")]


MOVE_TIMEOUT_S = 30.0
MOVE_TURNS = 10
"""Of many partitions only a few move at a time; the others wait for their turn."""
MOVE_GRACE_S = 60.0
"""For the new owner to begin, after the time that the old one has."""


class NotPartitioned(CallerError):
    """The topic has no partitions."""


class NotMoved(RetryableError):
    """A topic, or some of its partitions, stayed where they were."""

    outcome = Outcome.PARTLY


@app.command()
def create(
    name: Name,
    partitions: Annotated[
        int,
        typer.Option("--partitions", min=0, help="Spread it over this many partitions; 0: a plain topic."),
    ] = 0,
    non_reliable: Annotated[
        bool, typer.Option("--non-reliable", help="Keep nothing: only connected consumers get messages.")
    ] = False,
    schema: Annotated[
        str, typer.Option("--schema", metavar="SUBJECT", help="The registered subject its messages follow.")
    ] = "",
    if_absent: Annotated[
        bool, typer.Option("--if-absent", help="An existing topic of the same kind is no error.")
    ] = False,
    output: Output = Format.TABLE,
    admin: AdminOption = DEFAULT_ADMIN,
) -> None:
    """Create the topic NAME."""
    request = pb.CreateTopicRequest(
        name=name,
        reliable=not non_reliable,
        partitions=partitions,
        schema_subject=schema,
        if_absent=if_absent,
    )
    created = run(admin, lambda client: client.call(client.topics.CreateTopic, request))
    count = len(created.partitions)
    spread = f" with {count} partition{'s' if count > 1 else ''}" if count else ""
    print_answer(
        created, output, f"topic {created.name} is there: {created.delivery}{spread}, id {created.topic_id}"
    )


@app.command(name="list")
def list_(
    namespace: Annotated[str, typer.Argument(metavar="[NAMESPACE]", help="Only topics of this one.")] = "",
    output: Output = Format.TABLE,
    admin: AdminOption = DEFAULT_ADMIN,
) -> None:
    """List the topics of the cluster, or of one namespace."""
    show_topics(namespace, output, admin)


def show_topics(namespace: str, output: Format, admin: str) -> None:
    request = pb.ListTopicsRequest(namespace=namespace)
    response = run(admin, lambda client: client.call(client.topics.ListTopics, request))
    if output is Format.JSON:
        print_json([as_dict(topic) for topic in response.topics])
        return
    print_table(
        ("NAME", "DELIVERY", "PARTITIONS", "BROKER_ID", "STATE"),
        [
            (topic.name, topic.delivery, topic.partitions or "-", topic.broker_id or "-", topic.state or "-")
            for topic in response.topics
        ],
    )


@app.command()
def describe(name: Name, output: Output = Format.TABLE, admin: AdminOption = DEFAULT_ADMIN) -> None:
    """Show a topic: offsets, producers, subscriptions, limits; a partitioned one over all partitions."""

    async def ask(client: AdminClient) -> tuple[pb.TopicDescription, list[pb.TopicDescription]]:
        described = await _describe(client, name)
        if output is Format.JSON:
            return described, []
        return described, [await _describe(client, partition) for partition in described.partitions]

    described, partitions = run(admin, ask)
    if output is Format.JSON:
        print_json(as_dict(described))
    else:
        _show(described, partitions)


@app.command()
def delete(
    name: Name,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask, also on a terminal.")] = False,
    output: Output = Format.TABLE,
    admin: AdminOption = DEFAULT_ADMIN,
) -> None:
    """Delete a topic with its messages, subscriptions and partitions. Asks first on a terminal."""
    if not yes and sys.stdin.isatty():
        typer.confirm(f"Delete topic {name} with all its messages?", abort=True)
    response = run(
        admin, lambda client: client.call(client.topics.DeleteTopic, pb.DeleteTopicRequest(name=name))
    )
    print_answer(response, output, f"topic {name} deleted")


@app.command()
def partitions(
    name: Name,
    grow: Annotated[
        int, typer.Option("--grow", min=0, metavar="N", help="First make it N partitions; never fewer.")
    ] = 0,
    output: Output = Format.TABLE,
    admin: AdminOption = DEFAULT_ADMIN,
) -> None:
    """Show the partitions of a topic, each with its offsets, or add some."""

    async def ask(client: AdminClient) -> list[pb.TopicDescription]:
        if grow:
            await client.call(client.topics.GrowTopic, pb.GrowTopicRequest(name=name, partitions=grow))
        described = await _describe(client, name)
        if not described.partitions:
            raise NotPartitioned(f"topic {name} has no partitions")
        return [await _describe(client, partition) for partition in described.partitions]

    described = run(admin, ask)
    if output is Format.JSON:
        print_json([as_dict(each) for each in described])
    else:
        _show_partitions(described)


@app.command()
def unload(
    name: Name,
    to: Annotated[
        str,
        typer.Option(
            "--to",
            metavar="BROKER",
            help="Id of the broker, or the address of one of its ports; by default the one that suits best.",
        ),
    ] = "",
    timeout: Annotated[
        float,
        typer.Option(
            "--timeout",
            min=0.001,
            metavar="SECONDS",
            help="How long its broker may take to hand it over. After that it keeps it.",
        ),
    ] = MOVE_TIMEOUT_S,
    output: Output = Format.TABLE,
    admin: AdminOption = DEFAULT_ADMIN,
) -> None:
    """Move a topic, or all partitions of one, to another broker, and wait until it is served there."""

    async def work(client: AdminClient) -> list[pb.TopicMove]:
        request = pb.UnloadTopicRequest(
            name=name, to_broker_id=await id_of(client, to) if to else 0, timeout_ms=round(timeout * 1000)
        )
        patience = MOVE_TURNS * timeout + MOVE_GRACE_S
        return [move async for move in client.stream(client.topics.UnloadTopic, request, timeout=patience)]

    moves = run(admin, work)
    if output is Format.JSON:
        print_json([as_dict(move) for move in moves])
    else:
        _show_moves(moves)
    failed = [move for move in moves if move.error]
    if failed:
        raise NotMoved(
            f"{len(failed)} of {len(moves)} stayed where they were: {failed[0].topic}: {failed[0].error}"
        )


@app.command()
def set_policy(
    context: typer.Context,
    name: Name,
    max_producers_per_topic: limits.MaxProducers = None,
    max_subscriptions_per_topic: limits.MaxSubscriptions = None,
    max_consumers_per_topic: limits.MaxConsumers = None,
    max_consumers_per_subscription: limits.MaxSubscriptionConsumers = None,
    max_publish_rate: limits.MaxPublishRate = None,
    max_subscription_dispatch_rate: limits.MaxDispatchRate = None,
    max_message_size: limits.MaxMessageSize = None,
    retention_time_minutes: limits.RetentionTime = None,
    retention_size_mb: limits.RetentionSize = None,
    clear: limits.Clear = None,
    output: Output = Format.TABLE,
    admin: AdminOption = DEFAULT_ADMIN,
) -> None:
    """Set limits of one topic, instead of its namespace's. 0 means no limit."""
    policy, cleared = limits.change(context.params)
    request = pb.SetTopicPolicyRequest(name=name, policy=policy, clear=cleared)
    described = run(admin, lambda client: client.call(client.topics.SetTopicPolicy, request))
    if output is Format.JSON:
        print_json(as_dict(described))
    else:
        limits.show(described.policy, described.effective_policy)


@app.command()
def peek(
    name: Name,
    start: Annotated[
        str,
        typer.Option(
            "--from", metavar="OFFSET", help="First offset, earliest, or latest: the last messages there are."
        ),
    ] = "earliest",
    limit: Annotated[int, typer.Option("--limit", min=1, help="At most this many messages.")] = 10,
    time: Annotated[
        str | None,
        typer.Option("--time", metavar="ISO", help="Instead: from the first message since this time."),
    ] = None,
    output: Annotated[
        RawFormat, typer.Option("--output", "-o", help="json (a line each), table, or raw (payloads alone).")
    ] = RawFormat.TABLE,
    service: ServiceOption = DEFAULT_SERVICE,
    admin: AdminOption = DEFAULT_ADMIN,
) -> None:
    """Print messages that a topic has now. No subscription is touched."""
    # Only here: other commands start in half the time without the client.
    from sava.cli import consume

    position = parse_position(start) if time is None else parse_time(time)
    consume.peek(service, admin, name, position, limit, output)


app.command(name="seek")(subscriptions.seek)
# Danube's administrators know these under topics.
app.command(name="subscriptions")(subscriptions.list_)
app.command(name="unsubscribe")(subscriptions.delete)


async def _describe(client: AdminClient, name: str) -> pb.TopicDescription:
    described: pb.TopicDescription = await client.call(
        client.topics.DescribeTopic, pb.DescribeTopicRequest(name=name)
    )
    return described


def _show(described: pb.TopicDescription, partitions: list[pb.TopicDescription]) -> None:
    fields = as_dict(described)
    names = ["name", "topic_id", "broker_id", "delivery", "state"]
    if described.reason:
        names.append("reason")
    if not partitions:
        names += ["epoch", "start_offset", "next_offset", "stored_offset"]
    for name in (*names, "schema_subject", "validation_policy"):
        value = fields[name]
        print_line(f"{name:<17} {'-' if value in ('', '0', None) else value}")
    print_line(f"{'created':<17} {instant(described.created_ms * 1000)}")
    print_line(f"{'producers':<17} {', '.join(described.producers) or '-'}")
    overridden = [f"{name}={limit}" for name, limit in fields["policy"].items() if limit is not None]
    print_line(f"{'policy':<17} {', '.join(overridden) or '-'}")
    if partitions:
        print_line("")
        _show_partitions(partitions)
    if described.subscriptions:
        print_line("")
        subscriptions.show_table(described.subscriptions)


def _show_partitions(described: list[pb.TopicDescription]) -> None:
    rows = []
    for each in described:
        fields = as_dict(each)
        offsets = (fields["start_offset"], fields["next_offset"], fields["stored_offset"])
        shown = tuple("-" if offset is None else offset for offset in offsets)
        rows.append((each.name, each.broker_id or "-", *shown, len(each.producers), len(each.subscriptions)))
    columns = ("PARTITION", "BROKER_ID", "START", "NEXT", "STORED", "PRODUCERS", "SUBSCRIPTIONS")
    print_table(columns, rows)


def _show_moves(moves: list[pb.TopicMove]) -> None:
    rows = []
    for move in moves:
        next_offset = move.next_offset if move.HasField("next_offset") else "-"
        result = f"stayed: {move.error}" if move.error else "moved"
        brokers = (move.from_broker_id or "-", move.to_broker_id or "-")
        rows.append((move.topic, *brokers, next_offset, move.downtime_ms, result))
    columns = ("TOPIC", "OLD_BROKER_ID", "NEW_BROKER_ID", "NEXT_OFFSET", "DOWNTIME_MS", "RESULT")
    print_table(columns, rows)
