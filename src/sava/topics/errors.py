"""What a broker refuses, by whose fault it is. Services turn these into the codes that clients understand."""

from __future__ import annotations

from sava.errors import CallerError, Outcome, RetryableError, cut


class NamespaceUnknown(CallerError):
    def __init__(self, namespace: str) -> None:
        name = cut(namespace)
        super().__init__(f"namespace {name} does not exist; create it with `sava namespaces create {name}`")
        self.namespace = namespace


class NamespaceExists(CallerError):
    """The name is taken. Choose another, or use the one that is there."""


class NamespaceNotEmpty(CallerError):
    """A namespace with topics is not deleted: delete these first (``sava topics delete``)."""


class TopicUnknown(CallerError):
    def __init__(self, topic: object) -> None:
        super().__init__(
            f"topic {cut(str(topic))} does not exist; create it with `sava topics create {cut(str(topic))}`"
        )
        self.topic = str(topic)


class TopicExists(CallerError):
    """The name is taken: by a topic, by a partitioned topic, or by a partition."""


class TopicBeingDeleted(RetryableError):
    """The topic is gone, and its name is not free yet: what it had is still being removed."""

    def __init__(self, topic: object) -> None:
        super().__init__(f"topic {topic} is being deleted; its name will be free soon")
        self.topic = str(topic)


class TopicMismatch(CallerError):
    """The topic exists and is not what the request takes it for: reliable or not, its schema, partitioned or
    not."""


class SubscriptionUnknown(CallerError):
    def __init__(self, topic: object, subscription: str) -> None:
        super().__init__(
            f"topic {topic} has no subscription {cut(subscription)}; "
            f"`sava subscriptions list {topic}` shows which it has"
        )
        self.topic, self.subscription = str(topic), subscription


class SubscriptionExists(CallerError):
    """The topic has one of this name. Use it, choose another name, or delete it first."""


class SubscriptionMismatch(CallerError):
    """The subscription exists with another type, which it keeps. Consume by that type, or choose another
    name."""


class SubscriptionBusy(CallerError):
    """An exclusive subscription has a live consumer of another name; or it cannot be changed while consumers
    are connected. It is free when they have left."""


class OwnedByAnother(CallerError):
    """A subscription, a producer's name or a consumer's name belongs to another principal; says to whom, and
    what can be done."""

    def __init__(self, what: str, owner: str, principal: object, way_out: str) -> None:
        super().__init__(f"{what} belongs to {owner}, and not to {cut(str(principal))}: {way_out}")
        self.owner = owner


class ProducerBusy(CallerError):
    """The topic has an exclusive producer, or others that keep an exclusive one out. It is free when they
    have left."""


class ProducerFenced(CallerError):
    """A producer of the same name was opened after this one and has taken its place. Give each its own
    name."""


class LimitReached(RetryableError):
    """A limit of the cluster, namespace or topic; says which and what it is. It can be tried again when there
    are fewer, or when the limit is raised (``sava topics set-policy``, ``sava namespaces set-policy``, or the
    setting that the text names)."""


class MessageTooLarge(CallerError):
    """The payload is larger than the topic's ``max_message_size``, or than Danube's protocol can carry. Send
    less at a time, or raise the limit."""


class MessageInvalid(CallerError):
    """A field is missing or wrong."""


class SchemaRefused(CallerError):
    """The topic enforces a schema that the message or producer does not follow; says in what it differs.
    ``sava schemas topic`` shows which schema it is."""


class NotController(RetryableError):
    """Only the leader decides who serves what. ``leader`` is its node id, 0 if not known."""

    def __init__(self, leader: int = 0) -> None:
        where = f"broker {leader} leads" if leader else "it is not known who leads at the moment"
        super().__init__(f"this broker does not lead the cluster; {where}")
        self.leader = leader


class NotOwner(RetryableError):
    """Another broker serves the topic, or none does yet. ``owner`` is its node id, 0 if not known."""

    def __init__(self, topic: object, owner: int, text: str = "") -> None:
        where = f"is served by broker {owner}" if owner else "is not served by any broker at the moment"
        super().__init__(text or f"topic {topic} {where}")
        self.topic, self.owner = str(topic), owner


class TopicMoved(NotOwner):
    """This broker gives the topic up, or has lost it. Nothing of the refused request is in the topic; the
    same request goes to its next owner."""

    def __init__(self, topic: object, owner: int = 0) -> None:
        where = f"broker {owner} serves it now" if owner else "its next owner will serve it soon"
        super().__init__(topic, owner, f"topic {topic} has moved away from this broker; {where}")


class NotHandedOver(RetryableError):
    """A hand-over did not come to its end; its topic is closed here, and is to be taken up again under the
    next epoch."""

    outcome = Outcome.PARTLY


class ConsumerReplaced(CallerError):
    """Another stream of the same consumer name has taken over. Give each consumer its own name."""


class ConsumerClosed(RetryableError):
    """The broker ended the consumer: the topic moves, is deleted, or the subscription was removed. Subscribe
    again."""


class ConsumerUnknown(RetryableError):
    """No consumer has this id here."""
