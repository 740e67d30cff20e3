"""Hashing: the routing hash of many keys at once.

``sava.client.routing.fnv1a`` takes about 0.1 µs for each byte of a key and remembers keys that repeat. A
task of Spark sees millions of keys of which many come once, so here the keys advance together, byte by
byte, through Arrow's kernels, which wrap around at 64 bits as the hash wants it. The result is the same for
every key; a test holds them together.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from sava.client.routing import fnv1a

FEW: Final = 256
"""Up to so many keys Python is faster: each step of the kernels has a price of its own, and few keys are
remembered."""
LONG: Final = 256
"""Bytes after which a key is hashed by itself: one long key among short ones would make steps for hardly
anything."""

_BASIS: Final = fnv1a("")
_PRIME: Final = pa.scalar(0x100000001B3, pa.uint64())


def fnv1a_of(keys: pa.Array) -> pa.Array:
    """Of a string array (32-bit positions) without nulls, as uint64."""
    if len(keys) <= FEW:
        return pa.array(map(fnv1a, keys.to_pylist()), pa.uint64())
    lengths = pc.binary_length(keys)
    order = pc.sort_indices(lengths, sort_keys=[("", "descending")])
    _, positions, data = keys.buffers()
    starts = pa.Array.from_buffers(pa.int32(), len(keys), [None, positions], offset=keys.offset).take(order)
    text = pa.Array.from_buffers(pa.uint8(), data.size if data is not None else 0, [None, data])
    longer_than = _longer_than(lengths)
    values = pa.repeat(pa.scalar(_BASIS, pa.uint64()), len(keys))
    done = []
    for step, alive in enumerate(longer_than):
        done.append(values.slice(alive))
        if step == LONG:
            values = pa.array(map(fnv1a, keys.take(order.slice(0, alive)).to_pylist()), pa.uint64())
            break
        letters = text.take(pc.add(starts.slice(0, alive), pa.scalar(step, pa.int32()))).cast(pa.uint64())
        values = pc.multiply(pc.bit_wise_xor(values.slice(0, alive), letters), _PRIME)
    done.append(values)
    return pa.concat_arrays(reversed(done)).take(pc.sort_indices(order))


def _longer_than(lengths: pa.Array) -> list[int]:
    """How many keys are longer than 0, 1, 2 … bytes, up to LONG, as long as there are any."""
    counted = pc.value_counts(pc.min_element_wise(lengths, pa.scalar(LONG + 1, pa.int32())))
    by_length = dict(zip(counted.field(0).to_pylist(), counted.field(1).to_pylist(), strict=True))
    at_most = list(accumulate(by_length.get(length, 0) for length in range(LONG + 1)))
    return [alive for number in at_most if (alive := len(lengths) - number)]
