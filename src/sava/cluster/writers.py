"""Writers: batches of messages for any number of topics, published whole and once.

    1 stage     the writer puts each part into the object store                        no reader sees anything
    2 check     each topic says whether it would take its part                         no reader sees anything
    3 decide    one compare-and-swap of the writer's record names the batch            ◀── the one moment
    4 publish   the owner of each topic appends what it finds staged
    5 mark      the record says published; what was staged is removed

Up to 3 nothing has happened. From 3 on it will: every broker that comes to a record that is decided and not
published continues with 4, be it the broker that decided, the one that a repeated commit comes to, the next
commit of the writer, or the leader, which looks for such records every few seconds. What they publish is what
the record names, and topics recognise what they have (``sava.topics.publishing``), so it does not matter how
many do it or how often.

**One at a time.** A batch is decided when the one before it is published, and not before. So a topic that has
seen a later one of a writer has all of the earlier ones, and one number per writer is all that it must
remember.

**Who decides.** The first commit of a batch. A later one, of a driver that was restarted, names other objects
with the same messages (or, if its input is not what it was, other messages): it publishes what the first has
named, and ignores its own. A run that was followed by another is refused. A batch that is not beyond the last
one is a repetition if the record remembers it; of another query, or never seen, it is a writer id used twice
or numbers that do not grow: it is refused, loudly, since taking it for done would lose it.

**Nothing named is swept.** Staged objects that nothing names are removed when they are old. Between the look
at them and the decision they might be:

    broker   looks: the parts are there                    … stalls …                      decides
    leader                              they are old and unnamed: removed

The sweep therefore first writes down, under the key SWEEP, up to when it sweeps, then reads the records, and
then removes. A decision is conditional on that key being what it was when the parts were found to be younger.
Either the sweep sees the decision, or the decision is refused. All these times are the object store's: no
broker's clock has a part in it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple, Protocol

import msgspec

from sava.cluster import writer_records
from sava.cluster.writer_records import (
    SWEEP,
    WRITERS,
    Commit,
    StagedLost,
    WriterBusy,
    WriterRecord,
    WriterUnknown,
    now_ms,
    swept_until,
    writer_key,
)
from sava.errors import SavaError
from sava.metadata.commands import Put
from sava.metadata.errors import OutcomeUnknown, Unavailable
from sava.metadata.records import RecordBusy, RecordChange, RecordStore, Versioned, decode, encode, unchanged
from sava.metadata.store import MetadataStore
from sava.storage import staging
from sava.storage.errors import ObjectMissing, StagedExpired, StagedInvalid
from sava.storage.objectstore import ObjectInfo, ObjectStore
from sava.storage.staging import Manifest, Part, Section
from sava.tasks import SingleFlight, cancelled, spawn, spread
from sava.topics.names import TopicName, check_name

log = logging.getLogger(__name__)

ATTEMPTS: Final = 16
PARALLEL: Final = 16
"""Topics, or objects, of one batch that are asked at a time."""
INEXACT_MS: Final = 2000
"""By so much two answers of an object store about the age of one object may differ: some of them are given in
whole seconds."""


class StagedTopics(Protocol):
    """Topics, wherever they are."""

    async def check(self, writer: str, topic: TopicName, sections: Sequence[Section]) -> int:
        """The topic's id. Raises what the topic would refuse them with."""
        ...

    async def publish(self, writer: str, part: Part, *, producer_id: int, ordinal: int) -> None:
        """Until they are durable in the topic, or the topic is gone. Raises what stands in the way."""
        ...


class PublishedPart(NamedTuple):
    topic: str
    messages: int


class CommitResult(NamedTuple):
    decided_now: bool
    published: Sequence[PublishedPart]
    """Empty if that was long ago."""


class _Decided(NamedTuple):
    record: WriterRecord
    manifest: Manifest


