"""``sava replication``: which topics are copied to other clusters, and how far they are; ``sava remotes``:
those clusters; and ``sava replication verify``, which compares a replica with its source, message by
message."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec
import typer

from sava.api.admin_client import AdminClient
from sava.cli.connection import AdminSession, command, tls_from_environment
from sava.cli.messages import instant, parse_time, position_message
from sava.cli.output import as_dict, print_fields, print_json, print_line, print_rows, print_table
from sava.errors import CallerError, RetryableError
from sava.pipeline.launch import DEFAULT_MASTER, spark_home
from sava.proto import brokers_pb2
from sava.proto import replication_pb2 as pb

if TYPE_CHECKING:
    from sava.pipeline.cluster import ClusterAccess
    from sava.pipeline.replicate.verify import PartitionVerdict, VerifyRequest

app = typer.Typer(no_args_is_help=True)

Scope = Annotated[
    str,
    typer.Argument(metavar="SCOPE", help="A namespace (default) or a topic (/default/orders)."),
]
ASK_TIMEOUT_S = 30.0
"""For commands that wait for another cluster's answers."""
START = "earliest, latest, or a time such as 2026-03-01T12:00 (UTC unless it names a zone)"


class RemotesDiffer(CallerError):
    """A policy was not set, because remotes have not what it needs."""


@command(app, "set")
def set_(
    session: AdminSession,
    scope: Scope,
    remotes: Annotated[
        list[str] | None, typer.Option("--remote", metavar="NAME", help="Copy to this remote. Repeatable.")
    ] = None,
    off: Annotated[bool, typer.Option("--off", help="Copy nowhere.")] = False,
    start: Annotated[
        str, typer.Option("--start", help=f"Where to begin with what was never copied: {START}.")
    ] = "earliest",
    forward: Annotated[
        bool,
        typer.Option("--forward", help="Pass on what came from elsewhere, unless it has been there."),
    ] = False,
    subscriptions: Annotated[
        list[str] | None,
        typer.Option("--subscription", metavar="NAME", help="Copy the position of this one too. Repeatable."),
    ] = None,
    skip_checks: Annotated[
        bool, typer.Option("--skip-checks", help="Do not compare the remotes first.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show in what the remotes differ.")] = False,
) -> None:
    """Replicate the topics of SCOPE. The policy of a topic holds in place of its namespace's, as a whole.
    Remotes that differ in what keeps messages from being copied are shown, and nothing is set."""
    if bool(remotes) == off:
        raise typer.BadParameter("name the remotes with --remote, or say --off")
    policy = pb.ReplicationPolicy(
        remotes=remotes or [],
        start=_start(start),
        forward=forward,
        subscriptions=subscriptions or [],
    )
    request = pb.SetReplicationRequest(scope=scope, policy=policy, skip_checks=skip_checks, dry_run=dry_run)
    response = session.ask(request, timeout=ASK_TIMEOUT_S)
    if session.is_json:
        print_json(as_dict(response))
    else:
        _show_set(scope, response)
    if not response.is_set and not dry_run:
        differing = [each.remote for each in response.remotes if any(d.blocks for d in each.differences)]
        raise RemotesDiffer(
            f"the policy of {scope} was not changed: messages would not be copied because of differences at "
            f"{', '.join(differing)}; --skip-checks sets it all the same"
        )


@command(app)
def get(session: AdminSession, scope: Scope) -> None:
    """Show the policy of SCOPE, and where it is set."""
    response = session.ask(pb.GetReplicationRequest(scope=scope))
    if session.is_json:
        print_json(as_dict(response))
    elif not response.from_scope:
        print_line(f"{scope} is not replicated: no policy is set")
    else:
        _show_policy(scope, response)


@command(app)
def clear(session: AdminSession, scope: Scope) -> None:
    """Remove the policy of SCOPE; a topic then has its namespace's."""
    response = session.ask(pb.ClearReplicationRequest(scope=scope))
    session.answer(response, f"{scope} has no replication policy of its own")


@command(app)
def status(
    session: AdminSession,
    topic: Annotated[str, typer.Argument(metavar="[TOPIC]", help="Only this topic.")] = "",
    remote: Annotated[str, typer.Option("--remote", metavar="NAME", help="Only to this remote.")] = "",
) -> None:
    """Show how far every partition is at every remote, and what stops it."""
    request = pb.GetReplicationStatusRequest(topic=topic, remote=remote)
    response = session.ask(request)
    if session.is_json:
        print_json([as_dict(each) for each in response.topics])
    else:
        show_status(response.topics)


