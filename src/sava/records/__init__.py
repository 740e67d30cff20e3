"""Records: Message and RecordBatch, the one form that messages have in memory, on the wire and in the
journal.

Pure: no I/O, no clock. The format is specified in ``docs/design/record-batch.md``.

===============  =====================================================================
``message``      a message as applications see it, and columns → messages
``header``       the fixed header, and which part of it is the broker's
``columns``      which columns there are and how each may be encoded
``encoder``      values or Arrow arrays → columns → the bytes of a batch
``decoder``      the bytes of a body → checked columns
``single``       both ways for one plain message, without Arrow
``batch``        RecordBatch, over all of these
===============  =====================================================================
"""

from sava.records.batch import RecordBatch, iter_batches
from sava.records.columns import DERIVED_COLUMNS, STORED_COLUMNS, schema_of
from sava.records.errors import (
    BatchCorrupt,
    BatchTooLarge,
    BatchUnassigned,
    InvalidMessage,
    OffsetOutside,
    UnsupportedBatch,
)
from sava.records.header import (
    HEADER_BYTES,
    MAX_BATCH_BYTES,
    MAX_COUNT,
    PREFIX_BYTES,
    UNASSIGNED,
    Compression,
    Header,
    peek_header,
)
from sava.records.message import Message, Origin

__all__ = [
    "DERIVED_COLUMNS",
    "HEADER_BYTES",
    "MAX_BATCH_BYTES",
    "MAX_COUNT",
    "PREFIX_BYTES",
    "STORED_COLUMNS",
    "UNASSIGNED",
    "BatchCorrupt",
    "BatchTooLarge",
    "BatchUnassigned",
    "Compression",
    "Header",
    "InvalidMessage",
    "Message",
    "OffsetOutside",
    "Origin",
    "RecordBatch",
    "UnsupportedBatch",
    "iter_batches",
    "peek_header",
    "schema_of",
]
