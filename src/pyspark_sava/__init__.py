"""``format("sava")``: what Spark finds.

Spark looks for top-level modules named ``pyspark_*`` and imports all of them for every session, so that
nothing is imported here that a session without Sava would pay for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

    from sava.pipeline.sink import BatchWriter, StreamWriter
    from sava.pipeline.source import BatchReader, StreamReader

__all__ = ["DefaultSource"]


class DefaultSource(DataSource):
    @classmethod
    def name(cls) -> str:
        return "sava"

    def schema(self) -> StructType:
        from sava.pipeline import source

        return source.schema(self.options)

    def reader(self, schema: StructType) -> BatchReader:
        from sava.pipeline import source

        return source.reader(self.options, schema)

    def streamReader(self, schema: StructType) -> StreamReader:  # noqa: N802
        from sava.pipeline import source

        return source.stream_reader(self.options, schema)

    def writer(self, schema: StructType, overwrite: bool) -> BatchWriter:
        from sava.pipeline import sink

        return sink.writer(self.options, schema, overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> StreamWriter:  # noqa: N802
        from sava.pipeline import sink

        return sink.stream_writer(self.options, schema, overwrite)
