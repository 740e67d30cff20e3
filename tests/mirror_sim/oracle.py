"""Oracle: what is true, and what was promised. Checks the invariants as things happen, and presents the bill
at the end.

J1   a broker has one open ledger; records change by compare-and-swap along the table in ``record``; a
     closed one keeps its end
J2   what is acknowledged is durable on ``qa`` members of its fragment at that moment
J3   every copy is a range of the owner's stream without a gap
J4   the fence is durable when it is said; after it nothing of a lower epoch is taken
J5   any ``qa`` members and any ``qc`` members have one in common
J6   an answer counts only from the disk that is listed
J7   a ledger is closed at or behind everything acknowledged; every byte of it can be read; what was not yet
     committed is on ``qa`` disks
J8   a topic continues at or behind everything acknowledged
J9   nothing is delivered that is not committed; an offset has one payload, permanently
J10  what is trimmed is in registered segments
J11  a cursor is not beyond what exists, and is written under the owner's epoch
J12  a process whose disk has failed is never heard again

It knows every byte that an owner has appended, every message that was acknowledged or delivered, and looks at
the durable images of disks, not at what anybody says of them."""

from __future__ import annotations

from collections import defaultdict
from itertools import combinations
from typing import TYPE_CHECKING, Any

from sava.ledger.protocol.member import FenceAnswer
from sava.ledger.protocol.record import (
    Fragment,
    LedgerId,
    LedgerRecord,
    LedgerState,
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
    from tests.mirror_sim.ledgers import OwnJournal
    from tests.mirror_sim.world import World


RECENT_US = 3_000_000
"""Damage since then may have come after a recovery had checked what it closed."""


class Oracle:
    def __init__(self, world: World) -> None:
        self.world = world
        self.streams: dict[LedgerId, bytearray] = defaultdict(bytearray)
        self.batches: dict[LedgerId, list[Batch]] = defaultdict(list)
        self.bound: dict[tuple[int, int], int] = {}
        """What an offset of a topic is, since somebody was told or could read it."""
        self.promised: dict[tuple[int, int], tuple[int, LedgerId, int]] = {}
        """Acknowledged or delivered: hash, ledger, end of the record."""
        self.acked_end: dict[LedgerId, int] = defaultdict(int)
        self.closed: dict[LedgerId, LedgerRecord] = {}
        self._fences: dict[tuple[StorageId, LedgerId], int] = {}
        self.rotten: dict[tuple[StorageId, LedgerId], int] = {}
        """Copies with flipped bits, and where the first is. Behind it a restart may take all for torn."""
        self._damaged_at = -RECENT_US
        self._given_up: set[LedgerId] = set()
        self.registered: dict[int, dict[int, int]] = defaultdict(dict)
        """By topic: what registered segments hold."""

    # -- what owners do ----------------------------------------------------------------------

    def appended(self, ledger: LedgerId, batch: Batch, data: bytes) -> None:
        stream = self.streams[ledger]
        if len(stream) != batch.frame.position:
            raise Violation("J3", f"{ledger}: appended at {batch.frame.position}, not at {len(stream)}")
        stream += data
        self.batches[ledger].append(batch)

    def taken_back(self, ledger: LedgerId, end: int) -> None:
        del self.streams[ledger][end:]
        self.batches[ledger] = [each for each in self.batches[ledger] if each.position_end <= end]

    def acked(self, ledger: OwnJournal, batch: Batch) -> None:
        """J2: on enough durable images at this moment. J9: one payload for an offset."""
        record = self.world.store.get(("ledger", ledger.id)).value
        end = batch.position_end
        if end > ledger.core.commit:
            raise Violation("J9", f"{ledger.id}: {end} was delivered, committed is {ledger.core.commit}")
        for known in (ledger.core.record, record):
            if known is not None and known.state is LedgerState.OPEN:
                self._check_copies("J2", ledger.id, known.last, batch.frame.position, end)
        self.acked_end[ledger.id] = max(self.acked_end[ledger.id], end)
        if ledger.id in self.closed and end > self.closed[ledger.id].end:
            raise Violation("J7", f"{ledger.id} is closed at {self.closed[ledger.id].end}; acked {end}")
        self._bind(batch)
        self.promised[batch.frame.topic, batch.frame.start] = (batch.hash, ledger.id, end)
        self.world.count("acked")

    def _check_copies(self, rule: str, ledger: LedgerId, fragment: Fragment, start: int, end: int) -> None:
        if start < fragment.start:
            return
        holding = [each for each in fragment.members if self._held(each, ledger, start, end)]
        if len(holding) < fragment.qa:
            raise Violation(
                rule, f"{ledger}: {start}..{end} is durable on {holding} of {fragment}, not on {fragment.qa}"
            )

    def _held(self, storage: StorageId, ledger: LedgerId, start: int, end: int) -> bool:
        """Or was, before the disk was damaged."""
        if storage not in self.world.disks or end > self.rotten.get((storage, ledger), end):
            return True
        return self.holds(storage, ledger, start, end)

    def holds(self, storage: StorageId, ledger: LedgerId, start: int, end: int) -> bool:
        """Whether a power cut would leave these bytes there as they were written."""
        held = durable_bytes(self.world.disks[storage], ledger, start, end)
        return held == bytes(self.streams[ledger][start:end])

    def _bind(self, batch: Batch) -> None:
        key = (batch.frame.topic, batch.frame.start)
        if self.bound.setdefault(key, batch.hash) != batch.hash:
            raise Violation("J9", f"offset {key[1]} of topic {key[0]} is bound to two payloads")

    # -- what disks do -----------------------------------------------------------------------

    def wrote(self, ledger: LedgerId, end: int, position: int, data: bytes) -> None:
        if position > end:
            raise Violation("J3", f"{ledger}: a copy that ends at {end} is continued at {position}")
        if bytes(self.streams[ledger][position : position + len(data)]) != data:
            raise Violation("J3", f"{ledger}: what is written at {position} is not the owner's stream")

    def taken(self, storage: StorageId, ledger: LedgerId, epoch: int) -> None:
        if epoch < self._fences.get((storage, ledger), 0):
            raise Violation("J4", f"{storage} took bytes of {ledger} under epoch {epoch} after a fence")

    def fenced(self, broker: Broker, message: FenceAnswer) -> None:
        """About to be said: it must be durable, and true."""
        storage, ledger = message.storage, message.ledger
        if storage != broker.storage:
            raise Violation("J6", f"{broker.storage} speaks for {storage}")
        note = durable_note(broker.disk, ledger)
        if note is None or note.fence < message.epoch:
            raise Violation("J4", f"{storage} says that it is fenced at {message.epoch}; stored is {note}")
        self._fences[storage, ledger] = max(message.epoch, self._fences.get((storage, ledger), 0))

    def trimmed(self, ledger: LedgerId, floor: int) -> None:
        for batch in self.batches[ledger]:
            if batch.position_end > floor:
                break
            self._check_registered(ledger, batch)
        self.batches[ledger] = [each for each in self.batches[ledger] if each.position_end > floor]

    def _check_registered(self, ledger: LedgerId, batch: Batch) -> None:
        if ledger in self._given_up:
            return
        frame = batch.frame
        promised = self.promised.get((frame.topic, frame.start))
        if promised is None or promised[0] != batch.hash:
            return  # nobody was told of it, and its topic went on without it
        if self.registered[frame.topic].get(frame.start) != batch.hash:
            raise Violation("J10", f"{ledger}: {frame} was trimmed, and is in no registered segment")

    def sent(self, broker: Broker) -> None:
        if broker.has_failed:
            raise Violation("J12", f"broker {broker.id} speaks after its disk has failed")

    # -- what the store says -----------------------------------------------------------------

    def changed(self, key: Key, before: Any, after: Any) -> None:
        if key[0] == "ledger":
            self._journal_changed(key[1], before, after)
        elif key[0] == "topic" and before is not None:
            self._topic_changed(key[1], before, after)

    def _journal_changed(
        self, ledger: LedgerId, before: LedgerRecord | None, after: LedgerRecord | None
    ) -> None:
        if before is not None and before.state is LedgerState.CLOSED and after is not None:
            raise Violation("J1", f"{ledger} was closed and is changed to {after}")
        if after is None:
            if before is not None and before.state is not LedgerState.CLOSED:
                raise Violation("J1", f"{ledger} is removed while it is {before.state}")
            return
        if before is not None and after.epoch < before.epoch:
            raise Violation("J1", f"{ledger}: the epoch falls from {before.epoch} to {after.epoch}")
        if after.state is LedgerState.OPEN:
            self._check_single(ledger)
        self._check_intersection(after.last)
        if after.state is LedgerState.CLOSED:
            self._check_closing(ledger, after)

    def _check_single(self, ledger: LedgerId) -> None:
        for key, held in self.world.store.items("ledger"):
            other: LedgerId = key[1]
            if other.broker == ledger.broker and other > ledger and held.value.state is LedgerState.OPEN:
                raise Violation("J1", f"{ledger} and {other} are open")

    def _check_intersection(self, fragment: Fragment) -> None:
        """J5, by counting them out."""
        members, qc = set(fragment.members), recovery_quorum(fragment)
        for acking in combinations(sorted(members), fragment.qa):
            for asked in combinations(sorted(members), qc):
                if not set(acking) & set(asked):
                    raise Violation("J5", f"{acking} may acknowledge what {asked} do not know")

    def _check_closing(self, ledger: LedgerId, record: LedgerRecord) -> None:
        self.closed[ledger] = record
        self.world.count("ledgers closed")
        if record.end > len(self.streams[ledger]):
            raise Violation("J3", f"{ledger} is closed at {record.end}, beyond all that was ever appended")
        if ledger in self._given_up:
            return
        if record.end < self.acked_end[ledger]:
            raise Violation("J7", f"{ledger} is closed at {record.end}; acked {self.acked_end[ledger]}")
        self._check_readable(ledger, record)
        # What nobody was told of yet may be read from now on.
        if record.end > max(self.acked_end[ledger], record.last.start):
            start = max(self.acked_end[ledger], record.last.start)
            held = [each for each in record.holders if self._held(each, ledger, start, record.end)]
            if len(held) < record.last.qa:
                raise Violation("J7", f"{ledger}: {start}..{record.end} is on {held} only when it is closed")

    def _check_readable(self, ledger: LedgerId, record: LedgerRecord) -> None:
        storages = list(dict.fromkeys((*record.holders, *record.storages)))
        if self.world.now - self._damaged_at < RECENT_US:
            has = self._held
        else:
            has, storages = self.holds, [each for each in storages if each in self.world.disks]
        for batch in self.batches[ledger]:
            start, end = batch.frame.position, batch.position_end
            is_needed = record.floor <= start and end <= record.end
            if is_needed and not any(has(each, ledger, start, end) for each in storages):
                raise Violation("J7", f"{ledger} is closed, and nobody has {start}..{end} of it")

    def lost_disk(self) -> None:
        """Just now."""
        self._damaged_at = self.world.now

    def rotted(self, storage: StorageId, ledger: LedgerId, position: int) -> None:
        """Just now."""
        self._damaged_at = self.world.now
        self.rotten[storage, ledger] = min(position, self.rotten.get((storage, ledger), position))

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
        for (promised_topic, offset), (_, ledger, _) in self.promised.items():
            if promised_topic == topic and offset >= record.end and ledger != record.ledger:
                if ledger in self._given_up:
                    continue
                raise Violation("J8", f"topic {topic} goes on at {record.end}; {offset} was acked ({ledger})")

    # -- giving up ---------------------------------------------------------------------------

    def was_given_up(self, ledger: LedgerId) -> bool:
        return ledger in self._given_up

    def gave_up(self, ledger: LedgerId, missing: tuple[Range, ...], unknown_from: int | None) -> None:
        """An operator was told this loss: what was promised and is lost must lie in it, or behind it in its
        topic."""
        self._given_up.add(ledger)
        lost = [Range(*each) for each in missing]
        if unknown_from is not None:
            lost.append(Range(unknown_from, 1 << 62))
        holed: dict[int, int] = {}
        for batch in self.batches[ledger]:
            at = batch.frame.position
            if any(each.start < batch.position_end and at < each.end for each in lost):
                holed.setdefault(batch.frame.topic, batch.frame.start)
        for (topic, offset), (_, where, _) in list(self.promised.items()):
            if where == ledger and topic in holed and offset >= holed[topic]:
                del self.promised[topic, offset]
                self.bound.pop((topic, offset), None)
                self.world.count("acked, and given up by the operator")

    # -- the bill ----------------------------------------------------------------------------

    def settle(self) -> None:
        """Every promise is kept: readable from segments, or from its owner's committed ledger."""
        for (topic, offset), (hash_, ledger, end) in self.promised.items():
            record: TopicRecord = self.world.store.get(("topic", topic)).value
            found = self.registered[topic].get(offset)
            if found is None and record.state is TopicState.ASSIGNED and record.ledger == ledger:
                found = self._in_journal(ledger, topic, offset)
            if found != hash_:
                raise Violation(
                    "lost", f"offset {offset} of topic {topic} ({ledger}, up to {end}) is {found}; {record}"
                )

    def _in_journal(self, ledger: LedgerId, topic: int, offset: int) -> int | None:
        """What was written there, if a disk still has it."""
        record: LedgerRecord = self.world.store.get(("ledger", ledger)).value
        there = [each for each in record.storages if each in self.world.disks]
        for batch in self.batches[ledger]:
            start, end = batch.frame.position, batch.position_end
            if (batch.frame.topic, batch.frame.start) == (topic, offset):
                return batch.hash if any(self._held(each, ledger, start, end) for each in there) else None
        return None
