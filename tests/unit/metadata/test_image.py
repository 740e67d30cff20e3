"""A snapshot whose frames are well formed but whose content no machine could have written is refused too."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from sava.metadata.commands import Txn
from sava.metadata.errors import SnapshotCorrupt
from sava.metadata.machine.state_machine import StateMachine
from tests.unit.metadata.steps import Steps

Frames = list[tuple[int, Any]]


def _frames() -> Frames:
    steps = Steps()
    lease = steps.grant()
    session = steps.session()
    steps.put("/a", b"1", lease)
    steps.put("/b", b"2")
    steps.session(b"other")
    steps.apply(Txn(), session=session, seq=1)
    stream = b"".join(steps.machine.freeze().chunks())
    frames: Frames = []
    position = 0
    while position < len(stream):
        kind, length = struct.unpack_from(">BI", stream, position)
        position += 5
        if kind != 5:
            frames.append((kind, msgspec.msgpack.decode(stream[position : position + length])))
        position += length
    return frames


def _sealed(frames: Frames) -> bytes:
    body = b"".join(
        struct.pack(">BI", kind, len(payload)) + payload
        for kind, payload in ((kind, msgspec.msgpack.encode(content)) for kind, content in frames)
    )
    return body + struct.pack(">BI", 5, 32) + hashlib.blake2b(body, digest_size=32).digest()


def _header(position: int, value: object) -> Callable[[Frames], None]:
    def change(frames: Frames) -> None:
        frames[0][1][position] = value

    return change


def _key(position: int, value: object) -> Callable[[Frames], None]:
    def change(frames: Frames) -> None:
        frames[2][1][1][position] = value

    return change


def _set(frame: int, position: int, value: object) -> Callable[[Frames], None]:
    def change(frames: Frames) -> None:
        content = frames[frame][1]
        (content[0] if frame == 1 else content)[position] = value

    return change


def test_the_pieces_of_these_stories_are_themselves_readable() -> None:
    assert [kind for kind, _ in _frames()] == [1, 2, 3, 4, 4]
    assert StateMachine.restore([_sealed(_frames())]).revision == 2


@pytest.mark.parametrize(
    "change",
    [
        _header(0, b"something else"),
        _header(1, 2),
        _header(2, -1),
        _header(2, 1),
        _header(5, 1),
        _header(6, 1),
        _header(7, 0),
        _header(8, 3),
        _header(9, 1),
        _key(0, "/a"),
        _key(0, "/"),
        _key(2, 0),
        _key(2, 3),
        _key(3, 9),
        _key(4, 0),
        _key(5, 77),
        _set(1, 0, 9),
        _set(1, 2, 0),
        _set(3, 0, 0),
        _set(3, 0, 2),
        _set(3, 1, b"other"),
        _set(3, 3, 2),
        _set(3, 4, [[1, b"\xc1"]]),
        _set(3, 4, [[1, b""], [1, b""]]),
        lambda frames: frames.pop(0),
        lambda frames: frames.pop(1),
        lambda frames: frames.reverse(),
        lambda frames: frames.append(frames[2]),
        lambda frames: frames.append((9, [])),
        lambda frames: frames.insert(1, frames[0]),
        lambda frames: frames[1][1].append(frames[1][1][0]),
        lambda frames: frames.clear(),
    ],
)
def test_an_impossible_content_is_refused(change: Callable[[Frames], object]) -> None:
    frames = _frames()
    change(frames)
    with pytest.raises(SnapshotCorrupt):
        StateMachine.restore([_sealed(frames)])
