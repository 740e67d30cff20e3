"""The short way for one plain message gives what the general way gives, and takes nothing that it would not
take."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sava.errors import SavaError
from sava.records import HEADER_BYTES, InvalidMessage, RecordBatch, peek_header, single
from sava.records.decoder import read_columns
from sava.records.encoder import BatchPlace, assemble, encode_values
from sava.records.header import Compression
from tests.unit.records.samples import seal


def general(
    payload: bytes, *, publish_time: int, producer: str, producer_id: int, base_sequence: int
) -> bytes:
    body = encode_values(
        [payload],
        publish_time=publish_time,
        producer=producer,
        keys=None,
        attributes=None,
        schema_id=None,
        schema_version=None,
        origins=None,
    )
    _, data = assemble(
        body, producer_id=producer_id, base_sequence=base_sequence, codec=Compression.NONE, place=BatchPlace()
    )
    return data


def one(payload: bytes = b"payload", producer: str = "p") -> bytes:
    return RecordBatch.encode([payload], publish_time=5, producer=producer, producer_id=7).to_bytes()


numbers = st.integers(0, (1 << 63) - 2)


@given(payload=st.binary(max_size=40), publish_time=numbers, producer=st.text(), producer_id=numbers,
       base_sequence=numbers)  # fmt: skip
def test_both_ways_give_the_same_bytes(
    payload: bytes, publish_time: int, producer: str, producer_id: int, base_sequence: int
) -> None:
    made = single.encode(
        payload,
        publish_time=publish_time,
        producer=producer,
        producer_id=producer_id,
        base_sequence=base_sequence,
    )
    if made is None:
        return
    header, data = made
    assert data == general(
        payload,
        publish_time=publish_time,
        producer=producer,
        producer_id=producer_id,
        base_sequence=base_sequence,
    )
    assert header == peek_header(data)
    assert single.is_sound(data, header)
    assert single.is_of(data, header, producer)


def test_an_ordinary_message_goes_the_short_way() -> None:
    made = single.encode(b"x" * 100, publish_time=1, producer="p", producer_id=2, base_sequence=3)
    assert made is not None
    assert single.is_sound(made[1], made[0])


@pytest.mark.parametrize("name", ["\ud800", "p" * (single.SMALL + 1)])
def test_what_it_declines_is_judged_by_the_general_way(name: str) -> None:
    assert single.encode(b"", publish_time=1, producer=name, producer_id=2, base_sequence=3) is None
    if name.startswith("p"):
        assert RecordBatch.encode([b""], publish_time=1, producer=name).verify().is_of(name)
    else:
        with pytest.raises(InvalidMessage):
            RecordBatch.encode([b""], publish_time=1, producer=name)


def test_it_calls_nothing_sound_that_the_decoder_refuses() -> None:
    accepted = 0
    for seed in range(3000):
        rng = Random(seed)
        data = bytearray(one(rng.randbytes(rng.randrange(20)), rng.choice(["", "p", "näme"])))
        for _ in range(rng.randrange(1, 3)):
            if rng.random() < 0.2:
                del data[rng.randrange(HEADER_BYTES, len(data)) :]
                break
            at = rng.randrange(40, len(data))
            data[at] = rng.choice([0, 1, 7, 8, 127, 128, 255, data[at] ^ 1 << rng.randrange(8)])
        forged = seal(bytes(data))
        try:
            batch = RecordBatch.parse(forged)
        except SavaError:
            continue
        if single.is_sound(forged, batch.header):
            accepted += 1
            read_columns(batch._body(), batch.header)
            assert len(list(batch)) == 1, f"seed {seed}"
    assert accepted


def test_a_name_that_ends_like_another_column_is_not_that_name() -> None:
    """The column of a producer is an offset, a length and the name. A name that ends in the column of another
    name has the same last bytes as a batch of that one."""
    victim = one(producer="victim!!")
    inner = victim[-16:].decode()
    forged = RecordBatch.parse(one(producer="attacker" + inner)).verify()
    assert forged.to_bytes().endswith(victim[-16:])
    assert not forged.is_of("victim!!")
    assert forged.is_of("attacker" + inner)


def test_a_message_without_a_name_is_of_anybody() -> None:
    batch = RecordBatch.parse(RecordBatch.encode([b"a"], publish_time=1).to_bytes()).verify()
    assert single.is_sound(batch.to_bytes(), batch.header)
    assert batch.is_of("whoever")
