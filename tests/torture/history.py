"""What happened, as lines of JSON: the load writes them, the oracles read them.

Every line is an array that begins with its kind. Times are seconds of the machine's monotonic clock, which
all processes of a run share. A message is known by its ``producer`` and its ``number``; both are in its
payload. A producer that shares its name with earlier ones carries its generation behind a ``#``.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import IO

import msgspec


class Acked(msgspec.Struct, frozen=True, array_like=True, tag="acked"):
    """A producer has its receipt. ``offset`` is -1 if the client does not tell it."""

    at: float
    topic: str
    producer: str
    number: int
    offset: int


class Unsent(msgspec.Struct, frozen=True, array_like=True, tag="unsent"):
    """A producer has an error instead: the message is certainly not in the topic, or it may be."""

    at: float
    topic: str
    producer: str
    number: int
    is_unknown: bool
    error: str


class Stored(msgspec.Struct, frozen=True, array_like=True, tag="stored"):
    """A message as the topic has it at the end. ``copy`` is the name of another cluster, or empty."""

    topic: str
    offset: int
    producer: str
    number: int
    key: str = ""
    copy: str = ""


class Received(msgspec.Struct, frozen=True, array_like=True, tag="received"):
    at: float
    topic: str
    subscription: str
    consumer: str
    offset: int
    producer: str
    number: int
    key: str = ""


class Called(msgspec.Struct, frozen=True, array_like=True, tag="called"):
    """One call of the metadata store.

    ``kind`` is get, put, cas or delete; ``outcome`` is ok, refused (the condition did not hold), failed
    (certainly without effect) or unknown. ``seen`` and ``seen_mod`` are what the answer shows of the key
    before the call, None and 0 if it did not exist. ``expect`` is the condition of a cas.
    """

    began: float
    ended: float
    client: str
    kind: str
    key: str
    value: str
    expect: int
    outcome: str
    revision: int = 0
    seen: str | None = None
    seen_mod: int = 0
    error: str = ""


class Watching(msgspec.Struct, frozen=True, array_like=True, tag="watching"):
    """A watcher will see everything after ``revision``. A second one of the same watcher allows a gap: the
    store has told it to read again."""

    watcher: str
    revision: int


class Watched(msgspec.Struct, frozen=True, array_like=True, tag="watched"):
    """A change as a watcher saw it; ``value`` None: the key was deleted."""

    watcher: str
    revision: int
    key: str
    value: str | None


class Caught(msgspec.Struct, frozen=True, array_like=True, tag="caught"):
    """The watcher has seen the last change, which was ``revision``."""

    watcher: str
    revision: int


class Fault(msgspec.Struct, frozen=True, array_like=True, tag="fault"):
    """``ended`` is when its cause was removed; ``recovered`` when the cluster was whole again, 0: never."""

    began: float
    ended: float
    recovered: float
    kind: str
    where: str


class Operated(msgspec.Struct, frozen=True, array_like=True, tag="operated"):
    """What an operator asked for, beside all faults."""

    at: float
    kind: str
    is_done: bool
    seconds: float
    error: str = ""


class Exited(msgspec.Struct, frozen=True, array_like=True, tag="exited"):
    """A process ended by itself."""

    at: float
    host: str
    code: int
    excuse: str = ""
    """The fault that explains it."""


Event = Acked | Unsent | Stored | Received | Called | Watching | Watched | Caught | Fault | Operated | Exited

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Event).decode


class Recorder:
    """Appends events to a file. Owned by one process; each line is written at once, so that a killed process
    leaves whole lines."""

    def __init__(self, path: Path) -> None:
        self._file: IO[bytes] = path.open("ab", buffering=0)

    def add(self, event: Event) -> None:
        self._file.write(_encode(event) + b"\n")

    def close(self) -> None:
        self._file.close()


def read(*paths: Path) -> Iterator[Event]:
    for path in paths:
        with path.open("rb") as lines:
            for line in lines:
                if line.endswith(b"\n"):  # the writer may have been killed in the middle of the last one
                    yield _decode(line)


def payload(producer: str, number: int) -> bytes:
    return f"{producer} {number}".encode()


def parse(data: bytes) -> tuple[str, int]:
    producer, _, number = data.decode().rpartition(" ")
    return producer, int(number)
