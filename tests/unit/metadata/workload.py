"""Random proposals for a state machine, and the digest of what they lead to.

Run as a program it prints that digest: the determinism test runs it under different hash seeds.
"""

from __future__ import annotations

import sys
from random import Random

from sava.metadata.commands import (
    AllocateId,
    Command,
    Compare,
    Delete,
    DeletePrefix,
    Get,
    LeaseExpire,
    LeaseGrant,
    LeaseRevoke,
    LeaseTouch,
    Operation,
    Proposal,
    Put,
    Relation,
    SessionExpire,
    SessionOpen,
    SetVersion,
    Target,
    Txn,
    TxnBatch,
)
from sava.metadata.machine.state_machine import Limits, StateMachine, rolling_digest

LIMITS = Limits(max_total_bytes=600, max_sessions=4, max_session_window=5, max_delete_keys=6, max_leases=6)
"""Tight, so that every refusal happens."""

TERMS = (1, 2)


def _key(rng: Random) -> str:
    return rng.choice(("/a", "/ab", "/a/1", "/a/2", "/a/2/x", "/b/1", "/b/ä", "/c", "/n", "/n/1"))


def _operation(rng: Random) -> Operation:
    roll = rng.random()
    if roll < 0.5:
        return Put(_key(rng), rng.randbytes(rng.randrange(40)), rng.choice((0, 0, 0, rng.randrange(8))))
    if roll < 0.7:
        return Delete(_key(rng))
    if roll < 0.8:
        return DeletePrefix(rng.choice(("/a/", "/b/", "/n/", "/", "/a/2/")))
    if roll < 0.9:
        return AllocateId(rng.choice(("/ids/x", "/ids/y", "/n")), rng.randrange(1, 4))
    return Get(_key(rng))


def _operations(rng: Random, most: int) -> tuple[Operation, ...]:
    return tuple(_operation(rng) for _ in range(rng.randrange(most + 1)))


def _compare(rng: Random) -> tuple[Compare, ...]:
    return tuple(
        Compare(_key(rng), Target(rng.randrange(4)), Relation(rng.randrange(4)), rng.randrange(6))
        for _ in range(rng.randrange(3))
    )


def _changes(rng: Random) -> tuple[Operation, ...]:
    return tuple(each for each in _operations(rng, 6) if isinstance(each, Put | Delete))


def _command(rng: Random) -> Command:
    roll = rng.random()
    if roll < 0.35:
        return Txn(then=(_operation(rng),))
    if roll < 0.45:
        return TxnBatch(tuple(Txn(_compare(rng), _changes(rng)) for _ in range(rng.randrange(4))))
    if roll < 0.7:
        return Txn(_compare(rng), _operations(rng, 6), _operations(rng, 3))
    return rng.choice(
        (
            LeaseGrant(rng.randrange(500, 10_000)),
            LeaseGrant(9_000),
            LeaseRevoke(rng.randrange(8)),
            LeaseExpire(rng.randrange(8), rng.randrange(1, 5)),
            LeaseTouch(rng.randrange(8)),
            SessionOpen(rng.choice((b"a", b"b", b"c", b"d", b"e"))),
            SessionExpire(rng.randrange(200)),
            SetVersion(rng.randrange(4)),
        )
    )


def proposals(seed: int, count: int) -> list[Proposal]:
    rng = Random(seed)
    made: list[Proposal] = []
    for i in range(count):
        if made and rng.random() < 0.1:
            made.append(rng.choice(made))
            continue
        session = rng.choice((0, rng.randrange(1, 6)))
        seq = rng.randrange(1, 12 + i // 10) if session else 0
        fence = rng.choice((0, 0, 0, 1, 2))
        made.append(Proposal(_command(rng), i, session, seq, max(0, seq - 8), fence))
    return made


def run(machine: StateMachine, work: list[Proposal]) -> bytes:
    """Applies all of it; returns the rolling digest of results and events."""
    rolling = b""
    for proposal in work:
        rolling = rolling_digest(rolling, machine.apply(proposal, TERMS[0]))
    return rolling


if __name__ == "__main__":
    machine = StateMachine(LIMITS)
    rolling = run(machine, proposals(int(sys.argv[1]), int(sys.argv[2])))
    sys.stdout.write(rolling.hex() + machine.digest().hex())
