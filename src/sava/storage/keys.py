"""Keys: what storage calls its records in the metadata store and its objects in the object store.

Made and parsed here only. Parsing goes from the left and accepts exactly what the functions make: splitting
at a substring would take a topic named ``objects`` or ``state`` for something else.

    /storage/topics/{namespace}/{topic}/state                    TopicState
    /storage/topics/{namespace}/{topic}/objects/{start}          Segment
    topics/{namespace}/{topic}/{topic id}/{start}-{end}-{epoch}-{suffix}.parquet

Offsets have 20 digits, so that the order of keys is the order of offsets. An object's name holds topic id,
epoch and a random suffix: whatever two brokers upload, at whatever time, they never write the same key, and
what a deleted topic of the same name has left is never taken for this one's.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from sava.errors import shown
from sava.storage.errors import InvalidStorageName
from sava.storage.types import TopicKey

TOPICS: Final = "/storage/topics/"
"""Prefix of all of them in the metadata store."""
_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
"""As ``topics.names``. No character of it has a meaning in paths, URLs or globs."""
MAX_NAME_BYTES: Final = 255

_STATE: Final = re.compile(rf"{TOPICS}[^/]+/[^/]+/state")
_SEGMENT: Final = re.compile(rf"({TOPICS}[^/]+/[^/]+/objects/)\d{{20}}")
_OBJECT: Final = re.compile(r"topics/([^/]+)/([^/]+)/(\d+)/(\d{20})-(\d{20})-(\d+)-([0-9a-f]+)\.parquet")


def check_topic(topic: TopicKey) -> TopicKey:
    """Raise InvalidStorageName unless both names are usable; the topic itself."""
    for name in (topic.namespace, topic.name):
        if not _NAME.fullmatch(name) or len(name.encode()) > MAX_NAME_BYTES:
            raise InvalidStorageName(
                f"{shown(name)} cannot be a name: ASCII letters, digits, '_', '-' and '.' can be used, and "
                "it begins with one of the first three"
            )
    if topic.topic_id < 0:
        raise InvalidStorageName(f"topic id {topic.topic_id} of {topic.path}")
    return topic


# -- metadata store ----------------------------------------------------------------------


def topic_prefix(topic: TopicKey) -> str:
    """Everything that the metadata store holds of a topic's storage."""
    return f"{TOPICS}{topic.namespace}/{topic.name}/"


def state_key(topic: TopicKey) -> str:
    return f"{topic_prefix(topic)}state"


def segments_prefix(topic: TopicKey) -> str:
    return f"{topic_prefix(topic)}objects/"


def segment_key(topic: TopicKey, start: int) -> str:
    return f"{segments_prefix(topic)}{start:020}"


def is_state_key(key: str) -> bool:
    return _STATE.fullmatch(key) is not None


def topic_of_state_key(key: str, topic_id: int) -> TopicKey:
    """Whose state it is, ``topic_id`` being the one that it tells."""
    _, _, _, namespace, name, _ = key.split("/")
    return TopicKey(namespace, name, topic_id)


def segments_prefix_of(key: str) -> str | None:
    """The prefix that a descriptor shares with the others of its topic; None if the key is not of one."""
    match = _SEGMENT.fullmatch(key)
    return match[1] if match else None


# -- object store ------------------------------------------------------------------------


class ObjectName(NamedTuple):
    topic: TopicKey
    start: int
    end: int
    epoch: int
    suffix: str


def name_prefix(topic: TopicKey) -> str:
    """All objects of topics that have or had this name."""
    return f"topics/{topic.namespace}/{topic.name}"


def objects_prefix(topic: TopicKey) -> str:
    """All objects of this topic, and none of another topic of the same name."""
    return f"{name_prefix(topic)}/{topic.topic_id}"


def object_key(name: ObjectName) -> str:
    return f"{objects_prefix(name.topic)}/{name.start:020}-{name.end:020}-{name.epoch}-{name.suffix}.parquet"


def parse_object_key(key: str) -> ObjectName | None:
    """What a key names, or None if ``object_key`` does not make it."""
    match = _OBJECT.fullmatch(key)
    if match is None:
        return None
    namespace, name, topic_id, start, end, epoch, suffix = match.groups()
    parsed = ObjectName(TopicKey(namespace, name, int(topic_id)), int(start), int(end), int(epoch), suffix)
    return parsed if object_key(parsed) == key else None


# -- names of subscriptions ------------------------------------------------------------------------


SLOT_PREFIX: Final = "sava-link."
"""Of the subscriptions that are replication slots."""


def replication_slot(remote: str) -> str:
    """The subscription that keeps messages until the remote cluster has them."""
    return f"{SLOT_PREFIX}{remote}"


def slot_remote(subscription: str) -> str | None:
    """None: it is no link's."""
    return subscription.removeprefix(SLOT_PREFIX) if subscription.startswith(SLOT_PREFIX) else None


def is_replication_slot(subscription: str) -> bool:
    return subscription.startswith(SLOT_PREFIX)
