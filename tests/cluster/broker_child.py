"""A broker in a process of its own that meets a trap: ``python -m tests.cluster.broker_child broker …``.

It is the ``sava`` command with some functions wrapped. The environment variable ``SAVA_TRAP`` names a file; a
trap in it says a step, a topic, and whom to kill. The process that reaches this step with this topic kills
the other one, or itself, before it does anything else. All brokers of a cluster share the file, so one trap
kills once, and the next one can be set while they run.

=======================  =======================================================  ===========
step                     reached                                                  by
=======================  =======================================================  ===========
before, after ``moving`` around the write of the move                             controller
``held``                 publishers wait, single messages are settled             source
``uploaded``             everything is in registered segments                     source
around storage sealed    around the write of the sealed storage state             source
around ``sealed``        around the write of the sealed ownership                 source
around ``assigned``      around the write of the next owner                       controller
around ``taken``         around the write with which it takes the topic up        target
after ``claimed``        the storage state is of its epoch                        target
``loaded``               subscriptions are there, nobody was served yet           target
around ``deleting``      around the mark in the ownership of a deleted topic      deleter
around ``released``      around the write that the owner has it no longer         owner
around storage removed   around the end of its storage state                      deleter
around ``removed``       around the end of its records                            deleter
around journal …         around ``recovering`` and ``closed`` in a record          coordinator
around ``decided``       around the decision of a writer's batch                  decider
around ``published``     around the mark that it is published                     finisher
``first frame``          nothing of a staged run is in the topic                  owner
``later frame``          a part of it is                                          owner
=======================  =======================================================  ===========

In the place of the topic, decisions have the writer: ``/writers/{writer}``, and journals the broker whose
they are: ``/ledgers/{broker}``.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from sava.cli.main import main
from sava.cluster.writer_records import WRITERS, WriterRecord
from sava.ledger.protocol import LedgerRecord
from sava.ledger.registry import LEDGERS
from sava.metadata.commands import Delete, DeletePrefix, Put, TxnResult
from sava.metadata.store import RaftStore
from sava.records import RecordBatch
from sava.storage import keys
from sava.storage.producers import RUN
from sava.storage.types import TopicState
from sava.storage.uploader import Backlog, Uploader
from sava.topics import specs
from sava.topics.non_reliable import TransientSubscriptions
from sava.topics.publishing import Publisher
from sava.topics.specs import Ownership, OwnershipState
from sava.topics.subscriptions import Subscriptions

VARIABLE: Final = "SAVA_TRAP"
MOVE_STEPS: Final = (
    "before moving",
    "after moving",
    "held",
    "uploaded",
    "before storage sealed",
    "after storage sealed",
    "before sealed",
    "after sealed",
    "before assigned",
    "after assigned",
    "before taken",
    "after taken",
    "after claimed",
    "loaded",
)
"""In the order in which they are reached."""
DELETION_STEPS: Final = (
    "before deleting",
    "after deleting",
    "before released",
    "after released",
    "before storage removed",
    "after storage removed",
    "before removed",
    "after removed",
)


class Trap(msgspec.Struct, frozen=True):
    step: str
    topic: str
    pid: int

    def set(self, path: Path) -> None:
        """In one step: somebody may be reading."""
        draft = path.with_suffix(".draft")
        draft.write_bytes(msgspec.json.encode(self))
        draft.rename(path)


def reached(step: str, topic: str) -> None:
    path = Path(os.environ[VARIABLE])
    try:
        trap = msgspec.json.decode(path.read_bytes(), type=Trap)
        if (trap.step, trap.topic) != (step, topic):
            return
        path.unlink()
    except FileNotFoundError:
        return
    os.kill(trap.pid, signal.SIGKILL)


# -- what a transaction is about ----------------------------------------------------------------


def _changes(store: RaftStore, operations: Sequence[object]) -> Iterator[tuple[str, str]]:
    """What it changes, and of which topic."""
    for operation in operations:
        match operation:
            case Put(key) if key.startswith(specs.TOPICS) and key.endswith("/ownership"):
                yield _name_ownership(msgspec.json.decode(operation.value, type=Ownership)), _topic(key, 2)
            case Put(key) if keys.is_state_key(key):
                yield _name_state(store, operation), _topic(key, 3)
            case Delete(key) if keys.is_state_key(key):
                yield "storage removed", _topic(key, 3)
            case DeletePrefix(key) if key.startswith(specs.TOPICS):
                yield "removed", _topic(key, 2)
            case Put(key) if key.startswith(LEDGERS):
                journal = msgspec.json.decode(operation.value, type=LedgerRecord)
                yield f"journal {journal.state.value}", key.rpartition("/")[0]
            case Put(key) if key.startswith(WRITERS):
                record = msgspec.json.decode(operation.value, type=WriterRecord)
                yield "published" if record.is_published else "decided", key


def _topic(key: str, depth: int) -> str:
    namespace, name = key.split("/")[depth : depth + 2]
    return f"/{namespace}/{name}"


def _name_ownership(record: Ownership) -> str:
    match record.state:
        case OwnershipState.ASSIGNED:
            return "taken" if record.incarnation else "assigned"
        case OwnershipState.DELETING:
            return "deleting" if record.owner else "released"
    return str(record.state.value)


def _name_state(store: RaftStore, put: Put) -> str:
    state = msgspec.json.decode(put.value, type=TopicState)
    if state.sealed:
        return "storage sealed"
    known = store.local.get(put.key)
    if known is None or msgspec.json.decode(known.value, type=TopicState).epoch < state.epoch:
        return "claimed"
    return "stored"


# -- wrapping -----------------------------------------------------------------------------------


def _wrap_transactions() -> None:
    original = RaftStore.txn

    async def txn(
        self: RaftStore, compare: Sequence[Any], then: Sequence[Any], *args: Any, **kwargs: Any
    ) -> TxnResult:
        changes = list(_changes(self, then))
        for change, topic in changes:
            reached(f"before {change}", topic)
        result = await original(self, compare, then, *args, **kwargs)
        for change, topic in changes:
            if result.succeeded:
                reached(f"after {change}", topic)
        return result

    RaftStore.txn = txn  # type: ignore[method-assign]


def _after(owner: type, method: str, step: str, topic_of: Callable[..., str]) -> None:
    original: Callable[..., Awaitable[None]] = getattr(owner, method)

    async def wrapped(*args: Any, **kwargs: Any) -> None:
        await original(*args, **kwargs)
        reached(step, topic_of(*args))

    setattr(owner, method, wrapped)


def _wrap_frames() -> None:
    original = Publisher.begin

    async def begin(
        self: Publisher, batch: RecordBatch | None, *args: Any, **kwargs: Any
    ) -> asyncio.Future[int]:
        sequence = batch.header.base_sequence if batch is not None else 0
        if sequence >= RUN:
            reached("later frame" if sequence % RUN else "first frame", str(self.topic))
        return await original(self, batch, *args, **kwargs)

    Publisher.begin = begin  # type: ignore[method-assign]


def _path_of(_: Uploader, backlog: Backlog, *__: object) -> str:
    return f"/{backlog.topic.namespace}/{backlog.topic.name}"


def run() -> None:
    _wrap_transactions()
    _wrap_frames()
    _after(Publisher, "hold", "held", lambda publisher: str(publisher.topic))
    _after(Uploader, "flush", "uploaded", _path_of)
    for subscriptions in (Subscriptions, TransientSubscriptions):
        _after(subscriptions, "load", "loaded", lambda loaded: str(loaded._topic))
    main()


if __name__ == "__main__":
    run()
