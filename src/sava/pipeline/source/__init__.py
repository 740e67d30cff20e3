"""The source of ``format("sava")``: batch and streaming.

==============  =======================================================================
``columns``     what a query sees of a message
``batch``       a range of offsets, as Spark calls it; ``filters`` narrow it
``stream``      an unbounded table, as Spark calls it; ``query`` is its state on the driver
``topics``      which partitions are read
``beginnings``  where they begin and end
``admission``   how much goes into one micro-batch
``history``     where the messages of a range are
``planning``    ranges → tasks
``reading``     what a task does: ``segments`` from the object store, tails from owners
``decoding``    payloads → values, by registered schemas
==============  =======================================================================
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from pyspark.sql.types import DataType, StructType

from sava.pipeline.link import Link
from sava.pipeline.options import OptionError, SourceOptions
from sava.pipeline.source.columns import COLUMNS, VALUE, Choice, SchemaRefused, check_schema
from sava.pipeline.source.query import Topics
from sava.pipeline.source.readers import BatchReader, FilteringReader, StreamReader

if TYPE_CHECKING:
    from sava.pipeline.source.decoding import Decoder

__all__ = ["BatchReader", "StreamReader", "reader", "schema", "stream_reader"]


def schema(options: Mapping[str, str]) -> StructType:
    """Of a query that does not choose columns. Raises OptionError."""
    parsed = SourceOptions.parse(options, stream=None)
    if not parsed.decode:
        return COLUMNS
    return StructType([*COLUMNS]).add(VALUE, _decoder(parsed).data_type)


def reader(options: Mapping[str, str], schema: StructType) -> BatchReader:
    """Raises OptionError, SchemaRefused."""
    parsed = SourceOptions.parse(options, stream=False)
    check_schema(schema, decode=parsed.decode)
    kind = FilteringReader if parsed.filter_pushdown else BatchReader
    return kind(parsed, Choice(schema), _decoder_for(parsed, schema))


def stream_reader(options: Mapping[str, str], schema: StructType) -> StreamReader:
    """Raises OptionError, SchemaRefused."""
    parsed = SourceOptions.parse(options, stream=True)
    check_schema(schema, decode=parsed.decode)
    return StreamReader(parsed, Choice(schema), _decoder_for(parsed, schema))


def _decoder(options: SourceOptions) -> Decoder:
    # Every worker of Spark imports this package; those that decode nothing need no schema languages.
    from sava.pipeline.source.decoding import Decoder, Registry

    subjects = Topics(Link.of(options.access), options.topics).subjects()
    for topic, subject in subjects.items():
        if not subject:
            raise OptionError("decode", "true", f"topic {topic} follows no registered schema")
    if len(set(subjects.values())) != 1:
        listed = ", ".join(f"{topic} follows {subject}" for topic, subject in subjects.items())
        raise OptionError(
            "decode", "true", f"one schema for all topics is needed ({listed or 'no topic matches'})"
        )
    return Decoder.of(next(iter(subjects.values())), Registry(options.access))


def _decoder_for(options: SourceOptions, schema: StructType) -> Decoder | None:
    """One that makes the type that the query has: a version that was registered since may have another."""
    if VALUE not in schema.fieldNames():
        return None
    wanted: DataType = schema[VALUE].dataType
    latest = decoder = _decoder(options)
    while decoder.data_type != wanted:
        if decoder.version <= 1:
            raise SchemaRefused(
                f'format("sava"): column {VALUE} is {latest.data_type.simpleString()} by schema '
                f"{latest.subject}, and {wanted.simpleString()} was asked for"
            )
        decoder = latest.of(latest.subject, latest.fetch, decoder.version - 1)
    return decoder
