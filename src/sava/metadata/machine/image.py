"""Images of the state: what a snapshot is made of, and how it is read back.

An image is a byte stream of frames, ``kind (1) length (4) payload``: a header, the leases, the keys in order,
the sessions in order, and an end frame with a BLAKE2b hash of everything before it. It is canonical: two
replicas in the same state write the same bytes, so comparing two hashes compares two replicas. All
revisions, lease generations, remembered answers and counters are in it; leave out one of them and a replica
that restarted from the image behaves differently from one that did not.

Chunks are pieces of that stream, cut anywhere. ``read`` accepts any other cutting of the same bytes, because
files and networks cut as they like.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Iterator
from typing import TypeVar

import msgspec

from sava.metadata.commands import UNREADABLE, KeyValue, decode_result, encode
from sava.metadata.errors import InvalidRequest, SnapshotCorrupt
from sava.metadata.machine.limits import MAX_INT
from sava.metadata.machine.tables import KeySpace, Lease, LeaseTable, Session, SessionTable

SNAPSHOT_FORMAT = 1
CHUNK_BYTES = 64 << 10
MAX_FRAME_BYTES = 256 << 20
"""Above what any state can write; a damaged length must not make a reader collect gigabytes."""

_MAGIC = b"sava-metadata"
_HEADER, _LEASES, _KEYS, _SESSIONS, _END = range(1, 6)
_FRAME = struct.Struct(">BI")
_KV_OVERHEAD = 32
"""Rough encoded size of a key's numbers; only where frames are cut depends on it."""

T = TypeVar("T")


class ImageHeader(msgspec.Struct, frozen=True, array_like=True):
    magic: bytes
    format: int
    revision: int
    clock_ms: int
    version: int
    next_lease: int
    next_session: int
    leases: int
    keys: int
    sessions: int


class LeaseRecord(msgspec.Struct, frozen=True, array_like=True):
    """Without its keys: each key names its lease, and one truth is enough."""

    lease: int
    ttl_ms: int
    generation: int


class SessionRecord(msgspec.Struct, frozen=True, array_like=True):
    session: int
    nonce: bytes
    last_stamp: int
    low: int
    responses: list[tuple[int, bytes]]


_header_decoder = msgspec.msgpack.Decoder(ImageHeader)
_leases_decoder = msgspec.msgpack.Decoder(list[LeaseRecord])
_keys_decoder = msgspec.msgpack.Decoder(list[KeyValue])
_session_decoder = msgspec.msgpack.Decoder(SessionRecord)


class FrozenState:
    """An image of the state. ``chunks`` yields the canonical snapshot bytes piece by piece (each piece a few
    hundred microseconds of work, so that a caller on an event loop can breathe in between).

    Holds copies of the containers and shares the immutable records in them, so that applies continue while it
    is written out (a walk over the live map would tear)."""

    __slots__ = (
        "_clock_ms",
        "_keys",
        "_kvs",
        "_leases",
        "_next_lease",
        "_next_session",
        "_sessions",
        "_version",
        "revision",
    )

    def __init__(
        self,
        revision: int,
        clock_ms: int,
        version: int,
        space: KeySpace,
        leases: LeaseTable,
        sessions: SessionTable,
    ) -> None:
        self.revision: int = revision
        self._clock_ms = clock_ms
        self._version = version
        self._kvs = space.kvs.copy()
        self._keys: list[str] = list(space.order)
        self._leases = sorted(
            (LeaseRecord(x.lease, x.ttl_ms, x.generation) for x in leases), key=lambda x: x.lease
        )
        self._next_lease = leases.next_id
        self._sessions = sorted((session.frozen() for session in sessions), key=lambda x: x.session)
        self._next_session = sessions.next_id

    def chunks(self) -> Iterator[bytes]:
        seal = hashlib.blake2b(digest_size=32)
        for frame in self._frames():
            seal.update(frame)
            if len(frame) <= CHUNK_BYTES:
                yield frame
            else:
                yield from (frame[i : i + CHUNK_BYTES] for i in range(0, len(frame), CHUNK_BYTES))
        yield _framed(_END, seal.digest())

    def digest(self) -> bytes:
        """The hash that ends the stream."""
        end = b""
        for chunk in self.chunks():
            end = chunk
        return end[_FRAME.size :]

    def _frames(self) -> Iterator[bytes]:
        header = ImageHeader(
            _MAGIC,
            SNAPSHOT_FORMAT,
            self.revision,
            self._clock_ms,
            self._version,
            self._next_lease,
            self._next_session,
            len(self._leases),
            len(self._keys),
            len(self._sessions),
        )
        yield _framed(_HEADER, encode(header))
        for i in range(0, len(self._leases), 1024):
            yield _framed(_LEASES, encode(self._leases[i : i + 1024]))
        yield from self._key_frames()
        for x in self._sessions:
            yield _framed(
                _SESSIONS,
                encode(SessionRecord(x.session, x.nonce, x.last_stamp, x.low, sorted(x.responses.items()))),
            )

    def _key_frames(self) -> Iterator[bytes]:
        group: list[KeyValue] = []
        room = CHUNK_BYTES - _FRAME.size
        for kv in map(self._kvs.__getitem__, self._keys):
            need = len(kv.key) + len(kv.value) + _KV_OVERHEAD
            if need > room and group:
                yield _framed(_KEYS, encode(group))
                group = []
                room = CHUNK_BYTES - _FRAME.size
            group.append(kv)
            room -= need
        if group:
            yield _framed(_KEYS, encode(group))


