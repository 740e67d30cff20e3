"""``sava topics``: create, inspect, move and delete topics, and look at what is in them; ``sava namespaces``:
where topics live. Both have limits, of which each is an option of ``set-policy``."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Final

import typer

from sava.api.admin_client import AdminClient
from sava.cli import subscriptions
from sava.cli.connection import AdminSession, ServiceOption, Yes, command, confirm, id_of, service_at
from sava.cli.messages import instant, parse_position, parse_time
from sava.cli.output import (
    RawFormat,
    as_dict,
    print_fields,
    print_json,
    print_line,
    print_rows,
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


# -- limits ------------------------------------------------------------------------


_LIMITS: Final[Mapping[str, tuple[str, str]]] = {
    "max_producers_per_topic": ("N", "Producers of one topic."),
    "max_subscriptions_per_topic": ("N", "Subscriptions of one topic."),
    "max_consumers_per_topic": ("N", "Consumers of one topic, over its subscriptions."),
    "max_consumers_per_subscription": ("N", "Consumers of one subscription."),
    "max_publish_rate": ("N", "Messages a second into one topic."),
    "max_subscription_dispatch_rate": ("N", "Messages a second out of one subscription."),
    "max_message_size": ("BYTES", "The largest payload."),
    "retention_time_minutes": ("N", "Messages older than this may go."),
    "retention_size_mb": ("N", "The oldest messages beyond this size may go."),
}
"""What stands for a value, and the help, by the name of the limit."""
_CLEAR: Final = typer.Option(
    "--clear", metavar="FIELD", help="Unset a limit so that it is inherited; may be repeated."
)


def with_limits(
    work: Callable[[AdminSession, str, pb.Policy, list[str]], None],
) -> Callable[..., None]:
    """A command about what its one argument names, with an option for each limit. ``work`` is given the
    limits to set, and the names of those to clear."""
    session, name, *_ = inspect.signature(work, eval_str=True).parameters.values()

    def limited(session: AdminSession, **given: Any) -> None:
        work(session, given[name.name], *_change(given))

    either = inspect.Parameter.POSITIONAL_OR_KEYWORD
    options = [
        inspect.Parameter(
            limit,
            either,
            default=None,
            annotation=Annotated[int | None, typer.Option(min=0, metavar=metavar, help=text)],
        )
        for limit, (metavar, text) in _LIMITS.items()
    ]
    clear = inspect.Parameter("clear", either, default=None, annotation=Annotated[list[str] | None, _CLEAR])
    limited.__signature__ = inspect.Signature([session, name, *options, clear])  # type: ignore[attr-defined]
    limited.__name__, limited.__doc__ = work.__name__, work.__doc__
    return limited


def _change(options: Mapping[str, Any]) -> tuple[pb.Policy, list[str]]:
    """What the options of a command set and clear. Raises BadParameter."""
    given = {name: options[name] for name in _LIMITS if options[name] is not None}
    cleared = [name.removeprefix("--").replace("-", "_") for name in options["clear"] or ()]
    for name in cleared:
        if name not in _LIMITS:
            raise typer.BadParameter(f"{name!r} is no limit; those are {', '.join(_LIMITS)}")
        if name in given:
            raise typer.BadParameter(f"{name} is both set and cleared")
    if not given and not cleared:
        raise typer.BadParameter("give a limit to set, or --clear FIELD")
    return pb.Policy(**given), cleared


def _show_limits(described: pb.TopicDescription | pb.NamespaceDescription) -> None:
    """A table of all limits: what is said here, and what holds."""
    said, holds = as_dict(described.policy), as_dict(described.effective_policy)

    def shown(limit: int | None) -> object:
        return "-" if limit is None else limit or "none"

    print_table(
        ("LIMIT", "SET", "EFFECTIVE"), [(name, shown(said[name]), shown(holds[name])) for name in _LIMITS]
    )


# -- sava topics -------------------------------------------------------------------


@command(app)
def create(
    session: AdminSession,
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
) -> None:
    """Create the topic NAME."""
    request = pb.CreateTopicRequest(
        name=name,
        reliable=not non_reliable,
        partitions=partitions,
        schema_subject=schema,
        if_absent=if_absent,
    )
    created = session.ask(request)
    count = len(created.partitions)
    spread = f" with {count} partition{'s' if count > 1 else ''}" if count else ""
    session.answer(
        created, f"topic {created.name} is there: {created.delivery}{spread}, id {created.topic_id}"
    )


@command(app, "list")
def list_(
    session: AdminSession,
    namespace: Annotated[str, typer.Argument(metavar="[NAMESPACE]", help="Only topics of this one.")] = "",
) -> None:
    """List the topics of the cluster, or of one namespace."""
    response = session.ask(pb.ListTopicsRequest(namespace=namespace))
    session.show_list(
        response.topics,
        *("name", "delivery"),
        partitions=lambda topic: topic.partitions or "-",
        broker_id="broker_id",
        state="state",
    )


@command(app)
def describe(session: AdminSession, name: Name) -> None:
    """Show a topic: offsets, producers, subscriptions, limits; a partitioned one over all partitions."""

    async def ask(client: AdminClient) -> tuple[pb.TopicDescription, list[pb.TopicDescription]]:
        described = await client.ask(pb.DescribeTopicRequest(name=name))
        return described, [] if session.is_json else await _partitions_of(client, described)

    described, partitions = session.run(ask)
    if session.is_json:
        print_json(as_dict(described))
    else:
        _show(described, partitions)


@command(app)
def delete(
    session: AdminSession,
    name: Name,
    yes: Yes = False,
) -> None:
    """Delete a topic with its messages, subscriptions and partitions. Asks first."""
    confirm(f"Delete topic {name} with all its messages?", yes=yes)
    session.answer(session.ask(pb.DeleteTopicRequest(name=name)), f"topic {name} deleted")


@command(app)
def partitions(
    session: AdminSession,
    name: Name,
    grow: Annotated[
        int, typer.Option("--grow", min=0, metavar="N", help="First make it N partitions; never fewer.")
    ] = 0,
) -> None:
    """Show the partitions of a topic, each with its offsets, or add some."""

    async def ask(client: AdminClient) -> list[pb.TopicDescription]:
        if grow:
            await client.ask(pb.GrowTopicRequest(name=name, partitions=grow))
        described = await client.ask(pb.DescribeTopicRequest(name=name))
        if not described.partitions:
            raise NotPartitioned(f"topic {name} has no partitions")
        return await _partitions_of(client, described)

    session.show_list(session.run(ask), **_PARTITION_COLUMNS)


@command(app)
def unload(
    session: AdminSession,
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
) -> None:
    """Move a topic, or all partitions of one, to another broker, and wait until it is served there."""

    async def work(client: AdminClient) -> list[pb.TopicMove]:
        request = pb.UnloadTopicRequest(
            name=name, to_broker_id=await id_of(client, to) if to else 0, timeout_ms=round(timeout * 1000)
        )
        patience = MOVE_TURNS * timeout + MOVE_GRACE_S
        return [move async for move in client.stream(client.topics.UnloadTopic, request, timeout=patience)]

    moves = session.run(work)
    session.show_list(
        moves,
        "topic",
        old_broker_id=lambda move: move.from_broker_id or "-",
        new_broker_id=lambda move: move.to_broker_id or "-",
        next_offset=lambda move: move.next_offset if move.HasField("next_offset") else "-",
        downtime_ms="downtime_ms",
        result=lambda move: f"stayed: {move.error}" if move.error else "moved",
    )
    failed = [move for move in moves if move.error]
    if failed:
        raise NotMoved(
            f"{len(failed)} of {len(moves)} stayed where they were: {failed[0].topic}: {failed[0].error}"
        )


@command(app)
@with_limits
def set_policy(session: AdminSession, name: Name, policy: pb.Policy, clear: list[str]) -> None:
    """Set limits of one topic, instead of its namespace's. 0 means no limit."""
    described = session.ask(pb.SetTopicPolicyRequest(name=name, policy=policy, clear=clear))
    if session.is_json:
        print_json(as_dict(described))
    else:
        _show_limits(described)


