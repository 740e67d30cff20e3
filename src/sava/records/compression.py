"""Compression of a batch's body, with pyarrow's codecs.

The size before compression is declared in the header and bounded there; here the bytes must turn out to be
exactly as many. That is not a formality: ``pyarrow.Codec.decompress`` allocates the declared size and, for
LZ4, does not look at how much of it was filled, so that a body declared too long would show its reader what
the allocator had there before. The stream reader counts what it gets. For ZSTD pyarrow itself refuses a size
that is not met.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from sava.records.errors import BatchCorrupt
from sava.records.header import Compression


def compress(codec: Compression, body: bytes) -> bytes:
    if codec is Compression.NONE:
        return body
    compressed: bytes = pa.Codec(codec.name.lower()).compress(body, asbytes=True)
    return compressed


def decompress(codec: Compression, body: Any, size: int) -> Any:
    """A pa.Buffer of exactly ``size`` bytes. Raises BatchCorrupt."""
    try:
        if codec is Compression.ZSTD:
            return pa.Codec("zstd").decompress(body, decompressed_size=size)
        with pa.CompressedInputStream(pa.BufferReader(body), "lz4") as stream:
            plain = stream.read_buffer(size)
            if len(plain) != size or stream.read(1):
                raise BatchCorrupt(f"the body does not decompress to the {size} bytes it declares")
            return plain
    except (OSError, pa.ArrowException) as error:
        raise BatchCorrupt(f"the body does not decompress: {error}") from None
