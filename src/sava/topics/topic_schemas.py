"""TopicSchemas: which schema subject a topic's messages follow, and how strictly that is checked.

The record is read from this node's view at each use, so that a change takes effect at once and everywhere. A
partition follows what its partitioned topic says.
"""

from __future__ import annotations

from sava.metadata.commands import Put
from sava.metadata.records import present
from sava.metadata.store import MetadataStore
from sava.schemas.types import Policy, TopicSchema
from sava.topics import specs
from sava.topics.errors import TopicUnknown
from sava.topics.names import TopicName
from sava.topics.registry import Registry


class TopicSchemas:
    """Holds nothing between calls."""

    def __init__(self, store: MetadataStore) -> None:
        self._store = store

    async def get(self, topic: TopicName) -> TopicSchema | None:
        kv = await self._store.get(specs.schema_key(topic.head))
        return specs.decode(kv, TopicSchema) if kv is not None else None

    async def enforcing(self, subject: str) -> list[TopicName]:
        """The topics that refuse what does not follow the subject. Those that are being deleted do not
        count."""
        found = await Registry(self._store).list()  # linearizable, so this node's view behind it is as new
        local = self._store.local
        records = ((name, local.get(specs.schema_key(name))) for name in found if name.head == name)
        schemas = ((name, specs.decode(kv, TopicSchema)) for name, kv in records if kv is not None)
        return sorted(
            name for name, schema in schemas if schema.subject == subject and schema.policy is Policy.ENFORCE
        )

    async def set(self, topic: TopicName, schema: TopicSchema) -> None:
        """Takes effect at once. Raises TopicUnknown."""
        head = topic.head
        put = Put(specs.schema_key(head), specs.encode(schema))
        if not (await self._store.txn((present(specs.spec_key(head)),), (put,))).succeeded:
            raise TopicUnknown(topic)
