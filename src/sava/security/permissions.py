"""What callers may do: permissions, roles, the one table of calls, and the Authorizer that decides.

A call needs permissions on resources. A *resource* is the cluster, a namespace, or a topic; a partition is
its topic. A *role* is a set of permissions, and a *binding* gives a principal a role at the cluster, in a
namespace, or for a topic, whose name may end in ``*``. A binding of the cluster covers everything, one of a
namespace all topics of it. What no binding allows is denied. ``super_admins`` of the configuration may do
everything; they make the first bindings.

``TABLE`` has a row for every call of every service, and is all that decides what a call needs: a method
without a row is denied. A row says where the request names its resources; the guard (``sava.peers.guard``)
asks before the handler begins. Three things a request cannot show, and the handler asks then
(``sava.security.calls``): which entries of a list the caller may see, which topic a producer or a consumer is
of that is named by a number alone, and whether a session is the caller's.

Two rules beside the bindings:

* A topic of the namespace ``system`` needs ``cluster-admin`` at the cluster, whatever the call is: the
  brokers' own records, such as ``/system/audit``, are in it. No principal publishes there, or creates topics,
  not even a super admin: what is in a record must be what a broker wrote.
* A subject of the schema registry is in the namespace that its name begins with, up to the first dot:
  ``sales.orders`` is in ``sales``. One without a dot belongs to the cluster. Schemas are read by each caller
  who may look up anything: a message carries no more than the number of its schema.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache
from operator import attrgetter
from typing import Any, Final, NamedTuple

from sava.errors import CallerError
from sava.security.principal import Principal

SYSTEM: Final = "system"
"""The namespace of the brokers' own topics."""
MAX_DECISIONS: Final = 4096
"""Of one principal that are remembered."""


class Permission(StrEnum):
    LOOKUP = "lookup"
    """See that a topic exists, where it is served, and how it is set up."""
    PRODUCE = "produce"
    """Publish; and create the topic on the way, where the cluster creates topics by itself."""
    CONSUME = "consume"
    """Receive by a subscription, and create, move and delete subscriptions."""
    READ = "read"
    """Read a topic without a subscription, and its segments in the object store."""
    MANAGE_TOPIC = "manage-topic"
    """Create, change, move and delete topics and subscriptions."""
    MANAGE_NAMESPACE = "manage-namespace"
    MANAGE_SCHEMA = "manage-schema"
    REPLICATE = "replicate"
    """Write what other clusters have, with their positions; and run links to them."""
    PIPELINES = "pipelines"
    """Define pipelines."""
    RUN_PIPELINES = "run-pipelines"
    """Run pipelines, for those who have defined them. It is a permission of its own: who may claim any
    pipeline acts for its creator."""
    CLUSTER_READ = "cluster-read"
    """See brokers, ledgers, roles, pipelines and figures."""
    CLUSTER_ADMIN = "cluster-admin"
    """Change who belongs to the cluster, and who may do what in it."""
    META = "meta"
    """The metadata store, key by key."""


P = Permission

ROLES: Final[Mapping[str, frozenset[Permission]]] = {
    "admin": frozenset(Permission),
    # Runs the cluster, and neither reads its messages nor grants rights.
    "operator": frozenset(Permission)
    - {P.PRODUCE, P.CONSUME, P.READ, P.RUN_PIPELINES, P.CLUSTER_ADMIN, P.META},
    "reader": frozenset((P.LOOKUP, P.READ)),
    "consumer": frozenset((P.LOOKUP, P.CONSUME)),
    "producer": frozenset((P.LOOKUP, P.PRODUCE)),
    "replicator": frozenset((P.LOOKUP, P.READ, P.REPLICATE)),
    "pipeline-runner": frozenset((P.LOOKUP, P.PRODUCE, P.CONSUME, P.READ, P.REPLICATE, P.RUN_PIPELINES)),
    "monitoring": frozenset((P.LOOKUP, P.CLUSTER_READ)),
}
"""Built in, and unchangeable."""


