"""A ledger: its name, the disks that hold it, how many of them are enough, and its record in the metadata
store.

A *position* is a byte of the owner's log (``wal``), and the same byte has the same position on every disk.
Every position that is said to any disk is the border of a record: streams are cut between records, so a copy
that ends somewhere ends with a whole one. Ends are exclusive.

**The record** changes only by these steps:

=============  ====================  ==============  ===================================================
step           from                  to              by
=============  ====================  ==============  ===================================================
``open``       (nothing)             open            the broker, for each generation: an unused number
``change``     open                  open            the owner: other mirrors from its commit position on
``drop``       open                  open            the owner: fragments that lie below the floor
``claim``      open, recovering      recovering, +1  a recoverer: ends the ledger
``close``      recovering            closed          the recoverer whose claim stands
``abandon``    closed                closed          an operator: parts that no disk has any more
=============  ====================  ==============  ===================================================

A closed record is removed when every topic of the ledger has its tail in segments. Each step is a
compare-and-swap on the revision that was read; the functions here say what comes out and what is refused.

``epoch`` is what makes a claim more than a note: it is carried to the disks (``Fence``), and they refuse what
has a lower one. ``by`` distinguishes two recoverers that claim with the same number: whose record it is says
whose claim happened, also when the answer to the write was lost.

**One step at a time leads from one set of mirrors to the next.** A recovery looks at the last fragment only,
because a fragment begins at a committed position: all before it is on enough disks of the fragments before,
and one intact copy of each byte will do.

**Quorum.** Of ``n`` members, a position is committed when ``qa`` have it durably. Recovery must hear from
enough that at least one of *any* ``qa`` members is among them:

    qa + qc > n,  so  qc = n - qa + 1          3 members, 2 to acknowledge: 2 to recover
                                               2 members, 2 to acknowledge: 1 to recover
                                               1 member (degraded, or a single broker): that one

With one answer fewer, the members that acknowledged may be exactly those that were not asked. The same number
says when something was *not* acknowledged: when ``qc`` members say that they do not have it, fewer than
``qa`` are left.

The owner's own disk is always among the ``qa``: an acknowledged message can be read back where it was
accepted, and a ledger that is read after a restart is never behind what was promised.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from enum import StrEnum
from typing import NamedTuple, NewType

import msgspec

from sava.errors import HostError, Outcome, RetryableError

StorageId = NewType("StorageId", str)
"""A disk, as long as it exists: drawn when the directory is created. A disk that was lost and replaced has
another one, so that it cannot say "nothing here" in the name of the one that held something."""


class LedgerId(msgspec.Struct, frozen=True, array_like=True, order=True):
    """One generation of a broker's journal. No broker, its owner included, ever continues a ledger of an
    earlier generation: a stream that only one process has written cannot have forked."""

    broker: int
    incarnation: int
    """Greater for each generation; the first record in the metadata store under a number has it."""

    def __str__(self) -> str:
        return f"{self.broker}/{self.incarnation}"


class Fragment(msgspec.Struct, frozen=True, array_like=True):
    """From ``start`` on (up to the next fragment) these disks hold the ledger, and what is durable on ``qa``
    of them is committed. The first of them is the owner's."""

    start: int
    members: tuple[StorageId, ...]
    qa: int


class Range(NamedTuple):
    start: int
    end: int


def without(whole: Range, parts: list[Range]) -> list[Range]:
    """What is left of ``whole`` when the parts are taken out of it."""
    left: list[Range] = []
    at = whole.start
    for part in sorted(parts):
        if part.start > at:
            left.append(Range(at, min(part.start, whole.end)))
        at = max(at, part.end)
        if at >= whole.end:
            return left
    if at < whole.end:
        left.append(Range(at, whole.end))
    return left


class LedgerFenced(RetryableError):
    """A recovery ends this ledger: its owner acknowledges nothing more. What was under way may have
    happened."""

    outcome = Outcome.UNKNOWN

    def __init__(self, ledger: LedgerId) -> None:
        super().__init__(f"ledger {ledger} was fenced; its topics continue elsewhere, or in the next ledger")
        self.ledger = ledger


class WrongStep(RetryableError):
    """The ledger's record does not allow this step."""

    def __init__(self, step: str, why: str) -> None:
        super().__init__(f"a ledger's record does not allow to {step}: {why}")
        self.step = step


class TailBroken(HostError):
    """A closed ledger does not hold what it must hold of a topic."""


NOTHING = 0
"""The durable end of a member that has not said any."""


def recovery_quorum(fragment: Fragment) -> int:
    """How many of its members must answer before it is known how far the ledger goes."""
    return len(fragment.members) - fragment.qa + 1


def suffices(fragment: Fragment, answered: Collection[StorageId]) -> bool:
    """Whether these answers leave no room for an acknowledgement that none of them knows of. An answer counts
    only from the very disk that is listed: all else is unknown, which is not empty."""
    return len(set(fragment.members).intersection(answered)) >= recovery_quorum(fragment)


def is_disproved(fragment: Fragment, position: int, ends: Mapping[StorageId, int]) -> bool:
    """Whether what begins at ``position`` can never have been acknowledged, by what members say of their
    ends."""
    denials = sum(1 for member in fragment.members if member in ends and ends[member] <= position)
    return denials >= recovery_quorum(fragment)


def committed(fragment: Fragment, durable: Mapping[StorageId, int]) -> int:
    """Up to where ``qa`` members, the owner among them, are durable."""
    ends = sorted([durable.get(member, NOTHING) for member in fragment.members], reverse=True)
    own = durable.get(fragment.members[0], NOTHING)
    return min(own, ends[fragment.qa - 1])


