"""Choice: which disks mirror a journal. Pure: neighbours in, disks out.

A mirror that does its work stays: each change of mirrors is a write to the metadata store and a copy of what
is not yet committed. Only if it shares a rack, and somebody is there in a rack that has no copy, that one
takes its place: racks may have come after the journal was opened. Of the others, in this order:

* a rack that neither the owner nor a mirror chosen before is in: what takes a rack away (a switch, a power
  supply) must not take every copy. A broker without a label is in a rack of its own, unknown to be shared.
* fewest journals mirrored: each one is a stream of bytes and syncs.
* the next greater broker id, around in a circle from the owner's: brokers that start together see the same
  counts, and would otherwise all choose the same neighbour.

A mirror to avoid (it refused, or was silent) is left out, as long as ``needed`` others are there: two members
that both have everything survive the loss of either, while three of which one is gone need both others to
recover. With fewer than ``needed`` nothing can be acknowledged, so those to avoid are taken as well, up to
``count``: whichever of them is well again first completes the quorum. Without that, an owner would wait out
its avoidance beside a healthy mirror.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from sava.ledger.ports import Neighbour
from sava.ledger.protocol import StorageId


def choose(
    candidates: Sequence[Neighbour],
    *,
    own: StorageId,
    keep: Sequence[StorageId],
    avoid: Collection[StorageId],
    count: int,
    needed: int = 0,
) -> tuple[StorageId, ...]:
    """See ``ports.Choose``."""
    by_storage = {each.storage: each for each in candidates if each.storage != own}
    owner = next((each for each in candidates if each.storage == own), None)
    kept = [by_storage[storage] for storage in dict.fromkeys(keep) if storage in by_storage]
    chosen = [each for each in kept if each.storage not in avoid][:count]
    fresh = [each for each in by_storage.values() if each not in kept and each.storage not in avoid]
    if len(chosen) == count:
        _spread(chosen, fresh, owner)
    while len(chosen) < count and fresh:
        best = min(fresh, key=lambda each: _rank(each, owner, chosen))
        fresh.remove(best)
        chosen.append(best)
    if len(chosen) < needed:
        chosen += [by_storage[storage] for storage in avoid if storage in by_storage]
    return tuple(each.storage for each in chosen[:count])


def _spread(chosen: list[Neighbour], fresh: Sequence[Neighbour], owner: Neighbour | None) -> None:
    """Leave out one that shares its rack, if there is somebody in another one."""
    racks = {each.rack for each in (*chosen, *([owner] if owner is not None else []))}
    if not any(each.rack and each.rack not in racks for each in fresh):
        return
    for each in reversed(chosen):
        others = [other for other in chosen if other is not each]
        if _is_shared(each, owner, others):
            chosen.remove(each)
            return


def _is_shared(each: Neighbour, owner: Neighbour | None, chosen: Sequence[Neighbour]) -> bool:
    others = [*([owner] if owner is not None else []), *chosen]
    return bool(each.rack) and any(each.rack == other.rack for other in others)


def _rank(
    each: Neighbour, owner: Neighbour | None, chosen: Sequence[Neighbour]
) -> tuple[bool, int, bool, int]:
    own_id = owner.broker if owner is not None else 0
    return _is_shared(each, owner, chosen), each.mirrored, each.broker < own_id, each.broker
