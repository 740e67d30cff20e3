"""Columns: what rows to be written may have, checked when the query is planned and not when the first row
arrives.

A column that has no place in a message is refused: ignored, it would be data that is lost without a word.
"""

from __future__ import annotations

from typing import Final

from pyspark.sql.types import (
    BinaryType,
    ByteType,
    DataType,
    IntegerType,
    LongType,
    MapType,
    ShortType,
    StringType,
    StructType,
    TimestampType,
)

from sava.pipeline.sink.errors import WriteRefused

_TEXT: Final = (StringType, BinaryType)
_WHOLE: Final = (ByteType, ShortType, IntegerType)

_ACCEPTED: Final[dict[str, tuple[str, tuple[type[DataType], ...]]]] = {
    "payload": ("binary or string", _TEXT),
    "key": ("string, or binary that is UTF-8", _TEXT),
    "attributes": ("map<string,string>", (MapType,)),
    "topic": ("string", (StringType,)),
    "partition": ("int", _WHOLE),
    "publish_time": ("timestamp", (TimestampType,)),
    "origin_cluster": ("string", (StringType,)),
    "origin_offset": ("bigint", (*_WHOLE, LongType)),
    "schema_id": ("bigint", (*_WHOLE, LongType)),
    "schema_version": ("int", _WHOLE),
}


def check_columns(schema: StructType, topic: str) -> None:
    """Raises WriteRefused. ``topic`` is the option, or empty."""
    names = schema.fieldNames()
    for field in schema.fields:
        if field.name not in _ACCEPTED or names.count(field.name) > 1:
            raise WriteRefused(
                f'format("sava"): column {field.name} cannot be written; rows have payload and, if wanted,'
                f" {', '.join(name for name in _ACCEPTED if name != 'payload')}, each once"
            )
        wanted, types = _ACCEPTED[field.name]
        if not isinstance(field.dataType, types) or not _is_text_map(field.dataType):
            raise WriteRefused(
                f'format("sava"): column {field.name} is {field.dataType.simpleString()}: {wanted} is needed'
            )
    if "payload" not in names:
        raise WriteRefused('format("sava"): rows to be written need a column payload, binary or string')
    if not topic and "topic" not in names:
        raise WriteRefused(
            'format("sava"): nothing says where to: set the option topic, or add a column topic'
        )
    if ("origin_cluster" in names) != ("origin_offset" in names):
        raise WriteRefused(
            'format("sava"): origin_cluster and origin_offset go together; one of them is missing'
        )


def _is_text_map(kind: DataType) -> bool:
    """True also for what is no map."""
    return not isinstance(kind, MapType) or (
        isinstance(kind.keyType, StringType) and isinstance(kind.valueType, StringType)
    )