class PermissionDenied(CallerError):
    """The caller may not do this."""


class Unauthenticated(CallerError):
    """The caller shows neither a token nor a certificate, or one that is not accepted."""


# -- resources -------------------------------------------------------------------------------------


class GrantScope(StrEnum):
    CLUSTER = "cluster"
    NAMESPACE = "namespace"
    TOPIC = "topic"


class Resource(NamedTuple):
    scope: GrantScope
    name: str
    """Empty, ``sales``, or ``/sales/orders``."""

    def __str__(self) -> str:
        return f"{self.scope} {self.name}" if self.name else "the cluster"

    @property
    def namespace(self) -> str:
        """Empty for the cluster."""
        return self.name.split("/", 2)[1] if self.scope is GrantScope.TOPIC else self.name


CLUSTER: Final = Resource(GrantScope.CLUSTER, "")


def subject_resource(subject: str) -> Resource:
    """Where a subject of the schema registry belongs."""
    namespace, dot, _ = subject.partition(".")
    return Resource(GrantScope.NAMESPACE, namespace) if dot and namespace else CLUSTER


# -- the table -------------------------------------------------------------------------------------


class On(StrEnum):
    """What a permission is needed on, and so what the request's field holds."""

    CLUSTER = "cluster"
    NAMESPACE = "namespace"
    TOPIC = "topic"
    """One, or each of several."""
    SCOPE = "scope"
    """A namespace, or a topic if it begins with a slash."""
    SUBJECT = "subject"
    WITHIN = "within"
    """Anything in the namespace; the handler lists what the caller may see of it."""
    ANYWHERE = "anywhere"
    """Anything at all."""


class Need(NamedTuple):
    """A permission, or one of several, that a call needs."""

    any_of: tuple[Permission, ...]
    on: On
    field: str = ""
    """Where the request names it; ``sections.topic``: of each section."""
    when: str = ""
    """Only if this field of the request is set."""
    otherwise: On | None = None
    """What it is on if the field is empty; None: an empty name is a name like others. For a list, whatever
    the caller may see."""
    is_optional: bool = False
    """An empty field needs nothing."""

    def names(self, request: Any) -> tuple[str, ...]:
        """As the request gives them."""
        found: tuple[str, ...] = _reader(type(request).DESCRIPTOR, self.field)(request)
        return found


@cache
def _reader(descriptor: Any, path: str) -> Any:
    """A function that finds the texts at a path of field names."""
    name, _, rest = path.partition(".")
    repeated = descriptor.fields_by_name[name].is_repeated
    if not repeated and not rest:
        get = attrgetter(name)
        return lambda message: (get(message),)
    if not rest:
        return lambda message: tuple(getattr(message, name))
    inner = _reader(descriptor.fields_by_name[name].message_type, rest)
    if repeated:
        return lambda message: tuple(text for each in getattr(message, name) for text in inner(each))
    return lambda message: inner(getattr(message, name))


class CallAccess(StrEnum):
    OPEN = "open"
    """To every caller, also without a token."""
    LISTED = "listed"
    """To every caller who is known; the handler answers with what the caller may see."""
    SESSION = "session"
    """To the principal that opened the session which the request names by a number. The handler checks it."""
    CHECKED = "checked"
    BROKERS = "brokers"
    """To brokers of this cluster, with or without roles."""


@dataclass(frozen=True, slots=True)
class Row:
    """What a call needs."""

    needs: tuple[Need, ...] = ()
    """All of them."""
    access: CallAccess = CallAccess.CHECKED
    always_audited: bool = False
    """Otherwise only when it is denied."""


def _on(on: On, *any_of: Permission, field: str = "", **options: Any) -> Need:
    return Need(any_of, on, field, **options)


def _row(*needs: Need, audit: bool = False) -> Row:
    return Row(needs, always_audited=audit)