class LedgerState(StrEnum):
    OPEN = "open"
    RECOVERING = "recovering"
    CLOSED = "closed"


class LedgerRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """``/ledgers/{broker}/{incarnation}``."""

    state: LedgerState = LedgerState.OPEN
    epoch: int = 0
    """Raised by each claim; the owner writes under 0."""
    by: str = ""
    """Who opened it, and then whose claim stands: unique to the attempt, so that a broker that did not hear
    the outcome of a write sees whether it was its own."""
    fragments: tuple[Fragment, ...]
    qw: int
    """How many disks should hold the ledger, and how many of them before anything is acknowledged. A
    fragment may have fewer, which is then visible here (``is_degraded``)."""
    qa: int
    floor: int = 0
    """Of a closed ledger: what lies before it is in registered segments."""
    end: int = 0
    """Of a closed ledger: nothing beyond it exists, and nothing from ``floor`` to it is missing but
    ``lost``."""
    holders: tuple[StorageId, ...] = ()
    """Of a closed ledger: who was seen to hold it up to its end."""
    lost: tuple[Range, ...] = ()
    """What an operator gave up so that the ledger could be closed."""

    @property
    def last(self) -> Fragment:
        return self.fragments[-1]

    @property
    def origin(self) -> StorageId:
        """The owner's disk."""
        return self.fragments[0].members[0]

    @property
    def is_degraded(self) -> bool:
        """Whether fewer copies are enough at the moment than were asked for."""
        return self.last.qa < self.qa

    @property
    def storages(self) -> tuple[StorageId, ...]:
        """Every disk that may hold a part, each once."""
        return tuple(dict.fromkeys(member for part in self.fragments for member in part.members))


def opened(
    start: int, members: tuple[StorageId, ...], *, qw: int, qa: int, by: str, is_degraded: bool = False
) -> LedgerRecord:
    """A new ledger from ``start`` on; ``members`` begins with the owner's disk, and may name disks that are
    not there at the moment. ``is_degraded``: as many copies as there are members are enough to begin with."""
    enough = min(qa, len(members)) if is_degraded else qa
    return LedgerRecord(fragments=(_fragment(start, members, enough),), qw=qw, qa=qa, by=by)


def changed(
    record: LedgerRecord,
    start: int,
    members: tuple[StorageId, ...],
    *,
    qa: int,
    asked: tuple[int, int] = (0, 0),
) -> LedgerRecord:
    """Other members from ``start`` on, which must be committed. ``asked``: how many disks should hold the
    ledger from now on, and how many of them before anything is acknowledged, if that is another number than
    before. It is not what there happens to be: a cluster of three of which two have died would otherwise be
    taken for one that is complete."""
    _require(record, "change its mirrors", LedgerState.OPEN)
    if members[:1] != record.last.members[:1]:
        raise WrongStep("change its mirrors", "the owner's disk is not the first member")
    if start < record.last.start:
        raise WrongStep("change its mirrors", f"{start} lies before the last fragment")
    # If nothing was committed since the last change, that fragment is empty, and this one takes its place.
    kept = record.fragments if start > record.last.start else record.fragments[:-1]
    return msgspec.structs.replace(
        record,
        fragments=(*kept, _fragment(start, members, qa)),
        qw=asked[0] or record.qw,
        qa=asked[1] or record.qa,
    )


def dropped(record: LedgerRecord, floor: int) -> LedgerRecord:
    """Without the fragments that end at or before ``floor``, which are in registered segments."""
    _require(record, "drop fragments", LedgerState.OPEN)
    ends = [part.start for part in record.fragments[1:]]
    gone = sum(1 for end in ends if end <= floor)
    return msgspec.structs.replace(record, fragments=record.fragments[gone:])


def claimed(record: LedgerRecord, by: str) -> LedgerRecord:
    """Under a greater epoch than any before, so that what other recoverers and the owner have under way is
    refused by every disk that was fenced."""
    _require(record, "be recovered", LedgerState.OPEN, LedgerState.RECOVERING)
    return msgspec.structs.replace(record, state=LedgerState.RECOVERING, epoch=record.epoch + 1, by=by)


def closed(
    record: LedgerRecord, whole: Range, holders: tuple[StorageId, ...], lost: tuple[Range, ...] = ()
) -> LedgerRecord:
    """``whole`` is what the ledger holds beyond segments."""
    _require(record, "be closed", LedgerState.RECOVERING)
    return msgspec.structs.replace(
        record,
        state=LedgerState.CLOSED,
        floor=whole.start,
        end=whole.end,
        holders=holders,
        lost=lost,
    )


def abandoned(record: LedgerRecord, parts: tuple[Range, ...]) -> LedgerRecord:
    """Without parts whose last copy was lost after the ledger was closed; its end stays where it is."""
    _require(record, "have parts given up", LedgerState.CLOSED)
    return msgspec.structs.replace(record, lost=tuple(sorted((*record.lost, *parts))))


def _require(record: LedgerRecord, step: str, *states: LedgerState) -> None:
    if record.state not in states:
        raise WrongStep(step, f"it is {record.state.value}")


def _fragment(start: int, members: tuple[StorageId, ...], qa: int) -> Fragment:
    if not 1 <= qa <= len(set(members)) or len(set(members)) != len(members):
        raise WrongStep("have these members", f"{qa} of {len(members)} disks are to acknowledge")
    return Fragment(start, members, qa)