def _framed(kind: int, payload: bytes) -> bytes:
    return _FRAME.pack(kind, len(payload)) + payload


class StateReader:
    """Rebuilds the tables from a stream, believing nothing: order, ranges, references, counts and the final
    hash."""

    def __init__(self, chunks: Iterable[bytes]) -> None:
        self.header: ImageHeader
        self.leases = LeaseTable()
        self.sessions = SessionTable()
        self._kvs: dict[str, KeyValue] = {}
        self._last_key = ""
        self._seal = hashlib.blake2b(digest_size=32)
        self._read(chunks)

    def space(self) -> KeySpace:
        return KeySpace.of_sorted(self._kvs)

    def _read(self, chunks: Iterable[bytes]) -> None:
        last = 0
        for kind, frame in _frames_of(chunks):
            payload = frame[_FRAME.size :]
            _require(last != _END, "bytes follow the end of the snapshot")
            _require(kind >= last and (kind == _HEADER) == (last == 0), f"frame {kind} follows frame {last}")
            if kind == _END:
                _require(
                    payload == self._seal.digest(), "the hash of the snapshot does not match its content"
                )
            else:
                self._seal.update(frame)
                self._take(kind, payload)
            last = kind
        _require(last == _END, "the snapshot is cut short")
        self._finish()

    def _take(self, kind: int, payload: bytes) -> None:
        match kind:
            case 1:
                self.header = _take_header(payload)
            case 2:
                for record in _decoded(_leases_decoder, payload):
                    self._add_lease(record)
            case 3:
                self._add_keys(_decoded(_keys_decoder, payload))
            case 4:
                self._add_session(_decoded(_session_decoder, payload))
            case _:
                raise SnapshotCorrupt(f"unknown frame {kind}")

    def _add_lease(self, x: LeaseRecord) -> None:
        _require(
            0 < x.lease < self.header.next_lease and x.generation > 0, f"lease {x.lease} is out of range"
        )
        _require(x.lease not in self.leases.by_id, f"lease {x.lease} appears twice")
        self.leases.add(Lease(x.lease, x.ttl_ms, x.generation, []))

    def _add_keys(self, kvs: list[KeyValue]) -> None:
        last, revision, table = self._last_key, self.header.revision, self._kvs
        for kv in kvs:
            key = kv.key
            if not (key > last and 0 < kv.create_revision <= kv.mod_revision <= revision and kv.version > 0):
                raise SnapshotCorrupt(f"key {key!r} is out of order or has impossible revisions")
            if kv.lease:
                holder = self.leases.by_id.get(kv.lease)
                if holder is None:
                    raise SnapshotCorrupt(f"key {key!r} names lease {kv.lease}, which does not exist")
                holder.keys.append(key)
            table[key] = kv
            last = key
        self._last_key = last

    def _add_session(self, x: SessionRecord) -> None:
        _require(0 < x.session < self.header.next_session, f"session {x.session} is out of range")
        _require(
            x.session not in self.sessions.by_id and self.sessions.find(x.nonce) is None,
            f"session {x.session} or its nonce appears twice",
        )
        responses = dict(x.responses)
        _require(len(responses) == len(x.responses), f"session {x.session} answers one request twice")
        for seq, response in x.responses:
            _require(x.low <= seq <= MAX_INT, f"session {x.session} answers request {seq} outside its window")
            try:
                decode_result(response)
            except InvalidRequest as error:
                raise SnapshotCorrupt(f"session {x.session} request {seq}: {error}") from error
        held = sum(map(len, responses.values()))
        self.sessions.add(Session(x.session, x.nonce, x.last_stamp, x.low, responses, held))

    def _finish(self) -> None:
        found = (len(self.leases), len(self._kvs), len(self.sessions))
        expected = (self.header.leases, self.header.keys, self.header.sessions)
        _require(
            found == expected,
            f"the snapshot announces {expected} leases, keys and sessions and holds {found}",
        )
        self.leases.next_id = self.header.next_lease
        self.sessions.next_id = self.header.next_session


def _take_header(payload: bytes) -> ImageHeader:
    header = _decoded(_header_decoder, payload)
    _require(header.magic == _MAGIC, "this is not a metadata snapshot")
    _require(
        header.format == SNAPSHOT_FORMAT,
        f"format {header.format} instead of {SNAPSHOT_FORMAT}: it was written by another version of Sava",
    )
    _require(min(header.revision, header.clock_ms, header.version) >= 0, "negative numbers in the header")
    return header


def _frames_of(chunks: Iterable[bytes]) -> Iterator[tuple[int, bytes]]:
    """Whole frames, however the stream was cut."""
    buffer = bytearray()
    for chunk in chunks:
        buffer += chunk
        start = 0
        while len(buffer) - start >= _FRAME.size:
            kind, length = _FRAME.unpack_from(buffer, start)
            _require(length <= MAX_FRAME_BYTES, f"a frame of {length} bytes")
            end = start + _FRAME.size + length
            if len(buffer) < end:
                break
            yield kind, bytes(buffer[start:end])
            start = end
        if start:
            del buffer[:start]
    _require(not buffer, "the snapshot is cut short")


def _decoded(decoder: msgspec.msgpack.Decoder[T], payload: bytes) -> T:
    try:
        return decoder.decode(payload)
    except UNREADABLE as error:
        raise SnapshotCorrupt(f"unreadable frame: {error}") from error


def _require(condition: bool, complaint: str) -> None:
    if not condition:
        raise SnapshotCorrupt(f"snapshot refused: {complaint}")