def _cluster(*any_of: Permission, audit: bool = False) -> Row:
    return _row(_on(On.CLUSTER, *any_of), audit=audit)


def _topic(*any_of: Permission, field: str = "topic", audit: bool = False) -> Row:
    return _row(_on(On.TOPIC, *any_of, field=field), audit=audit)


def _namespace(permission: Permission, *, field: str, audit: bool = False) -> Row:
    return _row(_on(On.NAMESPACE, permission, field=field), audit=audit)


def _listed(field: str, permission: Permission = P.LOOKUP) -> Row:
    """What the caller may see of one namespace; or of all of them if the field is empty."""
    return _row(_on(On.WITHIN, permission, field=field, is_optional=True))


OPEN: Final = Row(access=CallAccess.OPEN)
LISTED: Final = Row(access=CallAccess.LISTED)
SESSION: Final = Row(access=CallAccess.SESSION)
BROKERS: Final = Row(access=CallAccess.BROKERS)
_ANY_SCHEMA: Final = _row(_on(On.ANYWHERE, P.LOOKUP))
_DEAD_LETTERS: Final = _on(
    # What a subscription gives up is published there: a consumer must not write by it where it may not.
    *(On.TOPIC, P.PRODUCE, P.MANAGE_TOPIC),
    field="failure_policy.dead_letter_topic",
    is_optional=True,
)


def _written(field: str) -> Need:
    """A principal that manages topics may do it, but in the namespace ``system``."""
    return _on(On.TOPIC, P.MANAGE_TOPIC, P.PRODUCE, field=field)


_MADE: Final = (_on(On.TOPIC, P.MANAGE_TOPIC, field="name"), _written("name"))
_SUBSCRIPTION: Final = _topic(P.CONSUME, P.MANAGE_TOPIC, audit=True)

