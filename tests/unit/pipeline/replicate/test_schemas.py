"""Messages name their schemas as the target does."""

from __future__ import annotations

from typing import Any

import pytest

from sava.client.errors import Denied, Refused, Unavailable
from sava.pipeline.cluster import ClusterAccess, ClusterClient
from sava.pipeline.replicate.target import LinkEnds, TargetCluster
from sava.pipeline.replicate.translation import NotLearned, SchemaConflict, Schemas
from sava.proto import danube_schema_pb2
from sava.proto import replica_pb2 as pb
from sava.records import STORED_COLUMNS, Message, RecordBatch

TOPIC = "/default/orders"


class FakeSchemas:
    """A source in which subject ``s<id>`` has the id ``id``, and a target that gives out other ids."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int | None]] = []
        self.ensured: list[pb.EnsureSchemaRequest] = []
        self.refusal: Exception | None = None
        self.first_id = 100

    def schema_of(self, schema_id: int, version: int | None) -> danube_schema_pb2.GetSchemaResponse:
        self.asked.append((schema_id, version))
        if schema_id == 9:
            raise Refused("subject 9 does not exist")
        return danube_schema_pb2.GetSchemaResponse(
            schema_id=schema_id,
            version=version or 3,
            subject=f"s{schema_id}",
            schema_type="avro",
            schema_definition=b"%d.%d" % (schema_id, version or 3),
        )

    def ensure_schema(self, request: pb.EnsureSchemaRequest) -> pb.EnsureSchemaResponse:
        self.ensured.append(request)
        if self.refusal is not None:
            raise self.refusal
        schema_id, _, version = request.definition.decode().partition(".")
        return pb.EnsureSchemaResponse(schema_id=self.first_id + int(schema_id), version=10 + int(version))


@pytest.fixture
def clusters(monkeypatch: pytest.MonkeyPatch) -> FakeSchemas:
    clusters = FakeSchemas()
    monkeypatch.setattr(ClusterClient, "of", lambda access: clusters)
    monkeypatch.setattr(TargetCluster, "of", lambda access: clusters)
    return clusters


@pytest.fixture
def ends(request: pytest.FixtureRequest) -> LinkEnds:
    """What one test has learned is not known to another."""
    return LinkEnds(
        source=ClusterAccess("eu:1"),
        source_name="eu",
        source_id=request.node.name,
        target=ClusterAccess("us:1"),
        target_name="us",
        target_id="id-of-us",
    )


@pytest.fixture
def schemas(clusters: FakeSchemas, ends: LinkEnds) -> Schemas:
    return Schemas(ends, TOPIC, 5, "s1")


def rows(*named: tuple[int | None, int | None]) -> Any:
    messages = [Message(b"m", None, {}, 1, schema_id, version) for schema_id, version in named]
    return RecordBatch.from_messages(messages).to_arrow(STORED_COLUMNS)


def named(rows: Any) -> list[tuple[int | None, int | None]]:
    batch = RecordBatch.from_arrow(rows)
    return [(message.schema_id, message.schema_version) for message in batch.messages()]


def test_each_message_gets_the_target_s_name_for_its_schema(schemas: Schemas) -> None:
    found = schemas.translate(rows((1, 1), (1, 2), (None, None), (2, 1), (1, None), (1, 1)))
    assert named(found) == [(101, 11), (101, 12), (None, None), (102, 11), (101, None), (101, 11)]


def test_an_id_that_is_another_s_at_the_target_is_not_mapped_twice(
    schemas: Schemas, clusters: FakeSchemas
) -> None:
    """1 becomes 2, and 2 becomes 3."""
    clusters.first_id = 1
    assert named(schemas.translate(rows((1, 1), (2, 1), (1, 1)))) == [(2, 11), (3, 11), (2, 11)]


def test_messages_without_a_schema_ask_nobody(schemas: Schemas, clusters: FakeSchemas) -> None:
    given = rows((None, None), (None, None))
    assert schemas.translate(given) is given
    assert clusters.asked == []


def test_what_is_known_is_not_asked_again(schemas: Schemas, clusters: FakeSchemas) -> None:
    for _ in range(3):
        schemas.translate(rows((1, 1), (1, 2)))
    assert sorted(clusters.asked) == [(1, 1), (1, 2)]
    Schemas.forget(TOPIC)
    schemas.translate(rows((1, 1)))
    assert len(clusters.asked) == 3


def test_who_may_not_ask_knows_what_others_have_asked_for(
    schemas: Schemas, clusters: FakeSchemas, ends: LinkEnds
) -> None:
    silent = Schemas(ends, TOPIC, 5, "s1", may_ask=False)
    with pytest.raises(NotLearned):
        silent.translate(rows((1, 1)))
    assert clusters.asked == []
    assert named(schemas.translate(rows((1, 1)))) == named(silent.translate(rows((1, 1)))) == [(101, 11)]


def test_the_topic_follows_its_subject_and_no_other(schemas: Schemas, clusters: FakeSchemas) -> None:
    schemas.translate(rows((1, 1), (2, 1)))
    assert {each.subject: each.topic for each in clusters.ensured} == {"s1": TOPIC, "s2": ""}


def test_what_the_target_does_not_take_is_told_with_the_subject(
    schemas: Schemas, clusters: FakeSchemas
) -> None:
    clusters.refusal = Refused("not compatible", "schema_incompatible")
    with pytest.raises(SchemaConflict, match="subject 's1', version 1: the target says: not compatible"):
        schemas.translate(rows((1, 1)))
    clusters.refusal = None
    assert named(schemas.translate(rows((1, 1)))) == [(101, 11)], "a refusal is not remembered"


def test_the_first_row_that_cannot_be_translated_is_told(schemas: Schemas) -> None:
    """Whatever schemas the rows before it name, and however they are grouped."""
    plain: list[tuple[int | None, int | None]] = [(1, 1), (None, None), (2, 1), (1, 1)]
    with pytest.raises(SchemaConflict) as refused:
        schemas.translate(rows(*plain, (9, 4), (3, 1), (9, 1), (9, 4)))
    assert refused.value.row == 4


def test_a_schema_that_the_source_has_no_more(schemas: Schemas) -> None:
    with pytest.raises(SchemaConflict, match=r"schema 9, version 4, .*the source says: subject 9"):
        schemas.translate(rows((9, 4)))


@pytest.mark.parametrize("error", [Denied("no"), Unavailable("away")])
def test_other_troubles_are_not_the_schema_s(
    schemas: Schemas, clusters: FakeSchemas, error: Exception
) -> None:
    clusters.refusal = error
    with pytest.raises(type(error)):
        schemas.translate(rows((1, 1)))
