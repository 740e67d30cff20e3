"""Columns: what a query sees of a message, and which of it must be read.

Spark tells a Python source nothing of the columns that a query uses. Whoever wants few says so by
``.schema(…)``; then only those are read. What Spark receives must have exactly the types that it derives from
the schema itself.
"""

from __future__ import annotations

from typing import Any, Final

from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import (
    BinaryType,
    DataType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from sava.errors import CallerError
from sava.records import STORED_COLUMNS

VALUE: Final = "value"
"""The payload, decoded by the topic's schema."""

COLUMNS: Final = StructType(
    [
        StructField("topic", StringType()),
        StructField("partition", IntegerType()),
        StructField("offset", LongType()),
        StructField("publish_time", TimestampType()),
        StructField("key", StringType()),
        StructField("payload", BinaryType()),
        StructField("attributes", MapType(StringType(), StringType())),
        StructField("producer", StringType()),
        StructField("schema_id", LongType()),
        StructField("schema_version", IntegerType()),
        StructField("origin_cluster", StringType()),
        StructField("origin_offset", LongType()),
    ]
)

DECODED_FROM: Final = ("payload", "schema_id", "schema_version")


class SchemaRefused(CallerError):
    """A schema that was asked for and that messages do not have, in one line."""


def check_schema(schema: StructType, *, decode: bool) -> None:
    """Raises SchemaRefused unless it is a choice of the columns, in any order, with their types."""
    types: dict[str, DataType] = {field.name: field.dataType for field in COLUMNS}
    for field in schema:
        if field.name == VALUE and decode:
            continue
        if field.name not in types:
            hint = "; value needs the option decode=true" if field.name == VALUE else ""
            raise SchemaRefused(f'format("sava") has no column {field.name}: {", ".join(types)}{hint}')
        if field.dataType != types[field.name]:
            raise SchemaRefused(
                f'format("sava"): column {field.name} is {types[field.name].simpleString()}, '
                f"and {field.dataType.simpleString()} was asked for"
            )


class Choice:
    """The columns of one query. Travels to executors as the schema alone."""

    def __init__(self, schema: StructType) -> None:
        self.spark = schema
        self.names: tuple[str, ...] = tuple(schema.fieldNames())
        wanted = {*self.names, *(DECODED_FROM if VALUE in self.names else ())}
        self.stored: tuple[str, ...] = tuple(name for name in STORED_COLUMNS if name in wanted)
        """Those that must be read; topic, partition and offset are known without."""
        self.arrow: Any = to_arrow_schema(schema, timezone="UTC")

    def __reduce__(self) -> tuple[Any, tuple[StructType]]:
        return Choice, (self.spark,)
