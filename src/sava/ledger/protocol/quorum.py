"""Quorum: how many disks are enough.

Of ``n`` members, a position is committed when ``qa`` have it durably. Recovery must hear from so many that at
least one of *any* ``qa`` members is among them:

    qa + qc > n,  so  qc = n - qa + 1          3 members, 2 to acknowledge: 2 to recover
                                               2 members, 2 to acknowledge: 1 to recover
                                               1 member (degraded, or a single broker): that one

With one answer fewer, the members that acknowledged may be exactly those that were not asked. The same number
says when something was *not* acknowledged: when ``qc`` members say that they do not have it, fewer than
``qa`` are left.

The owner's own disk is always among the ``qa``: an acknowledged message can be read back where it was
accepted, and a journal that is read after a restart is never behind what was promised.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from sava.ledger.protocol.types import Fragment, StorageId

NOTHING = 0
"""The durable end of a member that has not said any."""


def recovery_quorum(fragment: Fragment) -> int:
    """How many of its members must answer before anybody knows how far the journal goes."""
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
    ends = sorted((durable.get(member, NOTHING) for member in fragment.members), reverse=True)
    own = durable.get(fragment.members[0], NOTHING)
    return min(own, ends[fragment.qa - 1])