@command(app)
def peek(
    session: AdminSession,
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
    service: ServiceOption = "",
) -> None:
    """Print messages that a topic has now. No subscription is touched."""
    # Only here: other commands start in half the time without the client.
    from sava.cli import consume

    position = parse_position(start) if time is None else parse_time(time)
    consume.peek(service_at(service, session.admin), session.admin, name, position, limit, output)


command(app, "seek")(subscriptions.seek)
# Danube's administrators know these under topics.
command(app, "subscriptions")(subscriptions.list_)
command(app, "unsubscribe")(subscriptions.delete)


async def _partitions_of(client: AdminClient, described: pb.TopicDescription) -> list[pb.TopicDescription]:
    return [await client.ask(pb.DescribeTopicRequest(name=name)) for name in described.partitions]


def _show(described: pb.TopicDescription, partitions: list[pb.TopicDescription]) -> None:
    fields = as_dict(described)
    names = ["name", "topic_id", "broker_id", "delivery", "state"]
    if described.reason:
        names.append("reason")
    if not partitions:
        names += ["epoch", "start_offset", "next_offset", "stored_offset"]
    overridden = [f"{name}={limit}" for name, limit in fields["policy"].items() if limit is not None]
    shown = {name: fields[name] for name in (*names, "schema_subject", "validation_policy")}
    print_fields(
        {name: "" if value == "0" else value for name, value in shown.items()}
        | {
            "created": instant(described.created_ms * 1000),
            "producers": ", ".join(described.producers),
            "policy": ", ".join(overridden),
        }
    )
    if partitions:
        print_line("")
        print_rows(partitions, **_PARTITION_COLUMNS)
    if described.subscriptions:
        print_line("")
        print_rows(described.subscriptions, **subscriptions.COLUMNS)