@command(app)
def recreate(
    session: AdminSession,
    topic: Annotated[str, typer.Argument(metavar="TOPIC", help="A topic, such as /default/orders.")],
    remote: Annotated[str, typer.Option("--remote", metavar="NAME", help="Where it was deleted.")],
) -> None:
    """Replicate TOPIC to a remote again where it was deleted, or continue where messages were lost before
    they were copied. It is created there if replication may do that."""
    request = pb.RecreateRemoteTopicRequest(topic=topic, remote=remote)
    session.answer(session.ask(request), f"topic {topic} is replicated to {remote} again")


def _start(text: str) -> str:
    """As a policy has it."""
    if text in ("earliest", "latest"):
        return text
    try:
        moment = parse_time(text)
    except typer.BadParameter:
        raise typer.BadParameter(f"--start {text!r}: give {START}") from None
    return str(position_message(moment).publish_time)


def _show_set(scope: str, response: pb.SetReplicationResponse) -> None:
    if response.remotes:
        show_differences({each.remote: each.differences for each in response.remotes})
    if response.is_set:
        print_line(f"the policy of {scope} is set")


def _show_policy(scope: str, response: pb.GetReplicationResponse) -> None:
    policy = response.policy
    start = policy.start if not policy.start.isdecimal() else instant(int(policy.start))
    print_line(f"{scope}, as set for {response.from_scope}")
    print_fields(
        {
            "remotes": ", ".join(policy.remotes) or "none: it is not replicated",
            "start": start,
            "forward": "yes" if policy.forward else "no",
            "subscriptions": ", ".join(policy.subscriptions),
        }
    )


# -- sava replication verify -------------------------------------------------------
UNREACHABLE = "unreachable"


class NotReplicated(CallerError):
    def __init__(self, topic: str, remote: str) -> None:
        super().__init__(
            f"topic {topic} is not replicated to {remote}, or nothing of it was copied yet; "
            f"`sava replication status {topic}` tells more"
        )


class ReplicaDiffers(CallerError):
    """Messages at the remote are not what they are here."""


@command(app)
def verify(
    session: AdminSession,
    topic: Annotated[str, typer.Argument(metavar="TOPIC", help="A topic, such as /default/orders.")],
    remote: Annotated[str, typer.Option("--remote", metavar="NAME", help="Where the replica is.")],
    since: Annotated[
        str, typer.Option("--since", metavar="TIME", help="Only what was published at or after this time.")
    ] = "",
    master: Annotated[str, typer.Option("--master", metavar="URL", help="Spark's master.")] = DEFAULT_MASTER,
) -> None:
    """Compare what was copied of TOPIC to a remote with what is there, by content, with Spark. Exit code 1 if
    anything is missing, different, repeated, out of order or too much."""
    spark_home()  # a user without Spark sees this error, not which of the imports below fails first
    from sava.pipeline.launch import open_session
    from sava.pipeline.replicate.verify import verify as compare

    link, status, service = session.run(lambda client: ask(client, topic, remote))
    question = question_of(topic, remote, link, status, service, since)
    spark = open_session("sava replication verify", master)
    try:
        verdicts = compare(spark, question)
    finally:
        spark.stop()
    if session.is_json:
        print_json(msgspec.to_builtins(verdicts))
    else:
        _show(verdicts)
    if wrong := [verdict.partition for verdict in verdicts if not verdict.is_equal]:
        numbers = ", ".join(map(str, wrong))
        raise ReplicaDiffers(f"topic {topic} at {remote} is not what it is here: partition {numbers}")


async def ask(client: AdminClient, topic: str, remote: str) -> tuple[pb.Link, Any, str]:
    """The link first: what is reported as copied after that is there."""
    link = await client.ask(pb.GetLinkRequest(remote=remote))
    request = pb.GetReplicationStatusRequest(topic=topic, remote=remote)
    status, brokers = await asyncio.gather(
        client.ask(request),
        client.call(client.brokers.ListBrokers, brokers_pb2.ListBrokersRequest()),
    )
    service = ",".join(each.client_addr for each in brokers.brokers if each.status != UNREACHABLE)
    return link, status, service