_SERVICES: Final[Mapping[str, Mapping[str, Row]]] = {
    "sava.streams.Streams": {
        "Publish": _topic(P.PRODUCE, field="open.topic"),
        "Subscribe": _topic(P.CONSUME, field="open.topic"),
        "Read": _topic(P.READ),
        "LookUp": _row(
            _on(On.TOPIC, P.LOOKUP, field="topic"),
            _on(On.TOPIC, P.PRODUCE, P.MANAGE_TOPIC, field="topic", when="create"),
        ),
        "Offsets": _topic(P.READ, P.CONSUME),
        "Segments": _topic(P.READ),
        "Schema": _ANY_SCHEMA,
        "ListTopics": _listed("namespace"),
        "Advance": _topic(P.CONSUME),
        "Append": BROKERS,
    },
    "sava.writers.Writers": {
        "Staging": _row(_on(On.ANYWHERE, P.PRODUCE)),
        "Commit": _topic(P.PRODUCE, field="sections.topic"),
        "PublishStaged": BROKERS,
        "ListWriters": _cluster(P.PRODUCE, P.CLUSTER_READ),
        "ForgetWriter": _cluster(P.MANAGE_TOPIC, audit=True),
    },
    "sava.replica.Replica": {
        "Hello": _row(_on(On.ANYWHERE, P.REPLICATE)),
        "DescribeTopics": _topic(P.REPLICATE, field="topics"),
        "EnsureTopic": _topic(P.REPLICATE, audit=True),
        "EnsureSchema": _row(
            _on(On.TOPIC, P.REPLICATE, field="topic", otherwise=On.CLUSTER),
            audit=True,
        ),
        "Append": _topic(P.REPLICATE, field="open.topic"),
        "AppendEach": _topic(P.REPLICATE, field="appends.open.topic"),
        "ApplyAcks": _topic(P.REPLICATE),
        "ReadAcks": _topic(P.REPLICATE),
        "ReadEach": _topic(P.READ, field="tails.topic"),
    },
    "sava.admin.Cluster": {
        "Init": _cluster(P.CLUSTER_ADMIN, audit=True),
        "Status": _cluster(P.CLUSTER_READ),
        "AddNode": _cluster(P.CLUSTER_ADMIN, audit=True),
        "PromoteNode": _cluster(P.CLUSTER_ADMIN, audit=True),
        "RemoveNode": _cluster(P.CLUSTER_ADMIN, audit=True),
        "TransferLeader": _cluster(P.CLUSTER_ADMIN, audit=True),
        "Snapshot": _cluster(P.CLUSTER_ADMIN, audit=True),
    },
    "sava.admin.Meta": {
        "Get": _cluster(P.META),
        "Range": _cluster(P.META),
        "Put": _cluster(P.META, audit=True),
        "Delete": _cluster(P.META, audit=True),
        "Txn": _cluster(P.META, audit=True),
        "AllocateId": _cluster(P.META, audit=True),
        "Watch": _cluster(P.META),
        "GrantLease": _cluster(P.META, audit=True),
        "KeepAlive": _cluster(P.META),
        "RevokeLease": _cluster(P.META, audit=True),
    },
    "sava.admin.Brokers": {
        # A runner finds the brokers that it calls.
        "ListBrokers": _cluster(P.CLUSTER_READ, P.RUN_PIPELINES),
        # They move topics, of all namespaces.
        "DrainBroker": _cluster(P.MANAGE_TOPIC, audit=True),
        "ActivateBroker": _cluster(P.MANAGE_TOPIC, audit=True),
        "GetBalance": _cluster(P.CLUSTER_READ),
        "GetHistory": _row(_on(On.TOPIC, P.LOOKUP, P.CLUSTER_READ, field="topic", otherwise=On.CLUSTER)),
        "Rebalance": _cluster(P.MANAGE_TOPIC, audit=True),
        "ReportLoad": BROKERS,
        "PrepareMove": BROKERS,
    },
    "sava.admin.Namespaces": {
        "CreateNamespace": _namespace(P.MANAGE_NAMESPACE, field="namespace", audit=True),
        "ListNamespaces": LISTED,
        "DescribeNamespace": _row(_on(On.WITHIN, P.LOOKUP, field="namespace")),
        "SetNamespacePolicy": _namespace(P.MANAGE_NAMESPACE, field="namespace", audit=True),
        "DeleteNamespace": _namespace(P.MANAGE_NAMESPACE, field="namespace", audit=True),
    },
    "sava.admin.Topics": {
        "CreateTopic": _row(*_MADE, audit=True),
        "ListTopics": _listed("namespace"),
        "DescribeTopic": _topic(P.LOOKUP, field="name"),
        "DeleteTopic": _topic(P.MANAGE_TOPIC, field="name", audit=True),
        "GrowTopic": _topic(P.MANAGE_TOPIC, field="name", audit=True),
        "SetTopicPolicy": _topic(P.MANAGE_TOPIC, field="name", audit=True),
        "UnloadTopic": _topic(P.MANAGE_TOPIC, field="name", audit=True),
    },
    "sava.admin.Subscriptions": {
        "CreateSubscription": _SUBSCRIPTION,
        "DescribeSubscription": _topic(P.LOOKUP),
        "DeleteSubscription": _SUBSCRIPTION,
        "SeekSubscription": _SUBSCRIPTION,
        "ConfigureSubscription": _row(*_SUBSCRIPTION.needs, _DEAD_LETTERS, audit=True),
    },
    "sava.admin.Ledgers": {
        "ListLedgers": _cluster(P.CLUSTER_READ),
        "DescribeLedger": _cluster(P.CLUSTER_READ),
        "RecoverLedger": _cluster(P.CLUSTER_ADMIN, audit=True),
    },
    "sava.admin.Doctor": {"Examine": _cluster(P.CLUSTER_READ)},
    "sava.admin.Pipelines": {
        "ApplyPipeline": _cluster(P.PIPELINES, audit=True),
        "ListPipelines": _cluster(P.PIPELINES, P.RUN_PIPELINES, P.CLUSTER_READ),
        "PausePipeline": _cluster(P.PIPELINES, audit=True),
        "ResumePipeline": _cluster(P.PIPELINES, audit=True),
        "DeletePipeline": _cluster(P.PIPELINES, audit=True),
        "ListRunners": _cluster(P.PIPELINES, P.CLUSTER_READ),
        "JoinRunner": _cluster(P.RUN_PIPELINES),
        "LeaveRunner": _cluster(P.RUN_PIPELINES),
        "ClaimPipeline": _cluster(P.RUN_PIPELINES, audit=True),
        "ReportPipeline": _cluster(P.RUN_PIPELINES),
        "ReleasePipeline": _cluster(P.RUN_PIPELINES),
    },
    "sava.admin.Replication": {
        "AddRemote": _cluster(P.REPLICATE, audit=True),
        "ListRemotes": _cluster(P.REPLICATE, P.CLUSTER_READ),
        "RemoveRemote": _cluster(P.REPLICATE, audit=True),
        "TestRemote": _cluster(P.REPLICATE, audit=True),
        # Not ``replicate`` alone: the token by which another cluster writes here must not send data away.
        "SetReplication": _row(
            _on(On.SCOPE, P.REPLICATE, field="scope"),
            _on(On.SCOPE, P.MANAGE_TOPIC, field="scope"),
            audit=True,
        ),
        "GetReplication": _row(_on(On.SCOPE, P.LOOKUP, field="scope")),
        "ClearReplication": _row(
            _on(On.SCOPE, P.REPLICATE, field="scope"),
            _on(On.SCOPE, P.MANAGE_TOPIC, field="scope"),
            audit=True,
        ),
        "GetReplicationStatus": _row(_on(On.TOPIC, P.LOOKUP, field="topic", otherwise=On.CLUSTER)),
        "GetLink": _cluster(P.REPLICATE),
        "ReportLink": _cluster(P.REPLICATE),
        "RecreateRemoteTopic": _row(
            _on(On.TOPIC, P.REPLICATE, field="topic"),
            _on(On.TOPIC, P.MANAGE_TOPIC, field="topic"),
            audit=True,
        ),
    },
    "sava.admin.Security": {
        "WhoAmI": OPEN,
        "CanI": OPEN,
        "ListRoles": _cluster(P.CLUSTER_READ),
        "SetRole": _cluster(P.CLUSTER_ADMIN, audit=True),
        "DeleteRole": _cluster(P.CLUSTER_ADMIN, audit=True),
        "ListBindings": _cluster(P.CLUSTER_READ),
        "CreateBinding": _cluster(P.CLUSTER_ADMIN, audit=True),
        "DeleteBinding": _cluster(P.CLUSTER_ADMIN, audit=True),
        "Revoke": _cluster(P.CLUSTER_ADMIN, audit=True),
        "ListRevocations": _cluster(P.CLUSTER_READ),
        "DeleteRevocation": _cluster(P.CLUSTER_ADMIN, audit=True),
        "ListQuotas": _cluster(P.CLUSTER_READ),
        "SetQuota": _cluster(P.CLUSTER_ADMIN, audit=True),
        "DeleteQuota": _cluster(P.CLUSTER_ADMIN, audit=True),
    },
    "danube.ProducerService": {
        "CreateProducer": _topic(P.PRODUCE, field="topic_name"),
        "SendMessage": SESSION,
    },
    "danube.ConsumerService": {
        "Subscribe": _topic(P.CONSUME, field="topic_name"),
        "ReceiveMessages": SESSION,
        "Ack": _topic(P.CONSUME, field="msg_id.topic_name"),
        "Nack": _topic(P.CONSUME, field="msg_id.topic_name"),
    },
    "danube.Discovery": {
        "TopicLookup": _topic(P.LOOKUP),
        "TopicPartitions": _topic(P.LOOKUP),
    },
    "danube.HealthCheck": {"HealthCheck": OPEN},
    "danube.StorageService": {"ListSegmentDescriptors": _topic(P.READ, P.CONSUME)},
    "danube_schema.SchemaRegistry": {
        "RegisterSchema": _row(_on(On.SUBJECT, P.MANAGE_SCHEMA, field="subject"), audit=True),
        "GetSchema": _ANY_SCHEMA,
        "GetLatestSchema": _ANY_SCHEMA,
        "ListVersions": _ANY_SCHEMA,
        "CheckCompatibility": _ANY_SCHEMA,
        "DeleteSchemaVersion": _row(_on(On.SUBJECT, P.MANAGE_SCHEMA, field="subject"), audit=True),
        "SetCompatibilityMode": _row(_on(On.SUBJECT, P.MANAGE_SCHEMA, field="subject"), audit=True),
        "ConfigureTopicSchema": _topic(P.MANAGE_TOPIC, P.MANAGE_SCHEMA, field="topic_name", audit=True),
        "UpdateTopicValidationPolicy": _topic(
            *(P.MANAGE_TOPIC, P.MANAGE_SCHEMA), field="topic_name", audit=True
        ),
        "GetTopicSchemaConfig": _topic(P.LOOKUP, field="topic_name"),
        "ListSubjects": LISTED,
    },
    "danube_admin.BrokerAdmin": {
        "ListBrokers": _cluster(P.CLUSTER_READ),
        "GetLeaderBroker": _cluster(P.CLUSTER_READ),
        "ListNamespaces": LISTED,
        "UnloadBroker": _cluster(P.MANAGE_TOPIC, audit=True),
        "ActivateBroker": _cluster(P.MANAGE_TOPIC, audit=True),
        "GetClusterBalance": _cluster(P.CLUSTER_READ),
        "TriggerRebalance": _cluster(P.MANAGE_TOPIC, audit=True),
    },
    "danube_admin.ClusterAdmin": {
        "ClusterStatus": _cluster(P.CLUSTER_READ),
        "AddNode": _cluster(P.CLUSTER_ADMIN, audit=True),
        "PromoteNode": _cluster(P.CLUSTER_ADMIN, audit=True),
        "RemoveNode": _cluster(P.CLUSTER_ADMIN, audit=True),
    },
    "danube_admin.NamespaceAdmin": {
        "GetNamespaceTopics": _row(_on(On.WITHIN, P.LOOKUP, field="name")),
        "GetNamespacePolicies": _row(_on(On.WITHIN, P.LOOKUP, field="name")),
        "CreateNamespace": _namespace(P.MANAGE_NAMESPACE, field="name", audit=True),
        "DeleteNamespace": _namespace(P.MANAGE_NAMESPACE, field="name", audit=True),
    },
    "danube_admin.TopicAdmin": {
        "ListNamespaceTopics": _row(_on(On.WITHIN, P.LOOKUP, field="name")),
        "ListBrokerTopics": LISTED,
        "CreateTopic": _row(*_MADE, audit=True),
        "CreatePartitionedTopic": _row(
            _on(On.TOPIC, P.MANAGE_TOPIC, field="base_name"), _written("base_name"), audit=True
        ),
        "DeleteTopic": _topic(P.MANAGE_TOPIC, field="name", audit=True),
        "UnloadTopic": _topic(P.MANAGE_TOPIC, field="name", audit=True),
        "ListSubscriptions": _topic(P.LOOKUP, field="name"),
        "Unsubscribe": _SUBSCRIPTION,
        "SetSubscriptionFailurePolicy": _row(*_SUBSCRIPTION.needs, _DEAD_LETTERS, audit=True),
        "GetSubscriptionFailurePolicy": _topic(P.LOOKUP),
        "DescribeTopic": _topic(P.LOOKUP, field="name"),
        "SetSubscriptionDispatchConfig": _SUBSCRIPTION,
        "GetSubscriptionDispatchConfig": _topic(P.LOOKUP),
    },
    "danube_admin.SecurityAdmin": {
        "CreateRole": _cluster(P.CLUSTER_ADMIN, audit=True),
        "GetRole": _cluster(P.CLUSTER_READ),
        "ListRoles": _cluster(P.CLUSTER_READ),
        "DeleteRole": _cluster(P.CLUSTER_ADMIN, audit=True),
        "CreateBinding": _cluster(P.CLUSTER_ADMIN, audit=True),
        "GetBinding": _cluster(P.CLUSTER_READ),
        "ListBindings": _cluster(P.CLUSTER_READ),
        "ListAllBindings": _cluster(P.CLUSTER_READ),
        "DeleteBinding": _cluster(P.CLUSTER_ADMIN, audit=True),
    },
}

