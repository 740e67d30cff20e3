"""Schemas: what a schema of the source is called at the target.

Each cluster gives out its own ids and versions. The definition that a message was written with is registered
at the target under the same subject, or found there, and the message names it as the target does. What a
process has learned it keeps: versions never change.

The subject of the topic is given to the topic at the target with the first message that names it. Messages of
another subject (the topic had another one before) are mapped all the same.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from sava.client.errors import Denied, Refused
from sava.errors import CallerError, Outcome, SavaError
from sava.pipeline.link import Access, Link
from sava.pipeline.replicate.errors import at_source
from sava.pipeline.replicate.target import Target
from sava.pipeline.replicate.work import LinkEnds
from sava.proto import replica_pb2 as pb

CACHED: Final = 4096


class SchemaConflict(CallerError):
    """The target does not take a schema of the source, or the source does not have it any more."""

    def __init__(self, what: str, reason: str) -> None:
        super().__init__(f"{what}: {reason}")
        self.row = 0
        """The first that names it, of those that were to be translated."""


class NotLearned(SavaError):
    """Somebody has to be asked what a schema is called at the target."""

    outcome = Outcome.NOT_DONE


class Named(NamedTuple):
    """A schema as messages name it; without a version it is the latest."""

    schema_id: int
    version: int | None


class _Asked(NamedTuple):
    source: Access
    source_id: str
    target: Access
    target_topic_id: int
    topic: str
    subject: str
    named: Named


class Schemas:
    """Of one topic on its way to one target. For one thread."""

    def __init__(
        self, ends: LinkEnds, topic: str, target_topic_id: int, subject: str, *, may_ask: bool = True
    ) -> None:
        """``may_ask``: either cluster, for what this process does not know yet."""
        self._may_ask = may_ask
        self._ends = ends
        self._topic = topic
        self._target_topic_id = target_topic_id
        self._subject = subject

    def translate(self, rows: Any) -> Any:
        """The same rows, with the target's ids and versions. Raises SchemaConflict, of the first row that
        cannot be translated; Unavailable, Denied; SourceFailed. Raises NotLearned instead of asking, if it
        may not."""
        ids, versions = rows.column("schema_id"), rows.column("schema_version")
        if ids.null_count == len(ids):
            return rows
        named = pa.table([ids, versions, pa.arange(0, len(ids))], ["schema_id", "schema_version", "row"])
        distinct = named.group_by(["schema_id", "schema_version"]).aggregate([("row", "min")])
        new_ids, new_versions = ids, versions
        for pair in distinct.sort_by("row_min").to_pylist():
            schema_id, version = pair["schema_id"], pair["schema_version"]
            if schema_id is None:
                continue
            try:
                there = self._there(Named(schema_id, version))
            except SchemaConflict as error:
                error.row = pair["row_min"]
                raise
            here = pc.equal(ids, schema_id)
            same = pc.is_null(versions) if version is None else pc.equal(versions, version)
            is_of = pc.fill_null(pc.and_(here, same), False)
            new_ids = pc.if_else(is_of, pa.scalar(there.schema_id, pa.int64()), new_ids)
            new_versions = pc.if_else(is_of, pa.scalar(there.version, pa.int32()), new_versions)
        columns = {"schema_id": new_ids, "schema_version": new_versions}
        return pa.RecordBatch.from_arrays(
            [columns.get(name, rows.column(name)) for name in rows.schema.names], schema=rows.schema
        )

    def _there(self, named: Named) -> Named:
        ends = self._ends
        asked = _Asked(
            ends.source,
            ends.source_id,
            ends.target,
            self._target_topic_id,
            self._topic,
            self._subject,
            named,
        )
        with _guard:
            known = _known.get(asked)
        if known is None:
            if not self._may_ask:
                raise NotLearned(f"{self._topic}: schema {named.schema_id} was not asked for yet")
            known = _ensured(asked)
            with _guard:
                _known[asked] = known
                while len(_known) > CACHED:
                    _known.popitem(last=False)
        return known

    @staticmethod
    def forget(topic: str) -> None:
        """What the target calls them may have changed: somebody has deleted a subject there, and registered
        it again."""
        with _guard:
            for asked in [each for each in _known if topic == each.topic]:
                del _known[asked]


_guard: Final = threading.Lock()
_known: Final[OrderedDict[_Asked, Named]] = OrderedDict()


def _ensured(asked: _Asked) -> Named:
    schema_id, version = asked.named
    try:
        with at_source():
            found = Link.of(asked.source).schema_of(schema_id, version)
    except Refused as error:
        which = f"schema {schema_id}" + ("" if version is None else f", version {version}")
        raise SchemaConflict(f"{which}, which messages name", f"the source says: {error}") from error
    request = pb.EnsureSchemaRequest(
        subject=found.subject,
        type=found.schema_type,
        definition=found.schema_definition,
        topic=asked.topic if found.subject == asked.subject else "",
    )
    try:
        there = Target.of(asked.target).ensure_schema(request)
    except Denied:
        raise
    except Refused as error:
        raise SchemaConflict(
            f"subject {found.subject!r}, version {found.version}", f"the target says: {error}"
        ) from error
    return Named(there.schema_id, None if version is None else there.version)
