"""``sava replication verify``: compare a replica with its source, message by message."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from sava.api.admin_client import AdminClient
from sava.cli import positions
from sava.cli.connection import DEFAULT_ADMIN, AdminOption, auth_from_environment, run
from sava.cli.output import Format, print_json, print_line, print_table
from sava.errors import CallerError
from sava.pipeline.launch import DEFAULT_MASTER, spark_home
from sava.proto import brokers_pb2
from sava.proto import replication_pb2 as pb

if TYPE_CHECKING:
    from sava.pipeline.cluster import ClusterAccess
    from sava.pipeline.replicate.verify import PartitionVerdict, VerifyRequest

UNREACHABLE = "unreachable"


class NotReplicated(CallerError):
    def __init__(self, topic: str, remote: str) -> None:
        super().__init__(
            f"topic {topic} is not replicated to {remote}, or nothing of it was copied yet; "
            f"`sava replication status {topic}` tells more"
        )


class ReplicaDiffers(CallerError):
    """Messages at the remote are not what they are here."""


def verify(
    topic: Annotated[str, typer.Argument(metavar="TOPIC", help="A topic, such as /default/orders.")],
    remote: Annotated[str, typer.Option("--remote", metavar="NAME", help="Where the replica is.")],
    since: Annotated[
        str, typer.Option("--since", metavar="TIME", help="Only what was published at or after this time.")
    ] = "",
    master: Annotated[str, typer.Option("--master", metavar="URL", help="Spark's master.")] = DEFAULT_MASTER,
    output: Annotated[Format, typer.Option("--output", "-o", help="json or table.")] = Format.TABLE,
    admin: AdminOption = DEFAULT_ADMIN,
) -> None:
    """Compare what was copied of TOPIC to a remote with what is there, by content, with Spark. Exit code 1 if
    anything is missing, different, repeated, out of order or too much."""
    spark_home()  # whoever has no Spark is told so, and not which of the imports below fails first
    from sava.pipeline.launch import open_session
    from sava.pipeline.replicate.verify import verify as compare

    link, status, service = run(admin, lambda client: ask(client, topic, remote))
    question = question_of(topic, remote, link, status, service, since)
    spark = open_session("sava replication verify", master)
    try:
        verdicts = compare(spark, question)
    finally:
        spark.stop()
    if output is Format.JSON:
        print_json(msgspec.to_builtins(verdicts))
    else:
        _show(verdicts)
    if wrong := [verdict.partition for verdict in verdicts if not verdict.is_equal]:
        numbers = ", ".join(map(str, wrong))
        raise ReplicaDiffers(f"topic {topic} at {remote} is not what it is here: partition {numbers}")


async def ask(client: AdminClient, topic: str, remote: str) -> tuple[pb.Link, Any, str]:
    """The link first: what is reported as copied after that is there."""
    link = await client.call(client.replication.GetLink, pb.GetLinkRequest(remote=remote))
    request = pb.GetReplicationStatusRequest(topic=topic, remote=remote)
    status, brokers = await asyncio.gather(
        client.call(client.replication.GetReplicationStatus, request),
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

    moment = positions.to_message(positions.parse_time(since)).publish_time
    link = ClusterClient.of(question.source.access)
    return {
        partition: (max(begin, link.offset_at(question.name(partition), moment)), end)
        for partition, (begin, end) in question.ranges.items()
    }


def _access_here(service: str) -> ClusterAccess:
    from sava.pipeline.cluster import ClusterAccess

    tls = auth_from_environment().tls
    if tls is None:
        return ClusterAccess(service)
    return ClusterAccess(service, ca=str(tls.ca_file or ""), cert=str(tls.cert_file), key=str(tls.key_file))


def _access_there(remote: pb.Remote) -> ClusterAccess:
    from sava.pipeline.cluster import ClusterAccess

    return ClusterAccess(
        remote.service, token=remote.token, ca=remote.tls_ca, cert=remote.tls_cert, key=remote.tls_key
    )


def _show(verdicts: list[PartitionVerdict]) -> None:
    print_table(
        (
            *("PARTITION", "OFFSETS", "COMPARED", "MISSING", "DIFFERENT"),
            *("REPEATED", "EXTRA", "OUT_OF_ORDER", "EXPIRED"),
        ),
        [
            (
                *(each.partition, f"{each.start}..{each.end}", each.compared, each.missing, each.different),
                *(each.repeated, each.extra, each.out_of_order, each.expired),
            )
            for each in verdicts
        ],
    )
    for line in _examples(verdicts):
        print_line(line)


def _examples(verdicts: list[PartitionVerdict]) -> Iterator[str]:
    for verdict in verdicts:
        for found in verdict.examples:
            what = found.what.replace("_", " ")
            yield f"partition {verdict.partition}: {what}: offset {found.offset} of {found.cluster}"