TABLE: Final[Mapping[str, Row]] = {
    f"/{service}/{method}": row for service, rows in _SERVICES.items() for method, row in rows.items()
}
"""By the path of the method: ``/sava.admin.Topics/DeleteTopic``. The opening of a stream is its request."""


# -- who may what ----------------------------------------------------------------------------------


class Grant(NamedTuple):
    """A binding, as far as it matters for decisions."""

    role: str
    resource: Resource


@dataclass(slots=True)
class _Grants:
    """What one principal may do, compiled from its bindings."""

    cluster: set[Permission] = field(default_factory=set)
    namespaces: dict[str, set[Permission]] = field(default_factory=dict)
    topics: dict[str, set[Permission]] = field(default_factory=dict)
    prefixes: list[tuple[str, set[Permission]]] = field(default_factory=list)
    decisions: dict[tuple[tuple[Permission, ...], Resource], bool] = field(default_factory=dict)

    def add(self, permissions: Iterable[Permission], resource: Resource) -> None:
        if resource.scope is GrantScope.CLUSTER:
            self.cluster.update(permissions)
        elif resource.scope is GrantScope.NAMESPACE:
            self.namespaces.setdefault(resource.name, set()).update(permissions)
        elif resource.name.endswith("*"):
            self.prefixes.append((resource.name[:-1], set(permissions)))
        else:
            self.topics.setdefault(resource.name, set()).update(permissions)

    def allow(self, any_of: tuple[Permission, ...], resource: Resource) -> bool:
        known = self.decisions.get((any_of, resource))
        if known is None:
            if len(self.decisions) >= MAX_DECISIONS:
                self.decisions.clear()
            known = self.decisions[any_of, resource] = self._decide(any_of, resource)
        return known

    def _decide(self, any_of: tuple[Permission, ...], resource: Resource) -> bool:
        namespace = resource.namespace
        if namespace == SYSTEM:
            return Permission.CLUSTER_ADMIN in self.cluster
        held = set(self.cluster)
        if namespace:
            held |= self.namespaces.get(namespace, set())
        if resource.scope is GrantScope.TOPIC:
            held |= self.topics.get(resource.name, set())
            for prefix, permissions in self.prefixes:
                if resource.name.startswith(prefix):
                    held |= permissions
        return not held.isdisjoint(any_of)

    def allow_within(self, any_of: tuple[Permission, ...], namespace: str) -> bool:
        """Whether anything of the namespace; empty: anything at all."""
        if namespace and self.allow(any_of, Resource(GrantScope.NAMESPACE, namespace)):
            return True
        if namespace == SYSTEM:
            return False
        if not namespace and any(
            not held.isdisjoint(any_of) for held in (self.cluster, *self.namespaces.values())
        ):
            return True
        inside = f"/{namespace}/" if namespace else "/"
        return any(
            name.startswith(inside) and not held.isdisjoint(any_of)
            for name, held in (*self.topics.items(), *self.prefixes)
        )


