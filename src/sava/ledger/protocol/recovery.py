"""Recovery: ends a ledger whose owner is gone, with every acknowledged byte in it.

    claim       the record becomes *recovering* under the next epoch: no mirror change can happen any more
    fence       every disk that may hold a part gets the epoch, stores it, and says how far its copy goes
    count       enough members of the last fragment have answered (``quorum``); until then: wait
    choose      the end is the greatest of theirs: all copies are beginnings of one stream, so the longest one
                holds whatever was acknowledged
    check       the disks verify what they hold; each byte up to the end needs one intact copy
    write back  what may be on too few disks is copied until as many hold it as an acknowledgement needs
    close       the record becomes *closed* at the end, by compare-and-swap on the claim

**Unknown is not empty.** A member that does not answer may hold acknowledged bytes. Fewer answers than needed
mean waiting, for as long as it takes; ``waiting_for`` says for whom. Two disks lost of three is such a case:
nothing is invented, and an operator may decide (``loss``, ``accept_loss``). One disk's word does not suffice
where two acknowledged, not even the owner's, which has all that was acknowledged: a disk that lost its last
records cannot tell that from a write that was cut short.

**Bad is not the end.** A record that does not verify is looked for on the other disks. If none has it intact,
it is waited for, with one exception: when enough members say that they never had it that it cannot have been
acknowledged, the ledger ends before it.

**Before closing, enough copies.** The longest copy may hold bytes that no other disk has. They may be read
once the ledger is closed, so they must not disappear with one disk then:

    a holds 120, b holds 100; closed at 120 without writing back; a consumer reads 120; a burns down → lost

If too few disks can take it, it waits here as well. Nothing is missing then, and an operator who accepts
fewer copies for the time until all of it is in segments may say so, in the same way.

**Two recoverers** cannot harm each other: each claim has its own epoch, a disk that was fenced by the later
one refuses the earlier one's bytes, and only one can close. The later one may find another end than the
earlier one would have; both hold all that was acknowledged, and only the one in the record counts.

The host's part: carry ``poll``'s messages to the disks they name (the broker that has this disk, if any), and
their answers back; store ``wanted`` in place of ``revision`` and tell the outcome, repeating it while that is
unknown; call ``retry`` from time to time. Owned by one task.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from sava.ledger.protocol import record as steps
from sava.ledger.protocol.messages import (
    Check,
    CheckAnswer,
    CopyState,
    Durable,
    Fence,
    FenceAnswer,
    LedgerRefused,
    Message,
    Read,
    ReadAnswer,
    WriteBack,
)
from sava.ledger.protocol.record import (
    LedgerId,
    LedgerRecord,
    LedgerState,
    Range,
    StorageId,
    is_disproved,
    recovery_quorum,
    suffices,
    without,
)

READ_BYTES = 1 << 20
STALLED = 4
"""After this many times that no disk could take what is to be written back, that is how it is for now."""


class Phase(StrEnum):
    CLAIM = "claim"
    FENCE = "fence"
    CHECK = "check"
    WRITE_BACK = "write back"
    CLOSE = "close"
    CLOSED = "closed"
    OVERTAKEN = "overtaken"
    """Another broker recovers this ledger, or has closed it."""


@dataclass(frozen=True, slots=True)
class Loss:
    """What would be lost if the ledger were closed with what is there."""

    missing: tuple[Range, ...]
    """Known to have existed, and no disk that answers can give it back."""
    unknown_from: int | None
    """From here on anything may have been acknowledged, because too few members answer."""
    silent: tuple[StorageId, ...]
    """Disks whose answer would help, or that would help by taking a copy."""


class Recovery:
    def __init__(
        self,
        ledger: LedgerId,
        record: LedgerRecord,
        revision: int,
        *,
        by: str,
        spares: Sequence[StorageId] = (),
    ) -> None:
        """``by`` is unique to this attempt. ``spares`` are disks of living brokers that may hold a copy when
        too few members are left. Raises WrongStep for a closed ledger."""
        self.ledger = ledger
        self.phase = Phase.CLAIM
        self.revision = revision
        self.record = record
        self._spares = tuple(spare for spare in spares if spare not in record.storages)
        self._wanted: LedgerRecord | None = steps.claimed(record, by)
        self._epoch = record.epoch + 1
        self._copies: dict[StorageId, CopyState | None] = {}
        self._bad: dict[StorageId, tuple[Range, ...]] = {}
        """Of the disks that have checked their copy."""
        self._end = 0
        self._lost: tuple[Range, ...] = ()
        self._is_unclean = False
        self._stalls = 0
        """How often it was tried again since the last piece was written back."""
        self._written: dict[StorageId, int] = {}
        """Durable ends of copies that were written back to."""
        self._copying: tuple[StorageId, StorageId, int] | None = None
        """Source, target, position."""
        self._is_given = False
        """Whether the source has given what is being copied, and the target's answer is awaited."""
        self._unable: set[StorageId] = set()
        """Targets that refused, sources that did not give, and who did not answer: until all were tried."""
        self._out: list[Message] = []

    # -- the record --------------------------------------------------------------------------

    @property
    def wanted(self) -> LedgerRecord | None:
        """To be stored in place of ``revision``, again and again until the outcome is known."""
        return self._wanted

    def stored(self, revision: int) -> None:
        """``wanted`` is the record now."""
        assert self._wanted is not None
        self.record, self.revision, self._wanted = self._wanted, revision, None
        if self.record.state is LedgerState.CLOSED:
            self.phase = Phase.CLOSED
        else:
            self.phase = Phase.FENCE
            self._fence()

    def found(self, record: LedgerRecord | None, revision: int) -> None:
        """``wanted`` was refused, and this is there instead. It may be what was wanted: an earlier try of
        ours, whose answer was lost."""
        if record is not None and record == self._wanted:
            self.stored(revision)
        else:
            self.phase, self._wanted = Phase.OVERTAKEN, None

    # -- messages ----------------------------------------------------------------------------

    def poll(self) -> list[Message]:
        """What is to be sent."""
        out, self._out = self._out, []
        return out

    def offer(self, spares: Sequence[StorageId]) -> None:
        """These disks are there now, too."""
        known = (*self.record.storages, *self._spares)
        self._spares += tuple(spare for spare in spares if spare not in known)

    def ask_again(self) -> None:
        """The disks that have not answered at all, while others are at work."""
        if self.phase in (Phase.FENCE, Phase.CHECK, Phase.WRITE_BACK):
            self._fence()

    def retry(self) -> None:
        """Ask the disks again that have not answered, or were not done; none is at work."""
        if self.phase in (Phase.FENCE, Phase.CHECK, Phase.WRITE_BACK):
            self._stalls += self.phase is Phase.WRITE_BACK
            if self._copying is None:
                self._unable.clear()
            else:
                # A disk that has not answered may never do: the others are tried first, all of them. But only
                # the one that was asked: its counterpart may be the only one that has, or can take, the rest.
                self._unable.add(self._copying[1] if self._is_given else self._copying[0])
                self._copying = None
            self._fence()
            self._check()
            self._step()

    def receive(self, message: Message) -> None:
        if self.phase not in (Phase.FENCE, Phase.CHECK, Phase.WRITE_BACK):
            return
        if isinstance(message, FenceAnswer):
            self._fenced(message)
        elif isinstance(message, CheckAnswer):
            if message.storage in self._copies:
                self._bad[message.storage] = message.bad
        elif isinstance(message, ReadAnswer):
            self._got(message)
        elif isinstance(message, Durable):
            self._written_back(message)
        elif isinstance(message, LedgerRefused):
            self._refused(message)
        self._step()

    def _fence(self) -> None:
        asked = (*self.record.storages, *self._spares)
        self._out += [
            Fence(self.ledger, storage, self._epoch) for storage in asked if storage not in self._copies
        ]

    def _fenced(self, message: FenceAnswer) -> None:
        if message.epoch == self._epoch and message.storage not in self._copies:
            self._copies[message.storage] = message.copy
            self._stalls = 0
            self._check()

    def _check(self) -> None:
        """Each disk checks what it holds of what is needed, all at the same time."""
        for storage, copy in self._copies.items():
            if copy is not None and storage not in self._bad:
                self._out.append(Check(self.ledger, storage, max(copy.base, copy.floor), copy.end))

    def _refused(self, message: LedgerRefused) -> None:
        if self._copying is not None and message.storage == self._copying[1]:
            self._unable.add(message.storage)
            self._copying = None

    # -- deciding ----------------------------------------------------------------------------

    @property
    def _floor(self) -> int:
        """What lies before it is in segments, or was never part of the ledger."""
        floors = [copy.floor for copy in self._copies.values() if copy is not None]
        return max([self.record.fragments[0].start, *floors])

    @property
    def _ends(self) -> dict[StorageId, int]:
        return {storage: copy.end if copy is not None else 0 for storage, copy in self._copies.items()}

    @property
    def _greatest_end(self) -> int:
        """Of the last fragment's members: those that were replaced may have got more than was ever
        committed with them, which no topic needs."""
        ends = [end for storage, end in self._ends.items() if storage in self.record.last.members]
        return max([self.record.last.start, *ends])

    def _step(self) -> None:
        if self.phase in (Phase.FENCE, Phase.CHECK):
            self._choose()
        if self.phase is Phase.WRITE_BACK:
            self._copy()

    def _choose(self) -> None:
        last = self.record.last
        if not suffices(last, self._copies) and not self._is_unclean:
            return
        self.phase = Phase.CHECK
        end = self._greatest_end
        missing = self._missing(end)
        if missing and not self._is_unclean:
            first = missing[0].start
            if first < last.start or not is_disproved(last, first, self._ends):
                return
            end, missing = first, []
        self._end, self._lost = end, tuple(missing)
        self.phase = Phase.WRITE_BACK

    def _missing(self, end: int) -> list[Range]:
        """What no disk that has checked its copy can give back."""
        held = [part for storage in self._bad for part in self._intact(storage)]
        return without(Range(self._floor, max(end, self._floor)), held)

    def _intact(self, storage: StorageId) -> list[Range]:
        copy = self._copies[storage]
        if copy is None:
            return []
        return without(Range(max(copy.base, copy.floor), copy.end), list(self._bad[storage]))

    # -- writing back ------------------------------------------------------------------------

    @property
    def _settled(self) -> int:
        """Up to here enough disks have it, or segments: it was committed, or lies before the last
        fragment."""
        commits = [copy.commit for copy in self._copies.values() if copy is not None]
        return min(self._end, max([self.record.last.start, self._floor, *commits]))

    def _holders(self) -> list[StorageId]:
        """Who has all that was not settled."""
        needed = Range(self._settled, self._end)
        return [
            storage
            for storage in self._copies
            if self._is_checked(storage)
            and self._end_of(storage) >= self._end
            and not self._lacks(storage, needed)
        ]

    def _is_checked(self, storage: StorageId) -> bool:
        return storage in self._bad or self._copies[storage] is None

    def _end_of(self, storage: StorageId) -> int:
        copy = self._copies[storage]
        return max(copy.end if copy is not None else 0, self._written.get(storage, 0))

    def _lacks(self, storage: StorageId, needed: Range) -> list[Range]:
        """What was there before the writing back, and is not to be given back."""
        copy = self._copies[storage]
        if copy is None:
            return []
        before = Range(needed.start, max(needed.start, min(needed.end, copy.end)))
        return without(before, self._intact(storage))

    def _copy(self) -> None:
        if self._settled >= self._end or len(self._holders()) >= self.record.last.qa:
            self._close()
        elif self._copying is None:
            self._copy_next()
            if self._copying is None and self._is_unclean:
                self._close()

    def _close(self) -> None:
        self.phase = Phase.CLOSE
        whole = Range(self._floor, max(self._end, self._floor))
        self._wanted = steps.closed(self.record, whole, tuple(self._holders()), self._lost)

    def _copy_next(self) -> None:
        holders = self._holders()
        for target in self._copies:
            if target in holders or target in self._unable or not self._is_checked(target):
                continue
            part = self._next_part(target)
            for source in self._bad:
                if source not in self._unable and self._has(source, part.start):
                    self._copying, self._is_given = (source, target, part.start), False
                    self._out.append(Read(self.ledger, source, part.start, part.end, READ_BYTES))
                    return

    def _next_part(self, target: StorageId) -> Range:
        """What to write back to it: first what is damaged, then what it never had."""
        for damaged in self._lacks(target, self._unsettled):
            return damaged
        return Range(self._settled if self._begins(target) else self._end_of(target), self._end)

    def _begins(self, target: StorageId) -> bool:
        """Whether it has no copy that could be continued: none at all, or one of which no disk has the next
        byte any more, because it is in segments."""
        copy = self._copies[target]
        return target not in self._written and (copy is None or copy.end < self._floor)

    @property
    def _unsettled(self) -> Range:
        return Range(self._settled, self._end)

    def _has(self, source: StorageId, position: int) -> bool:
        return any(part.start <= position < part.end for part in self._intact(source))

    def _got(self, message: ReadAnswer) -> None:
        if self._copying is None or (message.storage, message.position) != self._copying[::2]:
            return
        source, target, position = self._copying
        if message.data:
            self._is_given = True
            is_first = self._begins(target)
            self._out.append(WriteBack(self.ledger, target, self._epoch, position, message.data, is_first))
        else:
            self._unable.add(source)
            self._copying = None

    def _written_back(self, message: Durable) -> None:
        if message.storage in self._copies:
            self._written[message.storage] = max(message.end, self._written.get(message.storage, 0))
            self._stalls = 0
            if self._copying is not None and message.storage == self._copying[1]:
                self._repaired(message.storage, self._copying[2])
                self._copying = None

    def _repaired(self, target: StorageId, position: int) -> None:
        """A part of its old copy was overwritten: it looks again what it has."""
        copy = self._copies[target]
        if copy is not None and position < copy.end:
            self._bad.pop(target, None)
            self._check()

    # -- waiting, and giving up --------------------------------------------------------------

    @property
    def waiting_for(self) -> tuple[StorageId, ...]:
        """Disks of the ledger that have not answered."""
        return tuple(storage for storage in self.record.storages if storage not in self._copies)

    @property
    def answers_needed(self) -> int:
        """How many more members of the last fragment must answer, or how many more disks take a copy."""
        if self.phase is Phase.WRITE_BACK:
            return max(0, self.record.last.qa - len(self._holders()))
        answered = sum(1 for member in self.record.last.members if member in self._copies)
        return max(0, recovery_quorum(self.record.last) - answered)

    def loss(self) -> Loss | None:
        """What closing the ledger now would cost; None if there is no need to: the recovery continues by
        itself, or has not yet heard from those who will answer."""
        if self.phase is Phase.WRITE_BACK and self._stalls >= STALLED:
            lacking = [storage for storage in self._copies if storage not in self._holders()]
            return Loss(self._lost, None, tuple(dict.fromkeys((*self.waiting_for, *lacking))))
        if self.phase not in (Phase.FENCE, Phase.CHECK) or self._wanted is not None:
            return None
        end = self._greatest_end
        is_short = not suffices(self.record.last, self._copies)
        return Loss(tuple(self._missing(end)), end if is_short else None, self.waiting_for)

    def accept_loss(self, loss: Loss) -> bool:
        """An operator accepts exactly this loss; False if it is no longer what would be lost."""
        if loss != self.loss():
            return False
        self._is_unclean = True
        self._step()
        return True