def question_of(
    topic: str, remote: str, link: pb.Link, status: pb.ReplicationStatus, service: str, since: str
) -> VerifyRequest:
    """What to compare: from where the copy of each partition begins up to what is reported as copied."""
    from sava.pipeline.replicate.verify import VerifyRequest, VerifySide

    known = next((each for each in link.topics if each.topic == topic), None)
    if known is None or not status.topics:
        raise NotReplicated(topic, remote)
    source = _access_here(service)
    begins = dict(enumerate(status.topics[0].begins))
    ranges = {
        each.partition: (begins.get(each.partition, 0), each.position)
        for each in status.topics[0].partitions
        if each.partition < len(known.remote_topic_ids) and known.remote_topic_ids[each.partition]
    }
    if not ranges:
        raise NotReplicated(topic, remote)
    question = VerifyRequest(
        topic=topic,
        partitioned=known.partition_count > 0,
        source=VerifySide(
            access=source,
            cluster_name=link.cluster_name,
            cluster_id=link.cluster_id,
            topic_ids=tuple(known.topic_ids),
        ),
        target=VerifySide(
            access=_access_there(link.remote),
            cluster_name=link.remote.cluster_name,
            cluster_id=link.remote.cluster_id,
            topic_ids=tuple(known.remote_topic_ids),
        ),
        ranges=ranges,
        forward=known.policy.forward,
    )
    return msgspec.structs.replace(question, ranges=_since(question, since)) if since else question


def _since(question: VerifyRequest, since: str) -> dict[int, tuple[int, int]]:
    from sava.pipeline.cluster import ClusterClient

    moment = position_message(parse_time(since)).publish_time
    link = ClusterClient.of(question.source.access)
    return {
        partition: (max(begin, link.offset_at(question.name(partition), moment)), end)
        for partition, (begin, end) in question.ranges.items()
    }


def _access_here(service: str) -> ClusterAccess:
    from sava.pipeline.cluster import ClusterAccess

    return ClusterAccess.by_files(service, tls_from_environment())


def _access_there(remote: pb.Remote) -> ClusterAccess:
    from sava.pipeline.cluster import ClusterAccess

    return ClusterAccess(
        remote.service, token=remote.token, ca=remote.tls_ca, cert=remote.tls_cert, key=remote.tls_key
    )


_VERDICT: Final = (*("compared", "missing", "different", "repeated", "extra", "out_of_order", "expired"),)


def _show(verdicts: list[PartitionVerdict]) -> None:
    print_rows(
        verdicts,
        "partition",
        offsets=lambda each: f"{each.start}..{each.end}",
        **{name: name for name in _VERDICT},
    )
    for line in _examples(verdicts):
        print_line(line)


def _examples(verdicts: list[PartitionVerdict]) -> Iterator[str]:
    for verdict in verdicts:
        for found in verdict.examples:
            what = found.what.replace("_", " ")
            yield f"partition {verdict.partition}: {what}: offset {found.offset} of {found.cluster}"


# -- tables ------------------------------------------------------------------------


def show_differences(found: Mapping[str, Iterable[pb.Difference]]) -> None:
    rows = [
        (remote, each.topic or "-", each.what, each.local or "-", each.remote or "-", each.consequence)
        for remote, differences in found.items()
        for each in differences
    ]
    if rows:
        print_table(("REMOTE", "TOPIC", "DIFFERS_IN", "HERE", "THERE", "CONSEQUENCE"), rows)
    else:
        print_line("no differences")


def show_status(topics: Iterable[pb.LinkTopic]) -> None:
    """All but the reason fits a terminal of 120 columns."""
    now_ms = time.time_ns() // 1_000_000
    print_table(
        (
            *("TOPIC", "REMOTE", "PART", "STATE", "POSITION", "END", "BACKLOG", "SECONDS"),
            *("RATE", "BYTES/S", "RESTARTS", "DISCONNECTED", "REASON"),
        ),
        [
            (
                *(topic.topic, topic.remote, each.partition if topic.partition_count else "-", each.state),
                *(each.position, each.end),
                *(_known(each.backlog, "d"), _known(each.backlog_seconds, ".1f")),
                *(f"{each.rate:.1f}", _short(each.bytes_rate), each.restarts),
                f"{topic.disconnected_count} of {len(topic.partitions)}",
                _reason(each, now_ms),
            )
            for topic in topics
            for each in topic.partitions
        ],
    )


