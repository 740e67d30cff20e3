"""``sava subscriptions``: which there are, how far they are, and what happens to messages that fail."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Annotated, Any, Final

import typer

from sava.cli.connection import AdminSession, Yes, command, confirm
from sava.cli.messages import (
    POSITION_FORMS,
    chosen_position,
    parse_position,
    position_message,
)
from sava.cli.output import as_dict, print_fields, print_json
from sava.proto import topics_admin_pb2 as pb
from sava.topics.specs import DeadLetterPolicy, RedeliveryBackoff

app = typer.Typer(no_args_is_help=True)

Topic = Annotated[str, typer.Argument(metavar="TOPIC", help="A topic, such as /default/orders.")]
Subscription = Annotated[str, typer.Argument(metavar="SUBSCRIPTION", help="The name of the subscription.")]


class Type(StrEnum):
    EXCLUSIVE = "exclusive"
    SHARED = "shared"
    FAILOVER = "failover"
    KEY_SHARED = "key_shared"


@command(app, "list")
def list_(session: AdminSession, topic: Topic) -> None:
    """List the subscriptions of TOPIC, of a partitioned one over all its partitions."""
    session.show_list(session.ask(pb.DescribeTopicRequest(name=topic)).subscriptions, **COLUMNS)


@command(app)
def describe(session: AdminSession, topic: Topic, subscription: Subscription) -> None:
    """Show the position, consumers and policy of SUBSCRIPTION."""
    request = pb.DescribeSubscriptionRequest(topic=topic, subscription=subscription)
    _show(session, session.ask(request))


@command(app)
def create(
    session: AdminSession,
    topic: Topic,
    subscription: Subscription,
    type_: Annotated[Type, typer.Option("--type", help="How consumers share the messages.")] = Type.SHARED,
    start: Annotated[
        str, typer.Option("--start", metavar="POSITION", help=f"Where it begins: {POSITION_FORMS}.")
    ] = "latest",
) -> None:
    """Create SUBSCRIPTION ahead of its first consumer."""
    request = pb.CreateSubscriptionRequest(
        topic=topic,
        subscription=subscription,
        type=type_.value,
        start=position_message(parse_position(start)),
    )
    described = session.ask(request)
    session.answer(described, f"subscription {subscription} of {topic} created, {_position_of(described)}")


@command(app)
def delete(session: AdminSession, topic: Topic, subscription: Subscription, yes: Yes = False) -> None:
    """Delete SUBSCRIPTION and its position. Asks first. Its consumers are disconnected; the messages stay."""
    confirm(f"Delete subscription {subscription} of {topic} with its position?", yes=yes)
    request = pb.DeleteSubscriptionRequest(topic=topic, subscription=subscription)
    session.answer(session.ask(request), f"subscription {subscription} of {topic} deleted")


@command(app)
def seek(
    session: AdminSession,
    topic: Topic,
    subscription: Subscription,
    offset: Annotated[int | None, typer.Option("--offset", min=0, help="To this offset.")] = None,
    time: Annotated[
        str | None,
        typer.Option("--time", metavar="ISO", help="To the first message not published before this time."),
    ] = None,
    earliest: Annotated[bool, typer.Option("--earliest", help="To the first message that is kept.")] = False,
    latest: Annotated[bool, typer.Option("--latest", help="To the end: skip everything there is.")] = False,
) -> None:
    """Move SUBSCRIPTION forward or back. What was acked beyond the new position is delivered again."""
    position = chosen_position(offset=offset, time=time, earliest=earliest, latest=latest)
    request = pb.SeekSubscriptionRequest(
        topic=topic, subscription=subscription, position=position_message(position)
    )
    described = session.ask(request)
    session.answer(described, f"subscription {subscription} of {topic} moved, {_position_of(described)}")


@command(app)
def configure(
    session: AdminSession,
    topic: Topic,
    subscription: Subscription,
    max_redelivery: Annotated[
        int | None,
        typer.Option("--max-redelivery", min=0, metavar="N", help="Deliveries after the first one."),
    ] = None,
    ack_timeout: Annotated[
        float | None,
        typer.Option("--ack-timeout", min=0, metavar="SECONDS", help="Without an ack redeliver; 0: never."),
    ] = None,
    backoff: Annotated[
        RedeliveryBackoff | None, typer.Option("--backoff", help="How the delay before a redelivery grows.")
    ] = None,
    base_delay: Annotated[
        float | None,
        typer.Option("--base-delay", min=0, metavar="SECONDS", help="Delay before the first redelivery."),
    ] = None,
    max_delay: Annotated[
        float | None, typer.Option("--max-delay", min=0, metavar="SECONDS", help="The longest delay.")
    ] = None,
    dead_letter: Annotated[
        DeadLetterPolicy | None,
        typer.Option("--dead-letter", help="What happens to a message that failed too often."),
    ] = None,
    dead_letter_topic: Annotated[
        str | None,
        typer.Option(
            "--dead-letter-topic", metavar="TOPIC", help="Where it goes; '' for TOPIC-SUBSCRIPTION-dlq."
        ),
    ] = None,
    max_unacked: Annotated[
        int | None,
        typer.Option("--max-unacked", min=1, metavar="N", help="Messages delivered and not acked, at most."),
    ] = None,
) -> None:
    """Change what SUBSCRIPTION does with messages that are not acked. Options that are not given stay."""
    policy = _given(
        max_redelivery_count=max_redelivery,
        ack_timeout_ms=_milliseconds(ack_timeout),
        base_redelivery_delay_ms=_milliseconds(base_delay),
        max_redelivery_delay_ms=_milliseconds(max_delay),
        backoff=backoff,
        dead_letter=dead_letter,
        dead_letter_topic=dead_letter_topic,
    )
    window = _given(max_unacked_messages=max_unacked)
    if not policy and not window:
        raise typer.BadParameter("give something to change")
    request = pb.ConfigureSubscriptionRequest(
        topic=topic, subscription=subscription, failure_policy=pb.FailurePolicy(**policy), **window
    )
    _show(session, session.ask(request))


def _show(session: AdminSession, described: pb.SubscriptionDescription) -> None:
    fields = as_dict(described)
    if session.is_json:
        print_json(fields)
        return
    policy = fields.pop("failure_policy") or {}
    fields.update(
        cursor=_cursor(described),
        consumers=", ".join(described.consumers),
        blocked="yes" if described.blocked else "no",
        blocked_offsets=_ranges(described.blocked_offsets),
        **policy,
    )
    print_fields(fields)


def _ranges(bounds: Sequence[int]) -> str:
    """Each from its first offset to the one behind its last."""
    return ", ".join(f"{start}..{end}" for start, end in zip(bounds[::2], bounds[1::2], strict=True))


def _cursor(described: pb.SubscriptionDescription) -> object:
    return described.cursor if described.HasField("cursor") else "-"


def _state(described: pb.SubscriptionDescription) -> str:
    if described.error:
        return f"error: {described.error}"
    return "blocked" if described.blocked else "ok"


def _position_of(described: pb.SubscriptionDescription) -> str:
    return f"at offset {_cursor(described)}, backlog {described.backlog}"


COLUMNS: Final[dict[str, str | Callable[[Any], object]]] = {
    "subscription": "subscription",
    "type": "type",
    "consumers": lambda each: len(each.consumers),
    "cursor": _cursor,
    "backlog": "backlog",
    "unacked": "unacked",
    "state": _state,
}


def _given(**options: Any) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def _milliseconds(seconds: float | None) -> int | None:
    return None if seconds is None else round(seconds * 1000)
