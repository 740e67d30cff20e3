"""SchemaRegistry: subjects and their versions, in the metadata store.

Every change of a subject is one transaction on the condition that the subject's record is still the one that
was read:

    read the subject (linearizable) -> read its versions -> check -> transaction: if it is unchanged, write

Each transaction writes the subject's record, so two changes never cross, whichever brokers make them: of two
registrations that were both checked against version 7, one becomes version 8 and the other is checked again,
against 8.

**Unknown outcomes** are found out as for any record (``metadata.records``). Where another has changed the
subject since, a registration that took effect is found by its fingerprint, a deletion by the version that is
gone.

**Ids.** A subject gets its id from the store's counter before the transaction that creates it, so an attempt
that loses leaves a gap. The id always belongs to the subject, also when all versions are deleted.

Reading and comparing schemas takes time and may run a compiler, so it is done in a thread. Few threads do it,
and as few check payloads: each that computes makes the event loop wait for the interpreter's lock, and
clients decide how many requests there are.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, NamedTuple, TypeVar

import msgspec

from sava.metadata.commands import Delete, KeyValue, Operation, Put
from sava.metadata.records import (
    Decide,
    RecordBusy,
    RecordChange,
    RecordStore,
    Updated,
    Versioned,
    decode,
    encode,
)
from sava.metadata.store import MetadataStore
from sava.schemas import records, types
from sava.schemas.definition import PayloadRefusal, Schema, Validator, find_problems, fingerprint, read_schema
from sava.schemas.errors import (
    RegistryCorrupt,
    SchemaError,
    SchemaIncompatible,
    SchemasBusy,
    SubjectTypeMismatch,
    SubjectUnknown,
    TooManyVersions,
    VersionUnknown,
)
from sava.schemas.json_schema import NotEasy
from sava.schemas.records import (
    DefinitionRecord,
    RegisteredVersion,
    SchemaVersion,
    SubjectInfo,
    SubjectRecord,
    VersionInfo,
    VersionRecord,
)
from sava.schemas.types import (
    DEFAULT_MODE,
    CompatibilityMode,
    Reference,
    Resolved,
    SchemaType,
    choose_version,
)

T = TypeVar("T")

ATTEMPTS: Final = 16
MAX_VERSIONS: Final = 4096
"""The most versions that a subject has at a time."""
PAGE: Final = 500
DEFINITIONS_PAGE: Final = 16
"""This is small because a definition may have hundreds of KiB."""
CACHED_VALIDATORS: Final = 256


class _Threads:
    """A few threads, and a bounded queue before them."""

    def __init__(self, name: str, count: int, waiting: int) -> None:
        self._pool = ThreadPoolExecutor(count, thread_name_prefix=name)
        self._name = name
        self._most = count + waiting
        self._entered = 0

    async def run(self, work: Callable[..., T], *arguments: Any) -> T:
        """Raises SchemasBusy."""
        if self._entered >= self._most:
            raise SchemasBusy(f"{self._name}: {self._entered} requests are under way or wait; try again")
        self._entered += 1
        future = asyncio.get_running_loop().run_in_executor(self._pool, work, *arguments)
        # Counted until the thread is free, which may be after its caller has gone.
        future.add_done_callback(self._left)
        return await asyncio.shield(future)

    def _left(self, future: asyncio.Future[Any]) -> None:
        self._entered -= 1
        if not future.cancelled():
            future.exception()


_reading: Final = _Threads("schemas", 2, 256)
_checking: Final = _Threads("payloads", 2, 4096)


class _Candidate(NamedTuple):
    """A definition to register, read and checked."""

    subject: str
    type: SchemaType
    schema: Schema
    info: VersionRecord
    """The version number is not set yet."""
    definition: DefinitionRecord


class SchemaRegistry:
    """Any number of registries, in any number of brokers, may share one store."""

    def __init__(
        self, metadata: MetadataStore, *, now_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000
    ) -> None:
        self._metadata = metadata
        self._records = RecordStore(metadata)
        self._now_ms = now_ms
        self._validators: OrderedDict[tuple[int, int], tuple[str, Validator]] = OrderedDict()

    async def register(
        self,
        subject: str,
        kind: SchemaType | str,
        definition: bytes,
        *,
        description: str = "",
        created_by: str = "",
        tags: Sequence[str] = (),
    ) -> RegisteredVersion:
        """The version that holds this schema: an existing one if it has the same fingerprint, else a new one.

        Raises SchemaIncompatible, SubjectTypeMismatch, SchemaInvalid, SchemaTooLarge, TypeUnknown,
        SubjectInvalid, TooManyVersions, RecordBusy."""
        types.check_subject(subject)
        info = VersionRecord(
            version=0,
            fingerprint="",
            created_ms=self._now_ms(),
            created_by=types.check_text("creator", created_by, types.MAX_CREATED_BY_BYTES),
            description=types.check_text("description", description, types.MAX_DESCRIPTION_BYTES),
            tags=types.check_tags(tuple(tags)),
        )
        kind = types.parse_type(kind)
        schema = await _reading.run(read_schema, kind, definition)
        info = msgspec.structs.replace(info, fingerprint=fingerprint(schema))
        stored = DefinitionRecord(definition=definition, compiled=schema.compiled)
        return await self._register(_Candidate(subject, kind, schema, info, stored))

    async def _register(self, candidate: _Candidate) -> RegisteredVersion:
        schema_id = attempted = 0
        existing: VersionRecord | None = None

        async def decide(found: Versioned[SubjectRecord]) -> RecordChange[SubjectRecord] | None:
            nonlocal schema_id, attempted, existing
            record = found.value
            if record is None:
                schema_id = schema_id or await self._metadata.allocate_id(records.ID_COUNTER)
                attempted = 1
                return _creation(candidate, schema_id)
            versions = await self._versions(candidate.subject)
            wanted = candidate.info.fingerprint
            existing = next((each for each in versions if each.fingerprint == wanted), None)
            if existing is not None and record.type is candidate.type:
                return None
            await self._check_candidate(candidate, record)
            attempted = record.next_version
            return _addition(candidate, record)

        updated = await self._change(candidate.subject, decide)
        record = _known(candidate.subject, updated.value)
        if updated.is_changed or existing is None:
            return RegisteredVersion(record.schema_id, record.latest, True, candidate.info.fingerprint)
        is_new = existing == msgspec.structs.replace(candidate.info, version=attempted)
        return RegisteredVersion(record.schema_id, existing.version, is_new, existing.fingerprint)

    async def _check_candidate(self, candidate: _Candidate, record: SubjectRecord) -> None:
        if record.type is not candidate.type:
            raise SubjectTypeMismatch(candidate.subject, record.type, candidate.type)
        if record.count >= MAX_VERSIONS:
            raise TooManyVersions(f"subject {candidate.subject!r} has {record.count} versions already")
        problems = await self._problems(candidate.subject, record, candidate.schema, record.mode)
        if problems:
            raise SchemaIncompatible(candidate.subject, problems)

    async def set_mode(self, subject: str, mode: CompatibilityMode | str) -> SubjectInfo:
        """Sets the mode of registrations from now on. Raises SubjectUnknown, ModeUnknown, RecordBusy."""
        wanted = types.parse_mode(mode)

        def decide(found: Versioned[SubjectRecord]) -> RecordChange[SubjectRecord] | None:
            record = _known(subject, found.value)
            changed = msgspec.structs.replace(record, mode=wanted)
            return RecordChange(changed) if changed != record else None

        updated = await self._change(types.check_subject(subject), decide)
        return _subject_info(subject, _known(subject, updated.value))

    async def delete_version(self, subject: str, version: int) -> SubjectInfo:
        """Remove a version for good: nothing serves it any more, and its number is not used again. The
        subject stays, also without any version. Raises SubjectUnknown, VersionUnknown, RecordBusy."""
        is_attempted = False

        async def decide(found: Versioned[SubjectRecord]) -> RecordChange[SubjectRecord] | None:
            nonlocal is_attempted
            record = _known(subject, found.value)
            versions = await self._versions(subject)
            left = [each for each in versions if each.version != version]
            if len(left) == len(versions):
                if is_attempted:
                    return None
                raise VersionUnknown(subject, version)
            is_attempted = True
            latest = max(left, key=lambda each: each.version, default=None)
            changed = msgspec.structs.replace(
                record,
                latest=latest.version if latest else 0,
                count=len(left),
                tags=latest.tags if latest else (),
            )
            return RecordChange(
                changed,
                (
                    Delete(records.version_key(subject, version)),
                    Delete(records.definition_key(subject, version)),
                ),
            )

        updated = await self._change(types.check_subject(subject), decide)
        return _subject_info(subject, _known(subject, updated.value))

    async def _change(self, subject: str, decide: Decide[SubjectRecord]) -> Updated[SubjectRecord]:
        return await self._records.update(
            records.subject_key(subject), SubjectRecord, decide, what=f"subject {subject!r}"
        )

    async def latest(self, subject: str) -> SchemaVersion:
        """The latest version. Raises SubjectUnknown, VersionUnknown (all are deleted)."""
        return await self._load(types.check_subject(subject), None)

    async def get(self, schema_id: int, version: int | None = None) -> SchemaVersion:
        """A version by id; the latest when no version is named. Raises SubjectUnknown, VersionUnknown."""
        return await self._load(await self._subject_by_id(schema_id), version)

    async def get_version(self, subject: str, version: int) -> SchemaVersion:
        """Raises SubjectUnknown, VersionUnknown."""
        return await self._load(types.check_subject(subject), version)

    async def versions(self, subject: str) -> list[VersionInfo]:
        """All versions that exist, oldest first. Raises SubjectUnknown."""
        record = await self._subject(types.check_subject(subject))
        return [
            VersionInfo(schema_id=record.schema_id, **msgspec.structs.asdict(each))
            for each in await self._versions(subject)
        ]

    async def subject(self, subject: str) -> SubjectInfo:
        """Raises SubjectUnknown."""
        return _subject_info(subject, await self._subject(types.check_subject(subject)))

    async def subjects(self) -> list[SubjectInfo]:
        """All subjects, in the order of their names as keys."""
        kvs = await self._range(records.SUBJECTS, PAGE)
        return [_subject_info(records.subject_of(kv.key), decode(kv, SubjectRecord)) for kv in kvs]

    async def check(
        self,
        subject: str,
        definition: bytes,
        kind: SchemaType | str,
        mode: CompatibilityMode | str | None = None,
    ) -> list[str]:
        """The problems of registering this, under the subject's mode or another; empty when there are none.
        Raises SubjectUnknown, SchemaInvalid, SchemaTooLarge, TypeUnknown, ModeUnknown."""
        kind = types.parse_type(kind)
        wanted = None if mode is None else types.parse_mode(mode)
        record = await self._subject(types.check_subject(subject))
        if record.type is not kind:
            return [str(SubjectTypeMismatch(subject, record.type, kind))]
        schema = await _reading.run(read_schema, kind, definition)
        return await self._problems(subject, record, schema, wanted or record.mode)

    async def resolve(self, reference: Reference) -> Resolved:
        """Raises SubjectUnknown, VersionUnknown."""
        record = await self._subject(types.check_subject(reference.subject))
        if reference.pinned_version is None:
            existing = [record.latest] if record.latest else []
        else:
            existing = [each.version for each in await self._versions(reference.subject)]
        return Resolved(record.schema_id, choose_version(reference, existing))

    async def validator(self, schema_id: int, version: int) -> Validator:
        """The validator of payloads of exactly this version; made once and kept. A version that this node
        knows to be deleted is not served from memory. Raises SubjectUnknown, VersionUnknown."""
        cached = self._validators.get((schema_id, version))
        if cached is not None and self._metadata.local.get(cached[0]) is not None:
            self._validators.move_to_end((schema_id, version))
            return cached[1]
        found = await self.get(schema_id, version)
        schema = await _reading.run(read_schema, found.type, found.definition, found.compiled)
        validator = Validator(schema)
        self._validators[schema_id, version] = (records.version_key(found.subject, version), validator)
        self._validators.move_to_end((schema_id, version))
        if len(self._validators) > CACHED_VALIDATORS:
            self._validators.popitem(last=False)
        return validator

    async def check_payloads(self, validator: Validator, payloads: Sequence[bytes]) -> PayloadRefusal | None:
        """As the validator does, but never for long on the event loop. Raises SchemasBusy."""
        try:
            return validator.validate_easy(payloads)
        except NotEasy:
            return await _checking.run(validator.validate_many, payloads)

    async def _subject(self, subject: str) -> SubjectRecord:
        """Raises SubjectUnknown."""
        return _known(subject, (await self._records.get(records.subject_key(subject), SubjectRecord)).value)

    async def _subject_by_id(self, schema_id: int) -> str:
        kv = await self._metadata.get(records.id_key(schema_id)) if schema_id > 0 else None
        if kv is None:
            raise SubjectUnknown(schema_id)
        return kv.value.decode()

    async def _versions(self, subject: str) -> list[VersionRecord]:
        kvs = await self._range(records.versions_prefix(subject), PAGE)
        return [decode(kv, VersionRecord) for kv in kvs]

    async def _load(self, subject: str, version: int | None) -> SchemaVersion:
        """Record, version and definition are three reads, between which a version may be deleted; the latest
        one is then looked up again."""
        for _ in range(ATTEMPTS):
            record = await self._subject(subject)
            number = record.latest if version is None else version
            if number < 1:
                raise VersionUnknown(subject, version)
            info = await self._metadata.get(records.version_key(subject, number))
            definition = await self._metadata.get(records.definition_key(subject, number))
            if info is not None and definition is not None:
                return SchemaVersion(
                    schema_id=record.schema_id,
                    subject=subject,
                    type=record.type,
                    mode=record.mode,
                    **msgspec.structs.asdict(decode(info, VersionRecord)),
                    **msgspec.structs.asdict(decode(definition, DefinitionRecord)),
                )
            if version is not None:
                raise VersionUnknown(subject, version)
        raise RecordBusy(f"subject {subject!r} changed under {ATTEMPTS} attempts to read it")

    async def _problems(
        self, subject: str, record: SubjectRecord, schema: Schema, mode: CompatibilityMode
    ) -> list[str]:
        if mode is CompatibilityMode.NONE or not record.latest:
            return []
        older = await self._definitions(subject, record, mode)
        return await _reading.run(_find_problems, schema, older, record.type, mode)

    async def _definitions(
        self, subject: str, record: SubjectRecord, mode: CompatibilityMode
    ) -> list[tuple[int, DefinitionRecord]]:
        """The definitions of the versions that count under the mode, newest first. One that another broker
        deletes meanwhile may be missing; the transaction that follows notices."""
        if mode.is_transitive:
            kvs = await self._range(records.definitions_prefix(subject), DEFINITIONS_PAGE)
        else:
            kv = await self._metadata.get(records.definition_key(subject, record.latest))
            kvs = [] if kv is None else [kv]
        found = [(int(kv.key.rpartition("/")[2]), decode(kv, DefinitionRecord)) for kv in kvs]
        return found[::-1]

    async def _range(self, prefix: str, page: int) -> list[KeyValue]:
        """All keys of a prefix, read a page at a time."""
        kvs: list[KeyValue] = []
        more = True
        while more:
            found = await self._metadata.range(prefix, limit=page, start_after=kvs[-1].key if kvs else "")
            kvs.extend(found.kvs)
            more = found.more
        return kvs


def _known(subject: str, record: SubjectRecord | None) -> SubjectRecord:
    if record is None:
        raise SubjectUnknown(subject)
    return record


def _creation(candidate: _Candidate, schema_id: int) -> RecordChange[SubjectRecord]:
    record = SubjectRecord(
        schema_id=schema_id,
        type=candidate.type,
        mode=DEFAULT_MODE,
        next_version=2,
        latest=1,
        count=1,
        tags=candidate.info.tags,
    )
    owner = Put(records.id_key(schema_id), candidate.subject.encode())
    return RecordChange(record, (owner, *_writes(candidate, 1)))


def _addition(candidate: _Candidate, record: SubjectRecord) -> RecordChange[SubjectRecord]:
    version = record.next_version
    changed = msgspec.structs.replace(
        record,
        next_version=version + 1,
        latest=version,
        count=record.count + 1,
        tags=candidate.info.tags,
    )
    return RecordChange(changed, _writes(candidate, version))


def _writes(candidate: _Candidate, version: int) -> tuple[Operation, ...]:
    info = msgspec.structs.replace(candidate.info, version=version)
    return (
        Put(records.version_key(candidate.subject, version), encode(info)),
        Put(records.definition_key(candidate.subject, version), encode(candidate.definition)),
    )


def _find_problems(
    schema: Schema, older: list[tuple[int, DefinitionRecord]], kind: SchemaType, mode: CompatibilityMode
) -> list[str]:
    """Compares with the older versions, reading one old schema at a time."""
    return find_problems(
        schema,
        ((version, _read_stored(kind, version, record)) for version, record in older),
        mode,
    )


def _read_stored(kind: SchemaType, version: int, record: DefinitionRecord) -> Schema:
    """A definition that was accepted once must stay readable: if it is not, the caller is not at fault."""
    try:
        return read_schema(kind, record.definition, record.compiled)
    except SchemaError as error:
        raise RegistryCorrupt(f"version {version} cannot be read any more: {error}") from error


def _subject_info(subject: str, record: SubjectRecord) -> SubjectInfo:
    return SubjectInfo(
        subject=subject,
        schema_id=record.schema_id,
        type=record.type,
        mode=record.mode,
        latest=record.latest,
        versions=record.count,
        tags=record.tags,
    )