def _reason(partition: pb.LinkPartition, now_ms: int) -> str:
    wait_ms = partition.next_retry_ms - now_ms
    retry = f" (next try in {math.ceil(wait_ms / 1000)} s)" if wait_ms > 0 else ""
    return f"{partition.reason}{retry}".strip() or "-"


def _short(size: float) -> str:
    for unit in ("", "k", "M"):
        if size < 1000:
            return f"{size:.1f}{unit}" if unit else f"{size:.0f}"
        size /= 1000
    return f"{size:.1f}G"


def _known(value: float, form: str) -> str:
    return "?" if value < 0 else format(value, form)


# -- sava remotes ------------------------------------------------------------------


remotes_app = typer.Typer(no_args_is_help=True)


Name = Annotated[str, typer.Argument(metavar="NAME", help="What the remote is called here, such as west.")]
FILE = "PEM file on the machines of all brokers and runners"


class RemoteSilent(RetryableError):
    """A remote that was tested did not answer, or not as it should."""


class RemoteDiffers(CallerError):
    """A remote that was tested has not what policies need of it."""


@command(remotes_app)
def add(
    session: AdminSession,
    name: Name,
    service: Annotated[
        str,
        typer.Option("--service", metavar="ADDRESSES", help="Client addresses, with commas between."),
    ],
    token: Annotated[
        str,
        typer.Option("--token", envvar="SAVA_REMOTE_TOKEN", help="Sent with every call to the remote."),
    ] = "",
    tls_ca: Annotated[str, typer.Option("--tls-ca", help=f"Whose signature the remote has: a {FILE}.")] = "",
    tls_cert: Annotated[str, typer.Option("--tls-cert", help=f"Shown to the remote: a {FILE}.")] = "",
    tls_key: Annotated[str, typer.Option("--tls-key", help=f"Of --tls-cert: a {FILE}.")] = "",
    max_rate: Annotated[
        int, typer.Option("--max-rate", min=0, help="Messages a second, of all topics together; 0: no limit.")
    ] = 0,
) -> None:
    """Add the cluster at ADDRESSES as remote NAME, or give a remote new addresses and all that goes with
    them. It must answer, and have another cluster_name."""
    request = pb.Remote(
        name=name,
        service=service,
        token=token,
        tls_ca=tls_ca,
        tls_cert=tls_cert,
        tls_key=tls_key,
        max_rate=max_rate,
    )
    response = session.ask(request, "AddRemote", timeout=ASK_TIMEOUT_S)
    session.answer(
        response.remote,
        f"remote {name} is cluster {response.remote.cluster_name} (id {response.remote.cluster_id})",
    )


@command(remotes_app, "list")
def list_(session: AdminSession) -> None:
    """List the remotes. Tokens are not shown."""
    response = session.ask(pb.ListRemotesRequest())
    session.show_list(
        response.remotes,
        *("name", "service"),
        cluster="cluster_name",
        cluster_id="cluster_id",
        tls=lambda each: "yes" if each.tls_ca or each.tls_cert or "https://" in each.service else "-",
        max_rate=lambda each: each.max_rate or "any",
    )


@command(remotes_app, "test")
def try_(session: AdminSession, name: Name) -> None:
    """Ask remote NAME who it is, and show what policies miss there."""
    response = session.ask(pb.TestRemoteRequest(name=name), timeout=ASK_TIMEOUT_S)
    if session.is_json:
        print_json(as_dict(response))
    elif response.is_reachable:
        print_line(
            f"remote {name} is cluster {response.cluster_name} (id {response.cluster_id}), "
            f"answered in {response.round_trip_ms:.0f} ms"
        )
        show_differences({name: response.differences})
    if not response.is_reachable:
        raise RemoteSilent(f"remote {name}: {response.error}")
    if blocking := [each for each in response.differences if each.blocks]:
        raise RemoteDiffers(
            f"remote {name}: messages are not copied because of differences in "
            f"{', '.join(dict.fromkeys(each.topic or each.what for each in blocking))}"
        )


@command(remotes_app)
def remove(session: AdminSession, name: Name) -> None:
    """Remove remote NAME and the state of topics there. Refused while a policy names it."""
    session.answer(session.ask(pb.RemoveRemoteRequest(name=name)), f"remote {name} removed")
