"""The sink of ``format("sava")``: batch and streaming.

============  =============================================================================
``writers``   the sink as Spark calls it: columns are checked, tasks write, the driver commits
``routing``   rows to partitions of topics and to record batches; these to staged objects or to brokers
============  =============================================================================
"""

from __future__ import annotations

from collections.abc import Mapping

from pyspark.sql.types import StructType

from sava.pipeline.errors import WriteRefused
from sava.pipeline.options import OptionError, SinkOptions
from sava.pipeline.sink.writers import BatchWriter, StreamWriter, check_columns

__all__ = ["BatchWriter", "StreamWriter", "WriteRefused", "stream_writer", "writer"]


def writer(options: Mapping[str, str], schema: StructType, overwrite: bool = False) -> BatchWriter:
    """The writer of a batch job. ``overwrite`` is Spark's mode. Raises OptionError, WriteRefused."""
    parsed = SinkOptions.parse(options, stream=False)
    if parsed.writer_id and parsed.batch_id is None:
        raise OptionError(
            "writerId",
            parsed.writer_id,
            "a batch write needs the option batchId beside it, which tells its batches apart",
        )
    if overwrite:
        raise WriteRefused('format("sava"): mode overwrite: topics are only appended to; use mode("append")')
    check_columns(schema, parsed.topic)
    return BatchWriter(parsed)


def stream_writer(options: Mapping[str, str], schema: StructType, overwrite: bool = False) -> StreamWriter:
    """The writer of a stream. Spark sets ``overwrite`` for output mode complete. Raises OptionError,
    WriteRefused."""
    parsed = SinkOptions.parse(options, stream=True)
    if overwrite:
        raise WriteRefused(
            'format("sava"): output mode complete: topics are only appended to; use outputMode("append"), or'
            " foreachBatch"
        )
    check_columns(schema, parsed.topic)
    return StreamWriter(parsed)