class Policies:
    """Roles and bindings as a broker knows them; ``sava.security.store`` keeps them current. Owned by the
    event loop."""

    def __init__(self) -> None:
        self.roles: dict[str, frozenset[Permission]] = dict(ROLES)
        self.grants: dict[Principal, set[Grant]] = {}
        self.revision = 0
        """Grows with every change."""

    def changed(self) -> None:
        self.revision += 1


class Authorizer:
    """Decides. Owned by the event loop."""

    def __init__(self, policies: Policies, super_admins: Iterable[Principal] = ()) -> None:
        self.super_admins = frozenset(super_admins)
        self._policies = policies
        self._compiled: dict[Principal, _Grants] = {}
        self._revision = policies.revision

    def allows(self, principal: Principal, any_of: tuple[Permission, ...], resource: Resource) -> bool:
        if Permission.PRODUCE in any_of and resource.namespace == SYSTEM:
            return False
        return principal in self.super_admins or self._grants(principal).allow(any_of, resource)

    def allows_within(self, principal: Principal, any_of: tuple[Permission, ...], namespace: str) -> bool:
        """Whether anything of the namespace; empty: anything at all."""
        return principal in self.super_admins or self._grants(principal).allow_within(any_of, namespace)

    def check(self, principal: Principal, any_of: tuple[Permission, ...], resource: Resource) -> None:
        """Raises PermissionDenied."""
        if not self.allows(principal, any_of, resource):
            raise denied(principal, any_of, resource)

    def reason(self, principal: Principal, any_of: tuple[Permission, ...], resource: Resource) -> str:
        """The binding that allows it, or what is missing."""
        if principal in self.super_admins:
            return f"{principal} is a super admin by the configuration"
        for grant in sorted(self._policies.grants.get(principal, ())):
            one = _Grants()
            one.add(self._policies.roles.get(grant.role, frozenset()), grant.resource)
            if one.allow(any_of, resource):
                return f"role {grant.role} on {grant.resource}"
        return str(denied(principal, any_of, resource))

    def _grants(self, principal: Principal) -> _Grants:
        if self._revision != self._policies.revision:
            self._compiled.clear()
            self._revision = self._policies.revision
        found = self._compiled.get(principal)
        if found is None:
            found = _Grants()
            for grant in self._policies.grants.get(principal, ()):
                found.add(self._policies.roles.get(grant.role, frozenset()), grant.resource)
            if len(self._compiled) >= MAX_DECISIONS:
                self._compiled.clear()
            self._compiled[principal] = found
        return found