def _offset(name: str) -> Callable[[pb.TopicDescription], object]:
    return lambda described: getattr(described, name) if described.HasField(name) else "-"  # type: ignore[arg-type]  # a name of an offset


_PARTITION_COLUMNS: Final[dict[str, str | Callable[[Any], object]]] = {
    "partition": "name",
    "broker_id": "broker_id",
    "start": _offset("start_offset"),
    "next": _offset("next_offset"),
    "stored": _offset("stored_offset"),
    "producers": lambda each: len(each.producers),
    "subscriptions": lambda each: len(each.subscriptions),
}


# -- sava namespaces ---------------------------------------------------------------


namespaces_app = typer.Typer(no_args_is_help=True)

Namespace = Annotated[str, typer.Argument(metavar="NAMESPACE", help="A namespace, such as default.")]


class NamespaceTaken(CallerError):
    """A namespace of that name exists already."""


@command(namespaces_app, "create")
def create_namespace(
    session: AdminSession,
    namespace: Namespace,
    if_absent: Annotated[
        bool, typer.Option("--if-absent", help="A namespace that exists already is no error.")
    ] = False,
) -> None:
    """Create NAMESPACE."""
    response = session.ask(pb.CreateNamespaceRequest(namespace=namespace))
    if response.already_existed and not if_absent:
        raise NamespaceTaken(f"namespace {namespace} exists already")
    done = "exists already" if response.already_existed else "created"
    session.answer(response, f"namespace {namespace} {done}")


@command(namespaces_app, "list")
def list_namespaces(session: AdminSession) -> None:
    """List the namespaces."""
    response = session.ask(pb.ListNamespacesRequest())
    if session.is_json:
        print_json(list(response.namespaces))
    else:
        print_table(("NAMESPACE",), [(name,) for name in response.namespaces])


@command(namespaces_app, "describe")
def describe_namespace(session: AdminSession, namespace: Namespace) -> None:
    """Show NAMESPACE: how many topics it has, and its limits."""
    _show_namespace(session, session.ask(pb.DescribeNamespaceRequest(namespace=namespace)))


@command(namespaces_app)
def topics(session: AdminSession, namespace: Namespace) -> None:
    """List the topics of NAMESPACE."""
    list_(session, namespace)


@command(namespaces_app)
def policies(session: AdminSession, namespace: Namespace) -> None:
    """Show the limits of NAMESPACE: what it sets itself, and what holds."""
    description = session.ask(pb.DescribeNamespaceRequest(namespace=namespace))
    if session.is_json:
        fields = as_dict(description)
        print_json({name: fields[name] for name in ("namespace", "policy", "effective_policy")})
    else:
        _show_limits(description)


@command(namespaces_app, "set-policy")
@with_limits
def set_namespace_policy(
    session: AdminSession, namespace: Namespace, policy: pb.Policy, clear: list[str]
) -> None:
    """Set limits of NAMESPACE. They hold for its topics unless these have their own; 0 means no limit."""
    request = pb.SetNamespacePolicyRequest(namespace=namespace, policy=policy, clear=clear)
    _show_namespace(session, session.ask(request))


@command(namespaces_app, "delete")
def delete_namespace(session: AdminSession, namespace: Namespace, yes: Yes = False) -> None:
    """Delete NAMESPACE with its limits. Asks first. Refused while it has topics."""
    confirm(f"Delete namespace {namespace}?", yes=yes)
    response = session.ask(pb.DeleteNamespaceRequest(namespace=namespace))
    session.answer(response, f"namespace {namespace} deleted")


def _show_namespace(session: AdminSession, description: pb.NamespaceDescription) -> None:
    if session.is_json:
        print_json(as_dict(description))
        return
    print_line(f"namespace {description.namespace}, {description.topics} topics")
    _show_limits(description)
