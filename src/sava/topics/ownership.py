"""Ownership: which broker serves a topic. One record for each, and one table of what may become of it.

=============  =======================  ==============  ===============================================
step           from                     to              by
=============  =======================  ==============  ===============================================
``assign``     unassigned, sealed       assigned, e+1   the controller: to a broker that is there, and active
``take``       assigned, orphan         assigned, e+1   the owner, each time that it begins to serve
``move``       assigned                 moving          the controller, on request
``seal``       moving                   sealed          the owner: everything is where any broker can read it
``roll_back``  moving                   assigned, e+1   the owner, or the controller after the deadline
``give_back``  assigned, not taken up   sealed          the owner, which could not begin to serve
``orphan``     assigned, moving         orphan          the controller: the owner's registration is gone
``recover``    orphan                   sealed          the controller: the owner kept nothing to itself
``delete``     any                      deleting, e+1   the broker that deletes the topic
``let_go``     deleting                 deleting        the owner: no broker has it any more
=============  =======================  ==============  ===============================================

A step is a compare-and-swap on the record, so of two that are tried at once one happens, and the other is
decided again. The epoch grows whenever a broker begins to serve, a restart of the same broker included: what
a former life still has under way (a cursor write that the network delayed) carries the old epoch and is
refused.

No broker acts on the absence of a record: a topic without one is *unassigned* as long as its spec exists,
which every step compares too, and only ``delete`` leads to anything being removed. Moving, failing over and
deleting are different states here and cannot be taken for one another."""

from __future__ import annotations

import time
from typing import Any, Final, NamedTuple

import msgspec

from sava.errors import RetryableError
from sava.metadata.commands import KeyValue
from sava.metadata.store import LocalView
from sava.topics import specs
from sava.topics.names import TopicName
from sava.topics.specs import Ownership, OwnershipState

NO_OWNER: Final = 0
UNASSIGNED: Final = Ownership(state=OwnershipState.UNASSIGNED, epoch=0)

_S = OwnershipState


class Step(NamedTuple):
    """What a record must be, and what it becomes."""

    sources: frozenset[OwnershipState]
    target: OwnershipState
    raises_epoch: bool
    forgets: frozenset[str]
    """Fields that go back to their defaults unless the step sets them."""


def _step(
    *sources: OwnershipState, to: OwnershipState, raises_epoch: bool = False, forgets: str = ""
) -> Step:
    return Step(frozenset(sources), to, raises_epoch, frozenset(forgets.split()))


STEPS: Final[dict[str, Step]] = {
    "assign": _step(
        _S.UNASSIGNED, _S.SEALED, to=_S.ASSIGNED, raises_epoch=True, forgets="incarnation target timeout_ms"
    ),
    "take": _step(_S.ASSIGNED, _S.ORPHAN, to=_S.ASSIGNED, raises_epoch=True, forgets="failures"),
    "move": _step(_S.ASSIGNED, to=_S.MOVING, forgets="error"),
    "seal": _step(_S.MOVING, to=_S.SEALED, forgets="owner incarnation timeout_ms error"),
    "roll_back": _step(_S.MOVING, to=_S.ASSIGNED, raises_epoch=True, forgets="target timeout_ms"),
    "give_back": _step(_S.ASSIGNED, to=_S.SEALED, forgets="owner incarnation"),
    "orphan": _step(_S.ASSIGNED, _S.MOVING, to=_S.ORPHAN, forgets="target timeout_ms"),
    "recover": _step(_S.ORPHAN, to=_S.SEALED, forgets="owner incarnation"),
    "delete": _step(*_S, to=_S.DELETING, raises_epoch=True, forgets="target timeout_ms"),
    "let_go": _step(_S.DELETING, to=_S.DELETING, forgets="owner incarnation"),
}


class WrongState(RetryableError):
    """The topic's ownership does not allow the step at the moment."""

    def __init__(self, topic: object, step: str, state: OwnershipState) -> None:
        super().__init__(
            f"topic {topic} is {state.value}, from where there is no way to {step.replace('_', ' ')}"
        )
        self.topic, self.state = str(topic), state


def after(step: str, topic: TopicName, record: Ownership, **changes: Any) -> Ownership:
    """The record after a step. Raises WrongState."""
    rule = STEPS[step]
    if record.state not in rule.sources:
        raise WrongState(topic, step, record.state)
    forgotten = {name: _DEFAULTS[name] for name in rule.forgets}
    return msgspec.structs.replace(
        record,
        **forgotten
        | {
            "state": rule.target,
            "epoch": record.epoch + rule.raises_epoch,
            "since_ms": time.time_ns() // 1_000_000,
        }
        | changes,
    )


_DEFAULTS: Final = {
    field.name: field.default
    for field in msgspec.structs.fields(Ownership)
    if field.default is not msgspec.NODEFAULT
}


class KnownOwnership(NamedTuple):
    """A record as it was read; revision 0: there is none, which means unassigned."""

    record: Ownership
    revision: int


def held(kv: KeyValue | None) -> KnownOwnership:
    return (
        KnownOwnership(UNASSIGNED, 0)
        if kv is None
        else KnownOwnership(specs.decode(kv, Ownership), kv.mod_revision)
    )


def known(local: LocalView, topic: TopicName) -> KnownOwnership:
    """As this node knows it."""
    return held(local.get(specs.ownership_key(topic)))
