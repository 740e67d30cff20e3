"""Checks: how a remote differs from what a policy needs, before the policy is accepted.

Each difference says what replication will do about it, by the same table that it will do it by (``matrix``).
A difference that would keep messages from being copied *blocks*: the policy is refused, unless somebody says
that it is meant so. A topic that is merely not there yet does not; it is created, or waited for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from sava.replication import matrix
from sava.replication.errors import RemoteDenied, RemoteRefused, RemoteUnreachable
from sava.replication.matrix import Here, KnownThere, Settings, TopicRelation
from sava.replication.records import RemoteRecord
from sava.replication.remotes import ClusterIdentity, Remotes, Shape

PROBE: Final = "replication-check"
"""The topic by which a namespace without topics is asked about; nobody minds whether it exists."""
PAGE: Final = 500
"""Topics in one question."""


class Difference(NamedTuple):
    topic: str
    """Or the namespace, or nothing: it is about the remote as a whole."""
    what: str
    """unreachable, cluster, permission, namespace, missing, deleted, kind, partitions, schema"""
    local: str
    remote: str
    consequence: str
    blocks: bool


class LocalTopic(NamedTuple):
    here: Here
    schema_subject: str = ""


async def compare(
    remotes: Remotes,
    name: str,
    record: RemoteRecord,
    topics: Sequence[LocalTopic],
    namespaces: Sequence[str],
    settings: Settings,
    known: Mapping[str, KnownThere],
) -> list[Difference]:
    """Everything in which the remote differs; empty: nothing keeps replication from copying all of it.
    ``known``: what is remembered of topics there."""
    try:
        identity = (await remotes.ask(record)).identity
        shapes = await _describe(remotes, name, record, topics, namespaces)
    except RemoteDenied as error:
        return [_of_remote(name, "permission", f"{error}; nothing is copied until it is allowed")]
    except (RemoteUnreachable, RemoteRefused) as error:
        return [_of_remote(name, "unreachable", f"{error}; nothing is copied until it answers")]
    found = identity_differences(name, record, identity)
    for namespace in namespaces:
        if not _namespace_exists(namespace, shapes):
            create = (
                f"create it at {name} with `sava namespaces create {namespace}`; nothing is copied before"
            )
            found.append(Difference(namespace, "namespace", "exists", "missing", create, blocks=True))
    by_topic = {shape.topic: shape for shape in shapes}
    for local in topics:
        shape = by_topic[local.here.topic]
        if shape.there.namespace_exists:
            found += topic_differences(local, shape, settings, known.get(shape.topic, KnownThere()))
    return found


def identity_differences(name: str, record: RemoteRecord, identity: ClusterIdentity) -> list[Difference]:
    """Since it was added."""
    anew = f"nothing is copied until it is removed and added again: `sava remotes remove {name}`"
    pairs = ((record.cluster_id, identity.cluster_id), (record.cluster_name, identity.cluster_name))
    return [
        Difference("", "cluster", f"added as {known}", f"now {answered}", anew, blocks=True)
        for known, answered in pairs
        if known != answered
    ]


async def _describe(
    remotes: Remotes, name: str, record: RemoteRecord, topics: Sequence[LocalTopic], namespaces: Sequence[str]
) -> list[Shape]:
    asked = [local.here.topic for local in topics]
    asked += [f"/{namespace}/{PROBE}" for namespace in namespaces]
    found: list[Shape] = []
    for start in range(0, len(asked), PAGE):
        found += await remotes.calls.describe(name, record, asked[start : start + PAGE])
    return found


def _namespace_exists(namespace: str, shapes: Sequence[Shape]) -> bool:
    return all(shape.there.namespace_exists for shape in shapes if shape.topic.startswith(f"/{namespace}/"))


def topic_differences(
    local: LocalTopic, shape: Shape, settings: Settings, known: KnownThere
) -> list[Difference]:
    """Of one topic, whose namespace is there."""
    here, there = local.here, shape.there
    relation = matrix.relate(here, there, settings, known)
    verdict = matrix.decide(here, there, settings, known)
    blocks = bool(verdict.disconnected)
    counts = matrix.spread(here.partitions), matrix.spread(there.partitions)
    found = []
    match relation:
        case TopicRelation.SAME:
            pass
        case TopicRelation.ABSENT:
            plan = f"it will be created at {there.remote} with {counts[0]}"
            found.append(Difference(here.topic, "missing", counts[0], "none", plan, blocks=False))
        case TopicRelation.AWAITED:
            found.append(Difference(here.topic, "missing", counts[0], "none", verdict.reason, blocks=False))
        case TopicRelation.DELETED:
            other = "another topic" if there.exists else "none"
            found.append(Difference(here.topic, "deleted", counts[0], other, verdict.reason, blocks))
        case TopicRelation.GROWN:
            plan = f"partitions will be added at {there.remote}, as they were here"
            found.append(Difference(here.topic, "partitions", *counts, plan, blocks))
        case TopicRelation.OTHER_KIND:
            kinds = matrix.kind(here.reliable), matrix.kind(there.reliable)
            found.append(Difference(here.topic, "kind", kinds[0], kinds[1], verdict.reason, blocks))
        case _:
            surplus = f"all are copied; at {there.remote} partitions from {here.partitions} on get nothing"
            why = verdict.reason or surplus
            found.append(Difference(here.topic, "partitions", counts[0], counts[1], why, blocks))
    if there.exists and local.schema_subject != shape.schema_subject:
        found.append(_schema_difference(local, shape))
    return found


def _schema_difference(local: LocalTopic, shape: Shape) -> Difference:
    here, there, remote = local.schema_subject, shape.schema_subject, shape.there.remote
    consequence = f"the schemas are registered at {remote}; the topic there does not check them"
    if there:
        consequence = f"{remote} may refuse messages; nothing is copied beyond the first that it refuses"
    return Difference(
        local.here.topic, "schema", here or "none", there or "none", consequence, blocks=bool(here and there)
    )


def _of_remote(name: str, what: str, consequence: str) -> Difference:
    return Difference("", what, "", name, consequence, blocks=True)
