"""The registry: subjects, versions and ids, changed by several brokers, over a store that may fail."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from sava.metadata.commands import Compare, Operation, TxnResult
from sava.metadata.errors import OutcomeUnknown, Unavailable
from sava.metadata.machine.limits import DEFAULT_LIMITS
from sava.metadata.records import RecordBusy, RecordCorrupt
from sava.schemas import records
from sava.schemas import registry as registry_module
from sava.schemas.errors import (
    ModeUnknown,
    PayloadInvalid,
    RegistryCorrupt,
    SchemaIncompatible,
    SchemaInvalid,
    SchemaTooLarge,
    SubjectInvalid,
    SubjectTypeMismatch,
    SubjectUnknown,
    TooManyVersions,
    TypeUnknown,
    VersionUnknown,
)
from sava.schemas.records import RegisteredVersion
from sava.schemas.registry import SchemaRegistry
from sava.schemas.types import (
    MAX_DEFINITION_BYTES,
    CompatibilityMode,
    Policy,
    Reference,
    Resolved,
    SchemaType,
    TopicSchema,
)
from tests.support.memory_store import MemoryStore


def schema(*optional: str, required: Sequence[str] = (), **types: str) -> bytes:
    """A JSON Schema of an object with string properties, or of the types that are given."""
    properties = {name: {"type": types.get(name, "string")} for name in (*optional, *required, *types)}
    return json.dumps({"type": "object", "properties": properties, "required": list(required)}).encode()


def avro(**defaults: Any) -> bytes:
    fields = [
        {"name": name, "type": "int"} | ({} if default is None else {"default": default})
        for name, default in defaults.items()
    ]
    return json.dumps({"type": "record", "name": "R", "fields": fields}).encode()


class Flaky(MemoryStore):
    """Loses answers, or refuses to give any, when told to."""

    lose_answers = 0
    refuse_reads = 0
    rival: Any = None
    """Called before each transaction: another broker is quicker."""

    async def txn(
        self,
        compare: Sequence[Compare],
        then: Sequence[Operation],
        otherwise: Sequence[Operation] = (),
        *,
        fence_term: int = 0,
        batched: bool = False,
        timeout: float = 1.0,
    ) -> TxnResult:
        if self.rival is not None and compare:
            await self.rival()
        result = await super().txn(compare, then, otherwise, fence_term=fence_term, timeout=timeout)
        if compare and self.lose_answers:
            self.lose_answers -= 1
            raise OutcomeUnknown("the answer was lost")
        return result

    async def get(self, key: str, **options: Any) -> Any:
        if self.refuse_reads and not self.lose_answers:
            self.refuse_reads -= 1
            raise Unavailable("no leader")
        return await super().get(key, **options)


@pytest.fixture
def store() -> Flaky:
    return Flaky(clock=lambda: 0)


@pytest.fixture
def registry(store: Flaky) -> SchemaRegistry:
    return SchemaRegistry(store, now_ms=lambda: 1_000)


# -- subjects, versions, ids ---------------------------------------------------------------------------------


async def test_a_subject_has_one_id_and_versions_from_1(registry: SchemaRegistry, store: Flaky) -> None:
    first = await registry.register(
        "orders", "json", schema("a"), description="d", created_by="me", tags=["x"]
    )
    assert (first.schema_id, first.version, first.is_new_version) == (1, 1, True)
    second = await registry.register("orders", "JSON_SCHEMA", schema("a", "b"), tags=["y", "z"])
    assert (second.schema_id, second.version, second.is_new_version) == (1, 2, True)
    other = await registry.register("payments", SchemaType.STRING, b"string")
    assert (other.schema_id, other.version) == (2, 1)
    assert (await store.get(records.id_key(1))).value == b"orders"

    latest = await registry.latest("orders")
    assert (latest.version, latest.definition, latest.mode) == (
        2,
        schema("a", "b"),
        CompatibilityMode.BACKWARD,
    )
    assert (
        latest == await registry.get(1) == await registry.get(1, 2) == await registry.get_version("orders", 2)
    )
    old = await registry.get(1, 1)
    assert (old.subject, old.definition, old.description, old.created_by) == (
        "orders",
        schema("a"),
        "d",
        "me",
    )
    assert (old.tags, old.created_ms, old.type) == (("x",), 1_000, SchemaType.JSON_SCHEMA)
    assert [(each.version, each.fingerprint) for each in await registry.versions("orders")] == [
        (1, first.fingerprint),
        (2, second.fingerprint),
    ]
    assert [(each.subject, each.schema_id, each.latest, each.tags) for each in await registry.subjects()] == [
        ("orders", 1, 2, ("y", "z")),
        ("payments", 2, 1, ()),
    ]


async def test_the_same_schema_is_the_same_version(registry: SchemaRegistry) -> None:
    first = await registry.register("orders", "json", b'{"type": "string", "title": "t"}')
    again = await registry.register("orders", "json", b'{ "title":"t","type":"string" }')
    assert again == RegisteredVersion(first.schema_id, 1, False, first.fingerprint)
    await registry.register("orders", "json", b'{"type": ["string", "null"]}')
    assert (await registry.register("orders", "json", b'{"type": "string", "title": "t"}')).version == 1


@pytest.mark.parametrize("subject", ["/default/orders", "a b%2F", "orders.", "..", "nar.o#c"])
async def test_any_printable_name_is_a_subject(registry: SchemaRegistry, subject: str) -> None:
    await registry.register(subject, "bytes", b"bytes")
    await registry.register(f"{subject}x", "bytes", b"bytes")
    assert {each.subject for each in await registry.subjects()} == {subject, f"{subject}x"}
    assert [each.version for each in await registry.versions(subject)] == [1]


async def test_what_is_unknown_or_wrong_is_a_typed_error(registry: SchemaRegistry) -> None:
    await registry.register("orders", "json", schema("a"))
    for call in (
        registry.latest("nothing"),
        registry.versions("nothing"),
        registry.subject("nothing"),
        registry.get(99),
        registry.get(0),
        registry.get(-1),
        registry.set_mode("nothing", "full"),
        registry.delete_version("nothing", 1),
        registry.check("nothing", schema("a"), "json"),
        registry.resolve(Reference("nothing")),
    ):
        with pytest.raises(SubjectUnknown):
            await call
    for version in (0, 2, -1, 1 << 32):
        with pytest.raises(VersionUnknown):
            await registry.get(1, version)
        with pytest.raises(VersionUnknown):
            await registry.delete_version("orders", version)
    with pytest.raises(TypeUnknown):
        await registry.register("orders", "thrift", b"")
    with pytest.raises(ModeUnknown):
        await registry.set_mode("orders", "sideways")
    with pytest.raises(SubjectInvalid):
        await registry.register("", "json", schema("a"))
    with pytest.raises(SchemaInvalid):
        await registry.register("orders", "json", b"{")
    with pytest.raises(SchemaTooLarge):
        await registry.register("orders", "bytes", b"x" * (MAX_DEFINITION_BYTES + 1))
    with pytest.raises(SchemaTooLarge):
        await registry.register("orders", "json", schema("a"), description="x" * 5000)
    with pytest.raises(SubjectTypeMismatch):
        await registry.register("orders", "avro", b"string")
    assert [each.version for each in await registry.versions("orders")] == [1]


# -- compatibility -------------------------------------------------------------------------------------------


async def test_a_new_version_must_keep_what_the_mode_promises(registry: SchemaRegistry) -> None:
    await registry.register("orders", "json", schema(required=["name"]))
    with pytest.raises(SchemaIncompatible) as caught:
        await registry.register("orders", "json", schema(required=["name", "email"]))
    assert any("version 1, backward: $.email" in each for each in caught.value.problems)
    await registry.register("orders", "json", schema("email", required=["name"]))
    assert (await registry.set_mode("orders", "NONE")).mode is CompatibilityMode.NONE
    assert (await registry.register("orders", "json", schema(required=["name", "email"]))).version == 3


OLD = schema("nick", required=["name"])
CHANGES = {
    "optional added": (schema("nick", "email", required=["name"]), {"backward", "forward", "full"}),
    "optional removed": (schema(required=["name"]), {"backward", "forward", "full"}),
    "required added": (schema("nick", required=["name", "email"]), set()),
    "required removed": (schema("nick"), set()),
    "becomes required": (schema(required=["name", "nick"]), {"forward"}),
    "becomes optional": (schema("nick", "name"), {"backward"}),
    "type changed": (schema("nick", required=["name"], name="integer"), set()),
    "type widened": (
        b'{"type": "object", "properties": {"name": {"type": ["string", "null"]}}, "required": ["name"]}',
        {"backward"},
    ),
}


@pytest.mark.parametrize(("new", "allowed"), CHANGES.values(), ids=CHANGES.keys())
async def test_modes_decide_by_direction(registry: SchemaRegistry, new: bytes, allowed: set[str]) -> None:
    await registry.register("orders", "json", OLD)
    for mode in ("backward", "forward", "full"):
        problems = await registry.check("orders", new, "json", mode)
        assert (not problems) == (mode in allowed), problems
        assert bool(await registry.check("orders", new, "json", f"{mode}_transitive")) == bool(problems)
    assert await registry.check("orders", new, "json", "none") == []


async def test_transitive_modes_look_at_all_versions(registry: SchemaRegistry) -> None:
    await registry.register("points", "avro", avro(a=None))
    await registry.register("points", "avro", avro(a=None, b=0))
    third = avro(a=None, b=None)
    assert await registry.check("points", third, "avro") == []
    problems = await registry.check("points", third, "avro", "backward_transitive")
    assert len(problems) == 1
    assert problems[0].startswith("version 1, backward: $.b")
    await registry.set_mode("points", "full_transitive")
    with pytest.raises(SchemaIncompatible):
        await registry.register("points", "avro", third)


async def test_a_check_changes_nothing_and_says_when_the_type_is_another(registry: SchemaRegistry) -> None:
    await registry.register("orders", "json", schema("a"))
    assert await registry.check("orders", schema("a", "b"), "json") == []
    assert [each.version for each in await registry.versions("orders")] == [1]
    assert "not avro" in (await registry.check("orders", b"string", "avro"))[0]
    with pytest.raises(SchemaInvalid):
        await registry.check("orders", b"{", "json")


async def test_protobuf_is_compiled_once_and_kept_compiled(registry: SchemaRegistry, store: Flaky) -> None:
    source = b'syntax = "proto3"; message Order { string id = 1; }'
    await registry.register("orders", "proto", source)
    with pytest.raises(SchemaIncompatible):
        await registry.register("orders", "proto", source.replace(b"string", b"int32"))
    latest = await registry.latest("orders")
    assert latest.definition == source
    assert latest.compiled
    (await registry.validator(1, 1)).validate(b"\x0a\x01x")


# -- deleting ------------------------------------------------------------------------------------------------


async def test_a_deleted_version_is_gone_and_its_number_is_not_used_again(registry: SchemaRegistry) -> None:
    for names in ("a", "ab", "abc"):
        await registry.register("orders", "json", schema(*names), tags=[names])
    info = await registry.delete_version("orders", 3)
    assert (info.latest, info.versions, info.tags) == (2, 2, ("ab",))
    assert (await registry.latest("orders")).version == 2
    with pytest.raises(VersionUnknown):
        await registry.get(1, 3)
    assert [each.version for each in await registry.versions("orders")] == [1, 2]
    assert (await registry.register("orders", "json", schema(*"abc"))).version == 4
    await registry.delete_version("orders", 1)
    assert [each.version for each in await registry.versions("orders")] == [2, 4]


async def test_a_subject_without_versions_keeps_its_id_and_type(registry: SchemaRegistry) -> None:
    await registry.register("orders", "json", schema("a"))
    await registry.set_mode("orders", "full")
    await registry.delete_version("orders", 1)
    for call in (registry.latest("orders"), registry.get(1), registry.resolve(Reference("orders"))):
        with pytest.raises(VersionUnknown):
            await call
    assert await registry.versions("orders") == []
    assert (await registry.subject("orders")).latest == 0
    with pytest.raises(SubjectTypeMismatch):
        await registry.register("orders", "string", b"string")
    again = await registry.register("orders", "json", b'{"type": "integer"}')
    assert (again.schema_id, again.version) == (1, 2)
    assert (await registry.subject("orders")).mode is CompatibilityMode.FULL


# -- references and validators -------------------------------------------------------------------------------


async def test_a_reference_is_pinned_or_the_latest_or_at_least(registry: SchemaRegistry) -> None:
    for names in ("a", "ab", "abc"):
        await registry.register("orders", "json", schema(*names))
    await registry.delete_version("orders", 2)
    assert await registry.resolve(Reference("orders")) == Resolved(1, 3)
    assert await registry.resolve(Reference("orders", pinned_version=1)) == Resolved(1, 1)
    assert await registry.resolve(Reference("orders", min_version=2)) == Resolved(1, 3)
    assert await registry.resolve(Reference("orders", min_version=3)) == Resolved(1, 3)
    for wrong in (Reference("orders", pinned_version=2), Reference("orders", min_version=4)):
        with pytest.raises(VersionUnknown):
            await registry.resolve(wrong)
    with pytest.raises(ValueError, match="either"):
        Reference("orders", 1, 1)


async def test_each_version_has_its_own_validator(registry: SchemaRegistry) -> None:
    await registry.register("orders", "json", schema(required=["a"]))
    await registry.set_mode("orders", "none")
    await registry.register("orders", "json", schema(required=["b"]))
    first, second = await registry.validator(1, 1), await registry.validator(1, 2)
    first.validate(b'{"a": "x"}')
    with pytest.raises(PayloadInvalid):
        second.validate(b'{"a": "x"}')
    assert await registry.validator(1, 1) is first
    await registry.delete_version("orders", 1)
    with pytest.raises(VersionUnknown):
        await registry.validator(1, 1)
    assert await registry.validator(1, 2) is second


async def test_validators_are_kept_in_bounds(
    registry: SchemaRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry_module, "CACHED_VALIDATORS", 2)
    for index in range(1, 4):
        await registry.register(f"s{index}", "string", b"")
    first = await registry.validator(1, 1)
    second = await registry.validator(2, 1)
    assert await registry.validator(1, 1) is first
    await registry.validator(3, 1)
    assert await registry.validator(1, 1) is first
    assert await registry.validator(2, 1) is not second


def test_the_settings_of_a_topic_survive_json() -> None:
    settings = TopicSchema(subject="orders", policy=Policy.ENFORCE, validate_payload=True)
    assert msgspec.json.decode(msgspec.json.encode(settings), type=TopicSchema) == settings
    assert TopicSchema(subject="orders") == TopicSchema(subject="orders", policy=Policy.WARN)


# -- several brokers -----------------------------------------------------------------------------------------


async def test_two_brokers_that_register_at_once_agree(store: Flaky) -> None:
    brokers = [SchemaRegistry(store) for _ in range(4)]
    answers = await asyncio.gather(*(broker.register("orders", "json", schema("a")) for broker in brokers))
    assert {(each.schema_id, each.version) for each in answers} == {(answers[0].schema_id, 1)}
    assert sum(each.is_new_version for each in answers) == 1
    assert (await store.get(records.id_key(answers[0].schema_id))).value == b"orders"


async def test_different_schemas_at_once_become_different_versions(store: Flaky) -> None:
    brokers = [SchemaRegistry(store) for _ in range(3)]
    names = "abcdefgh"
    answers = await asyncio.gather(
        *(brokers[index % 3].register("orders", "json", schema(name)) for index, name in enumerate(names))
    )
    assert sorted(each.version for each in answers) == list(range(1, 9))
    assert len({each.schema_id for each in answers}) == 1
    assert [each.version for each in await brokers[0].versions("orders")] == list(range(1, 9))


async def test_a_registration_that_lost_is_checked_against_the_winner(store: Flaky) -> None:
    """Both were compatible with version 1; the slower one is not compatible with the quicker one."""
    ours, theirs = SchemaRegistry(store), SchemaRegistry(store)
    await ours.register("points", "avro", avro(a=None))

    async def rival() -> None:
        store.rival = None
        await theirs.register("points", "avro", avro(b=1))

    store.rival = rival
    with pytest.raises(SchemaIncompatible, match=r"version 2, backward: \$\.a"):
        await ours.register("points", "avro", avro(a=None, c=0))
    assert [each.version for each in await ours.versions("points")] == [1, 2]


async def test_endless_conflicts_end(registry: SchemaRegistry, store: Flaky) -> None:
    await registry.register("orders", "json", schema("a"))
    modes = iter(["full", "none", "backward", "forward"] * 20)

    async def rival() -> None:
        again, store.rival = store.rival, None
        await SchemaRegistry(store).set_mode("orders", next(modes))
        store.rival = again

    store.rival = rival
    with pytest.raises(RecordBusy):
        await registry.register("orders", "json", schema("a", "b"))


# -- a store that fails --------------------------------------------------------------------------------------


async def test_a_lost_answer_is_found_out(registry: SchemaRegistry, store: Flaky) -> None:
    store.lose_answers = 1
    first = await registry.register("orders", "json", schema("a"))
    assert (first.schema_id, first.version, first.is_new_version) == (1, 1, True)
    store.lose_answers = 1
    second = await registry.register("orders", "json", schema("a", "b"))
    assert (second.version, second.is_new_version) == (2, True)
    store.lose_answers = 1
    assert (await registry.set_mode("orders", "full")).mode is CompatibilityMode.FULL
    store.lose_answers = 1
    assert (await registry.delete_version("orders", 2)).latest == 1
    assert [each.version for each in await registry.versions("orders")] == [1]


async def test_a_refusal_after_a_lost_answer_leaves_the_outcome_unknown(
    registry: SchemaRegistry, store: Flaky
) -> None:
    """Schedule: version 2 is written and its answer lost. Before the subject is read again another broker
    deletes version 2 and registers a version that ours does not fit."""
    await registry.register("points", "avro", avro(a=None))
    theirs, txn = SchemaRegistry(store), store.txn

    async def losing(*args: Any, **options: Any) -> Any:
        result = await txn(*args, **options)
        if not args[0]:
            return result
        store.txn = txn  # type: ignore[method-assign]
        await theirs.delete_version("points", 2)
        await theirs.register("points", "avro", avro(b=1))
        raise OutcomeUnknown("the answer was lost")

    store.txn = losing  # type: ignore[method-assign]
    with pytest.raises(OutcomeUnknown) as raised:
        await registry.register("points", "avro", avro(a=None, c=0))
    assert isinstance(raised.value.__cause__, SchemaIncompatible)


async def test_what_cannot_be_found_out_is_unknown(registry: SchemaRegistry, store: Flaky) -> None:
    await registry.register("orders", "json", schema("a"))
    store.lose_answers = store.refuse_reads = 1
    with pytest.raises(OutcomeUnknown):
        await registry.register("orders", "json", schema("a", "b"))
    assert (await registry.register("orders", "json", schema("a", "b"))).version == 2


async def test_a_store_without_a_leader_is_not_an_empty_registry(
    registry: SchemaRegistry, store: Flaky
) -> None:
    await registry.register("orders", "json", schema("a"))
    store.refuse_reads = 1
    with pytest.raises(Unavailable):
        await registry.latest("orders")


async def test_a_damaged_record_is_not_the_callers_fault(registry: SchemaRegistry, store: Flaky) -> None:
    await registry.register("orders", "json", schema("a"))
    await store.put(records.definition_key("orders", 1), b'{"definition": "ew=="}')
    with pytest.raises(RegistryCorrupt):
        await registry.register("orders", "json", schema("a", "b"))
    await store.put(records.subject_key("orders"), b"{")
    with pytest.raises(RecordCorrupt):
        await registry.latest("orders")


# -- limits --------------------------------------------------------------------------------------------------


async def test_a_thousand_versions_of_ten_kilobytes(registry: SchemaRegistry, store: Flaky) -> None:
    """No value comes near the store's limit, and a registration still reads little."""
    for index in range(1, 1001):
        title = {"type": "string", "title": f"{index} " + "x" * 10_000}
        await registry.register("orders", "json", json.dumps(title).encode())
    largest = max(len(kv.value) for kv in store.local.range("/schemas/").kvs)
    assert largest < 20_000 < DEFAULT_LIMITS.max_value_bytes
    assert len(await registry.versions("orders")) == 1000
    assert (await registry.latest("orders")).version == 1000


async def test_the_largest_definition_fits_the_store(registry: SchemaRegistry) -> None:
    definition = b'"int"' + b" " * (MAX_DEFINITION_BYTES - 5)
    await registry.register("big", "avro", definition, description="\0" * 4096, tags=["\0" * 128] * 32)
    assert (await registry.latest("big")).definition == definition


async def test_a_subject_has_a_largest_number_of_versions(
    registry: SchemaRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry_module, "MAX_VERSIONS", 2)
    await registry.register("orders", "json", schema("a"))
    await registry.register("orders", "json", schema("b"))
    with pytest.raises(TooManyVersions):
        await registry.register("orders", "json", schema("c"))
    assert not (await registry.register("orders", "json", schema("a"))).is_new_version
    await registry.delete_version("orders", 1)
    assert (await registry.register("orders", "json", schema("c"))).version == 3