class Writers:
    """Owned by the event loop. Holds nothing that is not in the store."""

    def __init__(
        self, store: MetadataStore, objects: ObjectStore, topics: StagedTopics, *, expiry_s: float
    ) -> None:
        self._store = store
        self._records = RecordStore(store)
        self._objects = objects
        self._topics = topics
        self.usable_s = expiry_s / 2
        """Parts that were staged longer ago are refused: what is about to be swept is not decided upon."""
        self._finishing: SingleFlight[tuple[str, str], Sequence[PublishedPart]] = SingleFlight()
        self._tidying: set[asyncio.Task[None]] = set()

        # For metrics.
        self.decided = 0
        self.published = 0
        self.messages = 0

    async def close(self) -> None:
        """What is not finished is left to other brokers."""
        await self._finishing.stop(Unavailable("this broker stops"))
        await cancelled(*self._tidying)

    # -- committing ------------------------------------------------------------------------------

    async def commit(self, commit: Commit) -> CommitResult:
        """Until the batch is published. Repeating it is safe. Raises WriterFenced, WriterReused,
        BatchOutOfOrder, StagedExpired, StagedInvalid and what a topic refuses its part with: nothing is
        published then. Any other error leaves open whether it is decided; a batch that is will be
        published."""
        writer_records.check_commit(commit)
        unknown: list[OutcomeUnknown] = []
        for _ in range(ATTEMPTS):
            try:
                result = await self._attempt(commit, unknown)
            except (SavaError, TimeoutError) as error:
                if unknown:
                    raise unknown[0] from error  # an earlier attempt may be published yet
                raise
            if result is not None:
                return result
        raise (
            unknown[0]
            if unknown
            else RecordBusy(
                f"several programs write as writer {commit.writer} at once, or its record cannot be changed"
            )
        )

    async def _attempt(self, commit: Commit, unknown: list[OutcomeUnknown]) -> CommitResult | None:
        """None: the record has changed, or the decision has no answer, which is noted in ``unknown``."""
        known = await self._known(commit.writer)
        record = known.value
        if record is not None:
            writer_records.check_run(record, commit)
            if commit.batch <= record.batch:
                writer_records.check_repeated(record, commit)
                unknown.clear()  # it is decided
                if await self._follow(known, record, commit.run):
                    return CommitResult(False, await self._published(record, commit))
                return None
            if not record.is_published:
                await self.finish(commit.writer, record.manifest)
                return None
        try:
            decided = await self._decide(commit, known)
        except OutcomeUnknown as error:
            # It may yet take effect, and need its manifest. What is tried next has the same condition, so
            # that only one of them does.
            unknown.append(error)
            return None
        if decided is None:
            return None
        manifest = decided.record.manifest
        return CommitResult(True, await self.finish(commit.writer, manifest, decided))

    async def _follow(self, known: Versioned[WriterRecord], record: WriterRecord, run: str) -> bool:
        """Take the writer over from an earlier run, if there is one. False: read the record again."""
        followed = record.followed_by(run)
        if followed is record:
            return True
        with suppress(OutcomeUnknown):
            put = Put(known.key, encode(followed))
            return (await self._store.txn((known.unchanged,), (put,))).succeeded
        return False

    async def _published(self, record: WriterRecord, commit: Commit) -> Sequence[PublishedPart]:
        if commit.batch < record.batch or record.is_published:
            return ()
        return await self.finish(commit.writer, record.manifest)

    async def _decide(self, commit: Commit, known: Versioned[WriterRecord]) -> _Decided | None:
        """None: it was another's turn. Raises OutcomeUnknown."""
        swept = swept_until(await self._store.get(SWEEP))
        await self._check_fresh(commit, swept.moment_ms)
        manifest = Manifest(writer=commit.writer, batch=commit.batch, parts=await self._check_topics(commit))
        record = writer_records.next_record(commit, known.value, manifest)
        await staging.put_manifest(self._objects, record.manifest, manifest)
        conditions = (known.unchanged, unchanged(SWEEP, swept.revision))
        result = await self._store.txn(conditions, (Put(known.key, encode(record)),))
        if not result.succeeded:
            self._tidy(self._remove([record.manifest]))
            return None
        self.decided += 1
        return _Decided(record, manifest)

    async def _check_fresh(self, commit: Commit, swept_ms: int) -> None:
        """Raise unless all objects are there, large enough, and not about to be removed."""
        ends: dict[str, int] = {}
        for _, sections in commit.parts:
            for section in sections:
                ends[section.key] = max(ends.get(section.key, 0), section.end)

        async def look(key: str) -> ObjectInfo:
            try:
                return await self._objects.head(key)
            except ObjectMissing:
                raise StagedExpired(
                    f"{key} is gone, or never came; the batch has to be staged again"
                ) from None

        oldest_ms = now_ms() - self.usable_s * 1000
        for info in await spread(ends, look, parallel=PARALLEL):
            if info.size < ends[info.key]:
                raise StagedInvalid(f"{info.key} has {info.size} bytes; a section ends at {ends[info.key]}")
            if info.modified_ms < max(oldest_ms, swept_ms + INEXACT_MS):
                raise StagedExpired(
                    f"{info.key} was staged more than {self.usable_s:g} s ago; the batch has to be staged "
                    "again (storage.staging_expiry_seconds is twice as long as a commit may come later)"
                )

    async def _check_topics(self, commit: Commit) -> tuple[Part, ...]:
        async def check(part: tuple[TopicName, Sequence[Section]]) -> Part:
            topic, sections = part
            topic_id = await self._topics.check(commit.writer, topic, sections)
            return Part(str(topic), topic_id, tuple(sections))

        return tuple(await spread(commit.parts, check, parallel=PARALLEL))

    # -- finishing -------------------------------------------------------------------------------

    async def finish(
        self, writer: str, manifest: str, decided: _Decided | None = None
    ) -> Sequence[PublishedPart]:
        """Publish what was decided, if that is not done; what it was, empty if another broker has done it.
        Continues if the caller does not. Raises what stands in the way.

        A decision is known by its manifest, which no other has. The ordinals of a writer that was forgotten
        begin again, and a late broker must not take the new one's first batch for the one that it has
        published itself."""
        return await self._finishing.run((writer, manifest), lambda: self._finish(writer, manifest, decided))

    async def _finish(self, writer: str, key: str, decided: _Decided | None) -> Sequence[PublishedPart]:
        try:
            if decided is None:
                decided = await self._load(writer, key)
                if decided is None:
                    return ()
            await self._publish(writer, decided.record, decided.manifest)
        except (SavaError, TimeoutError) as error:
            # A faster broker has removed what this one was looking for.
            if await self._is_over(writer, key):
                return ()
            failure = error
            if isinstance(error, ObjectMissing):
                failure = StagedLost(f"a decided batch of writer {writer} cannot be published: {error}")
            await self._note(writer, key, error=str(failure))
            raise failure from error
        await self._change(writer, key, _published)
        self.published += 1
        self.messages += decided.record.messages
        self._tidy(self._remove([*decided.manifest.keys, decided.record.manifest]))
        return [PublishedPart(part.topic, part.messages) for part in decided.manifest.parts]

    async def _load(self, writer: str, key: str) -> _Decided | None:
        """None: there is nothing left to do."""
        record = (await self._known(writer)).value
        if record is None or _is_over(record, key):
            return None
        return _Decided(record, await staging.get_manifest(self._objects, record.manifest))

    async def _publish(self, writer: str, record: WriterRecord, manifest: Manifest) -> None:
        """All parts; a part that fails does not keep the others from being published. Raises the first
        failure."""
        done: list[str] = []
        failures: list[SavaError | TimeoutError] = []

        async def publish(part: Part) -> None:
            try:
                await self._topics.publish(
                    writer, part, producer_id=record.producer_id, ordinal=record.ordinal
                )
                done.append(part.topic)
            except (SavaError, TimeoutError) as error:
                failures.append(error)

        left = [part for part in manifest.parts if part.topic not in record.done]
        await spread(left, publish, parallel=PARALLEL)
        if failures:
            if done:
                await self._note(writer, record.manifest, done=done)
            raise failures[0]

    async def _note(self, writer: str, key: str, *, done: Iterable[str] = (), error: str = "") -> None:
        """How far it has come, for those who continue and those who look. If it cannot be written, it is
        not."""

        def noted(record: WriterRecord) -> WriterRecord:
            both = tuple(dict.fromkeys((*record.done, *done)))
            return msgspec.structs.replace(record, done=both, error=error or record.error)

        with suppress(SavaError, TimeoutError):
            await self._change(writer, key, noted)

    async def _change(self, writer: str, key: str, change: Callable[[WriterRecord], WriterRecord]) -> None:
        """The writer's record, unless this batch is over."""

        def decide(found: Versioned[WriterRecord]) -> RecordChange[WriterRecord] | None:
            if found.value is None or _is_over(found.value, key):
                return None
            changed = change(found.value)
            return RecordChange(changed) if changed != found.value else None

        await self._records.update(writer_key(writer), WriterRecord, decide, what=f"writer {writer}")

    async def _is_over(self, writer: str, key: str) -> bool:
        try:
            record = (await self._known(writer)).value
        except (SavaError, TimeoutError):
            return False
        return record is None or _is_over(record, key)

    # -- knowing and forgetting ------------------------------------------------------------------

    async def list(self) -> list[tuple[str, WriterRecord]]:
        found = (await self._store.range(WRITERS)).kvs
        return [(kv.key.removeprefix(WRITERS), decode(kv, WriterRecord)) for kv in found]

    async def forget(self, writer: str, *, force: bool = False) -> None:
        """Raises WriterUnknown, WriterBusy."""
        check_name(writer, "writer")

        def decide(found: Versioned[WriterRecord]) -> RecordChange[WriterRecord]:
            record = found.value
            if record is None:
                raise WriterUnknown(writer)
            if not record.is_published and not force:
                raise WriterBusy(writer, record.batch, record.error)
            return RecordChange(None)

        await self._records.update(writer_key(writer), WriterRecord, decide, what=f"writer {writer}")
        log.info("writers: forgotten writer=%s", writer)

    # -- records and objects ---------------------------------------------------------------------

    async def _known(self, writer: str) -> Versioned[WriterRecord]:
        return await self._records.get(writer_key(writer), WriterRecord)

    async def _remove(self, keys: Sequence[str]) -> None:
        """What is left is swept later."""
        try:
            await self._objects.delete(keys)
        except SavaError as error:
            log.warning("writers: staged objects not removed error=%s: %s", type(error).__name__, error)

    def _tidy(self, work: Coroutine[Any, Any, None]) -> None:
        task = spawn(work, name="writers: removing")
        self._tidying.add(task)
        task.add_done_callback(self._tidying.discard)


def _is_over(record: WriterRecord, manifest: str) -> bool:
    return record.manifest != manifest or record.is_published


def _published(record: WriterRecord) -> WriterRecord:
    return msgspec.structs.replace(record, is_published=True, done=(), error="")
