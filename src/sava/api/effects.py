"""Which calls of the admin port change something, and how to learn afterwards whether one did.

The answer to a call can get lost on its way: the deadline passes, or the connection breaks after the request
has gone out. A lost answer to a read means that nothing was learned, and the read can be repeated. After a
lost answer to a change, the change may have been made. So a client has to know the one kind from the other,
and what to read in order to find out. A method that stands in neither table is taken for a change: a new call
that somebody forgets to list here is at worst called unknown when it only read.
"""

from __future__ import annotations

from typing import Any, Final

_SERVICES: Final = {
    "/sava.admin.Cluster/": ("Status",),
    "/sava.admin.Meta/": ("Get", "Range", "Watch"),
    "/sava.admin.Brokers/": ("ListBrokers", "GetBalance"),
    "/sava.admin.Namespaces/": ("ListNamespaces", "DescribeNamespace"),
    "/sava.admin.Topics/": ("ListTopics", "DescribeTopic"),
    "/sava.admin.Subscriptions/": ("DescribeSubscription",),
    "/sava.admin.Journals/": ("ListJournals", "DescribeJournal"),
    "/sava.admin.Doctor/": ("Examine",),
    "/sava.admin.Pipelines/": ("ListPipelines", "ListRunners"),
    "/sava.admin.Replication/": (
        *("ListRemotes", "TestRemote", "GetReplication", "GetReplicationStatus", "GetLink"),
    ),
    "/sava.writers.Writers/": ("Staging", "ListWriters"),
    "/danube_schema.SchemaRegistry/": (
        *("GetSchema", "GetLatestSchema", "ListVersions", "CheckCompatibility"),
        *("GetTopicSchemaConfig", "ListSubjects"),
    ),
}
READS: Final = frozenset(service + method for service, methods in _SERVICES.items() for method in methods)
"""Calls that change nothing."""

_STATUS: Final = "sava cluster status"
_LEASES: Final = "sava meta range /"
_RUNNERS: Final = "sava pipelines runners"
_PIPELINE: Final = "sava pipelines describe {0.name}"
_TOPIC: Final = "sava topics describe {0.name}"
_SUBSCRIPTION: Final = "sava subscriptions describe {0.topic} {0.subscription}"
_NAMESPACE: Final = "sava namespaces describe {0.namespace}"
_SCHEMA_TOPIC: Final = "sava schemas topic {0.topic_name}"

CHANGES: Final[dict[str, str]] = {
    "/sava.admin.Cluster/Init": _STATUS,
    "/sava.admin.Cluster/AddNode": _STATUS,
    "/sava.admin.Cluster/PromoteNode": _STATUS,
    "/sava.admin.Cluster/RemoveNode": _STATUS,
    "/sava.admin.Cluster/TransferLeader": _STATUS,
    "/sava.admin.Cluster/Snapshot": _STATUS,
    "/sava.admin.Meta/Put": "sava meta get {0.key}",
    "/sava.admin.Meta/Delete": "sava meta range {0.key}",
    "/sava.admin.Meta/Txn": "sava meta range /",
    "/sava.admin.Meta/AllocateId": "sava meta get {0.key}",
    "/sava.admin.Meta/GrantLease": _LEASES,
    "/sava.admin.Meta/KeepAlive": _LEASES,
    "/sava.admin.Meta/RevokeLease": _LEASES,
    "/sava.admin.Brokers/DrainBroker": "sava brokers list",
    "/sava.admin.Brokers/ActivateBroker": "sava brokers list",
    "/sava.admin.Brokers/Rebalance": "sava brokers balance",
    "/sava.admin.Brokers/ReportLoad": "sava brokers balance",
    "/sava.admin.Brokers/PrepareMove": "sava topics describe {0.topic}",
    "/sava.admin.Namespaces/CreateNamespace": _NAMESPACE,
    "/sava.admin.Namespaces/SetNamespacePolicy": _NAMESPACE,
    "/sava.admin.Namespaces/DeleteNamespace": _NAMESPACE,
    "/sava.admin.Topics/CreateTopic": _TOPIC,
    "/sava.admin.Topics/DeleteTopic": _TOPIC,
    "/sava.admin.Topics/GrowTopic": _TOPIC,
    "/sava.admin.Topics/SetTopicPolicy": _TOPIC,
    "/sava.admin.Topics/UnloadTopic": _TOPIC,
    "/sava.admin.Subscriptions/CreateSubscription": _SUBSCRIPTION,
    "/sava.admin.Subscriptions/DeleteSubscription": _SUBSCRIPTION,
    "/sava.admin.Subscriptions/SeekSubscription": _SUBSCRIPTION,
    "/sava.admin.Subscriptions/ConfigureSubscription": _SUBSCRIPTION,
    "/sava.admin.Journals/RecoverJournal": "sava journals describe {0.broker_id}/{0.incarnation}",
    "/sava.admin.Pipelines/ApplyPipeline": "sava pipelines describe {0.spec.name}",
    "/sava.admin.Pipelines/PausePipeline": _PIPELINE,
    "/sava.admin.Pipelines/ResumePipeline": _PIPELINE,
    "/sava.admin.Pipelines/DeletePipeline": _PIPELINE,
    "/sava.admin.Pipelines/JoinRunner": _RUNNERS,
    "/sava.admin.Pipelines/LeaveRunner": _RUNNERS,
    "/sava.admin.Pipelines/ClaimPipeline": _PIPELINE,
    "/sava.admin.Pipelines/ReportPipeline": _PIPELINE,
    "/sava.admin.Pipelines/ReleasePipeline": _PIPELINE,
    "/sava.admin.Replication/AddRemote": "sava remotes list",
    "/sava.admin.Replication/RemoveRemote": "sava remotes list",
    "/sava.admin.Replication/SetReplication": "sava replication get {0.scope}",
    "/sava.admin.Replication/ClearReplication": "sava replication get {0.scope}",
    "/sava.admin.Replication/ReportLink": "sava replication status",
    "/sava.admin.Replication/RecreateRemoteTopic": "sava replication status {0.topic}",
    "/sava.writers.Writers/Commit": "sava writers list",
    "/sava.writers.Writers/PublishStaged": "sava writers list",
    "/sava.writers.Writers/ForgetWriter": "sava writers list",
    "/danube_schema.SchemaRegistry/RegisterSchema": "sava schemas versions {0.subject}",
    "/danube_schema.SchemaRegistry/DeleteSchemaVersion": "sava schemas versions {0.subject}",
    "/danube_schema.SchemaRegistry/SetCompatibilityMode": "sava schemas mode {0.subject}",
    "/danube_schema.SchemaRegistry/ConfigureTopicSchema": _SCHEMA_TOPIC,
    "/danube_schema.SchemaRegistry/UpdateTopicValidationPolicy": _SCHEMA_TOPIC,
}
"""Calls that change something: the command that shows whether one did, with fields of its request."""


def check_of(method: str, request: Any) -> str | None:
    """The command that shows whether the call took effect. None: it changes nothing."""
    if method in READS or getattr(request, "dry_run", False):
        return None
    if method.endswith("/RecoverJournal") and not request.HasField("accepted"):
        return None  # it only says what would be lost
    return CHANGES.get(method, "sava doctor").format(request)
