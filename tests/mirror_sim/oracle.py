"""Oracle: what is true, and what was promised. Checks the invariants J1 to J12 of docs/design/journal.md as
things happen, and presents the bill at the end.

It knows every byte that an owner has appended, every message that was acknowledged or delivered, and looks at
the durable images of disks, not at what anybody says of them."""

from __future__ import annotations

from collections import defaultdict
from itertools import combinations
from typing import TYPE_CHECKING, Any

from sava.ledger.protocol.messages import Fenced
from sava.ledger.protocol.record import (
    Fragment,
    JournalId,
    JournalRecord,
    JournalState,
    Range,
    StorageId,
    recovery_quorum,
)
from tests.mirror_sim.copies import Batch, durable_bytes, durable_note
from tests.mirror_sim.records import TopicRecord, TopicState
from tests.mirror_sim.store import Key
from tests.sim.history import Violation

if TYPE_CHECKING:
    from tests.mirror_sim.broker import Broker
    from tests.mirror_sim.journals import OwnJournal
    from tests.mirror_sim.world import World


RECENT_US = 3_000_000
"""Damage since then may have come after a recovery had checked what it closed."""


class Oracle:
    def __init__(self, world: World) -> None:
        self.world = world
        self.streams: dict[JournalId, bytearray] = defaultdict(bytearray)
        self.batches: dict[JournalId, list[Batch]] = defaultdict(list)
        self.bound: dict[tuple[int, int], int] = {}
        """What an offset of a topic is, since somebody was told or could read it."""
        self.promised: dict[tuple[int, int], tuple[int, JournalId, int]] = {}
        """Acknowledged or delivered: hash, journal, end of the record."""
        self.acked_end: dict[JournalId, int] = defaultdict(int)
        self.closed: dict[JournalId, JournalRecord] = {}
        self._fences: dict[tuple[StorageId, JournalId], int] = {}
        self.rotten: dict[tuple[StorageId, JournalId], int] = {}
        """Copies with flipped bits, and where the first is. Behind it a restart may take all for torn."""
        self._damaged_at = -RECENT_US
        self._given_up: set[JournalId] = set()
        self.registered: dict[int, dict[int, int]] = defaultdict(dict)
        """By topic: what registered segments hold."""

    # -- what owners do ----------------------------------------------------------------------

    def appended(self, journal: JournalId, batch: Batch, data: bytes) -> None:
        stream = self.streams[journal]
        if len(stream) != batch.frame.position:
            raise Violation("J3", f"{journal}: appended at {batch.frame.position}, not at {len(stream)}")
        stream += data
        self.batches[journal].append(batch)

    def taken_back(self, journal: JournalId, end: int) -> None:
        del self.streams[journal][end:]
        self.batches[journal] = [each for each in self.batches[journal] if each.position_end <= end]

    def acked(self, journal: OwnJournal, batch: Batch) -> None:
        """J2: on enough durable images at this moment. J9: one payload for an offset."""
        record = self.world.store.get(("journal", journal.id)).value
        end = batch.position_end
        if end > journal.core.commit:
            raise Violation("J9", f"{journal.id}: {end} was delivered, committed is {journal.core.commit}")
        for known in (journal.core.record, record):
            if known is not None and known.state is JournalState.OPEN:
                self._check_copies("J2", journal.id, known.last, batch.frame.position, end)
        self.acked_end[journal.id] = max(self.acked_end[journal.id], end)
        if journal.id in self.closed and end > self.closed[journal.id].end:
            raise Violation("J7", f"{journal.id} is closed at {self.closed[journal.id].end}; acked {end}")
        self._bind(batch)
        self.promised[batch.frame.topic, batch.frame.start] = (batch.hash, journal.id, end)
        self.world.count("acked")

    def _check_copies(self, rule: str, journal: JournalId, fragment: Fragment, start: int, end: int) -> None:
        if start < fragment.start:
            return
        holding = [each for each in fragment.members if self._held(each, journal, start, end)]
        if len(holding) < fragment.qa:
            raise Violation(
                rule, f"{journal}: {start}..{end} is durable on {holding} of {fragment}, not on {fragment.qa}"
            )

    def _held(self, storage: StorageId, journal: JournalId, start: int, end: int) -> bool:
        """Or was, before the disk was damaged."""
        if storage not in self.world.disks or end > self.rotten.get((storage, journal), end):
            return True
        return self.holds(storage, journal, start, end)

    def holds(self, storage: StorageId, journal: JournalId, start: int, end: int) -> bool:
        """Whether a power cut would leave these bytes there as they were written."""
        held = durable_bytes(self.world.disks[storage], journal, start, end)
        return held == bytes(self.streams[journal][start:end])

    def _bind(self, batch: Batch) -> None:
        key = (batch.frame.topic, batch.frame.start)
        if self.bound.setdefault(key, batch.hash) != batch.hash:
            raise Violation("J9", f"offset {key[1]} of topic {key[0]} is bound to two payloads")

    # -- what disks do -----------------------------------------------------------------------

    def wrote(self, journal: JournalId, end: int, position: int, data: bytes) -> None:
        if position > end:
            raise Violation("J3", f"{journal}: a copy that ends at {end} is continued at {position}")
        if bytes(self.streams[journal][position : position + len(data)]) != data:
            raise Violation("J3", f"{journal}: what is written at {position} is not the owner's stream")

    def taken(self, storage: StorageId, journal: JournalId, epoch: int) -> None:
        if epoch < self._fences.get((storage, journal), 0):
            raise Violation("J4", f"{storage} took bytes of {journal} under epoch {epoch} after a fence")

    def fenced(self, broker: Broker, message: Fenced) -> None:
        """About to be said: it must be durable, and true."""
        storage, journal = message.storage, message.journal
        if storage != broker.storage:
            raise Violation("J6", f"{broker.storage} speaks for {storage}")
        note = durable_note(broker.disk, journal)
        if note is None or note.fence < message.epoch:
            raise Violation("J4", f"{storage} says that it is fenced at {message.epoch}; stored is {note}")
        self._fences[storage, journal] = max(message.epoch, self._fences.get((storage, journal), 0))

    def trimmed(self, journal: JournalId, floor: int) -> None:
        for batch in self.batches[journal]:
            if batch.position_end > floor:
                break
            self._check_registered(journal, batch)
        self.batches[journal] = [each for each in self.batches[journal] if each.position_end > floor]

    def _check_registered(self, journal: JournalId, batch: Batch) -> None:
        if journal in self._given_up:
            return
        frame = batch.frame
        promised = self.promised.get((frame.topic, frame.start))
        if promised is None or promised[0] != batch.hash:
            return  # nobody was told of it, and its topic went on without it
        if self.registered[frame.topic].get(frame.start) != batch.hash:
            raise Violation("J10", f"{journal}: {frame} was trimmed, and is in no registered segment")

    def sent(self, broker: Broker) -> None:
        if broker.has_failed:
            raise Violation("J12", f"broker {broker.id} speaks after its disk has failed")

    # -- what the store says -----------------------------------------------------------------

    def changed(self, key: Key, before: Any, after: Any) -> None:
        if key[0] == "journal":
            self._journal_changed(key[1], before, after)
        elif key[0] == "topic" and before is not None:
            self._topic_changed(key[1], before, after)

    def _journal_changed(
        self, journal: JournalId, before: JournalRecord | None, after: JournalRecord | None
    ) -> None:
        if before is not None and before.state is JournalState.CLOSED and after is not None:
            raise Violation("J1", f"{journal} was closed and is changed to {after}")
        if after is None:
            if before is not None and before.state is not JournalState.CLOSED:
                raise Violation("J1", f"{journal} is removed while it is {before.state}")
            return
        if before is not None and after.epoch < before.epoch:
            raise Violation("J1", f"{journal}: the epoch falls from {before.epoch} to {after.epoch}")
        if after.state is JournalState.OPEN:
            self._check_single(journal)
        self._check_intersection(after.last)
        if after.state is JournalState.CLOSED:
            self._check_closing(journal, after)

    def _check_single(self, journal: JournalId) -> None:
        for key, held in self.world.store.items("journal"):
            other: JournalId = key[1]
            if other.broker == journal.broker and other > journal and held.value.state is JournalState.OPEN:
                raise Violation("J1", f"{journal} and {other} are open")

    def _check_intersection(self, fragment: Fragment) -> None:
        """J5, by counting them out."""
        members, qc = set(fragment.members), recovery_quorum(fragment)
        for acking in combinations(sorted(members), fragment.qa):
            for asked in combinations(sorted(members), qc):
                if not set(acking) & set(asked):
                    raise Violation("J5", f"{acking} may acknowledge what {asked} do not know")

    def _check_closing(self, journal: JournalId, record: JournalRecord) -> None:
        self.closed[journal] = record
        self.world.count("journals closed")
        if record.end > len(self.streams[journal]):
            raise Violation("J3", f"{journal} is closed at {record.end}, beyond all that was ever appended")
        if journal in self._given_up:
            return
        if record.end < self.acked_end[journal]:
            raise Violation("J7", f"{journal} is closed at {record.end}; acked {self.acked_end[journal]}")
        self._check_readable(journal, record)
        # What nobody was told of yet may be read from now on.
        if record.end > max(self.acked_end[journal], record.last.start):
            start = max(self.acked_end[journal], record.last.start)
            held = [each for each in record.holders if self._held(each, journal, start, record.end)]
            if len(held) < record.last.qa:
                raise Violation("J7", f"{journal}: {start}..{record.end} is on {held} only when it is closed")

    def _check_readable(self, journal: JournalId, record: JournalRecord) -> None:
        storages = list(dict.fromkeys((*record.holders, *record.storages)))
        if self.world.now - self._damaged_at < RECENT_US:
            has = self._held
        else:
            has, storages = self.holds, [each for each in storages if each in self.world.disks]
        for batch in self.batches[journal]:
            start, end = batch.frame.position, batch.position_end
            is_needed = record.floor <= start and end <= record.end
            if is_needed and not any(has(each, journal, start, end) for each in storages):
                raise Violation("J7", f"{journal} is closed, and nobody has {start}..{end} of it")

    def lost_disk(self) -> None:
        """Just now."""
        self._damaged_at = self.world.now

    def rotted(self, storage: StorageId, journal: JournalId, position: int) -> None:
        """Just now."""
        self._damaged_at = self.world.now
        self.rotten[storage, journal] = min(position, self.rotten.get((storage, journal), position))

    def _topic_changed(self, topic: int, before: TopicRecord, after: TopicRecord) -> None:
        if after.epoch < before.epoch or after.end < before.end:
            raise Violation("J8", f"topic {topic} goes back from {before} to {after}")
        if after.cursor < before.cursor or after.cursor > after.end:
            raise Violation("J11", f"topic {topic}: the cursor is {after.cursor}, its end {after.end}")
        if after.cursor != before.cursor and after.epoch != before.epoch:
            raise Violation("J11", f"topic {topic}: a cursor of another epoch was written")
        for offset, hash_ in self.world.read(after.segments[len(before.segments) :]):
            self.registered[topic][offset] = hash_
            if self.bound.setdefault((topic, offset), hash_) != hash_:
                raise Violation("J9", f"offset {offset} of topic {topic} is bound to two payloads")

    def serves(self, topic: int, record: TopicRecord) -> None:
        """J8: whoever begins to serve goes on where all that was promised ends."""
        for (promised_topic, offset), (_, journal, _) in self.promised.items():
            if promised_topic == topic and offset >= record.end and journal != record.journal:
                if journal in self._given_up:
                    continue
                raise Violation(
                    "J8", f"topic {topic} goes on at {record.end}; {offset} was acked ({journal})"
                )

    # -- giving up ---------------------------------------------------------------------------

    def was_given_up(self, journal: JournalId) -> bool:
        return journal in self._given_up

    def gave_up(self, journal: JournalId, missing: tuple[Range, ...], unknown_from: int | None) -> None:
        """An operator was told this loss: what was promised and is lost must lie in it, or behind it in its
        topic."""
        self._given_up.add(journal)
        lost = [Range(*each) for each in missing]
        if unknown_from is not None:
            lost.append(Range(unknown_from, 1 << 62))
        holed: dict[int, int] = {}
        for batch in self.batches[journal]:
            at = batch.frame.position
            if any(each.start < batch.position_end and at < each.end for each in lost):
                holed.setdefault(batch.frame.topic, batch.frame.start)
        for (topic, offset), (_, where, _) in list(self.promised.items()):
            if where == journal and topic in holed and offset >= holed[topic]:
                del self.promised[topic, offset]
                self.bound.pop((topic, offset), None)
                self.world.count("acked, and given up by the operator")

    # -- the bill ----------------------------------------------------------------------------

    def settle(self) -> None:
        """Every promise is kept: readable from segments, or from its owner's committed journal."""
        for (topic, offset), (hash_, journal, end) in self.promised.items():
            record: TopicRecord = self.world.store.get(("topic", topic)).value
            found = self.registered[topic].get(offset)
            if found is None and record.state is TopicState.ASSIGNED and record.journal == journal:
                found = self._in_journal(journal, topic, offset)
            if found != hash_:
                raise Violation(
                    "lost", f"offset {offset} of topic {topic} ({journal}, up to {end}) is {found}; {record}"
                )

    def _in_journal(self, journal: JournalId, topic: int, offset: int) -> int | None:
        """What was written there, if a disk still has it."""
        record: JournalRecord = self.world.store.get(("journal", journal)).value
        there = [each for each in record.storages if each in self.world.disks]
        for batch in self.batches[journal]:
            start, end = batch.frame.position, batch.position_end
            if (batch.frame.topic, batch.frame.start) == (topic, offset):
                return batch.hash if any(self._held(each, journal, start, end) for each in there) else None
        return None