def denied(principal: Principal, any_of: tuple[Permission, ...], resource: Resource) -> PermissionDenied:
    """What the caller reads: what is missing, and the command by which an administrator grants it."""
    words = " or ".join(any_of)
    if Permission.PRODUCE in any_of and resource.namespace == SYSTEM:
        return PermissionDenied(
            f"{principal} may not write to {resource}: the namespace {SYSTEM} is for the brokers' own topics"
        )
    if resource.namespace == SYSTEM:
        any_of, resource = (Permission.CLUSTER_ADMIN,), CLUSTER
        words = f"{words} there without {Permission.CLUSTER_ADMIN}"
    options = {GrantScope.CLUSTER: "", GrantScope.NAMESPACE: " --namespace ", GrantScope.TOPIC: " --topic "}
    grant = f"{principal} {_least_role(any_of)}{options[resource.scope]}{resource.name}"
    return PermissionDenied(
        f"{principal} has no permission {words} on {resource}; an administrator grants it with "
        f"`sava auth bindings create {grant}`"
    )


def _least_role(any_of: tuple[Permission, ...]) -> str:
    """The built-in role that grants it and the least besides."""
    fitting = [name for name, held in ROLES.items() if not held.isdisjoint(any_of)]
    return min(fitting, key=lambda name: len(ROLES[name]))
