"""The sink of ``format("sava")``: batch and streaming.

==============  =======================================================================
``columns``     what rows may have, checked when the query is planned
``writers``     the sink as Spark calls it: tasks write, the driver commits
``task``        what Spark says of the task that runs
``routing``     rows → partitions of topics, ``hashing`` the keys as clients do
``batching``    rows → record batches of a good size
``staging``     batches → objects that the commit names (exactly once)
``publishing``  batches → brokers (at least once)
==============  =======================================================================
"""

from __future__ import annotations

from collections.abc import Mapping

from pyspark.sql.types import StructType

from sava.pipeline.errors import WriteRefused
from sava.pipeline.options import OptionError, SinkOptions
from sava.pipeline.sink.writers import BatchWriter, StreamWriter, check_columns

__all__ = ["BatchWriter", "StreamWriter", "WriteRefused", "stream_writer", "writer"]


def writer(options: Mapping[str, str], schema: StructType, overwrite: bool = False) -> BatchWriter:
    """Raises OptionError, WriteRefused. ``overwrite`` is Spark's mode of that name."""
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
    """Raises OptionError, WriteRefused. ``overwrite`` is what Spark makes of the output mode complete."""
    parsed = SinkOptions.parse(options, stream=True)
    if overwrite:
        raise WriteRefused(
            'format("sava"): output mode complete: topics are only appended to; use outputMode("append"), or'
            " foreachBatch"
        )
    check_columns(schema, parsed.topic)
    return StreamWriter(parsed)
